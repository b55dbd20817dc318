"""Strides compared with the results of PyTorch's elementwise ops, and memory formats compared with its tensors."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.fake_cuda_strides import OPS, compare
from helpers.operands import LAYOUTS, random_operands, random_tensor
from helpers.subprocesses import run_module
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.strides import (
    ShapeError,
    broadcast_shapes,
    channels_last_3d_strides,
    channels_last_strides,
    contiguous_strides,
    dense_strides,
    has_internal_overlap,
    is_channels_last_contiguous,
    is_contiguous,
    is_non_overlapping_and_dense,
    output_strides,
    suggest_memory_format,
    temporary_strides,
)
from torch_promote.reference.tensor_iterator import ElementwiseResult, infer_elementwise, infer_where

PAIRS, TRIPLES = 20_000, 5_000
#: How many operands are made for fake tensors, which are slow.
fake_counts = pytest.mark.parametrize("count", [500, pytest.param(PAIRS, marks=pytest.mark.slow)])


def same(ours: ElementwiseResult, tensor: torch.Tensor) -> bool:
    return ours[:3] == (tensor.dtype, tuple(tensor.shape), tensor.stride())


def layout(operands: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(operand.dtype, tuple(operand.shape), operand.stride()) for operand in operands]


@pytest.mark.parametrize(("name", "count"), [("add", PAIRS), ("where", TRIPLES), ("addcmul", TRIPLES)])
def test_results_of_cpu_tensors(name: str, count: int) -> None:
    stock, ours, dtypes = OPS[name]
    seen = 0
    for operands in random_operands(2 * count, seed=count, dtypes=dtypes):
        found = ours(*operands)
        if found.dtype not in TABLE_DTYPES:  # bcomplex32, where there is one, has no kernels
            continue
        result = stock(*operands)
        assert same(found, result), (layout(operands), result.dtype, result.stride(), found)
        seen += 1
        if seen == count:
            break
    assert seen == count


# NOTE: Who answers for a fake tensor. FakeTensor runs an op's meta kernel. For add, where and addcmul PyTorch registers
# Python ones, from torch._refs, over the C++ ones, and their strides are not always those that a CUDA tensor gets. The
# C++ meta kernels are TensorIterator itself, which makes no temporaries for a meta tensor, as for a CUDA tensor. So
# ours is compared with those, in a process that drops the Python ones. where has no C++ one; it converts its values
# itself on every device, so its CPU result equals CUDA's.
@pytest.mark.parametrize("name", ["add", "addcmul"])
@fake_counts
def test_results_of_fake_cuda_tensors_by_tensor_iterator(name: str, count: int) -> None:
    done = run_module("helpers.fake_cuda_strides", name, str(count), timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{name}: {count} cases, 0 differ from TensorIterator"


@pytest.mark.parametrize("name", ["add", "where", "addcmul"])
@fake_counts
def test_results_of_fake_cuda_tensors_as_shipped(name: str, count: int) -> None:
    """Where FakeTensor and ours differ, and no temporaries are in play, eager PyTorch says what ours says."""
    stock, ours, dtypes = OPS[name]
    checked = 0
    for operands, fake, result in compare(
        stock, random_operands(count, seed=count + 1, dtypes=dtypes), FakeTensorMode()
    ):
        found = ours(*fake)
        checked += 1
        assert found[:2] == (result.dtype, tuple(result.shape))
        no_temporaries = name == "where" or len({operand.dtype for operand in operands}) == 1
        # bcomplex32, where there is one, has no kernels to ask.
        if not same(found, result) and no_temporaries and found.dtype in TABLE_DTYPES:
            assert same(found, stock(*operands)), layout(operands)
    assert checked == count


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_where_takes_a_uint8_condition() -> None:
    dtypes = ((torch.uint8,), TABLE_DTYPES, TABLE_DTYPES)
    for operands in random_operands(500, seed=9, dtypes=dtypes):
        assert same(infer_where(*operands), torch.where(*operands)), layout(operands)


def test_a_fake_result_that_eager_contradicts() -> None:
    """The smallest kind of case in which FakeTensor's strides are not those of eager; ours are eager's."""
    shape, sliced, plain = (1, 3, 1, 1), (8, 1, 8, 4), (3, 1, 1, 1)
    eager = torch.empty_strided(shape, sliced) + torch.empty_strided(shape, plain)
    with FakeTensorMode():
        fake = torch.empty_strided(shape, sliced, device="cuda") + torch.empty_strided(shape, plain, device="cuda")
    assert output_strides(shape, [(shape, sliced), (shape, plain)]) == eager.stride() == (3, 1, 1, 1)
    assert fake.stride() == (3, 1, 3, 3)


def test_temporaries_are_made_on_the_cpu_only() -> None:
    expanded = torch.empty_strided((1, 2), (2, 0), dtype=torch.float32)
    plain = torch.empty_strided((1, 2), (1, 1), dtype=torch.float64)
    # Its copy in float64 is dense and contiguous; the original's stride of 0 does not decide, so `plain` does.
    assert temporary_strides((1, 2), (2, 0)) == (2, 1)
    assert infer_elementwise(expanded, plain).strides == (expanded + plain).stride() == (2, 1)
    assert infer_elementwise(expanded, plain, device_type="cuda").strides == (1, 1)
    assert infer_elementwise(expanded.double(), plain).strides == (2, 1)


@pytest.mark.parametrize(
    ("first", "second", "shape", "strides"),
    [
        (((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 4, 5), (20, 5, 1)), (2, 3, 4, 5), (60, 1, 15, 3)),
        (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 1), (1, 1, 1)), (2, 3, 1, 1), (3, 1, 3, 3)),
        (((2, 3, 1, 1), (3, 1, 3, 3)), ((3, 1, 3), (1, 3, 3)), (2, 3, 1, 3), (9, 1, 3, 3)),
    ],
    ids=["channels_last and a broadcast", "size-1 dims keep channels_last", "and so does a transposed operand"],
)
def test_worked_examples(first: Any, second: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    a, b = torch.empty_strided(*first), torch.empty_strided(*second)
    assert same(infer_elementwise(a, b), a + b)
    assert infer_elementwise(a, b)[1:3] == (shape, strides)


SHAPES = [
    *itertools.product((1, 2, 4), repeat=4),
    *itertools.product((1, 3), repeat=5),
    *itertools.product((0, 1, 2), repeat=3),
]


def suggested_by_stock(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that PyTorch's C++ suggests for a tensor; interpolation gives it to what it returns."""
    interpolate = torch.ops.aten.upsample_nearest2d if tensor.ndim == 4 else torch.ops.aten.upsample_nearest3d
    result = interpolate(tensor, [2] * (tensor.ndim - 2))
    for memory_format in (torch.contiguous_format, CHANNELS_LAST[tensor.ndim]):
        if result.stride() == torch.empty(result.shape, memory_format=memory_format).stride():
            return memory_format
    raise AssertionError(result.stride())


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("layout_name", sorted(set(LAYOUTS)))
def test_memory_formats_are_those_of_tensors(layout_name: str) -> None:
    rng = random.Random(layout_name)
    for shape in SHAPES:
        tensor = random_tensor(rng, shape, torch.float32, layout_name)
        strides = tensor.stride()
        assert is_contiguous(shape, strides) == tensor.is_contiguous()
        assert is_non_overlapping_and_dense(shape, strides) == torch.ops.aten.is_non_overlapping_and_dense(tensor)
        if len(shape) == 4:
            assert is_channels_last_contiguous(shape, strides) == tensor.is_contiguous(
                memory_format=torch.channels_last
            )
        if len(shape) in CHANNELS_LAST:
            suggested = suggested_by_stock(tensor)
            assert suggest_memory_format(shape, strides) == suggested, (shape, strides)
            exact = strides == torch.empty(shape, memory_format=suggested).stride()
            assert suggest_memory_format(shape, strides, exact_match=True) == (
                suggested if exact else torch.contiguous_format
            )
        else:
            assert suggest_memory_format(shape, strides) == torch.contiguous_format


