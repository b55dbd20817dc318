"""Predicates on a shape and strides: contiguous, channels_last, dense, overlapping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "Sizes",
    "channels_last_3d_strides",
    "channels_last_strides",
    "contiguous_strides",
    "has_internal_overlap",
    "is_channels_last_contiguous",
    "is_contiguous",
    "is_non_overlapping_and_dense",
    "is_strides_like_channels_last",
    "is_strides_like_channels_last_3d",
    "strides_along",
    "suggest_memory_format",
]

Sizes = tuple[int, ...]
"""Sizes or strides, one number for each dimension; strides count elements."""

#: The dimensions of channels_last and channels_last_3d tensors, innermost first.
_NHWC = (1, 3, 2, 0)
_NDHWC = (1, 4, 3, 2, 0)


def contiguous_strides(shape: Sizes) -> Sizes:
    """Returns the strides of a contiguous tensor. A size of 0 counts as 1.

    Example:
        >>> contiguous_strides((2, 0, 3))
        (3, 3, 1)

    Source: c10/core/TensorImpl.h, empty_tensor_restride (v2.13).
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    strides.reverse()
    return tuple(strides)


def strides_along(shape: Sizes, perm: Sequence[int]) -> Sizes:
    """Returns the strides of a dense tensor with its dimensions in the order `perm`, innermost first.

    Example:
        >>> strides_along((2, 3, 4), [0, 2, 1])
        (1, 8, 2)

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compatible_stride (v2.13).
    """
    strides = [0] * len(shape)
    step = 1
    for dim in perm:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def channels_last_strides(shape: Sizes) -> Sizes:
    """Returns the strides of a channels_last tensor.

    Args:
        shape: Four sizes: batch, channels, height, width.

    Example:
        >>> channels_last_strides((2, 3, 4, 5))
        (60, 1, 15, 3)

    Source: c10/core/MemoryFormat.h, get_channels_last_strides_2d (v2.13).
    """
    return strides_along(shape, _NHWC)


def channels_last_3d_strides(shape: Sizes) -> Sizes:
    """Returns the strides of a channels_last_3d tensor.

    Args:
        shape: Five sizes: batch, channels, depth, height, width.

    Example:
        >>> channels_last_3d_strides((2, 3, 4, 5, 6))
        (360, 1, 90, 18, 3)

    Source: c10/core/MemoryFormat.h, get_channels_last_strides_3d (v2.13).
    """
    return strides_along(shape, _NDHWC)


def is_contiguous(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor is contiguous. Dimensions of size 1 may have any stride.

    Example:
        >>> is_contiguous((2, 1, 3), (3, 99, 1))
        True

    Source: c10/core/Contiguity.h, _compute_contiguous (v2.13).
    """
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return 0 in shape
            expected *= size
    return True


def is_channels_last_contiguous(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor has four dimensions and is contiguous in channels_last format.

    Example:
        >>> is_channels_last_contiguous((2, 3, 4, 5), (60, 1, 15, 3))
        True

    Source: c10/core/Contiguity.h, _compute_channels_last_contiguous_2d (v2.13).
    """
    return len(shape) == 4 and _lies_along(shape, strides, _NHWC)


def _lies_along(shape: Sizes, strides: Sizes, perm: Sequence[int]) -> bool:
    expected = 1
    for dim in perm:
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def is_non_overlapping_and_dense(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor's elements fill a range of memory without gaps or overlaps, in any order of dimensions.

    Example:
        >>> is_non_overlapping_and_dense((2, 3), (1, 2)), is_non_overlapping_and_dense((2, 3), (6, 2))
        (True, False)

    Source: c10/core/Contiguity.h, _compute_non_overlapping_and_dense (v2.13); c10/core/TensorImpl.h,
    _refresh_contiguous (v2.13).
    """
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_strides_like_channels_last(shape: Sizes, strides: Sizes) -> bool:
    """Whether the strides of a 4-d tensor suggest that it was created in channels_last format.

    Shape and strides may be ambiguous: a `[2, 1, 4, 4]` tensor can be contiguous in both formats. The strides of
    dimensions of size 1 then decide; if they do not either, the tensor counts as contiguous.

    Example:
        >>> is_strides_like_channels_last((2, 1, 4, 4), (16, 16, 4, 1))
        False
        >>> is_strides_like_channels_last((2, 1, 4, 4), (16, 1, 4, 1))
        True

    Source: c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 (v2.13).
    """
    return len(shape) == 4 and _grows_along(shape, strides, _NHWC)


def is_strides_like_channels_last_3d(shape: Sizes, strides: Sizes) -> bool:
    """Whether the strides of a 5-d tensor suggest that it was created in channels_last_3d format.

    Example:
        >>> is_strides_like_channels_last_3d((2, 3, 4, 5, 6), (360, 1, 90, 18, 3))
        True

    Source: c10/core/MemoryFormat.h, is_channels_last_strides_3d_s5 (v2.13).
    """
    return len(shape) == 5 and _grows_along(shape, strides, _NDHWC)


def _grows_along(shape: Sizes, strides: Sizes, perm: Sequence[int]) -> bool:
    if strides[1] == 0:  # the channels are expanded
        return False
    least = 0
    for dim in perm:
        if shape[dim] == 0 or strides[dim] < least:
            return False
        # [N, 1, 1, 1] with equal strides: a sliced contiguous tensor looks like a sliced channels_last one.
        if dim == 0 and least == strides[1]:
            return False
        # A dimension of size 1 moves the bound too, which distinguishes [N, 1, H, 1] in channels_last from contiguous.
        least = strides[dim] * max(shape[dim], 1)
    return True


def suggest_memory_format(shape: Sizes, strides: Sizes, exact_match: bool = False) -> torch.memory_format:
    """Returns the memory format that a tensor's strides suggest.

    Args:
        shape: Its sizes.
        strides: Its strides.
        exact_match: Whether the strides must be exactly those of a channels_last tensor of the shape. Those of slices,
            and of tensors with dimensions of size 1, may differ.

    Returns:
        channels_last, channels_last_3d or contiguous_format.

    Example:
        >>> suggest_memory_format((2, 1, 4, 4), (16, 1, 4, 1))
        torch.channels_last
        >>> suggest_memory_format((2, 4, 1, 1), (4, 1, 1, 1))
        torch.contiguous_format

    Source: aten/src/ATen/core/TensorBase.h, suggest_memory_format (v2.13).
    """
    if is_strides_like_channels_last(shape, strides):
        if not exact_match or tuple(strides) == channels_last_strides(shape):
            return torch.channels_last
    elif is_strides_like_channels_last_3d(shape, strides) and (
        not exact_match or tuple(strides) == channels_last_3d_strides(shape)
    ):
        return torch.channels_last_3d
    return torch.contiguous_format


def has_internal_overlap(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor uses an element of memory twice, as an expanded tensor does.

    Example:
        >>> has_internal_overlap((2, 3), (0, 1)), has_internal_overlap((2, 3), (1, 1))
        (True, False)

    Source: aten/src/ATen/MemoryOverlap.cpp, has_internal_overlap (v2.13).
    """
    if is_non_overlapping_and_dense(shape, strides):
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))
