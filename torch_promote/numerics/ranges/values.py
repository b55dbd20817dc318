"""The ranges of a call's results: extremes, shares of special values, and a histogram of binary exponents."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.numerics.ranges.float_bits import count_intervals, scale_of
from torch_promote.numerics.ranges.recent_counts import RecentCounts
from torch_promote.numerics.ranges.unnoticed import can_be_read, unnoticed
from torch_promote.numerics.records.calls import Call

__all__ = ["Values", "ValuesCollector"]

_SHARES = ("zeros", "infs", "nans", "underflows", "under_float16", "over_float16", "under_bfloat16", "over_bfloat16")


@dataclass(frozen=True, slots=True)
class Values:
    """The range of a tensor. `count` is 0 if the tensor is not of a real floating point dtype, or cannot be read.

    Attributes:
        count: The number of counted values: the elements, or those that a sparse or nested tensor stores.
        amax: The largest finite magnitude; None if there is no finite value.
        min_nonzero: The smallest finite magnitude other than 0; None if there is none.
        zeros: The share of zeros, 0 to 1.
        infs: The share of infinite values.
        nans: The share of NaNs.
        underflows: The share of values that are subnormal in the tensor's own dtype: not 0, but below its smallest
            normal number. Values that underflowed to 0 count as zeros.
        under_float16: The share of finite nonzero values that a cast to float16 rounds to 0.
        over_float16: The share of finite values that a cast to float16 makes infinite.
        under_bfloat16: The same for 0 and bfloat16.
        over_bfloat16: The same for inf and bfloat16.
        exponents: Pairs (e, n): n finite values have a magnitude of at least 2**e and less than 2**(e + 1).
    """

    count: int = 0
    amax: float | None = None
    min_nonzero: float | None = None
    zeros: float = 0.0
    infs: float = 0.0
    nans: float = 0.0
    underflows: float = 0.0
    under_float16: float = 0.0
    over_float16: float = 0.0
    under_bfloat16: float = 0.0
    over_bfloat16: float = 0.0
    exponents: tuple[tuple[int, int], ...] = ()

    @property
    def overflows(self) -> float:
        """The share of values beyond the range of the tensor's own dtype: the infinite ones."""
        return self.infs

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Values:
        """Returns the statistics of a tensor immediately.

        Example:
            >>> values = Values.of(torch.tensor([0.0, 1e-9, 3.0, float("inf")]))
            >>> values.amax, values.zeros, values.infs, values.under_float16, values.exponents
            (3.0, 0.25, 0.25, 0.25, ((-30, 1), (1, 1)))
        """
        with unnoticed():
            counted = count_intervals(tensor)
            return EMPTY if counted is None else _evaluate(counted.tolist(), tensor.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON-compatible values; `exponents` as a dict with strings as keys."""
        return {
            "count": self.count,
            "amax": self.amax,
            "min_nonzero": self.min_nonzero,
            **{name: getattr(self, name) for name in (*_SHARES, "overflows")},
            "exponents": {str(exponent): count for exponent, count in self.exponents},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Values:
        """Returns the statistics from the data of `to_dict`."""
        exponents = tuple((int(exponent), count) for exponent, count in data["exponents"].items())
        rest = {name: data[name] for name in ("count", "amax", "min_nonzero", *_SHARES)}
        return cls(**rest, exponents=exponents)


EMPTY = Values()


def _evaluate(row: Sequence[int], dtype: torch.dtype) -> Values:
    scale = scale_of(dtype)
    largest, smallest, counts = row[0], row[1], row[2:]
    exponents: dict[int, int] = {}
    for exponent, number in zip(scale.exponents, counts, strict=True):
        if exponent is not None and number:
            exponents[exponent] = exponents.get(exponent, 0) + number
    count = sum(counts)
    finite = bisect.bisect_left(scale.bounds, scale.infinity) + 1
    normal = math.log2(torch.finfo(dtype).smallest_normal)

    def share(first: int, last: int) -> float:
        return sum(counts[first:last]) / count

    return Values(
        count=count,
        amax=scale.to_float(largest) if counts[0] or exponents else None,
        min_nonzero=scale.to_float(smallest) if exponents else None,
        zeros=counts[0] / count,
        infs=counts[-2] / count,
        nans=counts[-1] / count,
        underflows=sum(number for exponent, number in exponents.items() if exponent < normal) / count,
        under_float16=share(1, scale.at_least("under_float16")),
        over_float16=share(scale.at_least("over_float16"), finite),
        under_bfloat16=share(1, scale.at_least("under_bfloat16")),
        over_bfloat16=share(scale.at_least("over_bfloat16"), finite),
        exponents=tuple(sorted(exponents.items())),
    )


@dataclass
class ValuesCollector:
    """Counts the results of calls on their devices, and delivers the statistics after their transfer.

    Args:
        deliver: Called with the number of a call and the statistics of its results.
        most: The maximum number of results that wait for a transfer.
    """

    deliver: Callable[[int, tuple[Values, ...]], None]
    most: int = 4096
    _waiting: list[tuple[int, list[tuple[torch.Tensor | None, torch.dtype]]]] = field(default_factory=list)
    _results: int = 0
    _lock: Any = field(default_factory=threading.RLock)  # a signal handler may run ops
    _recent: RecentCounts = field(default_factory=RecentCounts)

    def add(self, number: int, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        """Counts the results of a call. On a GPU this does not synchronize, unless the buffer is full.

        Args:
            number: The call's number, for `deliver`.
            call: The call.
            tensors: The tensors among its results.
        """
        keeps = self._recent.forget_before(call.name, bool(call.inputs))
        if not tensors:
            return
        with unnoticed():
            counted = [(self._count(tensor, keeps), tensor.dtype) for tensor in tensors]
        with self._lock:
            self._waiting.append((number, counted))
            self._results += len(counted)
            full = self._results >= self.most
        if full:
            self.transfer()

    def _count(self, tensor: torch.Tensor, keeps: bool) -> torch.Tensor | None:
        try:
            if not tensor.is_floating_point() or not can_be_read(tensor):
                return None
            counts = self._recent.get(tensor) if keeps else None
            if counts is None:
                counts = count_intervals(tensor)
                if keeps and counts is not None:
                    self._recent.put(tensor, counts)
            return counts
        except RuntimeError:  # the device, layout or subclass lacks an op, which must not break the program
            return None

    def transfer(self) -> None:
        """Transfers and delivers the waiting results, with one synchronization per device.

        Does nothing while a CUDA graph is being captured, because a synchronization would end the capture.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            waiting, self._waiting, self._results = self._waiting, [], 0
        rows = {id(row): (row, dtype) for _, counted in waiting for row, dtype in counted if row is not None}
        with unnoticed():
            transferred = _transfer([row for row, _ in rows.values()])
        pairs = zip(transferred, rows.items(), strict=True)
        values = {key: _evaluate(found, dtype) for found, (key, (_, dtype)) in pairs}
        for number, counted in waiting:
            self.deliver(number, tuple(EMPTY if row is None else values[id(row)] for row, _ in counted))


def _transfer(rows: list[torch.Tensor]) -> list[list[int]]:
    by_device: dict[torch.device, list[int]] = {}
    for i, row in enumerate(rows):
        by_device.setdefault(row.device, []).append(i)
    found: list[list[int]] = [[] for _ in rows]
    for device, places in by_device.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the rows were computed on the streams of the calls
        flat = torch.cat([rows[i] for i in places]).tolist()
        start = 0
        for i in places:
            found[i] = flat[start : start + rows[i].numel()]
            start += rows[i].numel()
    return found
