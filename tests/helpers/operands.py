"""Random operands for the tests of strides: every layout that views give, in shapes that broadcast, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

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
