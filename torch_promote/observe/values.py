"""The values of tensors: counted in intervals of magnitude for `trace(values=True)`, and their extremes.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact. The values of a tensor are counted in intervals. The boundaries are the powers of two, and the values at which
a cast to float16 or bfloat16 starts to give 0 or inf.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.observe.ops import can_be_read, stored_values, unnoticed
from torch_promote.reference.dtypes import dtype_name

__all__ = [
    "FINITE",
    "Extremes",
    "Scale",
    "TensorRange",
    "Values",
    "ValuesCollector",
    "count_intervals",
    "extremes",
    "in_memory_order",
    "is_finite",
    "scale_of",
]


@dataclass(frozen=True)
class Scale:
    """The intervals into which the magnitudes of float32 or float64 are divided, as bit patterns.

    Attributes:
        integer: The integer dtype of the same size.
        code: The dtype's format character in the module `struct`.
        mantissa: The number of bits of the mantissa.
        magnitude: The mask of all bits but the sign.
        infinity: The bits of inf.
        bounds: The ends of the intervals, ascending: interval i goes from bounds[i - 1] to below bounds[i]. Interval 0
            contains the zeros.
        exponents: The binary exponent of each interval; None for zeros, inf and NaN.
        thresholds: The smallest magnitudes that a cast to float16 or bfloat16 does not round to 0, and the smallest
            that it makes infinite.
    """

    integer: torch.dtype
    code: str
    mantissa: int
    magnitude: int
    infinity: int
    bounds: tuple[int, ...]
    exponents: tuple[int | None, ...]
    thresholds: dict[str, int]

    def to_float(self, bits: int) -> float:
        """The value with these bits."""
        return float(struct.unpack(f"<{self.code.lower()}", bits.to_bytes(8 if self.code == "d" else 4, "little"))[0])

    def at_least(self, name: str) -> int:
        """The first interval above a threshold."""
        return bisect.bisect_right(self.bounds, self.thresholds[name])

    @functools.cached_property
    def interval_of_exponent(self) -> tuple[int, ...]:
        """For each exponent (as bits), the interval of its smallest magnitude. Exponent 0 starts after the zeros."""
        smallest = (max(exponent << self.mantissa, 1) for exponent in range((self.infinity >> self.mantissa) + 1))
        return tuple(bisect.bisect_right(self.bounds, bits) for bits in smallest)

    @functools.cached_property
    def interval_of_exponent_on_cpu(self) -> torch.Tensor:
        """The same as a tensor."""
        return torch.tensor(self.interval_of_exponent)

    @functools.cached_property
    def divided(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The exponents whose magnitudes span several intervals, with the bounds between them."""
        starts = [*self.interval_of_exponent, len(self.bounds) + 1]
        inner = (self.bounds[starts[i] : starts[i + 1] - 1] for i in range(len(starts) - 1))
        return tuple((exponent, bounds) for exponent, bounds in enumerate(inner) if bounds)

    @functools.cached_property
    def _on_devices(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def bounds_on(self, device: torch.device) -> torch.Tensor:
        """The bounds as a tensor, which is created once per device."""
        found = self._on_devices.get(device)
        if found is None:
            found = self._on_devices[device] = torch.tensor(self.bounds, dtype=self.integer, device=device)
        return found


def _make_scale(dtype: torch.dtype) -> Scale:
    double = dtype is torch.float64
    code, size, mantissa = ("d", 8, 52) if double else ("f", 4, 23)

    def bits(value: float) -> int:
        return int.from_bytes(struct.pack(f"<{code}", value), "little")

    smallest = -1074 if double else -149
    infinity = bits(math.inf)
    powers = [1 << i for i in range(mantissa)] + [i << mantissa for i in range(1, infinity >> mantissa)]
    # PyTorch casts float64 to float16 and bfloat16 via float32, so a float64 value counts if its rounding to float32
    # does. Ties round to an even mantissa, which all four thresholds have.
    thresholds = {  # the smallest magnitudes that do not become 0, and the smallest that become infinite
        "under_float16": bits(2.0**-25 * (1 + 2.0**-24 * double)) + 1,
        "over_float16": bits(65520.0 - 2.0**-9 * double),
        "under_bfloat16": bits(2.0**-134 + 2.0**-150 * double) + 1,
        "over_bfloat16": bits((2.0 - 2.0**-8 - 2.0**-24 * double) * 2.0**127),
    }
    bounds = sorted({*powers, *thresholds.values(), infinity, infinity + 1})
    exponents: list[int | None] = [None]
    exponent, steps = smallest - 1, frozenset(powers)
    for bound in bounds:
        exponent += bound in steps
        exponents.append(exponent if bound < infinity else None)
    return Scale(
        torch.int64 if double else torch.int32,
        code,
        mantissa,
        (1 << (size * 8 - 1)) - 1,
        infinity,
        tuple(bounds),
        tuple(exponents),
        thresholds,
    )


_SCALES = {dtype: _make_scale(dtype) for dtype in (torch.float32, torch.float64)}
#: The number of elements counted at a time, which bounds the memory for counting larger tensors.
_PIECE = 1 << 22


def scale_of(dtype: torch.dtype) -> Scale:
    """Returns the scale for counting the values of a floating point dtype: that of float64 or of float32."""
    return _SCALES[torch.float64 if dtype is torch.float64 else torch.float32]


def count_intervals(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the largest finite and the smallest nonzero magnitude as bits, then the counts of the intervals.

    Call it in `unnoticed`. On a GPU it does not synchronize.

    Returns:
        An int64 tensor; None if the tensor is empty, not of a real floating point dtype, or cannot be read.
    """
    if not tensor.is_floating_point():
        return None
    stored = stored_values(tensor)
    if stored is None:
        return None
    scale = scale_of(tensor.dtype)
    pieces = in_memory_order(stored.resolve_neg()).reshape(-1).split(_PIECE)
    counted = [_count_piece(piece, scale) for piece in pieces]
    if len(counted) == 1:
        return counted[0]
    stacked = torch.stack(counted)
    return torch.cat([stacked[:, :1].amax(0), stacked[:, 1:2].amin(0), stacked[:, 2:].sum(0)])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its dimensions sorted by stride. It is contiguous if it has no gaps."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _count_piece(values: torch.Tensor, scale: Scale) -> torch.Tensor:
    if values.dtype not in _SCALES:
        values = values.to(torch.float32)
    magnitudes = values.view(scale.integer) & scale.magnitude
    bounds = scale.bounds_on(values.device)
    if values.device.type != "cpu":  # without a synchronization, and without atomic additions
        return _count_by_sorting(magnitudes, bounds, scale)
    return _count_by_exponents(magnitudes, bounds, scale)


def _count_by_exponents(magnitudes: torch.Tensor, bounds: torch.Tensor, scale: Scale) -> torch.Tensor:
    """On the CPU: counts the exponents, then recounts those whose values span several intervals."""
    by_exponent = torch.bincount(magnitudes >> scale.mantissa, minlength=(scale.infinity >> scale.mantissa) + 1)
    counts = torch.zeros(len(scale.bounds) + 1, dtype=torch.int64)
    counts[scale.interval_of_exponent_on_cpu] = by_exponent
    smallest, largest = (int(value) for value in torch.aminmax(magnitudes))
    if smallest == 0:
        zeros = magnitudes.numel() - int(torch.count_nonzero(magnitudes))
        by_exponent[0] -= zeros
        counts[1] -= zeros
        counts[0] = zeros
    for exponent, inner in scale.divided:
        if not by_exponent[exponent]:
            continue
        if len(inner) > 1:
            first, last = max(exponent << scale.mantissa, 1), ((exponent + 1) << scale.mantissa) - 1
            inside = magnitudes[(magnitudes >= first) & (magnitudes <= last)]
            counts[scale.interval_of_exponent[exponent]] -= inside.numel()
            counts += torch.bincount(torch.bucketize(inside, bounds, right=True), minlength=counts.numel())
        else:
            interval = scale.interval_of_exponent[exponent]
            above = torch.count_nonzero(magnitudes >= inner[0]) - by_exponent[exponent + 1 :].sum()
            counts[interval] -= above
            counts[interval + 1] += above
    if smallest == 0:
        smallest = int(torch.where(magnitudes > 0, magnitudes, scale.infinity).amin())
    if largest >= scale.infinity:
        largest = int(torch.where(magnitudes < scale.infinity, magnitudes, 0).amax())
    return torch.cat([torch.tensor([largest, smallest]), counts])


def _count_by_sorting(magnitudes: torch.Tensor, bounds: torch.Tensor, scale: Scale) -> torch.Tensor:
    ordered = magnitudes.sort().values
    below = torch.searchsorted(ordered, bounds)
    ends = torch.full((1,), ordered.numel(), dtype=below.dtype, device=below.device)
    first, infinite = below[:1], below[bisect.bisect_left(scale.bounds, scale.infinity)].reshape(1)
    places = torch.cat([infinite - 1, first]).clamp(0, ordered.numel() - 1)
    counts = torch.diff(torch.cat([below, ends]), prepend=torch.zeros_like(ends))
    return torch.cat([ordered[places].long(), counts])


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

    def add(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Counts the results of a call. On a GPU this does not synchronize, unless the buffer is full.

        Args:
            number: The call's number, for `deliver`.
            tensors: The tensors among its results.
        """
        if not tensors:
            return
        with unnoticed():
            counted = [(_count(tensor), tensor.dtype) for tensor in tensors]
        with self._lock:
            self._waiting.append((number, counted))
            self._results += len(counted)
            full = self._results >= self.most
        if full:
            self.transfer()

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


def _count(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return count_intervals(tensor) if tensor.is_floating_point() and can_be_read(tensor) else None
    except RuntimeError:  # the device, layout or subclass lacks an op, which must not break the program
        return None


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


Extremes = tuple[float, float]
"""The smallest and the largest value. Both are NaN if the tensor contains a NaN."""

FINITE: Extremes = (0.0, 0.0)
"""The extremes of a tensor that has no floating point numbers or cannot be read."""


def extremes(tensors: Sequence[torch.Tensor]) -> list[Extremes]:
    """Returns the extremes of tensors, with one synchronization per device.

    Example:
        >>> extremes([torch.tensor([1.0, -3.0]), torch.tensor([1]), torch.tensor([1.0, float("nan")])])
        [(-3.0, 1.0), (0.0, 0.0), (nan, nan)]
    """
    found = [FINITE] * len(tensors)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with unnoticed():
        for i, tensor in enumerate(tensors):
            try:
                real = _real(tensor)
                if real is None:
                    continue
                low, high = torch.aminmax(real)
            except RuntimeError:  # the dtype, device or subclass lacks an op, which must not break the program
                continue
            if real.device.type == "cpu":
                found[i] = low.item(), high.item()
            else:
                on_devices.setdefault(real.device, []).append((i, torch.stack([low, high]).double()))
        for waiting in on_devices.values():
            values = torch.cat([pair for _, pair in waiting]).tolist()
            for place, (i, _) in enumerate(waiting):
                found[i] = values[2 * place], values[2 * place + 1]
    return found


def is_finite(found: Extremes) -> bool:
    """Whether all values are finite, given their extremes."""
    return math.isfinite(found[0]) and math.isfinite(found[1])


def _real(tensor: torch.Tensor) -> torch.Tensor | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    stored = stored_values(tensor)
    if stored is None:
        return None
    if stored.is_complex():
        stored = torch.view_as_real(stored.resolve_conj())
    return stored if stored.dtype.itemsize > 1 else stored.float()


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The range of an argument or a result.

    Attributes:
        name: The argument, "mat2"; for a result its index, "0".
        dtype: The dtype.
        shape: The shape; empty for a nested tensor.
        min: The smallest finite value; None if there is none, or if it is unknown.
        max: The largest finite value.
        infs: The number of infinite values.
        nans: The number of NaNs.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    infs: int = 0
    nans: int = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, before: Extremes | None = None) -> TensorRange:
        """Reads the range of a tensor; `before` are its extremes before the call, if the call has overwritten it."""
        shape = () if tensor.is_nested else tuple(tensor.shape)
        if before is not None:
            known = before if is_finite(before) else (None, None)
            return cls(name, tensor.dtype, shape, min=known[0], max=known[1])
        with unnoticed(), contextlib.suppress(RuntimeError):  # as in `extremes`
            real = _real(tensor)
            if real is None:
                return cls(name, tensor.dtype, shape)
            finite = real[torch.isfinite(real)]
            infs, nans = int(torch.isinf(real).sum()), int(torch.isnan(real).sum())
            if not finite.numel():
                return cls(name, tensor.dtype, shape, infs=infs, nans=nans)
            low, high = torch.aminmax(finite)
            return cls(name, tensor.dtype, shape, low.item(), high.item(), infs, nans)
        return cls(name, tensor.dtype, shape)

    def to_dict(self) -> dict[str, Any]:
        """Returns the range as JSON-compatible values."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "min": self.min,
            "max": self.max,
            "infs": self.infs,
            "nans": self.nans,
        }

    def __str__(self) -> str:
        text = f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"
        if self.min is not None:
            text += f" from {self.min:.4g} to {self.max:.4g}"
        text += f", {self.infs:,} inf" if self.infs else ""
        return f"{text}, {self.nans:,} NaN" if self.nans else text
