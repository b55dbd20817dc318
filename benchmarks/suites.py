"""The suites: their cases, and the code of each contender."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torch_promote as tp
from benchmarks.cases import ALREADY_CAST, LOW, OURS, PLAIN, STOCK, Case, Contender, Prepared, Settings
from benchmarks.measures import on_its_own
from benchmarks.programs import (
    MODELS,
    PROGRAMS,
    Block,
    Region,
    Step,
    Subject,
    cast_before,
    evaluate,
    forward,
    program,
    subject,
    train,
)
from torch_promote.parity.model import pretend_cuda
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.regions import float8

#: Makes the regions of a contender, with the arguments of torch.autocast.
_Autocast = Callable[..., Any]
_MODES = ("weights", "persistent", "all")
_AUTOCASTS: Mapping[str, _Autocast] = {STOCK: tp.stock_autocast, OURS: tp.my_autocast}


# Regions


#: Empty regions: construct, enter and leave.
_REGIONS: Mapping[str, tuple[str, Region | None]] = {
    "construct, enter, exit": ("with autocast(device): pass", nullcontext),
    "construct, enter, exit, with a dtype": ("with autocast(device, dtype=dtype): pass", nullcontext),
    "enter, exit of one object": ("with region: pass", nullcontext),
    "call of a decorated function": ("decorated()", nullcontext),
    "construct, enter, exit, cuda": ("with autocast('cuda'): pass", pretend_cuda),
    "construct, enter, exit, nested": ("with autocast(device, dtype): pass", None),
}


def _prepare_region(statement: str, around: Region | None, settings: Settings) -> Prepared:
    contenders = {}
    for contender, autocast in _AUTOCASTS.items():
        one = autocast(settings.device, LOW)
        names = {"autocast": autocast, "device": settings.device, "dtype": LOW, "region": one}
        names["decorated"] = one(lambda: None)
        contenders[contender] = Contender(statement, names, around or partial(autocast, settings.device, LOW))
    return Prepared(contenders)


# Single calls in an open region


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and its equivalents without autocast, as source.

    Attributes:
        statement: The call in the region.
        already_cast: The same on inputs that need no cast.
        plain: The call in float32, if that differs.
        setup: Code that runs before the call, in the region.
    """

    statement: str
    already_cast: str = ""
    plain: str = ""
    setup: str = "pass"


def _same(statement: str) -> Call:
    """A call with nothing to cast, which is the same without autocast."""
    return Call(statement, plain=statement)


_WEIGHT = Call("torch.mm(low, weight)", "torch.mm(low, low_weight)")
_SMALL_CALLS = {
    "mm, nothing to cast": _same("torch.mm(low, low)"),
    "linear, nothing to cast": _same("linear(low, low)"),
    "cat, nothing to cast": _same("torch.cat((low, low))"),
    "mse_loss (fp32), nothing to cast": _same("mse(single, single)"),
    "exp, a row of CUDA only": _same("torch.exp(single)"),
    "mm, a weight from the cache": _WEIGHT,
    "mm, an activation cast and a weight from the cache": Call("torch.mm(single, weight)", "torch.mm(low, low_weight)"),
    "policy lower_precision_fp (linear), three casts": Call(
        "linear(single, other, bias)", "linear(low, low_other, low_bias)", "linear(single, other, bias)"
    ),
    "policy fp32 (mse_loss), two casts": Call("mse(low, low_other)", "mse(raised, raised_other)", "mse(single, other)"),
    "policy promote (cat), one cast": Call(
        "torch.cat((low, single))", "torch.cat((raised, single))", "torch.cat((single, single))"
    ),
    "policy fallthrough (abs)": _same("torch.abs(low)"),
}

_TWO_CASTS = Call("torch.mm(a, b)", "torch.mm(low_a, low_b)", "torch.mm(a, b)")
_BACKWARD = Call(
    "grad(torch.mm(a, b), (a, b), low_g)",
    "grad(torch.mm(low_a, low_b), (low_a, low_b), low_g)",
    "grad(torch.mm(a, b), (a, b), g)",
)

#: Makes the names that a call can use.
_Names = Callable[[Settings], dict[str, Any]]


