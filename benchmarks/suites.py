"""The suites: their cases, and the code of each contender."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torch_promote as tp
from benchmarks.cases import ALREADY_CAST, HAND, LOW, OURS, PLAIN, STOCK, Case, Contender, Prepared, Settings
from benchmarks.measures import count_calls_of_compiler, count_compiled, on_its_own, without_disk_caches
from benchmarks.models import MODELS, Region, Step, Subject, cast_before, evaluate, forward, subject, train
from benchmarks.programs import PROGRAMS, missing, program
from torch_promote.parity.model import pretend_cuda

__all__ = ["PLACES", "SUITES", "Call", "calls", "instructions"]

#: Makes the regions of a contender, with the arguments of torch.autocast.
_Autocast = Callable[..., Any]


# Regions


def _function() -> None:
    pass


def region(settings: Settings) -> Iterator[Case]:
    """Empty regions: construct, enter and leave."""
    alone, within = nullcontext, None
    for name, statement, around in (
        ("construct, enter, exit", "with autocast(device): pass", alone),
        ("construct, enter, exit, with a dtype", "with autocast(device, dtype): pass", alone),
        ("enter, exit of one object", "with region: pass", alone),
        ("call of a decorated function", "decorated()", alone),
        ("construct, enter, exit, cuda", "with autocast('cuda'): pass", pretend_cuda),
        ("construct, enter, exit, cuda, with a dtype", "with autocast('cuda', dtype): pass", pretend_cuda),
        ("construct, enter, exit, nested", "with autocast(device, dtype): pass", within),
        ("construct, enter, exit, nested, disabled", "with autocast(device, enabled=False): pass", within),
    ):
        yield Case("region", name, partial(_prepare_region, statement, around))


def _prepare_region(statement: str, around: Region | None, settings: Settings) -> Prepared:
    contenders = {}
    makers: dict[str, _Autocast] = {STOCK: tp.stock_autocast, OURS: tp.my_autocast}
    for contender, autocast in makers.items():
        one = autocast(settings.device, LOW)
        names = {
            "autocast": autocast,
            "device": settings.device,
            "dtype": LOW,
            "region": one,
            "decorated": one(_function),
        }
        contenders[contender] = Contender(statement, names, around or partial(autocast, settings.device, LOW))
    return Prepared(contenders)


# Single calls in an open region


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and its equivalents without autocast, as source.

    Attributes:
        statement: The call in the region.
        hand: The same with casts in the code.
        already_cast: The same on inputs that need no cast.
        plain: The call in float32, if that differs.
        setup: Code that runs before the call, in the region.
    """

    statement: str
    hand: str = ""
    already_cast: str = ""
    plain: str = ""
    setup: str = "pass"


def _same(statement: str) -> Call:
    """A call with nothing to cast, which is the same without autocast."""
    return Call(statement, plain=statement)


_WEIGHT = Call("torch.mm(low, weight)", "torch.mm(low, weight.to(dtype))", "torch.mm(low, low_weight)")
_SMALL_CALLS = {
    "mm, nothing to cast": _same("torch.mm(low, low)"),
    "linear, nothing to cast": _same("linear(low, low)"),
    "cat, nothing to cast": _same("torch.cat((low, low))"),
    "mse_loss (fp32), nothing to cast": _same("torch.ops.aten.mse_loss(single, single)"),
    "exp, a row of CUDA only": _same("torch.exp(single)"),
    "mm, a weight from the cache": _WEIGHT,
    "mm, an activation cast and a weight from the cache": Call(
        "torch.mm(single, weight)", "torch.mm(single.to(dtype), weight.to(dtype))", "torch.mm(low, low_weight)"
    ),
    "policy lower_precision_fp (linear), three casts": Call(
        "linear(single, other, bias)",
        "linear(single.to(dtype), other.to(dtype), bias.to(dtype))",
        "linear(low, low_other, low_bias)",
        "linear(single, other, bias)",
    ),
    "policy fp32 (mse_loss), two casts": Call(
        "mse(low, low_other)", "mse(low.float(), low_other.float())", "mse(raised, raised_other)", "mse(single, other)"
    ),
    "policy promote (cat), one cast": Call(
        "torch.cat((low, single))",
        "torch.cat((low.float(), single))",
        "torch.cat((raised, single))",
        "torch.cat((single, single))",
    ),
    "policy fallthrough (abs)": _same("torch.abs(low)"),
}

