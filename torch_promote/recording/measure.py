"""What `Values` needs of a tensor: the statistics of its bits, a digest, the sum of its squares, and a sketch.

NOTE [ Values are counted by their bits ]
The statistics compare bit patterns as integers, which have the same order as the magnitudes. So they are exact, and not
affected by flush-to-zero or rounding on the device. float16, bfloat16 and float8 are first converted to float32, which
is exact.

csrc/python/measure.cpp measures tensors in the memory of the host; its NOTE [ Digest and sketch ] defines both.
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
    """Returns the elements to measure, None if they cannot be read; call it in `unnoticed`.

    They are a real, strided tensor whose memory has the values, perhaps without elements: those of the tensor, or those
    that a sparse or nested tensor stores.
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


#: The columns that a row has at least: the kernels of a convolution are no rows.
_LEAST_COLUMNS = 8


@functools.lru_cache(maxsize=64)
def _random_numbers(count: int) -> torch.Tensor:
    """Numbers between -1 and 1 that are the same everywhere, as float64 of shape (count,)."""
    numbers = torch.arange(count, device="cpu") * 6364136223846793005 + 1442695040888963407
    numbers = (numbers ^ (numbers >> 29)) * 6364136223846793005
    return (numbers >> 11).double() / 2.0**52


def project(tensor: torch.Tensor) -> tuple[str, str]:
    """Returns what tells the rows of a weight from others, and its columns; call it in `unnoticed`.

    Each is the product with random numbers, as float32 in Base64. More than two dimensions are matrices if the last one
    is long enough, (..., rows, columns), and (rows, ...) otherwise; one dimension is a column. Both are "" if the
    tensor cannot be read.
    """
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
    """Returns what is counted of floating point numbers on a CPU, for `Numbers.from_bytes`.

    `readable` has returned the elements for a tensor of the dtype. There is one at least, and they are contiguous.
    """
    bounds = format_of(elements.dtype).bounds
    return _C.measure(elements if elements.dtype.itemsize > 1 else elements.float(), bounds, bits_of(dtype))