@pytest.mark.parametrize(
    ("shape", "strides", "suggested"),
    [
        ((2, 1, 4, 4), (16, 16, 4, 1), torch.contiguous_format),
        ((2, 1, 4, 4), (16, 1, 4, 1), torch.channels_last),
        ((2, 4, 1, 1), (4, 1, 1, 1), torch.contiguous_format),
        ((2, 4, 1, 1), (4, 1, 4, 4), torch.channels_last),
        ((2, 1, 1, 1), (1, 1, 1, 1), torch.contiguous_format),
        ((2, 1, 1, 1), (4, 4, 4, 4), torch.contiguous_format),
        ((2, 3, 4, 4), (96, 1, 24, 6), torch.channels_last),
    ],
)
def test_ambiguous_memory_formats(
    shape: tuple[int, ...], strides: tuple[int, ...], suggested: torch.memory_format
) -> None:
    assert suggested_by_stock(torch.empty_strided(shape, strides)) == suggested
    assert suggest_memory_format(shape, strides) == suggested


def test_a_sliced_channels_last_tensor_is_no_exact_match() -> None:
    assert suggest_memory_format((2, 3, 4, 4), (96, 1, 24, 6)) == torch.channels_last
    assert suggest_memory_format((2, 3, 4, 4), (96, 1, 24, 6), exact_match=True) == torch.contiguous_format
    assert suggest_memory_format((2, 3, 4, 4), (48, 1, 12, 3), exact_match=True) == torch.channels_last


