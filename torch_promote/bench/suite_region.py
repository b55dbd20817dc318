"""The suite `region`: constructs, enters and leaves empty regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch_promote as tp
from torch_promote.bench.cases import LOW, OURS, STOCK, Case, Prepared, Settings
from torch_promote.bench.timing import stopwatch
from torch_promote.checking.autocast_in_force import pretend_cuda

__all__ = ["cases"]

Around = Callable[[], AbstractContextManager[Any]]

# The statements, by case. Those of the second table run in an open region. Cases for "cuda" simulate a GPU.
_OUTSIDE = {
    "construct, enter, exit": "with autocast(device): pass",
    "construct, enter, exit, with a dtype": "with autocast(device, dtype): pass",
    "enter, exit of one object": "with region: pass",
    "call of a decorated function": "decorated()",
}
_CUDA = {
    "construct, enter, exit, cuda": "with autocast('cuda'): pass",
    "construct, enter, exit, cuda, with a dtype": "with autocast('cuda', dtype): pass",
}
_INSIDE = {
    "construct, enter, exit, nested": "with autocast(device, dtype): pass",
    "construct, enter, exit, nested, disabled": "with autocast(device, enabled=False): pass",
}


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for name, statement in _OUTSIDE.items():
        yield Case("region", name, partial(_prepare, statement, nullcontext))
    for name, statement in _CUDA.items():
        yield Case("region", name, partial(_prepare, statement, pretend_cuda))
    for name, statement in _INSIDE.items():
        yield Case("region", name, partial(_prepare, statement, None))


def _prepare(statement: str, around: Around | None, settings: Settings) -> Prepared:
    """Prepares a case; `around` None times the statement in a region of the contender."""
    timers = {}
    makers: dict[str, Callable[..., Any]] = {STOCK: tp.stock_autocast, OURS: tp.my_autocast}
    for contender, autocast in makers.items():
        region = autocast(settings.device, LOW)
        names = {
            "autocast": autocast,
            "device": settings.device,
            "dtype": LOW,
            "region": region,
            "decorated": region(_function),
        }
        timers[contender] = stopwatch(statement, names, settings, around or partial(autocast, settings.device, LOW))
    return Prepared(timers)


def _function() -> None:
    pass
