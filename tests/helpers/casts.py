"""Functions that make both kinds of regions, and a count of the casts that a program makes."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp

#: Makes a region of the CPU, by default in bfloat16.
Region = Callable[..., Any]
#: What runs the same under both kinds of regions.
Program = Callable[[Region], Any]

stock: Region = functools.partial(tp.stock_autocast, "cpu")
ours: Region = functools.partial(tp.my_autocast, "cpu")

#: An input, and for a square weight of BIG rows a cast that is memory of its own, which goes back when it is freed.
X = torch.linspace(-1, 1, 8 * 16).view(8, 16)
BIG = 4096

#: A cast as it arrives below autograd; where autograd is passed by (inference mode), `to` itself arrives.
CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


class CastCount(TorchDispatchMode):
    """Counts the casts to some dtypes; of one tensor only, if one is given."""

    def __init__(
        self, of: torch.Tensor | None = None, to: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    ) -> None:
        super().__init__()
        self.of, self.to = of, to
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = self.of is None or args[0] is self.of
        if counts and func in CASTS and result.dtype in self.to:
            self.casts += 1
        return result


def casts_made(program: Program, region: Region) -> int:
    """Runs a program from a fixed seed and counts its casts."""
    torch.manual_seed(0)
    with CastCount() as count, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(region)
    return count.casts


def half(tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A cast without autocast, for comparison."""
    with tp.stock_autocast("cpu", enabled=False):
        return tensor.detach().to(dtype)


def weight() -> Any:
    """The same weight at each call, to be multiplied by `X`."""
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(16, 16))


def entries() -> int:
    """The number of casts that this thread keeps."""
    return tp.cache_info()["entries"]


def kept_in(action: Callable[[], object]) -> int:
    """The number of casts that this thread makes and keeps in a call."""
    before = tp.cache_info()["misses"]
    action()
    return tp.cache_info()["misses"] - before


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
