"""The peak memory of the benchmark's programs in a mode of the cache, and the bound that docs/casts.md gives for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from benchmarks.cases import LOW, Settings
from benchmarks.measures import peak_bytes
from benchmarks.programs import PROGRAMS, Program, program

MODES = ("weights", "persistent", "all")

#: Programs with a backward. The others run without gradients.
TRAINING = frozenset(name for name in PROGRAMS if name.endswith(("training", "step", "checkpoints", "LoRA", "EMA")))

#: Each program in each mode.
EVERY_PROGRAM = [pytest.param(name, mode, id=f"{name}, {mode}") for name in PROGRAMS for mode in MODES]


def step_of(name: str, mode: str, device: str, around: bool = False) -> Callable[[], Any]:
    """A step of a program in a mode of ours or under "stock"; with `around`, all of it is in one region, too."""
    region: Any = functools.partial(tp.stock_autocast, device, LOW)
    if mode != "stock":
        region = functools.partial(tp.my_autocast, device, LOW, cache=mode)
    step = _made(name, device).step(region)
    return region()(step) if around else step


def peaks(name: str, mode: str, device: str, around: bool = False) -> tuple[int, int]:
    """The peaks of a program's first step and of its second.

    Memory that casts hold after a step counts in the first peak; the second starts with it.
    """
    found = []
    for warm in (False, True):
        step = step_of(name, mode, device, around)
        found.append(peak_bytes(step, device, warm=warm))
        del step
        tp.clear_cache()
    return found[0], found[1]


def _made(name: str, device: str) -> Program:
    return program(name, Settings(device, tiny=True))


class _LargestCast(TorchDispatchMode):
    def __init__(self, weights: Any) -> None:
        super().__init__()
        self._weights = {weight.data_ptr() for weight in weights}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(result, Tensor):
            source = args[0]
            narrows = result.itemsize < source.itemsize
            if narrows and source.data_ptr() not in self._weights and torch._C._current_autograd_node() is None:
                self.bytes = max(self.bytes, result.nbytes)
        return result


def bytes_beyond_stock(name: str, mode: str, device: str) -> int:
    """The bytes that a mode may hold beyond stock: see docs/casts.md, section Memory."""
    frozen = name == "Llama-like, LoRA"
    if mode == "weights" or (mode == "all" and name in TRAINING and not frozen):
        return 0
    made = _made(name, device)
    only_frozen = frozen and mode == "all"
    weights = sum(weight.nbytes for weight in made.weights if not (only_frozen and weight.requires_grad))
    casts = 0 if name == "growing slices" else weights // 2  # none of views
    if mode == "persistent":
        return casts
    with _LargestCast(made.weights) as largest:
        made.step(functools.partial(tp.stock_autocast, device, LOW))()
    return casts + 4 * largest.bytes


def check_bounds(name: str, mode: str, device: str, of_stock: tuple[int, int], around: bool = False) -> None:
    """Compares the peaks of a program with stock's."""
    first, second = peaks(name, mode, device, around)
    beyond = bytes_beyond_stock(name, mode, device)
    assert 0 < first <= 1.02 * of_stock[0] + beyond
    assert 0 < second <= 1.02 * of_stock[1] + beyond
    if mode == "persistent" and name not in TRAINING:
        # The casts exist before the second step.
        assert second <= of_stock[1]
