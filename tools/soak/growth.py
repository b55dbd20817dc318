"""What a soak measures of its process, and whether a series of readings grows."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import statistics
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import torch_promote as tp
from torch_promote import _C

CONFIDENCE = 0.99
_WARM_UP = 0.25
_SIZED = (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and newer."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2.split())


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallInfo


def read() -> dict[str, int]:
    """Measures the process after a garbage collection: bytes, objects, and the entries of each registry."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    info = _mallinfo2()
    # Resident bytes of no file: the code of libraries becomes resident at its first use.
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    [resident] = [int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")]
    return {
        "resident": resident,
        "allocated": int(info.uordblks) + int(info.hblkhd),
        "python blocks": sys.getallocatedblocks(),
        "tensors": sum(number for kind, number in kinds.items() if issubclass(kind, torch.Tensor)),
        "ours": sum(number for kind, number in kinds.items() if str(kind.__module__).startswith("torch_promote")),
        **{f"registry {name}": size for name, size in _registries().items()},
    }


def _registries() -> dict[str, int]:
    """The entries of the registries in C++, and of every container and function cache of the loaded modules."""
    sizes: dict[str, int] = {f"_C {name}": size for name, size in _C.registry_sizes().items()}
    sizes |= {name: tp.cache_info()[name] for name in ("entries", "persistent_entries")}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("torch_promote.") or not isinstance(module, ModuleType):
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper) and value.__wrapped__.__module__ == name:
                if value.cache_parameters()["maxsize"] is None:  # the others have a bound
                    sizes[f"{name}.{attribute}"] = value.cache_info().currsize
            elif isinstance(value, _SIZED) and not attribute.startswith("__"):
                sizes[f"{name}.{attribute}"] = len(value)
    return sizes


@dataclass(frozen=True)
class Growth:
    """The growth of one measure after the warm-up.

    Attributes:
        slope: The growth of an iteration: the median of the slopes of all pairs of readings (Theil and Sen).
        low: The lower end of the slope's interval (Sen, 1968).
        high: The upper end of the slope's interval.
        first: The reading at the end of the warm-up.
        last: The last reading.
    """

    slope: float
    low: float
    high: float
    first: float
    last: float

    def verdict(self, bound: float) -> str:
        """Returns "flat" if the slope is at most the bound, "grows" if it is more, and "unclear" if both may be."""
        if self.high <= bound:
            return "flat"
        return "grows" if self.low > bound else "unclear"


def growth_of(iterations: Sequence[int], values: Sequence[float]) -> Growth:
    """Returns the growth over the last three quarters of a run."""
    begin = iterations[0] + (iterations[-1] - iterations[0]) * _WARM_UP
    points = [point for point in zip(iterations, values, strict=True) if point[0] >= begin]
    pairs = ((a, b) for place, a in enumerate(points) for b in points[place + 1 :])
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
    count = len(points)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)  # of Kendall's S, if there is no trend
    width = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return Growth(statistics.median(slopes), slopes[low], slopes[high], points[0][1], points[-1][1])