def test_strides_of_new_tensors() -> None:
    for shape in SHAPES:
        assert contiguous_strides(shape) == torch.empty(shape).stride()
        if len(shape) == 4:
            assert channels_last_strides(shape) == torch.empty(shape, memory_format=torch.channels_last).stride()
        if len(shape) == 5:
            assert channels_last_3d_strides(shape) == torch.empty(shape, memory_format=torch.channels_last_3d).stride()


def test_a_converted_copy_has_the_strides_of_a_temporary() -> None:
    for (operand,) in random_operands(5_000, seed=5, dtypes=((torch.float32,),)):
        assert temporary_strides(tuple(operand.shape), operand.stride()) == operand.to(torch.float64).stride()


def test_dense_strides_of_a_dense_tensor_are_its_own() -> None:
    for (operand,) in random_operands(2_000, seed=6, dtypes=((torch.float32,),)):
        shape, strides = tuple(operand.shape), operand.stride()
        if is_non_overlapping_and_dense(shape, strides) and min(shape, default=2) > 1:
            assert dense_strides(shape, strides) == strides


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2,), (3,), (1,)), ((4, 1, 2), (3, 3))])
def test_shapes_that_do_not_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        functools.reduce(torch.add, map(torch.empty, shapes))
    with pytest.raises(ShapeError, match="do not broadcast: dimension"):
        broadcast_shapes(*shapes)


def test_broadcast_shapes_are_torchs() -> None:
    rng = random.Random(7)
    for operands in random_operands(2_000, seed=7, dtypes=((torch.float32,),) * 3):
        shapes = [tuple(operand.shape) for operand in operands]
        rng.shuffle(shapes)
        assert broadcast_shapes(*shapes) == tuple(torch.broadcast_tensors(*map(torch.empty, shapes))[0].shape)


def test_an_expanded_tensor_overlaps_itself() -> None:
    for (operand,) in random_operands(2_000, seed=8, dtypes=((torch.float32,),)):
        try:
            operand.add_(1)
            stock = ""
        except RuntimeError as error:
            stock = str(error)
        overlaps = "more than one element of the written-to tensor" in stock
        assert has_internal_overlap(tuple(operand.shape), operand.stride()) == overlaps == bool(stock)
