"""The suite `instructions`: instructions of calls and models in an open region, with the targets for them.

Unlike times, the number of instructions is repeatable: two runs differ by less than 0.5%. But it does not show how long
they take, and valgrind has no AVX512, so other kernels may run.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_promote as tp
from torch_promote.bench.callgrind import PREPARED, READY
from torch_promote.bench.cases import (
    ALREADY_CAST,
    HAND,
    INSTRUCTIONS,
    LOW,
    OURS,
    PLAIN,
    STOCK,
    Case,
    Prepared,
    Settings,
    Target,
)
from torch_promote.bench.steps import Region, Step, Subject
from torch_promote.bench.suite_compile import COMPILED, compiled_steps
from torch_promote.bench.suite_models import evaluation_steps, forward_steps, prepare_steps, training_steps
from torch_promote.bench.suite_ops import Call, Names, activations, prepare_call, small_tensors
from torch_promote.bench.timing import Stopwatch, stopwatch

__all__ = ["cases", "serve"]

_Steps = Callable[[Subject, Region, Region], Mapping[str, Step]]


def _small(settings: Settings) -> dict[str, Any]:
    names = small_tensors(settings)
    return {**names, "bias": names["bias"].requires_grad_()}


def _four(grad: bool, settings: Settings) -> dict[str, Any]:
    return activations(4, grad, settings)


_MM = Call("torch.mm(low, low)", plain="torch.mm(low, low)")
_EXP = Call("torch.exp(single)", plain="torch.exp(single)")
_LINEAR = Call("linear(low, weight)", "linear(low, weight.to(dtype))", "linear(low, low_weight)")
_WITH_BIAS = Call("linear(low, weight, bias)", "linear(low, weight.to(dtype), bias.to(dtype))")
_WEIGHT = Call("torch.mm(low, weight)", "torch.mm(low, weight.to(dtype))", "torch.mm(low, low_weight)")
_TWO = Call("torch.mm(a, b)", "torch.mm(a.to(dtype), b.to(dtype))", "torch.mm(low_a, low_b)")

# The calls, by case. The setup holds a graph of the weight, which keeps the node of its cast alive.
_CALLS: dict[str, tuple[Call, Names, Target | None]] = {
    "mm, nothing to cast": (_MM, _small, Target(STOCK, 1.00)),
    "exp, a row of CUDA only": (_EXP, _small, Target(PLAIN, 1.03)),
    "linear, a cached weight": (replace(_LINEAR, setup="kept = linear(low, weight)"), _small, Target(STOCK, 0.95)),
    "linear, a cached weight and a cached bias": (
        replace(_WITH_BIAS, setup="kept = linear(low, weight, bias)"),
        _small,
        Target(STOCK, 0.95),
    ),
    "mm, two activations cast, without grad": (_TWO, partial(_four, False), Target(STOCK, 0.60)),
    "mm, two activations cast, with grad": (_TWO, partial(_four, True), Target(STOCK, 0.60)),
    "mm, a cached weight whose first graph is gone": (_WEIGHT, _small, Target(STOCK, 1.00)),
}

# A step compiles in its first run, and once more if the first optimizer step has changed what Dynamo guards.
_COMPILING_RUNS = 3

_OVERRIDES = {
    "aten::maximum": "lower_precision_fp",
    "aten::minimum": "fp32",
    "torch_promote_bench::two": "lower_precision_fp",
}
_BOXED = {
    "boxed by an override (maximum), two casts": Call(
        "torch.maximum(single, other)", "torch.maximum(single.to(dtype), other.to(dtype))"
    ),
    "boxed by an override (minimum), nothing to cast": Call(
        "torch.minimum(single, other)", "torch.minimum(single, other)"
    ),
    "boxed, a custom op in Python, two casts": Call("two(single, other)", "two(single.to(dtype), other.to(dtype))"),
}


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for name, (call, names, target) in _CALLS.items():
        yield Case(INSTRUCTIONS, name, partial(prepare_call, call, names), target)
    for name, call in _BOXED.items():
        yield Case(INSTRUCTIONS, name, partial(_prepare_boxed, call))
    for name, (model, steps, target) in _models().items():
        yield Case(INSTRUCTIONS, name, partial(_prepare_model, model, steps), target)
    for name in COMPILED:
        yield Case(INSTRUCTIONS, f"compiled, {name}", partial(_prepare_compiled, name), Target(STOCK, 1.02))


# --- ops outside the table


def _prepare_boxed(call: Call, settings: Settings) -> Prepared:
    _define_two()
    names = {**small_tensors(settings), "two": torch.ops.torch_promote_bench.two}
    region = partial(tp.my_autocast, settings.device, LOW, overrides=_OVERRIDES)
    timers = {OURS: stopwatch(call.statement, names, settings, region), HAND: stopwatch(call.hand, names, settings)}
    if "two" in call.statement:
        stock = partial(tp.stock_autocast, settings.device, LOW)
        timers[STOCK] = stopwatch(call.statement, names, settings, stock)
    return Prepared(timers)


@functools.cache
def _define_two() -> torch.library.Library:
    """Defines an op of two tensors, also with a rule for stock's autocast. It lives as long as the library."""
    library = torch.library.Library("torch_promote_bench", "DEF")
    library.define("two(Tensor a, Tensor b) -> Tensor")
    library.impl("two", lambda a, b: a.clone(), "CPU")
    torch.library.register_autocast("torch_promote_bench::two", "cpu", LOW, lib=library)
    return library


