"""What `Values` needs of a tensor: the statistics of its bits, a digest, the sum of its squares, and a sketch.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact.

csrc/python/measure.cpp measures CPU tensors; its NOTE [ Digest and sketch ] defines both. The ops here do the same on
other devices. No op depends on the data, so that nothing synchronizes.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_promote import _C
from torch_promote.observe.ops import can_be_read, stored_values

__all__ = [
    "Format",
    "Numbers",
    "bits_of",
    "format_of",
    "is_finite",
    "is_sketch",
    "measure",
    "measure_by_ops",
    "readable",
    "unpack",
    "unpack_sketch",
]

#: The number of projections of a sketch.
PROJECTIONS = 16
#: The bits of a projection in a sketch, for dtypes of at most 2, 4 and 8 bytes. All are multiples of 6, a digit's bits.
BITS = (30, 36, 54)
_SKETCH = re.compile("|".join(f"[A-Za-z0-9+/]{{{(24 + PROJECTIONS * bits) // 6}}}" for bits in BITS) + "|")
#: The elements of a row, its shift, and the rows of a piece, which bounds the memory; see the note in C++.
_ROW, _SHIFT, _PIECE_ROWS = 1021, 631, 4096
_PIECE = _ROW * _PIECE_ROWS


class Format(NamedTuple):
    """The bits of float32 or float64.

    Attributes:
        integer: The integer dtype of the same size.
        code: The dtype's format character in the module `struct`.
        mantissa: The number of bits of the mantissa.
        bias: The exponent of the number whose exponent bits are 0, negated.
        infinity: The bits of inf.
        magnitude: The mask of all bits but the sign.
        bounds: The magnitudes at which the counts of `Numbers.above` start: the smallest that is not 0; the smallest
            that a cast to float16 does not round to 0, the smallest that it makes infinite, and the same for bfloat16;
            the largest finite number of the tensor's own dtype; inf; NaN.
    """

    integer: torch.dtype
    code: str
    mantissa: int
    bias: int
    infinity: int
    magnitude: int
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
    """What was counted and summed of floating point numbers.

    Attributes:
        largest: The bits of the largest finite magnitude; 0 if there is none.
        smallest: The bits of the smallest finite magnitude other than 0; those of inf if there is none.
        above: The number of magnitudes from each of `Format.bounds` on.
        exponents: Pairs of exponent bits and the number of magnitudes that have them.
        squares: The sum of the squares of the finite numbers.
        sketch: Their projections, as `pack` writes them; "" if one is beyond the range of float64.
    """

    largest: int
    smallest: int
    above: Sequence[int]
    exponents: Sequence[tuple[int, int]]
    squares: float
    sketch: str

    @classmethod
    def from_bytes(cls, data: bytes) -> Numbers:
        """Returns the numbers from what `measure` returned."""
        largest, smallest, first, size, *above, squares = _HEAD.unpack_from(data)
        end = _HEAD.size + 8 * size
        counts = memoryview(data)[_HEAD.size : end].cast("q")
        places = [(place, number) for place, number in enumerate(counts, first) if number]
        return cls(largest, smallest, above, places, squares, data[end:].decode())


#: The ends, the first exponent and the number of exponents; `Numbers.above`; the sum of squares. The numbers of all
#: exponents from the first to the last follow, and the sketch.
_HEAD = struct.Struct("<4q8qd")
_NONFINITE = struct.Struct("<q"), 10 * 8


def is_finite(data: bytes) -> bool:
    """Whether all numbers are finite that `measure` has counted."""
    form, offset = _NONFINITE
    return not form.unpack_from(data, offset)[0]


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


def is_sketch(text: str) -> bool:
    """Whether a text is a sketch, or empty."""
    return _SKETCH.fullmatch(text) is not None


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements to measure; call it in `unnoticed`.

    Returns:
        A real, strided tensor whose memory has the values, perhaps without elements: those of the tensor, or those that
        a sparse or nested tensor stores. None if it cannot be read.
    """
    stored = stored_values(tensor)
    if stored is None:
        with contextlib.suppress(RuntimeError):  # the layout has no number of elements
            return tensor if not tensor.is_quantized and can_be_read(tensor) and not tensor.numel() else None
        return None
    if stored.is_complex():
        stored = torch.view_as_real(stored.resolve_conj())
    stored = stored.resolve_neg() if stored.is_neg() else stored
    return stored.clone() if stored._is_zerotensor() else stored