def calls() -> dict[str, tuple[Call, _Names]]:
    """Returns the calls by the names of their cases, each with the function that makes its names."""
    found: dict[str, tuple[Call, _Names]] = {name: (call, _small_tensors) for name, call in _SMALL_CALLS.items()}
    with_gradients = {
        "without grad": (_TWO_CASTS, False),
        "with grad": (_TWO_CASTS, True),
        "with grad, and backward": (_BACKWARD, True),
    }
    for how, (call, grad) in with_gradients.items():
        for size in (4, 16, 64, 256):
            name = f"mm, two activations cast, {size} x {size}, {how}"
            found[name] = (call, partial(_activations, size, grad))
    return found


def _small_tensors(settings: Settings) -> dict[str, Any]:
    single, other, bias, weight = (torch.randn(n, device=settings.device) for n in ((4, 4), (4, 4), (4,), (4, 4)))
    return {
        "torch": torch,
        "linear": nn.functional.linear,
        "mse": torch.ops.aten.mse_loss,
        "single": single,
        "other": other,
        "bias": bias,
        "weight": weight.requires_grad_(),
        "low": single.to(LOW),
        "low_other": other.to(LOW),
        "low_bias": bias.to(LOW),
        "raised": single.to(LOW).float(),
        "raised_other": other.to(LOW).float(),
        "low_weight": weight.detach().to(LOW).requires_grad_(),
    }


def _activations(size: int, grad: bool, settings: Settings) -> dict[str, Any]:
    a, b, g = (torch.randn(size, size, device=settings.device) for _ in range(3))
    operands = {"a": a, "b": b, "low_a": a.to(LOW), "low_b": b.to(LOW)}
    # Not leaves: autocast would cache their casts.
    activations = {name: operand.requires_grad_(grad) * 1 for name, operand in operands.items()}
    return {"torch": torch, "grad": torch.autograd.grad, "g": g, "low_g": g.to(LOW), **activations}


def _prepare_call(call: Call, make_names: _Names, settings: Settings) -> Prepared:
    names = make_names(settings)
    contenders = {
        contender: Contender(call.statement, names, partial(autocast, settings.device, LOW), call.setup)
        for contender, autocast in _AUTOCASTS.items()
    }
    for contender, statement in ((ALREADY_CAST, call.already_cast), (PLAIN, call.plain)):
        if statement:
            contenders[contender] = Contender(statement, names)
    return Prepared(contenders, (ALREADY_CAST if call.already_cast else PLAIN,))


# Models and programs

#: Makes a step from a model and the region around its forward.
_Steps = Callable[[Subject, Region], Step]


def _forward(made: Subject, each: Region, graph: bool = False) -> Step:
    return forward(made.net, made.x, each, graph)


def _evaluation(made: Subject, each: Region) -> Step:
    return evaluate(made.net, made.x, each)


def _models() -> dict[str, Case]:
    """Forwards, training steps and an evaluation loop of small models."""
    found = {f"{model}, forward": partial(_prepare_model, model, _forward, "weights") for model in MODELS}
    for model in MODELS:
        found[f"{model}, forward and backward"] = partial(_prepare_model, model, train, "weights")
    return {**found, "MLP, evaluation loop": partial(_prepare_model, "MLP", _evaluation, "weights")}


def _caches() -> dict[str, Case]:
    """Workloads for the modes of the cast cache. Stock's cache has one."""
    workloads: dict[str, tuple[str, _Steps]] = {
        "MLP, evaluation loop": ("MLP", _evaluation),
        "Llama-like, forward and backward": ("Llama-like", train),
    }
    return {
        f'{name}, cache="{mode}"': partial(_prepare_model, model, steps, mode)
        for mode in _MODES
        for name, (model, steps) in workloads.items()
    }


def _prepare_model(model: str, steps: _Steps, mode: str, settings: Settings) -> Prepared:
    return _prepare_subject(subject(model, settings), steps, mode, settings)


def _prepare_subject(made: Subject, steps: _Steps, mode: str, settings: Settings) -> Prepared:
    low = replace(made, net=cast_before(made.net))
    contenders = {
        STOCK: steps(made, partial(tp.stock_autocast, settings.device, LOW)),
        OURS: steps(made, partial(tp.my_autocast, settings.device, LOW, cache=mode)),
        ALREADY_CAST: steps(low, nullcontext),
        PLAIN: steps(made, nullcontext),
    }
    weights = [*made.net.parameters(), *low.net.parameters()]
    return Prepared({name: Contender(step) for name, step in contenders.items()}, (ALREADY_CAST,), weights)


