"""The values of tensors: what `trace(values=True)` records of them, their extremes and their ranges.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact.

csrc/python/measure.cpp measures tensors in the memory of the host; its NOTE [ Digest and sketch ] defines digest and
sketch.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.observe.ops import can_be_read, stored_values, unnoticed
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.report.codec import decode

#: The number of projections of a sketch.
PROJECTIONS = 16
#: The bits of a projection in a sketch, for dtypes of at most 2, 4 and 8 bytes. All are multiples of 6, a digit's bits.
BITS = (30, 36, 54)
_SKETCH = re.compile("|".join(f"[A-Za-z0-9+/]{{{(24 + PROJECTIONS * bits) // 6}}}" for bits in BITS) + "|")


class Format(NamedTuple):
    """The bits of float32 or float64."""

    integer: torch.dtype  # the integer dtype of the same size
    code: str  # the dtype's format character in the module `struct`
    mantissa: int  # the number of bits of the mantissa
    bias: int  # the exponent of the number whose exponent bits are 0, negated
    infinity: int  # the bits of inf
    magnitude: int  # the mask of all bits but the sign
    # The magnitudes at which the counts of `Numbers.above` start: the smallest that is not 0; the smallest that a cast
    # to float16 does not round to 0, the smallest that it makes infinite, and the same for bfloat16; the largest finite
    # number of the tensor's own dtype; inf; NaN.
    bounds: tuple[int, int, int, int, int, int, int, int]

    def to_float(self, bits: int) -> float:
        """The value with these bits."""
        return float(struct.unpack(f"<{self.code}", bits.to_bytes(self.integer.itemsize, "little"))[0])


@functools.cache
def format_of(dtype: torch.dtype) -> Format:
    """Returns the format in which the numbers of a real floating point dtype are counted."""
    double = dtype is torch.float64
    integer, code, mantissa, bias = (torch.int64, "d", 52, 1023) if double else (torch.int32, "f", 23, 127)
    magnitude = (1 << (8 * integer.itemsize - 1)) - 1

    def bits(value: float) -> int:
        return int.from_bytes(struct.pack(f"<{code}", value), "little")

    # PyTorch casts float64 to float16 and bfloat16 via float32, so a float64 value counts if its rounding to float32
    # does. Ties round to an even mantissa, which all four thresholds have.
    bounds = (
        1,
        bits(2.0**-25 * (1 + 2.0**-24 * double)) + 1,
        bits(65520.0 - 2.0**-9 * double),
        bits(2.0**-134 + 2.0**-150 * double) + 1,
        bits((2.0 - 2.0**-8 - 2.0**-24 * double) * 2.0**127),
        bits(torch.finfo(dtype).max),
        bits(math.inf),
        bits(math.inf) + 1,
    )
    return Format(integer, code, mantissa, bias, bits(math.inf), magnitude, bounds)


class Numbers(NamedTuple):
    """What was counted and summed of floating point numbers."""

    largest: int  # the bits of the largest finite magnitude; 0 if there is none
    smallest: int  # the bits of the smallest finite magnitude other than 0; those of inf if there is none
    above: Sequence[int]  # the number of magnitudes from each of `Format.bounds` on
    exponents: Sequence[tuple[int, int]]  # pairs of exponent bits and the number of magnitudes that have them
    squares: float  # the sum of the squares of the finite numbers
    sketch: str  # their projections, for `unpack_sketch`; "" if one is beyond the range of float64

    @classmethod
    def from_bytes(cls, data: bytes) -> Numbers:
        """Returns the numbers from what `measure` returned."""
        largest, smallest, above, first, counts, squares, sketch = split(data)
        places = [(place, number) for place, number in enumerate(counts, first) if number]
        return cls(largest, smallest, above, places, squares, sketch)


def split(data: bytes) -> tuple[int, int, list[int], int, list[int], float, str]:
    """Returns the parts of what `measure` returned: those of `Numbers`, with the counts of all exponents."""
    largest, smallest, first, size, *above, squares = _HEAD.unpack_from(data)
    end = _HEAD.size + 8 * size
    counts = memoryview(data)[_HEAD.size : end].cast("q").tolist()
    return largest, smallest, above, first, counts, squares, data[end:].decode()


def join(
    largest: int, smallest: int, above: Sequence[int], first: int, counts: Sequence[int], squares: float, sketch: str
) -> bytes:
    """Returns what `split` has split."""
    head = _HEAD.pack(largest, smallest, first, len(counts), *above, squares)
    return head + struct.pack(f"<{len(counts)}q", *counts) + sketch.encode()


#: The ends, the first exponent and the number of exponents; `Numbers.above`; the sum of squares. The numbers of all
#: exponents from the first to the last follow, and the sketch.
_HEAD = struct.Struct("<4q8qd")
#: Of these, the number of values that are not finite.
_NONFINITE = struct.Struct("<80xq")


@functools.cache
def bits_of(dtype: torch.dtype) -> int:
    """Returns the bits of a projection in the sketch of a tensor of this dtype."""
    size = dtype.itemsize // (1 + dtype.is_complex)
    return BITS[0] if size <= 2 else BITS[1] if size == 4 else BITS[2]


def unpack_sketch(text: str) -> list[float]:
    """Returns the projections of a sketch: Base64 of the exponent of their unit, and of integers of one of `BITS`."""
    data = base64.b64decode(text)
    bits = (len(data) - 3) * 8 // PROJECTIONS
    number, half = int.from_bytes(data, "big"), 1 << (bits - 1)
    exponent = (number >> PROJECTIONS * bits) - (1 << 23)
    places = range((PROJECTIONS - 1) * bits, -1, -bits)
    integers = ((number >> place & (2 * half - 1)) - half for place in places)
    return [math.ldexp(one, exponent + 1 - bits) for one in integers]


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements to measure, as a real, strided tensor; None if they cannot be read. Use in `unnoticed`."""
    stored = stored_values(tensor)
    if stored is None:
        with contextlib.suppress(RuntimeError):  # the layout has no number of elements
            return tensor if not tensor.is_quantized and can_be_read(tensor) and not tensor.numel() else None
        return None
    if stored.is_complex():
        stored = torch.view_as_real(stored.resolve_conj())
    stored = stored.resolve_neg() if stored.is_neg() else stored
    return stored.clone() if stored._is_zerotensor() else stored


