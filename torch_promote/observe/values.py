"""The values of tensors: their statistics for `trace(values=True)`, their extremes and their ranges.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact. On a GPU, no step depends on the data, so that the count does not synchronize.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_promote.observe.ops import stored_values, unnoticed
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.codec import decode_record

__all__ = [
    "EMPTY",
    "FINITE",
    "Extremes",
    "NonfiniteValues",
    "TensorRange",
    "Values",
    "ValuesCollector",
    "extremes",
    "is_finite",
]


class _Format(NamedTuple):
    """The bits of float32 or float64.

    Attributes:
        integer: The integer dtype of the same size.
        code: The dtype's format character in the module `struct`.
        mantissa: The number of bits of the mantissa.
        bias: The exponent of the number whose exponent bits are 0, negated.
        infinity: The bits of inf.
        magnitude: The mask of all bits but the sign.
        thresholds: The smallest magnitude that a cast to float16 does not round to 0, the smallest that it makes
            infinite, and the same for bfloat16.
        top: The largest finite number of the tensor's own dtype.
    """

    integer: torch.dtype
    code: str
    mantissa: int
    bias: int
    infinity: int
    magnitude: int
    thresholds: tuple[int, int, int, int]
    top: int

    def to_float(self, bits: int) -> float:
        """The value with these bits."""
        return float(struct.unpack(f"<{self.code}", bits.to_bytes(self.integer.itemsize, "little"))[0])


@functools.cache
def _format_of(dtype: torch.dtype) -> _Format:
    double = dtype is torch.float64
    integer, code, mantissa, bias = (torch.int64, "d", 52, 1023) if double else (torch.int32, "f", 23, 127)
    magnitude = (1 << (8 * integer.itemsize - 1)) - 1

    def bits(value: float) -> int:
        return int.from_bytes(struct.pack(f"<{code}", value), "little")

    # PyTorch casts float64 to float16 and bfloat16 via float32, so a float64 value counts if its rounding to float32
    # does. Ties round to an even mantissa, which all four thresholds have.
    thresholds = (
        bits(2.0**-25 * (1 + 2.0**-24 * double)) + 1,
        bits(65520.0 - 2.0**-9 * double),
        bits(2.0**-134 + 2.0**-150 * double) + 1,
        bits((2.0 - 2.0**-8 - 2.0**-24 * double) * 2.0**127),
    )
    return _Format(integer, code, mantissa, bias, bits(math.inf), magnitude, thresholds, bits(torch.finfo(dtype).max))


#: The number of elements counted at a time, which bounds the memory for counting larger tensors.
_PIECE = 1 << 22


def _count(tensor: torch.Tensor) -> torch.Tensor | None:
    """Counts the values of a tensor, for `_evaluate`; call it in `unnoticed`.

    Returns:
        An int64 tensor; None if the tensor is empty, not of a real floating point dtype, or cannot be read.
    """
    stored = stored_values(tensor) if tensor.is_floating_point() else None
    if stored is None:
        return None
    form = _format_of(tensor.dtype)
    if not stored.is_contiguous():  # sorted by stride, it is contiguous if it has no gaps
        stored = stored.permute(sorted(range(stored.dim()), key=stored.stride, reverse=True))
    pieces = [_count_piece(piece, form, stored.is_cpu) for piece in stored.resolve_neg().reshape(-1).split(_PIECE)]
    if len(pieces) == 1:
        return pieces[0]
    stacked = torch.stack(pieces)
    return torch.cat([stacked[:, :1].amax(0), stacked[:, 1:2].amin(0), stacked[:, 2:].sum(0)])


def _count_piece(values: torch.Tensor, form: _Format, on_cpu: bool) -> torch.Tensor:
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    bits = values.view(form.integer) & form.magnitude
    bounds = (1, *form.thresholds, form.top, form.infinity, form.infinity + 1)
    low, high = torch.aminmax(bits)
    # On a CPU, the range is at hand and answers most questions. A GPU would have to be waited for.
    first, last = (int(low), int(high)) if on_cpu else (0, form.magnitude)
    above: list[Any] = [
        torch.count_nonzero(bits >= bound) if first < bound <= last else bits.numel() * (bound <= first)
        for bound in bounds
    ]
    # Below 0, the mask wraps: a finite magnitude is larger than inf and NaN, and 0 is the largest.
    largest = (((high if last < form.infinity else bits) - form.infinity) & form.magnitude).amax()
    smallest = (((low if first > 0 else bits) - 1) & form.magnitude).amin()
    ends = [largest.long(), smallest.long(), *above]
    places = (form.infinity >> form.mantissa) + 1
    if on_cpu:
        return torch.cat([torch.tensor(list(map(int, ends))), torch.bincount(bits >> form.mantissa, minlength=places)])
    one = torch.ones(1, dtype=torch.int64, device=bits.device)
    exponents = one.new_zeros(places).index_add_(0, bits >> form.mantissa, one.expand(bits.numel()))
    return torch.cat([torch.stack(ends), exponents])


_SHARES = (
    "zeros",
    "infs",
    "nans",
    "underflows",
    "under_float16",
    "over_float16",
    "under_bfloat16",
    "over_bfloat16",
    "saturated",
)


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
            Subnormal numbers of float32 and bfloat16 count as -127, those of float64 as -1023.
        saturated: The share of finite values with the largest magnitude of the tensor's own dtype.
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
    saturated: float = 0.0
    digest: str = ""
    l2: float | None = None
    sketch: tuple[float, ...] = ()

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
            counted = _count(tensor)
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
        kinds = {"count": int, **dict.fromkeys(("amax", "min_nonzero"), float | None), **dict.fromkeys(_SHARES, float)}
        read = decode_record({**kinds, "exponents": Mapping[str, int]}, data)
        exponents = tuple((int(exponent), count) for exponent, count in read.pop("exponents").items())
        return cls(**read, exponents=exponents)


@dataclass
class NonfiniteValues:
    """The losses of a trace with values, and its inf and NaN except those that masks asked for.

    Attributes:
        losses: The number of losses.
        nans: The number of losses that are NaN.
        infs: The number of infinite losses.
        first_loss: The number of the first loss that is not finite, from 0; None if all are finite.
        loss_step: The number of optimizer steps that had ended before it.
        calls: The number of the program's calls whose results have inf or NaN.
        nan_calls: The number of those with NaN.
        first_call: The index in `TraceReport.calls` of the call that made them, for the first such loss if there is
            one; None if all results are finite.
        call_step: The number of optimizer steps that had ended before it.
    """

    losses: int = 0
    nans: int = 0
    infs: int = 0
    first_loss: int | None = None
    loss_step: int = 0
    calls: int = 0
    nan_calls: int = 0
    first_call: int | None = None
    call_step: int = 0

    @property
    def kind(self) -> str:
        """What the losses are that are not finite: "NaN", "inf", "NaN or inf" or ""."""
        return " or ".join(["NaN"] * bool(self.nans) + ["inf"] * bool(self.infs))

    def about_losses(self, steps: int) -> str:
        """Returns "3 of 10 losses are NaN, from step 4"; "" if all losses are finite.

        Args:
            steps: The number of optimizer steps in the trace. Without any, losses are counted instead.
        """
        bad, kind = self.nans + self.infs, self.kind
        if not bad:
            return ""
        if bad == self.losses:
            return f"all {bad:,} losses are {kind}" if bad > 1 else f"the only loss is {kind}"
        since = f"from step {self.loss_step:,}" if steps else f"from loss {self.first_loss or 0:,}, counted from 0"
        return f"{bad:,} of {self.losses:,} losses {'are' if bad > 1 else 'is'} {kind}, {since}"


EMPTY = Values()


def _evaluate(row: Sequence[int], dtype: torch.dtype) -> Values:
    form = _format_of(dtype)
    largest, smallest, nonzero, not_under16, over16, not_under_bf16, over_bf16, at_top, nonfinite, nans, *numbers = row
    count = sum(numbers)
    numbers[0] -= count - nonzero
    exponents = tuple((place - form.bias, number) for place, number in enumerate(numbers[:-1]) if number)
    normal = math.log2(torch.finfo(dtype).smallest_normal)
    return Values(
        count=count,
        amax=form.to_float(largest - (1 << form.mantissa)) if nonfinite < count else None,
        min_nonzero=form.to_float(smallest + 1) if exponents else None,
        zeros=(count - nonzero) / count,
        infs=(nonfinite - nans) / count,
        nans=nans / count,
        saturated=(at_top - nonfinite) / count,
        underflows=sum(number for exponent, number in exponents if exponent < normal) / count,
        under_float16=(nonzero - not_under16) / count,
        over_float16=(over16 - nonfinite) / count,
        under_bfloat16=(nonzero - not_under_bf16) / count,
        over_bfloat16=(over_bf16 - nonfinite) / count,
        exponents=exponents,
    )


class ValuesCollector:
    """Counts the outputs of calls on their devices, and delivers the statistics after their transfer.

    Args:
        deliver: Called with the number of a call and the statistics of its outputs.
        most: The maximum number of results that wait for a transfer.
    """

    def __init__(self, deliver: Callable[[int, tuple[Values, ...]], None], most: int = 4096) -> None:
        self._deliver = deliver
        self._most = most
        self._waiting: list[tuple[int, list[tuple[torch.Tensor | None, torch.dtype]]]] = []
        self._results = 0
        self._lock = threading.RLock()  # a signal handler may run ops

    def add(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Counts the outputs of a call. On a GPU this does not synchronize, unless the buffer is full.

        Args:
            number: The call's number, for `deliver`.
            tensors: Its outputs.
        """
        counted: list[tuple[torch.Tensor | None, torch.dtype]] = []
        with unnoticed():
            for tensor in tensors:
                row = None
                with contextlib.suppress(RuntimeError):  # the device, layout or subclass lacks an op
                    row = _count(tensor)
                counted.append((row, tensor.dtype))
        with self._lock:
            self._waiting.append((number, counted))
            self._results += len(counted)
        if self._results >= self._most:
            self.transfer()

    def transfer(self) -> None:
        """Transfers and delivers the waiting results, with one synchronization per device.

        Does nothing while a CUDA graph is being captured, because a synchronization would end the capture.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            waiting, self._waiting, self._results = self._waiting, [], 0
        with unnoticed():
            rows = iter(_transfer([row for _, counted in waiting for row, _ in counted if row is not None]))
        for number, counted in waiting:
            values = (EMPTY if row is None else _evaluate(next(rows), dtype) for row, dtype in counted)
            self._deliver(number, tuple(values))


def _transfer(rows: Sequence[torch.Tensor]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for device in {row.device for row in rows}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the rows were computed on the streams of the calls
        here = [row for row in rows if row.device == device]
        parts = torch.cat(here).cpu().split([row.numel() for row in here])
        found |= {id(row): part.tolist() for row, part in zip(here, parts, strict=True)}
    return [found[id(row)] for row in rows]


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

    def __str__(self) -> str:
        text = f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"
        if self.min is not None:
            text += f" from {self.min:.4g} to {self.max:.4g}"
        text += f", {self.infs:,} inf" if self.infs else ""
        return f"{text}, {self.nans:,} NaN" if self.nans else text