_TWO_CASTS = Call("torch.mm(a, b)", "torch.mm(a.to(dtype), b.to(dtype))", "torch.mm(low_a, low_b)", "torch.mm(a, b)")
_BACKWARD = Call(
    "grad(torch.mm(a, b), (a, b), low_g)",
    "grad(torch.mm(a.to(dtype), b.to(dtype)), (a, b), low_g)",
    "grad(torch.mm(low_a, low_b), (low_a, low_b), low_g)",
    "grad(torch.mm(a, b), (a, b), g)",
)

#: Makes the names that a call can use.
_Names = Callable[[Settings], dict[str, Any]]


def ops(settings: Settings) -> Iterator[Case]:
    """Single calls with different casts and cast policies."""
    for name, (call, names) in calls().items():
        yield Case("ops", name, partial(_prepare_call, call, names))


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
        "dtype": LOW,
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
    return {"torch": torch, "dtype": LOW, "grad": torch.autograd.grad, "g": g, "low_g": g.to(LOW), **activations}


def _prepare_call(call: Call, make_names: _Names, settings: Settings) -> Prepared:
    names = make_names(settings)
    regions = {
        STOCK: partial(tp.stock_autocast, settings.device, LOW),
        OURS: partial(tp.my_autocast, settings.device, LOW),
    }
    contenders = {
        contender: Contender(call.statement, names, around, call.setup) for contender, around in regions.items()
    }
    for contender, statement in ((HAND, call.hand), (ALREADY_CAST, call.already_cast), (PLAIN, call.plain)):
        if statement:
            contenders[contender] = Contender(statement, names)
    return Prepared(contenders, (HAND, ALREADY_CAST) if call.hand else (PLAIN,))


# Overrides, which stock does not have

_OVERRIDES = {
    "mm": "fp32",
    "bmm": "keep",
    "aten::neg": "fp32",
    "aten::add_.Tensor": "match_self",
}


def overrides(settings: Settings) -> Iterator[Case]:
    """Calls with a user's cast policy, compared with casts by hand."""
    for name, statement, by_hand in (
        ("a row (mm as fp32), two casts", "torch.mm(low, low)", "torch.mm(low.float(), low.float())"),
        ("a row (mm as fp32), nothing to cast", "torch.mm(single, single)", "torch.mm(single, single)"),
        ("a row (bmm as keep)", "torch.bmm(batch, batch)", "torch.bmm(batch, batch)"),
        ("another op (neg as fp32), a cast", "torch.neg(low)", "torch.neg(low.float())"),
        ("another op (neg as fp32), nothing to cast", "torch.neg(single)", "torch.neg(single)"),
        ("another op (add_ as match_self), a cast", "written.add_(low)", "written.add_(low.float())"),
        ("an op that is not overridden (abs)", "torch.abs(single)", "torch.abs(single)"),
    ):
        yield Case("overrides", name, partial(_prepare_overridden, statement, by_hand))


def _prepare_overridden(statement: str, by_hand: str, settings: Settings) -> Prepared:
    single = torch.randn(4, 4, device=settings.device)
    names = {
        "torch": torch,
        "low": single.bfloat16(),
        "single": single,
        "batch": single.reshape(1, 4, 4),
        "written": torch.zeros_like(single),
    }
    around = partial(tp.my_autocast, settings.device, overrides=_OVERRIDES)
    return Prepared({OURS: Contender(statement, names, around), HAND: Contender(by_hand, names)})