#: The columns that a row has at least: the kernels of a convolution are no rows.
_LEAST_COLUMNS = 8


@functools.lru_cache(maxsize=64)
def _random_numbers(count: int) -> torch.Tensor:
    """Numbers between -1 and 1 that are the same everywhere, as float64 of shape (count,)."""
    numbers = torch.arange(count, device="cpu") * 6364136223846793005 + 1442695040888963407
    numbers = (numbers ^ (numbers >> 29)) * 6364136223846793005
    return (numbers >> 11).double() / 2.0**52


def project(tensor: torch.Tensor) -> tuple[str, str]:
    """Returns what tells the rows of a weight from others, and its columns; call it in `unnoticed`."""
    # Products with random numbers, as float32 in Base64; both are "" if the tensor cannot be read. More than two
    # dimensions are (..., rows, columns) if the last one is long enough, otherwise (rows, ...); one is a column.
    elements = readable(tensor.detach())
    if elements is None or not elements.is_floating_point() or not elements.dim() or tensor.is_complex():
        return "", ""
    if elements.dim() > 2 and (elements.dim() > 3 or elements.shape[-1] < _LEAST_COLUMNS):
        elements = elements.flatten(1)
    elements = elements if elements.dtype is torch.float64 else elements.float()
    if elements.dim() == 1:
        elements = elements.unsqueeze(1)
    ends = [_random_numbers(size).to(elements) for size in elements.shape[-2:]]
    return _packed(elements @ ends[1]), _packed(elements.mT @ ends[0])


