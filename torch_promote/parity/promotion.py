"""Samples for each ordered pair of dtypes, in ops that promote in different ways.

The op database mixes no integer dtypes: only these samples reach every cell of the promotion table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_promote.parity.model import Options

__all__ = ["DTYPES", "ENTRIES", "promotion_calls"]

#: The entries, and the function of two tensors that each calls.
ENTRIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "promotion.add": torch.add,  # the common dtype
    "promotion.true_divide": torch.true_divide,  # integers give the default dtype
    "promotion.lt": torch.lt,  # computes in the common dtype, returns bool
    "promotion.where": lambda a, b: torch.where(a.to(torch.bool), a, b),  # without TensorIterator's wrapped numbers
    "promotion.cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),  # autocast promotes it too
}
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
#: A tensor with dimensions, and a 0-dim tensor, which promotion gives less weight.
_SHAPES = {"dim": (2, 3), "zero": ()}


def promotion_calls(dtype: torch.dtype, options: Options) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yields the pairs whose first tensor has the dtype, with names such as "int16-dim-zero".

    Example:
        >>> next(promotion_calls(torch.int8, Options()))[0]
        'bool-dim-dim'
    """
    for other, first, second in itertools.product(DTYPES, _SHAPES, _SHAPES):
        pair = (_made(dtype, _SHAPES[first], options), _made(other, _SHAPES[second], options))
        yield f"{str(other).removeprefix('torch.')}-{first}-{second}", pair


def _made(dtype: torch.dtype, shape: tuple[int, ...], options: Options) -> torch.Tensor:
    if options.fake:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.full(shape, 2, device="cpu").to(dtype).to(options.device_type)