# Models

#: Makes the steps of all contenders from a model, stock's regions and ours.
_Steps = Callable[[Subject, Region, Region], Mapping[str, Step]]


def _forward_steps(made: Subject, stock: Region, ours: Region, graph: bool = False) -> dict[str, Step]:
    return {
        STOCK: forward(made.net, made.x, stock, graph),
        OURS: forward(made.net, made.x, ours, graph),
        HAND: forward(made.by_hand, made.x, graph=graph),
        ALREADY_CAST: forward(cast_before(made.by_hand), made.x, graph=graph),
        PLAIN: forward(made.net, made.x, graph=graph),
    }


def _training_steps(
    made: Subject, stock: Region, ours: Region, batches: int = 1, around: bool = False
) -> dict[str, Step]:
    """Steps of several forwards and backwards; with `around`, one region is around all of them."""

    def step(net: nn.Module, each: Region = nullcontext) -> Step:
        return train(made, net, nullcontext if around else each, batches, each if around else nullcontext)

    return {
        STOCK: step(made.net, stock),
        OURS: step(made.net, ours),
        HAND: step(made.by_hand),
        ALREADY_CAST: step(cast_before(made.by_hand)),
        PLAIN: step(made.net),
    }


def _evaluation_steps(made: Subject, stock: Region, ours: Region) -> dict[str, Step]:
    """Evaluation loops. The version by hand casts the weights once, because they do not change."""
    return {
        STOCK: evaluate(made.net, made.x, stock),
        OURS: evaluate(made.net, made.x, ours),
        HAND: evaluate(cast_before(made.by_hand), made.x),
        PLAIN: evaluate(made.net, made.x),
    }


def models(settings: Settings) -> Iterator[Case]:
    """Forwards, training steps and an evaluation loop of small models."""
    for model in MODELS:
        yield Case("models", f"{model}, forward", partial(_prepare_model, model, _forward_steps, "weights"))
        steps = partial(_prepare_model, model, _training_steps, "weights")
        yield Case("models", f"{model}, forward and backward", steps)
    yield Case("models", "MLP, evaluation loop", partial(_prepare_model, "MLP", _evaluation_steps, "weights"))


def caches(settings: Settings) -> Iterator[Case]:
    """Workloads for the modes of the cast cache. Stock's cache has one mode, and can be off."""
    workloads: dict[str, tuple[str, _Steps]] = {
        "MLP, evaluation loop": ("MLP", _evaluation_steps),
        "MLP, four batches to a step": ("MLP", partial(_training_steps, batches=4)),
        "Llama-like, evaluation loop": ("Llama-like", _evaluation_steps),
        "Llama-like, forward and backward": ("Llama-like", _training_steps),
        "Llama-like, no rotary, forward and backward": ("Llama-like, no rotary", _training_steps),
    }
    for name, (model, steps) in workloads.items():
        for mode in ("weights", "persistent", "all", "none"):
            yield Case("caches", f'{name}, cache="{mode}"', partial(_prepare_model, model, steps, mode))


def _prepare_model(model: str, steps: _Steps, mode: str, settings: Settings) -> Prepared:
    stock = partial(tp.stock_autocast, settings.device, LOW, cache_enabled=mode != "none")
    ours = partial(tp.my_autocast, settings.device, LOW, cache=mode)
    made = subject(model, settings)
    contenders = {name: Contender(step) for name, step in steps(made, stock, ours).items()}
    return Prepared(contenders, (HAND, ALREADY_CAST), [*made.net.parameters(), *made.by_hand.parameters()])


def programs(settings: Settings) -> Iterator[Case]:
    """Typical programs in each mode of the cast cache, without those that need a package that is not installed."""
    for name in PROGRAMS:
        for mode in ("weights", "persistent", "all") if name not in missing() else ():
            yield Case("programs", f'{name}, cache="{mode}"', partial(_prepare_program, name, mode))