def _packed(numbers: torch.Tensor) -> str:
    values = numbers.flatten().float().tolist()
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def unpack_projections(text: str) -> torch.Tensor:
    """Returns the float32 numbers of one of the texts of `project`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32) if text else torch.empty(0)


def measure(elements: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Returns what is counted of contiguous elements on a CPU that `readable` returned for a tensor of a dtype."""
    bounds = format_of(elements.dtype).bounds
    return _C.measure(elements if elements.dtype.itemsize > 1 else elements.float(), bounds, bits_of(dtype))


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


#: What `Values.counts` has after the largest magnitude and the number of values.
COUNTED = (
    *("zeros", "infs", "nans", "saturated", "under_float16", "over_float16", "under_bfloat16", "over_bfloat16"),
    *("under_e4m3", "over_e4m3", "under_e5m2", "over_e5m2"),
)
#: The exponents of float8: the first whose numbers do not become 0, and the first beyond the largest number.
_FLOAT8 = (-10, 9), (-17, 16)


class _Lazy:
    """Holds what was measured, and the dtype. It is no field of the values, which are computed when somebody asks."""

    __slots__ = ("_measured",)
    _measured: tuple[bytes, torch.dtype] | None


@dataclass(frozen=True, slots=True)
class Values(_Lazy):
    """What is known of a tensor's values. `count` is 0 without real floating point numbers, or if it cannot be read.

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
        digest: 16 hexadecimal digits of the elements' bits in logical order, whatever the strides: tensors of one dtype
            and shape have the same digest if they have the same bits, and other digests otherwise. "" if the tensor
            cannot be read. Of a sparse or nested tensor, of what it stores. All dtypes have one.
        l2: The L2 norm of the finite elements, real or complex; None without floating point numbers.
        sketch: 16 projections in Base64, for `distance`; "" without `l2`. They depend on the elements in logical order
            alone.
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
    sketch: str = field(default="", repr=False)
    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Computes the attributes of measured values, of which most are never asked for."""
            if name not in Values.__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            measured = getattr(self, "_measured", None)
            if measured is not None:
                for one, value in _evaluate(self.digest, Numbers.from_bytes(measured[0]), measured[1]).items():
                    object.__setattr__(self, one, value)
            return object.__getattribute__(self, name)

    @property
    def is_finite(self) -> bool:
        """Whether there is no inf and no NaN."""
        measured = getattr(self, "_measured", None)
        return not (self.infs or self.nans if measured is None else _NONFINITE.unpack_from(measured[0])[0])

    @property
    def in_16_bits(self) -> bool:
        """Whether the tensor was float16 or bfloat16."""
        measured = getattr(self, "_measured", None)
        return measured is not None and measured[1] in LOWER_DTYPES

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
        return Measurer().values(tensor)

    def to_json(self) -> list[Any]:
        """Returns what was measured, exactly: for a file."""
        measured = getattr(self, "_measured", None)
        if measured is None:
            return [self.digest]
        largest, smallest, above, first, counts, squares, sketch = split(measured[0])
        return [
            self.digest,
            dtype_name(measured[1]),
            [largest, smallest, first, squares if math.isfinite(squares) else None],
            above,
            counts,
            sketch,
        ]

    def counts(self) -> list[float] | None:
        """Returns the largest finite magnitude, or 0, the number of values, and how many are what `COUNTED` names.

        What float8 has no number for is counted by the exponent: in e4m3, a magnitude below 2**-10 becomes 0, and one
        from 2**9 on has no number; in e5m2, below 2**-17 and from 2**16 on. None without real numbers.
        """
        measured = getattr(self, "_measured", None)
        if measured is None or measured[1].is_complex:
            return None
        largest, _, above, first, exponents, _, _ = split(measured[0])
        nonzero, not_under16, over16, not_under_bf16, over_bf16, at_top, nonfinite, nans = above
        form, count = format_of(measured[1]), sum(exponents)
        zeros = count - nonzero
        found: list[float] = [form.to_float(largest), count, zeros, nonfinite - nans, nans, at_top - nonfinite]
        found += [nonzero - not_under16, over16 - nonfinite, nonzero - not_under_bf16, over_bf16 - nonfinite]
        for low, high in _FLOAT8:
            under, over = (max(0, place + form.bias - first) for place in (low, high))
            found += [sum(exponents[:under]) - zeros * (under > 0), sum(exponents[over:]) - nonfinite]
        return found

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Values:
        """Returns the values from the data of `to_json`.

        Raises:
            TypeError, ValueError: It was changed.
        """
        digest, *rest = data
        decode(str, digest)
        if not rest:
            return cls(digest=digest) if digest else EMPTY
        name, numbers, above, counts, sketch = rest
        dtype = decode(torch.dtype, name)
        largest, smallest, first, squares = decode(tuple[int, int, int, float | None], numbers)
        if not _SKETCH.fullmatch(decode(str, sketch)):
            raise ValueError(f"a sketch has 16 numbers of {BITS} bits in Base64, got {sketch!r}")
        above, counts = decode(list[int], above), decode(list[int], counts)
        if len(above) != len(format_of(torch.float32).bounds) or not sum(counts) or min(*counts, 0) < 0:
            raise ValueError(f"there are no such counts: {above!r}, {counts!r}")
        ends = sorted((largest, smallest))
        if not dtype.is_complex and not 0 <= ends[0] <= ends[1] <= format_of(dtype).infinity:
            raise ValueError(f"there are no such magnitudes: {largest!r}, {smallest!r}")
        sum_of_squares = math.inf if squares is None else squares
        return _lazy(digest, join(largest, smallest, above, first, counts, sum_of_squares, sketch), dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values; `exponents` as a dict with strings as keys."""
        return {
            "count": self.count,
            "amax": self.amax,
            "min_nonzero": self.min_nonzero,
            **{name: getattr(self, name) for name in (*_SHARES, "overflows")},
            "digest": self.digest,
            "l2": self.l2,
            "exponents": {str(exponent): count for exponent, count in self.exponents},
            "sketch": self.sketch,
        }


def distance(one: Values, other: Values) -> float | None:
    """Estimates the L2 norm of the difference of two tensors of equal size that need not be in one process."""
    # Within a factor of 1.5 of the norm for 97 % of tensors; of a single element that differs, to 3 %. It sees
    # differences down to 1e-10 of the norm of float32 tensors. 0.0: equal digests; None: no sketch to compare.
    if one.digest and one.digest == other.digest:
        return 0.0
    return combined_norm((1.0, one), (-1.0, other))


def combined_norm(*terms: tuple[float, Values]) -> float | None:
    """Estimates, as `distance`, the L2 norm of a sum of tensors of equal size, each with its factor; None as there."""
    if not all(one.sketch for _, one in terms):
        return None
    scaled = [[factor * number for number in unpack_sketch(one.sketch)] for factor, one in terms]
    return _UNBIASED * math.hypot(*map(sum, zip(*scaled, strict=True)))


#: The mean logarithm of the root mean square of 16 normal numbers is that of 1/this.
_UNBIASED = 1.0324


@dataclass
class NonfiniteValues:
    """The losses of a trace, and with values its inf and NaN except those that masks asked for.

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

    def add_loss(self, is_nan: bool, is_inf: bool, step: int) -> bool:
        """Adds the next loss, after `step` optimizer steps. Returns whether it is the first that is not finite."""
        number = self.losses
        self.losses += 1
        self.nans += is_nan
        self.infs += is_inf
        if not (is_nan or is_inf) or self.first_loss is not None:
            return False
        self.first_loss, self.loss_step = number, step
        return True

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


def _evaluate(digest: str, numbers: Numbers, dtype: torch.dtype) -> dict[str, Any]:
    """The attributes of values."""
    largest, smallest, above, places, squares, sketch = numbers
    l2 = math.sqrt(squares) if math.isfinite(squares) else None  # beyond the range, or no float64 on the device
    found = {"digest": digest, "l2": l2, "sketch": sketch if digest else ""}
    if dtype.is_complex:
        return dataclasses.asdict(EMPTY) | found
    form, finfo = format_of(dtype), torch.finfo(dtype)
    nonzero, not_under16, over16, not_under_bf16, over_bf16, at_top, nonfinite, nans = above
    count = sum([number for _, number in places])
    zeros, end = count - nonzero, form.infinity >> form.mantissa
    exponents = tuple(
        [  # which is twice as fast as a generator
            (place - form.bias, number if place else number - zeros)
            for place, number in places
            if place < end and (place or number > zeros)
        ]
    )
    normal = math.log2(finfo.smallest_normal)
    return found | {
        "count": count,
        "amax": form.to_float(largest) if nonfinite < count else None,
        "min_nonzero": form.to_float(smallest) if exponents else None,
        "zeros": zeros / count,
        "infs": (nonfinite - nans) / count,
        "nans": nans / count,
        "saturated": (at_top - nonfinite) / count,
        "underflows": sum([number for exponent, number in exponents if exponent < normal]) / count,
        "under_float16": (nonzero - not_under16) / count,
        "over_float16": (over16 - nonfinite) / count,
        "under_bfloat16": (nonzero - not_under_bf16) / count,
        "over_bfloat16": (over_bf16 - nonfinite) / count,
        "exponents": exponents,
    }


#: The bound of the number of tensors whose values are kept, to be found again by digest.
_MOST_KNOWN = 8192


def _lazy(digest: str, data: bytes, dtype: torch.dtype) -> Values:
    """Values of which only the digest is known now."""
    values = object.__new__(Values)
    object.__setattr__(values, "digest", digest)
    object.__setattr__(values, "_measured", (data, dtype))
    return values


class Measurer:
    """Measures tensors in the memory of the host, to which those of other devices are copied."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype, int], Values] = {}  # a call and its last part return one tensor

    def values(self, tensor: torch.Tensor) -> Values:
        """Returns what is known of a tensor's values; `EMPTY` if it cannot be read."""
        elements = tensor if _C.is_measurable(tensor) else self._elements(tensor)
        if elements is None:
            return EMPTY
        size = elements.numel()
        digest = _C.digest(elements) if size else f"{0:016x}"
        if not size or not elements.is_floating_point():
            return Values(digest=digest)
        key = digest, tensor.dtype, size
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = _lazy(digest, measure(elements, tensor.dtype), tensor.dtype)
        return found

    def digest(self, tensor: torch.Tensor) -> str:
        """Returns the digest alone, which takes less time; "" if the tensor cannot be read."""
        elements = self._elements(tensor)
        if elements is None:
            return ""
        return _C.digest(elements) if elements.numel() else f"{0:016x}"

    @staticmethod
    def projections(tensor: torch.Tensor) -> tuple[str, str]:
        """Returns what tells the rows of a weight from others, and its columns, for `unpack_projections`."""
        with unnoticed(), torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
            return project(tensor)
        return "", ""

    @staticmethod
    def _elements(tensor: torch.Tensor) -> torch.Tensor | None:
        if _C.is_measurable(tensor):
            return tensor
        with unnoticed(), contextlib.suppress(RuntimeError, NotImplementedError):  # the layout or subclass lacks an op
            elements = readable(tensor)
            return None if elements is None else elements.cpu().contiguous()
        return None


Extremes = tuple[float, float]
"""The smallest and the largest value. Both are NaN if the tensor contains a NaN."""

FINITE: Extremes = (0.0, 0.0)
"""The extremes of a tensor that has no floating point numbers or cannot be read."""


def extremes(tensors: Sequence[torch.Tensor]) -> list[Extremes]:
    """Returns the extremes of tensors, with one synchronization per device."""
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