def _prepare_program(name: str, mode: str, settings: Settings) -> Prepared:
    made = program(name, settings)
    stock = Contender(made.step(partial(tp.stock_autocast, settings.device, LOW)))
    ours = Contender(made.step(partial(tp.my_autocast, settings.device, LOW, cache=mode)))
    return Prepared({STOCK: stock, OURS: ours}, weights=made.weights)


# Compiled steps


def _inside(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW):
            return net(x)  # type: ignore[no-any-return]

    return torch.compile(on_its_own(run))


def _around(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(on_its_own(lambda x: net(x)))

    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW):
            return compiled(x)  # type: ignore[no-any-return]

    return run


def _one_object(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    one = autocast("cpu", dtype=LOW)

    def run(x: Tensor) -> Tensor:
        with one:
            return net(x)  # type: ignore[no-any-return]

    return torch.compile(on_its_own(run))


def _decorated(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    # A function around it, because all decorated functions have one code object.
    decorated = autocast("cpu", dtype=LOW)(on_its_own(run))
    return torch.compile(on_its_own(lambda x: decorated(x)))


def _several(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with autocast("cpu"):
            y = net(x).float()
        with autocast("cpu", dtype=LOW, cache_enabled=False):
            y = (y @ y.mT).float()
            with autocast("cpu", enabled=False):
                return y.relu() + 1  # type: ignore[no-any-return]

    return torch.compile(on_its_own(run))


def _with_a_break(net: nn.Module, autocast: _Autocast) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW):
            y = net(x)
            torch._dynamo.graph_break()
            return torch.relu(y @ y.mT)

    return torch.compile(on_its_own(run))


#: Where the region is: each function compiles a model with a region.
PLACES: Mapping[str, Callable[[nn.Module, _Autocast], Callable[[Tensor], Tensor]]] = {
    "region inside": _inside,
    "region around": _around,
    "one region object": _one_object,
    "decorated": _decorated,
    "several regions": _several,
    "graph break in a region": _with_a_break,
}
#: The training steps that are compiled: the model, and the place of the region.
_COMPILED: Mapping[str, tuple[str, str]] = {
    **{f"{model}, step": (model, "region inside") for model in ("MLP", "Llama-like", "conv net")},
    **{f"MLP, step, {place}": ("MLP", place) for place in ("region around", "graph break in a region")},
}


class _Running(nn.Module):
    """A model whose forward is a separate function."""

    def __init__(self, net: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _prepare_compiled(name: str, settings: Settings) -> Prepared:
    """Each contender has a model of its own. The first run of a step compiles it."""
    model, place = _COMPILED[name]
    contenders = {}
    for contender, autocast in _AUTOCASTS.items():
        made = subject(model, settings)
        running = _Running(made.net, PLACES[place](made.net, autocast))
        contenders[contender] = Contender(train(replace(made, net=running)))
    return Prepared(contenders, compiles=True)


# Compiled steps in float8


def _prepare_float8(recipe: str, base: str, settings: Settings) -> Prepared:
    """Compiled training steps of a Llama-like block, with weights in the low dtype. The base is called stock."""
    width, hidden, heads, tokens = (64, 128, 4, 32) if settings.tiny else (4096, 14336, 32, 4096)
    bfloat16 = partial(tp.my_autocast, settings.device, LOW)
    in_float8 = partial(bfloat16, overrides={"linear": f"float8:{recipe}"})
    block = Block(width, hidden, heads, tokens).to(settings.device, LOW)
    x = torch.randn(1, tokens, width, device=settings.device, dtype=LOW)
    contenders = {}
    for name, region in ((STOCK, bfloat16), (OURS, in_float8)):
        net = copy.deepcopy(block)
        if name == STOCK and base == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))
        compiled = torch.compile(on_its_own(lambda x, net=net: net(x)))
        contenders[name] = Contender(train(Subject(_Running(net, compiled), x, torch.randn_like(x).float()), region))
    return Prepared(contenders)


def _prepare_product(policy: CastPolicy, phase: str, settings: Settings) -> Prepared:
    """A product in float8: an output, or the gradient of a weight with few rows. In float32 it is called stock."""
    fast = phase == "forward"
    rows, inner, columns = (16, 32, 32) if settings.tiny else (256, 512, 512) if fast else (1024, 32, 1024)
    recipe, matrix = float8.recipe(policy), partial(torch.randn, device=settings.device)
    left = recipe.in_float8(matrix(rows, inner), torch.float8_e4m3fn, 1)
    right = recipe.in_float8(matrix(columns, inner), torch.float8_e4m3fn, 1).T
    names = {"mm": torch.mm, "left": left.data, "right": right.data}
    names["multiply"] = partial(float8.multiply, recipe, left, right, LOW, fast)
    return Prepared({STOCK: Contender("mm(left.float(), right.float())", names), OURS: Contender("multiply()", names)})


# Instructions


def _instructions() -> dict[str, Case]:
    """Instructions of empty regions, of calls and models in an open one, and of compiled steps; see callgrind.py.

    Two runs differ by less than 0.5%. Counts do not show how long instructions take, and valgrind has no AVX512, so
    other kernels may run.
    """
    linear = Call("linear(low, weight)", "linear(low, low_weight)", setup="kept = linear(low, weight)")
    two_casts = replace(_TWO_CASTS, plain="")
    found: dict[str, Case] = {
        **{f"region: {name}": partial(_prepare_region, *each) for name, each in _REGIONS.items()},
        "mm, nothing to cast": partial(_prepare_call, _same("torch.mm(low, low)"), _small_tensors),
        "exp, a row of CUDA only": partial(_prepare_call, _same("torch.exp(single)"), _small_tensors),
        # The setup holds a graph of the weight, which keeps the node of its cast alive.
        "linear, a cached weight": partial(_prepare_call, linear, _small_tensors),
        "mm, two activations cast, without grad": partial(_prepare_call, two_casts, partial(_activations, 4, False)),
        "mm, two activations cast, with grad": partial(_prepare_call, two_casts, partial(_activations, 4, True)),
        "mm, a cached weight whose first graph is gone": partial(_prepare_call, _WEIGHT, _small_tensors),
    }
    for model in MODELS:
        steps = partial(_forward, graph=True)
        found[f"{model}, forward with a graph"] = partial(_prepare_counted_model, model, steps, "weights")
    found["MLP, forward and backward"] = partial(_prepare_counted_model, "MLP", train, "weights")
    found['MLP, evaluation loop, cache="persistent"'] = partial(
        _prepare_counted_model, "MLP", _evaluation, "persistent"
    )
    return {**found, **{f"compiled, {name}": partial(_prepare_counted_compiled, name) for name in _COMPILED}}


def _prepare_counted_model(model: str, steps: _Steps, mode: str, settings: Settings) -> Prepared:
    # Without oneDNN, kernels take many instructions. The suite measures dispatch, so models and inputs are small.
    settings = replace(settings, tiny=settings.tiny or model != "MLP")
    made = subject(model, settings)
    if model == "MLP":
        made = replace(made, x=made.x[:1].clone(), target=made.target[:1].clone())
    prepared = _prepare_subject(made, steps, mode, settings)
    return replace(prepared, contenders={name: one for name, one in prepared.contenders.items() if name != PLAIN})


def _prepare_counted_compiled(name: str, settings: Settings) -> Prepared:
    prepared = _prepare_compiled(name, replace(settings, tiny=settings.tiny or not name.startswith("MLP")))
    for contender in prepared.contenders.values():
        for _ in range(3):  # compiles in the first run, and again if the first step changes what Dynamo guards
            contender.statement()  # type: ignore[operator]
    return prepared


#: The cases of each suite, by name.
SUITES: Mapping[str, Mapping[str, Case]] = {
    "region": {name: partial(_prepare_region, *each) for name, each in _REGIONS.items()},
    "ops": {name: partial(_prepare_call, call, names) for name, (call, names) in calls().items()},
    "models": _models(),
    "caches": _caches(),
    "programs": {
        f'{name}, cache="{mode}"': partial(_prepare_program, name, mode) for name in PROGRAMS for mode in _MODES
    },
    "compile": {name: partial(_prepare_compiled, name) for name in _COMPILED},
    "float8": {
        f"Llama-like block, {recipe}, over {base}": partial(_prepare_float8, recipe, base)
        for recipe in ("tensorwise", "rowwise")
        for base in ("bfloat16", "torchao")
    }
    | {
        f"product, {policy.value}, {phase}, over float32": partial(_prepare_product, policy, phase)
        for policy in FLOAT8_POLICIES
        for phase in ("forward", "backward")
    },
    "instructions": _instructions(),
}
