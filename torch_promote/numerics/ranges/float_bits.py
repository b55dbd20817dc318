"""Counts the values of a tensor in intervals of magnitude.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact. The values of a tensor are counted in intervals. The boundaries are the powers of two, and the values at which
a cast to float16 or bfloat16 starts to give 0 or inf.
"""

from __future__ import annotations

import bisect
import functools
import math
import struct
from dataclasses import dataclass

import torch

from torch_promote.numerics.ranges.unnoticed import stored_values

__all__ = ["Scale", "count_intervals", "in_memory_order", "scale_of"]


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
