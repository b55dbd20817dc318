"""Shapes and strides: memory formats, broadcasting, and the strides that TensorIterator allocates.

Sizes and strides are plain tuples, with strides in elements. PyTorch sorts dimensions by strides in bytes. Since it
only compares strides of the same operand, the order is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_promote.errors import TorchPromoteError

Sizes = tuple[int, ...]
"""Sizes or strides, one number for each dimension; strides count elements."""

#: The dimensions of tensors in a memory format, innermost first.
_FORMATS = {torch.channels_last: (1, 3, 2, 0), torch.channels_last_3d: (1, 4, 3, 2, 0)}


def contiguous_strides(shape: Sizes) -> Sizes:
    """Returns the strides of a contiguous tensor. A size of 0 counts as 1."""
    # Source: c10/core/TensorImpl.h, empty_tensor_restride (v2.13).
    return strides_along(tuple(size or 1 for size in shape), range(len(shape) - 1, -1, -1))


def strides_along(shape: Sizes, perm: Sequence[int]) -> Sizes:
    """Returns the strides of a dense tensor with its dimensions in the order `perm`, innermost first."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compatible_stride (v2.13).
    strides = [0] * len(shape)
    step = 1
    for dim in perm:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def is_contiguous(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor is contiguous. Dimensions of size 1 may have any stride."""
    # Source: c10/core/Contiguity.h, _compute_contiguous (v2.13).
    return 0 in shape or _lies_along(shape, strides, range(len(shape) - 1, -1, -1))


def _lies_along(shape: Sizes, strides: Sizes, perm: Sequence[int]) -> bool:
    """Whether the strides are those of a dense tensor with its dimensions in the order `perm`."""
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
    innermost_first = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]))
    return 0 in shape or _lies_along(shape, strides, innermost_first)


def has_internal_overlap(shape: Sizes, strides: Sizes) -> bool:
    """Whether a tensor uses an element of memory twice, as an expanded tensor does."""
    # Source: aten/src/ATen/MemoryOverlap.cpp, has_internal_overlap (v2.13).
    if is_non_overlapping_and_dense(shape, strides):
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


# --- Broadcasting, and the strides that TensorIterator allocates


Layout = tuple[Sizes, Sizes]
"""A shape and its strides."""


class ShapeError(TorchPromoteError, ValueError):
    """Shapes that do not broadcast, or an output that cannot have the result's shape.

    Example:
        >>> broadcast_shapes((2, 3), (2,))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.strides.ShapeError: shapes [2, 3] and [2] do not broadcast: ...
    """


def broadcast_shapes(*shapes: Sizes) -> Sizes:
    """Returns the shape that several shapes broadcast to."""
    # Source: aten/src/ATen/ExpandUtils.cpp, infer_size (v2.13).
    result: Sizes = ()
    for shape in shapes:
        if shape == result:
            continue
        longer, shorter = (result, shape) if len(result) >= len(shape) else (shape, result)
        padded = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
        for dim, (a, b) in enumerate(zip(longer, padded, strict=True)):
            if a != b and a != 1 and b != 1:
                raise ShapeError(
                    f"shapes {list(result)} and {list(shape)} do not broadcast: dimension {dim} has sizes {a} and {b}, "
                    "which are neither equal nor 1."
                )
        result = tuple(b if a == 1 else a for a, b in zip(longer, padded, strict=True))
    return result


def reorder_dimensions(shape: Sizes, operands: Sequence[Sizes]) -> list[int]:
    """Returns the order in which TensorIterator iterates over the dimensions, innermost first."""
    # An insertion sort: the first operand whose strides differ decides. Comparison is not transitive, so another sort
    # would give another order. The strides of the operands are broadcast to `shape`: 0 in expanded dimensions.
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::reorder_dimensions (v2.13).
    ndim = len(shape)
    perm = list(range(ndim - 1, -1, -1))
    for i in range(1, ndim):
        inserted = i
        for before in range(i - 1, -1, -1):
            comparison = _should_swap(shape, operands, perm[before], perm[inserted])
            if comparison > 0:
                perm[before], perm[inserted] = perm[inserted], perm[before]
                inserted = before
            elif comparison < 0:
                break
    return perm


def _should_swap(shape: Sizes, operands: Sequence[Sizes], dim0: int, dim1: int) -> int:
    """Returns 1 if `dim0`, now the inner of the two, should be the outer; -1 if not; 0 if no operand decides."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::reorder_dimensions (v2.13).
    for strides in operands:
        stride0, stride1 = strides[dim0], strides[dim1]
        if stride0 == 0 or stride1 == 0:  # expanded: this operand does not decide
            continue
        if stride0 != stride1:
            return -1 if stride0 < stride1 else 1
        # If the strides are equal, one of the dimensions has size 1, which belongs inside.
        if shape[dim0] > shape[dim1]:
            return 1
    return 0


def output_strides(shape: Sizes, operands: Sequence[Layout]) -> Sizes:
    """Returns the strides of the result that TensorIterator allocates; an operand may be a `temporary_strides` copy."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::fast_set_up (v2.13);
    # aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::allocate_or_resize_outputs (v2.13).
    if all(own == shape for own, _ in operands):
        fast = _fast_set_up(shape, [strides for _, strides in operands])
        if fast is not None:
            return fast
    if len(shape) < 2:
        return contiguous_strides(shape)
    perm = reorder_dimensions(shape, [_stretch(shape, *operand) for operand in operands if operand[0]])
    if perm == list(range(len(shape) - 1, -1, -1)):
        return contiguous_strides(shape)
    return strides_along(shape, perm)


def _fast_set_up(shape: Sizes, operands: Sequence[Sizes]) -> Sizes | None:
    """Strides for operands of one shape that need no sorting, or None. There is no such path for channels_last_3d."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_fast_setup_type (v2.13).
    if all(is_contiguous(shape, strides) for strides in operands):
        return contiguous_strides(shape)
    channels_last = _FORMATS[torch.channels_last]
    if len(shape) == 4 and all(_lies_along(shape, strides, channels_last) for strides in operands):
        return strides_along(shape, channels_last)
    first = operands[0]
    if all(strides == first for strides in operands) and is_non_overlapping_and_dense(shape, first):
        return first
    return None


def _stretch(shape: Sizes, own_shape: Sizes, strides: Sizes) -> Sizes:
    """An operand's strides broadcast to a shape."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_strides (v2.13).
    if own_shape == shape:
        return strides
    missing = len(shape) - len(own_shape)
    return (0,) * missing + tuple(
        0 if own == 1 and full != 1 else stride
        for own, full, stride in zip(own_shape, shape[missing:], strides, strict=True)
    )


def temporary_strides(shape: Sizes, strides: Sizes) -> Sizes:
    """Returns the strides of `tensor.to(dtype)` for another dtype."""
    # Source: aten/src/ATen/native/TensorConversions.cpp, _to_copy (v2.13); aten/src/ATen/ExpandUtils.cpp,
    # infer_dense_strides (v2.13).
    if is_non_overlapping_and_dense(shape, strides):
        return strides
    # The same order of dimensions, without gaps or overlaps.
    return strides_along(tuple(max(size, 1) for size in shape), reorder_dimensions(shape, [strides]))