def _prepare_program(name: str, mode: str, settings: Settings) -> Prepared:
    made = program(name, settings)
    regions = {
        STOCK: partial(tp.stock_autocast, settings.device, LOW),
        OURS: partial(tp.my_autocast, settings.device, LOW, cache=mode),
    }
    return Prepared({name: Contender(made.step(each)) for name, each in regions.items()}, weights=made.weights)


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
_COMPILED_MODELS = ("MLP", "Llama-like", "conv net")
# By name, the model, the place of the region, and whether the step trains.
_COMPILED: Mapping[str, tuple[str, str, bool]] = {
    **{
        f"{model}, {name}": (model, "region inside", name == "step")
        for model in _COMPILED_MODELS
        for name in ("step", "forward")
    },
    **{
        f"MLP, step, {place}": ("MLP", place, True)
        for place in PLACES
        if place not in ("region inside", "several regions")
    },
    "MLP, forward, several regions": ("MLP", "several regions", False),
}


class _Running(nn.Module):
    """A model whose forward is a separate function."""

    def __init__(self, net: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def compile_steps(settings: Settings) -> Iterator[Case]:
    """Compiled steps, and their compilation, by Inductor on the CPU."""
    for name in _COMPILED:
        yield Case("compile", name, partial(_prepare_compiled, name))
    for model in _COMPILED_MODELS:
        yield Case("compile", f"{model}, compilation", partial(_prepare_compilation, f"{model}, step"))


def _prepare_compiled(name: str, settings: Settings) -> Prepared:
    """Each contender has a model of its own. The first run of a step compiles it."""
    model, place, trains = _COMPILED[name]
    contenders = {}
    for contender, autocast in ((STOCK, tp.stock_autocast), (OURS, tp.my_autocast)):
        made = subject(model, settings)
        run = PLACES[place](made.net, autocast)
        contenders[contender] = Contender(train(made, _Running(made.net, run)) if trains else forward(run, made.x))
    return Prepared(contenders, counts=lambda contender: count_compiled(contender.statement))


def _prepare_compilation(name: str, settings: Settings) -> Prepared:
    """The small models have as many graph nodes per layer."""
    prepared = _prepare_compiled(name, replace(settings, tiny=True))

    def counts(contender: Contender) -> dict[str, int]:
        return {**count_compiled(contender.statement), "calls": count_calls_of_compiler(contender.statement)}

    def compile_again(contender: Contender) -> float:
        torch._dynamo.reset()
        gc.collect()
        with without_disk_caches():
            start = time.process_time()
            contender.statement()
            return (time.process_time() - start) * 1e9

    return replace(prepared, counts=counts, stopwatch=compile_again)


# Instructions

# A step compiles in its first run, and once more if the first optimizer step has changed what Dynamo guards.
_COMPILING_RUNS = 3


def instructions(settings: Settings) -> Iterator[Case]:
    """Instructions of calls and models in an open region, and of compiled steps; see callgrind.py.

    Two runs differ by less than 0.5%. Counts do not show how long instructions take, and valgrind has no AVX512, so
    other kernels may run.
    """

    def small(settings: Settings) -> dict[str, Any]:
        names = _small_tensors(settings)
        return {**names, "bias": names["bias"].requires_grad_()}

    linear = Call("linear(low, weight)", "linear(low, weight.to(dtype))", "linear(low, low_weight)")
    biased = Call("linear(low, weight, bias)", "linear(low, weight.to(dtype), bias.to(dtype))")
    table: dict[str, tuple[Call, _Names]] = {
        "mm, nothing to cast": (_same("torch.mm(low, low)"), small),
        "exp, a row of CUDA only": (_same("torch.exp(single)"), small),
        # The setup holds a graph of the weight, which keeps the node of its cast alive.
        "linear, a cached weight": (replace(linear, setup="kept = linear(low, weight)"), small),
        "linear, a cached weight and a cached bias": (replace(biased, setup="kept = linear(low, weight, bias)"), small),
        "mm, two activations cast, without grad": (replace(_TWO_CASTS, plain=""), partial(_activations, 4, False)),
        "mm, two activations cast, with grad": (replace(_TWO_CASTS, plain=""), partial(_activations, 4, True)),
        "mm, a cached weight whose first graph is gone": (_WEIGHT, small),
    }
    for name, (call, names) in table.items():
        yield Case("instructions", name, partial(_prepare_call, call, names))
    yield Case("instructions", "boxed, a custom op in Python, two casts", _prepare_boxed)
    steps: dict[str, tuple[str, _Steps]] = {}
    for model in ("MLP", "Llama-like", "LSTM", "conv net"):
        steps[f"{model}, forward with a graph"] = (model, partial(_forward_steps, graph=True))
    steps["MLP, forward and backward"] = ("MLP", _training_steps)
    several = partial(_training_steps, batches=4, around=True)
    steps["MLP, four forwards and backwards in one region"] = ("MLP", several)
    steps['MLP, evaluation loop, cache="persistent"'] = ("MLP", _evaluation_steps)
    for name, (model, make) in steps.items():
        yield Case("instructions", name, partial(_prepare_counted_model, model, make))
    for name in _COMPILED:
        yield Case("instructions", f"compiled, {name}", partial(_prepare_counted_compiled, name))


def _prepare_boxed(settings: Settings) -> Prepared:
    _define_two()
    names = {**_small_tensors(settings), "two": torch.ops.torch_promote_bench.two}
    overrides = {"torch_promote_bench::two": "lower_precision_fp"}
    ours = partial(tp.my_autocast, settings.device, LOW, overrides=overrides)
    call = "two(single, other)"
    return Prepared(
        {
            OURS: Contender(call, names, ours),
            STOCK: Contender(call, names, partial(tp.stock_autocast, settings.device, LOW)),
            HAND: Contender("two(single.to(dtype), other.to(dtype))", names),
        }
    )


@functools.cache
def _define_two() -> torch.library.Library:
    """Defines an op of two tensors, also with a rule for stock's autocast. It lives as long as the library."""
    library = torch.library.Library("torch_promote_bench", "DEF")
    library.define("two(Tensor a, Tensor b) -> Tensor")
    library.impl("two", lambda a, b: a.clone(), "CPU")
    torch.library.register_autocast("torch_promote_bench::two", "cpu", LOW, lib=library)
    return library


def _prepare_counted_model(model: str, steps: _Steps, settings: Settings) -> Prepared:
    # Without oneDNN, kernels take many instructions. The suite measures dispatch, so models and inputs are small.
    settings = replace(settings, tiny=settings.tiny or model != "MLP")

    def of_one_sample(made: Subject, stock: Region, ours: Region) -> dict[str, Step]:
        if model == "MLP":
            made = replace(made, x=made.x[:1].clone(), target=made.target[:1].clone())
        return {name: step for name, step in steps(made, stock, ours).items() if name != PLAIN}

    return _prepare_model(model, of_one_sample, "persistent" if steps is _evaluation_steps else "weights", settings)


def _prepare_counted_compiled(name: str, settings: Settings) -> Prepared:
    prepared = _prepare_compiled(name, replace(settings, tiny=settings.tiny or not name.startswith("MLP")))
    for contender in prepared.contenders.values():
        for _ in range(_COMPILING_RUNS):
            contender.statement()
    return prepared


#: The suites by name.
SUITES: Mapping[str, Callable[[Settings], Iterator[Case]]] = {
    "region": region,
    "ops": ops,
    "overrides": overrides,
    "models": models,
    "caches": caches,
    "programs": programs,
    "compile": compile_steps,
    "instructions": instructions,
}