# --- models


def _models() -> dict[str, tuple[str, _Steps, Target | None]]:
    """The models, by case."""
    goals = {
        "MLP, forward with a graph": Target(ALREADY_CAST, 0.50, over=True),
        "MLP, forward and backward": Target(ALREADY_CAST, 0.55, over=True),
    }
    found: dict[str, tuple[str, _Steps, Target | None]] = {}
    for model in ("MLP", "Llama-like", "LSTM", "conv net"):
        for name, steps in (
            ("forward with a graph", partial(forward_steps, graph=True)),
            ("forward and backward", training_steps),
        ):
            found[f"{model}, {name}"] = (model, steps, goals.get(f"{model}, {name}"))
    evaluate = 'MLP, evaluation loop, cache="persistent"'
    accumulate = "MLP, four forwards and backwards in one region"
    return {
        **found,
        accumulate: ("MLP", partial(training_steps, batches=4, around=True), Target(STOCK, 1.05)),
        evaluate: ("MLP", evaluation_steps, Target(HAND, 1.05)),
    }


def _prepare_model(model: str, steps: _Steps, settings: Settings) -> Prepared:
    # Without oneDNN, kernels take many instructions. The suite measures dispatch, so models and inputs are small.
    settings = replace(settings, tiny=settings.tiny or model != "MLP")
    cache = "persistent" if steps is evaluation_steps else "weights"
    stock = partial(tp.stock_autocast, settings.device, LOW)
    ours = partial(tp.my_autocast, settings.device, LOW, cache=cache)

    def contenders(made: Subject) -> dict[str, Step]:
        if model == "MLP":
            made = replace(made, x=made.x[:1].clone(), target=made.target[:1].clone())
        return {name: step for name, step in steps(made, stock, ours).items() if name != PLAIN}  # no target needs it

    return prepare_steps(model, contenders, settings)


# --- compiled steps


def _prepare_compiled(name: str, settings: Settings) -> Prepared:
    model, place, trains = COMPILED[name]
    steps = compiled_steps(model, place, trains, replace(settings, tiny=settings.tiny or model != "MLP"))
    for step in steps.values():
        for _ in range(_COMPILING_RUNS):
            step()
    return Prepared({contender: stopwatch(step, {}, settings) for contender, step in steps.items()})


# --- in the process under valgrind


def serve() -> None:
    """Counts the cases whose names it reads from stdin, and writes the instructions of each contender as JSON.

    Between, it writes that a case is prepared, and waits for another line.

    The argument of the process is the folder that callgrind writes to. The last file of each contender gets its name.
    """
    folder = Path(sys.argv[1])
    settings = Settings()
    torch.backends.mkldnn.set_flags(False)  # valgrind's processor has no bfloat16, and oneDNN's LSTM then raises
    known = {case.name: case for case in cases(settings)}
    print(READY, flush=True)
    for line in sys.stdin:
        case = known[line.rstrip("\n")]
        prepared = case.prepare(settings)
        print(PREPARED, flush=True)
        sys.stdin.readline()
        counts = {}
        for name, timer in prepared.timers.items():
            assert isinstance(timer, Stopwatch)
            counts[name] = timer.instructions(folder)
            [last] = folder.glob("callgrind.*")
            last.rename(folder / name)
        prepared.close()
        print(json.dumps(counts), flush=True)
