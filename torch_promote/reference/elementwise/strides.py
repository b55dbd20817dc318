"""Shapes and strides of results: broadcasting, and the strides that TensorIterator allocates.

Sizes and strides are plain tuples, with strides in elements. PyTorch sorts dimensions by strides in bytes. Since it
only compares strides of the same operand, the order is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_promote.errors import TorchPromoteError
from torch_promote.reference.elementwise.memory_format import (
    Sizes,
    channels_last_strides,
    contiguous_strides,
    is_channels_last_contiguous,
    is_contiguous,
    is_non_overlapping_and_dense,
    strides_along,
)

__all__ = [
    "Layout",
    "ShapeError",
    "broadcast_shapes",
    "dense_strides",
    "output_strides",
    "reorder_dimensions",
    "temporary_strides",
]

Layout = tuple[Sizes, Sizes]
"""A shape and its strides."""


class ShapeError(TorchPromoteError, ValueError):
    """Shapes that do not broadcast, or an output that cannot have the result's shape.

    Example:
        >>> broadcast_shapes((2, 3), (2,))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.elementwise.strides.ShapeError: shapes [2, 3] and [2] do not broadcast: ...
    """


def broadcast_shapes(*shapes: Sizes) -> Sizes:
    """Returns the shape that several shapes broadcast to.

    Args:
        shapes: Any number of shapes.

    Returns:
        The common shape. Dimensions are aligned at the last one, and sizes of 1 are expanded.

    Raises:
        ShapeError: Two sizes differ, and neither is 1.

    Example:
        >>> broadcast_shapes((2, 1, 4), (3, 1))
        (2, 3, 4)

    Source: aten/src/ATen/ExpandUtils.cpp, infer_size (v2.13).
    """
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
    """Returns the order in which TensorIterator iterates over the dimensions, innermost first.

    It is an insertion sort that starts from the order of a contiguous tensor. Two dimensions are compared operand by
    operand, and the first operand whose strides differ decides. If none does, the dimensions keep their order and the
    insertion continues past them. The comparison is not transitive, so another sort would give another order.

    Args:
        shape: The broadcast shape.
        operands: The strides of each operand, broadcast to `shape`: 0 in expanded dimensions.

    Example:
        >>> reorder_dimensions((2, 3), [(1, 2)])
        [0, 1]

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::reorder_dimensions (v2.13).
    """
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
    """Returns 1 if `dim0`, now the inner of the two, should be the outer; -1 if not; 0 if no operand decides.

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::reorder_dimensions (v2.13).
    """
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
    """Returns the strides of the result that TensorIterator allocates.

    Args:
        shape: The broadcast shape.
        operands: The shape and strides of each operand, in order. For an input that the CPU first converts to another
            dtype, those of the copy: see `temporary_strides`.

    Example:
        >>> output_strides((2, 3, 4, 5), [((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 4, 5), (20, 5, 1))])
        (60, 1, 15, 3)

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::fast_set_up (v2.13); aten/src/ATen/TensorIterator.cpp,
    TensorIteratorBase::allocate_or_resize_outputs (v2.13).
    """
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
    """Strides for operands of one shape that need no sorting, or None. There is no such path for channels_last_3d.

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_fast_setup_type (v2.13).
    """
    if all(is_contiguous(shape, strides) for strides in operands):
        return contiguous_strides(shape)
    if len(shape) == 4 and all(is_channels_last_contiguous(shape, strides) for strides in operands):
        return channels_last_strides(shape)
    first = operands[0]
    if all(strides == first for strides in operands) and is_non_overlapping_and_dense(shape, first):
        return first
    return None


def _stretch(shape: Sizes, own_shape: Sizes, strides: Sizes) -> Sizes:
    """An operand's strides broadcast to a shape.

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_strides (v2.13).
    """
    if own_shape == shape:
        return strides
    missing = len(shape) - len(own_shape)
    return (0,) * missing + tuple(
        0 if own == 1 and full != 1 else stride
        for own, full, stride in zip(own_shape, shape[missing:], strides, strict=True)
    )


def dense_strides(shape: Sizes, strides: Sizes) -> Sizes:
    """Returns strides without gaps or overlaps that keep the order of the dimensions in memory.

    Example:
        >>> dense_strides((2, 3), (1, 4))
        (1, 2)

    Source: aten/src/ATen/ExpandUtils.cpp, infer_dense_strides (v2.13).
    """
    return strides_along(tuple(max(size, 1) for size in shape), reorder_dimensions(shape, [strides]))


def temporary_strides(shape: Sizes, strides: Sizes) -> Sizes:
    """Returns the strides of `tensor.to(dtype)` for another dtype.

    Example:
        >>> temporary_strides((2, 3), (0, 1)), temporary_strides((2, 3), (1, 2))
        ((3, 1), (1, 2))

    Source: aten/src/ATen/native/TensorConversions.cpp, _to_copy (v2.13).
    """
    if is_non_overlapping_and_dense(shape, strides):
        return strides
    return dense_strides(shape, strides)
