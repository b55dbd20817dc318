"""The suite `compile`: compiled steps of small models, and their compilation, by Inductor on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.bench.cases import LOW, OURS, STOCK, Case, Measured, Prepared, Settings, Timer
from torch_promote.bench.compiling import count_calls_of_compiler, count_compiled, on_its_own, without_disk_caches
from torch_promote.bench.memory import peak_bytes
from torch_promote.bench.steps import Step, forward, subject, train
from torch_promote.bench.timing import stopwatch

__all__ = ["COMPILED", "PLACES", "cases", "compiled_steps"]

#: Makes a region of the CPU.
_Autocast = Callable[..., Any]
#: Compiles a model.
_Place = Callable[[nn.Module, _Autocast], Callable[[Tensor], Tensor]]


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
    region = autocast("cpu", dtype=LOW)

    def run(x: Tensor) -> Tensor:
        with region:
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


#: Where the region is.
PLACES: Mapping[str, _Place] = {
    "region inside": _inside,
    "region around": _around,
    "one region object": _one_object,
    "decorated": _decorated,
    "several regions": _several,
    "graph break in a region": _with_a_break,
}
_MODELS = ("MLP", "Llama-like", "conv net")
#: The compiled steps: by name, the model, the place of the region, and whether the step trains.
COMPILED: Mapping[str, tuple[str, _Place, bool]] = {
    **{f"{model}, {name}": (model, _inside, name == "step") for model in _MODELS for name in ("step", "forward")},
    **{
        f"MLP, step, {name}": ("MLP", place, True) for name, place in PLACES.items() if place not in (_inside, _several)
    },
    "MLP, forward, several regions": ("MLP", _several, False),
}


class _Running(nn.Module):
    """A model whose forward is a separate function."""

    def __init__(self, net: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for name, (model, place, trains) in COMPILED.items():
        yield Case("compile", name, partial(_prepare, model, place, trains))
    for model in _MODELS:
        yield Case("compile", f"{model}, compilation", partial(_prepare_compilation, model))


def compiled_steps(model: str, place: _Place, trains: bool, settings: Settings) -> dict[str, Step]:
    """Returns the step of each contender, on a model of its own. The first run of a step compiles it.

    Args:
        model: The name of a model of `torch_promote.bench.nets`.
        place: A value of `PLACES`.
        trains: Whether the step has a backward and an update of the weights.
        settings: The size of the model.
    """
    steps = {}
    for contender, autocast in ((STOCK, tp.stock_autocast), (OURS, tp.my_autocast)):
        made = subject(model, settings)
        run: Any = place(made.net, autocast)
        steps[contender] = train(made, _Running(made.net, run)) if trains else forward(run, made.x)
    return steps


def _prepare(model: str, place: _Place, trains: bool, settings: Settings) -> Prepared:
    steps = compiled_steps(model, place, trains, settings)
    timers = {name: stopwatch(step, {}, settings) for name, step in steps.items()}
    return Prepared(timers, measure=partial(_measured, steps))


def _measured(steps: Mapping[str, Step]) -> dict[str, Measured]:
    return {name: Measured({}, peak_bytes(step, "cpu"), compiled=count_compiled(step)) for name, step in steps.items()}


def _prepare_compilation(model: str, settings: Settings) -> Prepared:
    """Prepares the compilation of a step. It uses the small models, which have as many graph nodes per layer."""
    steps = compiled_steps(model, _inside, trains=True, settings=replace(settings, tiny=True))
    return Prepared(
        {name: _compiling(step) for name, step in steps.items()}, measure=partial(_compiler_measured, steps)
    )


def _compiler_measured(steps: Mapping[str, Step]) -> dict[str, Measured]:
    measured = _measured(steps)
    return {
        name: replace(measured[name], compiled={**measured[name].compiled, "calls": count_calls_of_compiler(step)})
        for name, step in steps.items()
    }


def _compiling(step: Step) -> Timer:
    def timer() -> float:
        torch._dynamo.reset()
        gc.collect()
        with without_disk_caches():
            start = time.process_time()
            step()
            return (time.process_time() - start) * 1e9

    return timer
