"""Random operands for the tests of strides, in every layout that views give, and ops with fake CUDA operands.

`python -m helpers.operands add 1000` compares ours with TensorIterator's own meta kernel, in a process of its own: it
removes PyTorch's Python meta kernels.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.tensor_iterator import infer_elementwise, infer_where

#: A size of 0 is rare: an empty result takes the first branch of almost every rule.
SIZES = (0, 1, 1, 1, 2, 2, 3, 3, 4, 5)
NDIMS = (0, 1, 2, 3, 3, 4, 4, 4, 5, 5)


def random_operands(
    count: int, seed: int, dtypes: tuple[tuple[torch.dtype, ...], ...]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields `count` tuples of CPU tensors that broadcast, one tensor for each tuple of `dtypes` to choose from."""
    rng = random.Random(seed)
    for _ in range(count):
        full = tuple(rng.choice(SIZES) for _ in range(rng.choice(NDIMS)))
        # Half of the cases have one shape and one dtype, which is what the fast paths ask for.
        alike, one_dtype = rng.random() < 0.5, rng.random() < 0.5
        layout = rng.choice(LAYOUTS) if alike and rng.random() < 0.5 else None
        dtype = rng.choice(dtypes[-1])
        yield tuple(
            random_tensor(
                rng,
                full if alike else _narrower(rng, full),
                dtype if one_dtype and dtype in choices else rng.choice(choices),
                layout or rng.choice(LAYOUTS),
            )
            for choices in dtypes
        )


def _narrower(rng: random.Random, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `full`: leading dimensions dropped, others set to 1."""
    dropped = rng.choice((0, 0, 0, rng.randint(0, len(full)), len(full)))
    return tuple(1 if rng.random() < 0.25 else size for size in full[dropped:])


def random_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor of a shape in a layout; a layout that the shape cannot have gives a permuted tensor."""
    ndim = len(shape)
    if layout == "contiguous" or ndim == 0:
        return torch.empty(shape, dtype=dtype)
    if layout == "channels_last" and ndim in (4, 5):
        memory_format = torch.channels_last if ndim == 4 else torch.channels_last_3d
        return torch.empty(shape, dtype=dtype, memory_format=memory_format)
    if layout == "channels_last_sliced" and ndim in (4, 5):
        memory_format = torch.channels_last if ndim == 4 else torch.channels_last_3d
        larger = (shape[0], shape[1] + 1, *shape[2:-1], shape[-1] + 1)
        return torch.empty(larger, dtype=dtype, memory_format=memory_format)[:, : shape[1], ..., : shape[-1]]
    if layout == "sliced":
        steps = [rng.choice((1, 1, 2)) for _ in shape]
        base = torch.empty(
            [size * step + rng.choice((0, 1)) for size, step in zip(shape, steps, strict=True)], dtype=dtype
        )
        return base[tuple(slice(0, size * step, step) for size, step in zip(shape, steps, strict=True))]
    if layout == "expanded":
        return torch.empty([1 if rng.random() < 0.4 else size for size in shape], dtype=dtype).expand(shape)
    perm = rng.sample(range(ndim), ndim)
    base = torch.empty([shape[dim] for dim in perm], dtype=dtype)
    permuted = base.permute([perm.index(dim) for dim in range(ndim)])
    if layout == "permuted_expanded":
        stretched = [dim for dim in range(ndim) if shape[dim] != 0 and rng.random() < 0.4]
        for dim in stretched:
            permuted = permuted.narrow(dim, 0, 1)
        return permuted.expand(shape)
    return permuted


LAYOUTS = (
    "contiguous",
    "permuted",
    "permuted",
    "channels_last",
    "channels_last",
    "channels_last_sliced",
    "sliced",
    "expanded",
    "permuted_expanded",
)


#: addcmul has no kernel for these two on the CPU.
_MULTIPLIED = tuple(dtype for dtype in TABLE_DTYPES if dtype not in (torch.bool, torch.complex32))

#: PyTorch's function, ours, and the dtypes of the operands.
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[torch.dtype, ...], ...]]] = {
    "add": (torch.add, infer_elementwise, (TABLE_DTYPES, TABLE_DTYPES)),
    "where": (torch.where, infer_where, ((torch.bool,), TABLE_DTYPES, TABLE_DTYPES)),
    "addcmul": (torch.addcmul, functools.partial(infer_elementwise, preset="ternary"), (_MULTIPLIED,) * 3),
}


def main(name: str, count: int) -> None:
    # The C++ kernels come to light when the library that overrides them is taken back.
    torch._meta_registrations._meta_lib_dont_use_me_use_register_meta._destroy()
    stock, ours, dtypes = OPS[name]
    differing = 0
    for operands in random_operands(count, seed=count + 1, dtypes=dtypes):
        with FakeTensorMode():
            fake = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device="cuda") for o in operands]
            result = stock(*fake)
        differing += ours(*fake)[:3] != (result.dtype, tuple(result.shape), result.stride())
    print(f"{name}: {count} cases, {differing} differ from TensorIterator")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