def measure(elements: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Returns what is counted of floating point numbers on a CPU, for `Numbers.from_bytes`.

    Args:
        elements: What `readable` returned, made contiguous, with at least one element.
        dtype: The dtype of its argument.
    """
    bounds = format_of(elements.dtype).bounds
    return _C.measure(elements if elements.dtype.itemsize > 1 else elements.float(), bounds, bits_of(dtype))


# --- On other devices


def measure_by_ops(elements: torch.Tensor) -> torch.Tensor:
    """Measures a tensor that `readable` returned on its device.

    Returns:
        An int64 tensor for `unpack`.
    """
    if not elements.numel():
        return torch.zeros(1, dtype=torch.int64, device=elements.device)
    flat = elements.contiguous().reshape(-1)
    digest = _digest(flat).reshape(1)
    if not flat.is_floating_point():
        return digest
    form = format_of(flat.dtype)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32)
    pieces = flat.split(_PIECE)
    counts = [_count(piece, form) for piece in pieces]
    if len(counts) > 1:
        stacked = torch.stack(counts)
        counts = [torch.cat([stacked[:, :1].amax(0), stacked[:, 1:2].amin(0), stacked[:, 2:].sum(0)])]
    parts = [digest, *counts]
    with contextlib.suppress(RuntimeError, TypeError):  # some devices have no float64
        parts.append(_sums(pieces, form).view(torch.int64))
    return torch.cat(parts)


def unpack(row: Sequence[int], counted_as: torch.dtype, dtype: torch.dtype) -> tuple[str, Numbers | None]:
    """Returns the digest, and the numbers if there are any, from what `measure_by_ops` returned.

    Args:
        row: Its elements.
        counted_as: The dtype of its argument.
        dtype: The dtype of the tensor.
    """
    digest = f"{row[0] & 0xFFFFFFFFFFFFFFFF:016x}"
    if len(row) == 1:
        return digest, None
    form = format_of(counted_as)
    largest, smallest, *above = row[1 : 3 + len(form.bounds)]
    places = row[3 + len(form.bounds) :][: (form.infinity >> form.mantissa) + 1]
    sums = row[3 + len(form.bounds) + len(places) :]
    squares, *sketch = struct.unpack(f"<{len(sums)}d", struct.pack(f"<{len(sums)}q", *sums)) if sums else (math.nan,)
    pairs = [(place, number) for place, number in enumerate(places) if number]
    packed = _C.pack_sketch(sketch, bits_of(dtype)) if math.isfinite(squares) else ""
    return digest, Numbers(largest - (1 << form.mantissa), smallest + 1, above, pairs, squares, packed)


class _Tables(NamedTuple):
    places: torch.Tensor
    rows: torch.Tensor
    signs: torch.Tensor
    projections: torch.Tensor | None


def _table(data: bytes, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _signs(data: bytes) -> torch.Tensor:
    return 1 - (_table(data, torch.uint8, -1, _ROW) >> 6).to(torch.int8)


@functools.cache
def _tables(device: torch.device) -> _Tables:
    data = _C.measure_tables()
    places = _table(data["places"], torch.int32, 4, 1, _ROW).long() & 0xFFFFFFFF
    rows = _table(data["rows"], torch.int64, _PIECE_ROWS)
    signs = (_signs(data["outer"])[:, None] * _signs(data["inner"])).reshape(_PIECE_ROWS, _ROW)
    projections = _table(data["projections"], torch.float64, _ROW, PROJECTIONS).t().contiguous()
    with contextlib.suppress(RuntimeError, TypeError):  # no float64
        return _Tables(places.to(device), rows.to(device), signs.to(device), projections.to(device))
    return _Tables(places.to(device), rows.to(device), signs.to(device), None)


def _rows(piece: torch.Tensor) -> torch.Tensor:
    missing = -piece.numel() % _ROW
    return (torch.nn.functional.pad(piece, (0, missing)) if missing else piece).view(-1, _ROW)


def _digest(flat: torch.Tensor) -> torch.Tensor:
    size, tables = flat.dtype.itemsize, _tables(flat.device)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        words = _rows(piece).long()
        low = words & ((1 << 8 * min(size, 4)) - 1)
        a, b = ((low * place).sum(1) for place in tables.places[:2])
        if size == 8:
            high = (words >> 32) & 0xFFFFFFFF
            a, b = (one + (high * place).sum(1) for one, place in zip((a, b), tables.places[2:], strict=True))
        rows = a + (b << 32) + ((b >> 32) & 0xFFFFFFFF)
        digest += (rows * tables.rows[: rows.numel()]).sum() * _C.measure_piece_tables(number)[1]
    return digest


def _count(values: torch.Tensor, form: Format) -> torch.Tensor:
    bits = values.view(form.integer) & form.magnitude
    # Below 0, the mask wraps: a finite magnitude is larger than inf and NaN, and 0 is the largest.
    largest = ((bits - form.infinity) & form.magnitude).amax().long()
    smallest = ((bits - 1) & form.magnitude).amin().long()
    above = [torch.count_nonzero(bits >= bound) for bound in form.bounds]
    one = torch.ones(1, dtype=torch.int64, device=bits.device)
    exponents = one.new_zeros((form.infinity >> form.mantissa) + 1)
    exponents.index_add_(0, bits >> form.mantissa, one.expand(bits.numel()))
    return torch.cat([torch.stack([largest, smallest, *above]), exponents])


def _sums(pieces: Sequence[torch.Tensor], form: Format) -> torch.Tensor:
    """The sum of the squares, and the projections."""
    tables = _tables(pieces[0].device)
    if tables.projections is None:
        raise TypeError("the device has no float64")
    squares, buckets = 0.0, torch.zeros(_ROW, dtype=torch.float64, device=pieces[0].device)
    total: torch.Tensor | float = squares
    for number, piece in enumerate(pieces):
        finite = (piece.view(form.integer) & form.magnitude) < form.infinity
        rows = _rows(torch.where(finite, piece, 0).double())
        total = rows.square().sum() + total
        signed = rows * tables.signs[: len(rows)]
        if number:
            signed = signed * _signs(_C.measure_piece_tables(number)[0]).to(piece.device, non_blocking=True)
        # Rows that are longer by the shift start in another bucket each.
        long = buckets.new_zeros(-(-len(rows) * (_ROW + _SHIFT) // _ROW) * _ROW)
        long[: len(rows) * (_ROW + _SHIFT)].view(len(rows), -1)[:, :_ROW] = signed
        buckets = buckets + long.view(-1, _ROW).sum(0).roll(number * _PIECE_ROWS * _SHIFT % _ROW)
    assert isinstance(total, torch.Tensor)
    return torch.cat([total.reshape(1), (tables.projections * buckets).sum(1)])
