"""The ops whose strides are tested, and their results for fake CUDA tensors, with or without Python meta kernels.

`python -m helpers.fake_cuda_strides add 1000` compares ours with TensorIterator's own meta kernel, in a process of its
own: it removes PyTorch's Python meta kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.operands import random_operands
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.tensor_iterator import infer_elementwise, infer_where

#: addcmul has no kernel for these two on the CPU.
_MULTIPLIED = tuple(dtype for dtype in TABLE_DTYPES if dtype not in (torch.bool, torch.complex32))

#: PyTorch's function, ours, and the dtypes of the operands.
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[torch.dtype, ...], ...]]] = {
    "add": (torch.add, infer_elementwise, (TABLE_DTYPES, TABLE_DTYPES)),
    "where": (torch.where, infer_where, ((torch.bool,), TABLE_DTYPES, TABLE_DTYPES)),
    "addcmul": (torch.addcmul, functools.partial(infer_elementwise, preset="ternary"), (_MULTIPLIED,) * 3),
}


def compare(
    stock: Callable[..., Any], cases: Iterable[tuple[torch.Tensor, ...]], mode: FakeTensorMode
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]]:
    """Yields CPU operands, fake CUDA operands of the same layouts, and stock's result for the fake ones."""
    for operands in cases:
        with mode:
            fake = tuple(torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device="cuda") for o in operands)
            result = stock(*fake)
        yield operands, fake, result


def main(name: str, count: int) -> None:
    # The C++ kernels come to light when the library that overrides them is taken back.
    torch._meta_registrations._meta_lib_dont_use_me_use_register_meta._destroy()
    stock, ours, dtypes = OPS[name]
    differing = 0
    for _, fake, result in compare(stock, random_operands(count, seed=count + 1, dtypes=dtypes), FakeTensorMode()):
        differing += ours(*fake)[:3] != (result.dtype, tuple(result.shape), result.stride())
    print(f"{name}: {count} cases, {differing} differ from TensorIterator")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
