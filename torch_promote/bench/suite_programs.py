"""The suite `programs`: typical programs in each mode of the cast cache, compared with stock."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch_promote as tp
from torch_promote.bench.cases import LOW, OURS, STOCK, Case, Measured, Prepared, Settings
from torch_promote.bench.casts import count_casts
from torch_promote.bench.memory import peak_bytes
from torch_promote.bench.programs import PROGRAMS, Program, missing, program
from torch_promote.bench.steps import Region, Step
from torch_promote.bench.timing import stopwatch

__all__ = ["cases"]

_MODES = ("weights", "persistent", "all")


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite, without those that need a package that is not installed."""
    left_out = missing()
    for name in PROGRAMS:
        for mode in _MODES if name not in left_out else ():
            yield Case("programs", f'{name}, cache="{mode}"', partial(_prepare, name, mode))


def _prepare(name: str, mode: str, settings: Settings) -> Prepared:
    made = program(name, settings)
    regions: dict[str, Region] = {
        STOCK: partial(tp.stock_autocast, settings.device, LOW),
        OURS: partial(tp.my_autocast, settings.device, LOW, cache=mode),
    }
    steps = {contender: made.step(region) for contender, region in regions.items()}
    timers = {contender: stopwatch(step, {}, settings) for contender, step in steps.items()}

    def measure() -> dict[str, Measured]:
        return {name: _measured(step, made, settings.device) for name, step in steps.items()}

    return Prepared(timers, measure=measure, weights=made.weights)


def _measured(step: Step, made: Program, device: str) -> Measured:
    peak = peak_bytes(step, device)
    return Measured(count_casts(step, made.weights), peak)
