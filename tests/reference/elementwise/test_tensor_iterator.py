"""Every preset compared with the ops that are built with it; numbers, devices, and errors of configurations."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.operands import random_operands
from torch_promote.reference import Operand, PromotionError
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.strides import ShapeError
from torch_promote.reference.tensor_iterator import PRESETS, TensorIteratorConfig, infer_elementwise, infer_where


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Complex32 is experimental, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(params=[torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=dtype_name)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


#: Ops that PyTorch builds with a preset, with how many operands.
OPS: list[tuple[str, Callable[..., torch.Tensor], int]] = [
    ("unary", torch.neg, 1),
    ("unary", torch.bitwise_not, 1),
    ("unary", torch.ops.aten.sgn.default, 1),
    ("unary_float", torch.exp, 1),
    ("unary_float", torch.sqrt, 1),
    ("unary_float", torch.sigmoid, 1),
    ("unary_force_boolean", torch.isposinf, 1),
    ("unary_force_boolean", torch.signbit, 1),
    ("binary", torch.mul, 2),
    ("binary", torch.maximum, 2),
    ("binary", torch.bitwise_and, 2),
    ("binary", torch.hypot, 2),
    ("binary_float", torch.true_divide, 2),
    ("binary_float", torch.atan2, 2),
    ("comparison", torch.eq, 2),
    ("comparison", torch.lt, 2),
    ("comparison", torch.logical_or, 2),
    ("ternary", torch.addcmul, 3),
    ("ternary", torch.addcdiv, 3),
]

#: What says that an op is not for a dtype, which is not TensorIterator's to say.
NOT_FOR_IT = ("not implemented for", "not supported", "is no longer supported", "only for real", "does not support")


@pytest.mark.parametrize(("preset", "function", "arity"), OPS, ids=[f"{p}-{f.__name__}" for p, f, _ in OPS])
def test_a_preset_is_what_its_ops_do(
    preset: str, function: Callable[..., torch.Tensor], arity: int, default_dtype: torch.dtype
) -> None:
    checked = 0
    for operands in random_operands(400, seed=arity, dtypes=(TABLE_DTYPES,) * arity):
        try:
            result = function(*operands)
        except (RuntimeError, TypeError) as error:
            message = str(error)
            if not any(words in message for words in NOT_FOR_IT):
                raise
            continue
        found = infer_elementwise(*operands, preset=preset)
        layouts = [(o.dtype, tuple(o.shape), o.stride()) for o in operands]
        assert found[:3] == (result.dtype, tuple(result.shape), result.stride()), layouts
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j, 2**63])
def test_numbers_as_operands(number: Any, default_dtype: torch.dtype) -> None:
    for dtype, shape in itertools.product(TABLE_DTYPES, ((2, 3), (0,), ())):
        tensor = torch.ones(shape, dtype=dtype)
        if dtype is torch.bool and number == 2**63:
            with pytest.raises(PromotionError, match="uint16, uint32, uint64"):
                infer_elementwise(tensor, number)
            continue
        if infer_elementwise(tensor, number).dtype not in TABLE_DTYPES:  # bcomplex32, which has no kernels
            continue
        for operands in ((tensor, number), (number, tensor)):
            result = torch.mul(operands[0], operands[1]) if operands[0] is tensor else operands[0] * operands[1]
            found = infer_elementwise(*operands)
            assert found[:3] == (result.dtype, tuple(result.shape), result.stride()), (dtype, operands)


def test_an_operand_stands_for_a_tensor() -> None:
    for operands in random_operands(300, seed=11, dtypes=(TABLE_DTYPES, TABLE_DTYPES)):
        described = [Operand(o.dtype, tuple(o.shape), o.stride()) for o in operands]
        assert infer_elementwise(*described) == infer_elementwise(*operands)
    assert infer_elementwise(Operand(torch.int8, (2, 3)), 1.5, default_dtype=torch.float32)[:3] == (
        (torch.float32, (2, 3), (3, 1))
    )


def test_one_cpu_scalar_may_stand_among_cuda_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        cuda = torch.empty(2, 3, device="cuda", dtype=torch.float16)
        scalar = torch.empty((), dtype=torch.float64)
        assert infer_elementwise(cuda, scalar).dtype is (cuda + scalar).dtype is torch.float16
        assert infer_elementwise(scalar, cuda)[1:3] == ((2, 3), (3, 1))
        with pytest.raises(RuntimeError):
            cuda + torch.empty(3)
        with pytest.raises(PromotionError, match=r"others are on cuda\. Only one 0-dim CPU tensor is allowed"):
            infer_elementwise(cuda, torch.empty(3))
        for preset in ("binary", "ternary"):
            with pytest.raises(PromotionError, match="one operand is on cpu, others are on cuda"):
                infer_elementwise(cuda, scalar, scalar, preset=preset)
        with pytest.raises(PromotionError, match="Move it to the same device"):
            infer_elementwise(cuda, cuda, scalar, preset="ternary")


def test_an_output_on_another_device_is_refused() -> None:
    x = Operand(torch.float32, (2,), device="cuda")
    with pytest.raises(PromotionError, match="one operand is on cpu, others are on cuda"):
        infer_elementwise(x, x, out=Operand(torch.float32, (), device="cpu"))


def test_a_reduction_writes_to_a_smaller_output() -> None:
    x, out = torch.ones(2, 3, dtype=torch.float16), torch.empty(1, 3, dtype=torch.float32)
    found = infer_elementwise(x, preset="reduce", out=out)
    assert found == (torch.float32, (1, 3), (3, 1), torch.float16)
    with pytest.raises(ShapeError, match="do not broadcast"):
        infer_elementwise(x, preset="reduce", out=torch.empty(2, 2))


def test_nullary_ops_have_the_dtype_and_strides_of_what_they_fill() -> None:
    out = torch.empty(2, 3, dtype=torch.int16).t()
    assert infer_elementwise(preset="nullary", out=out) == (torch.int16, (3, 2), out.random_().stride(), None)
    with pytest.raises(PromotionError, match="so the result's dtype is undefined"):
        infer_elementwise(preset="nullary")


def test_unpromoted_inputs_of_several_dtypes_need_a_static_dtype() -> None:
    operands = Operand(torch.int8, (2,)), Operand(torch.int16, (2,))
    config = TensorIteratorConfig(check_all_same_dtype=False)
    with pytest.raises(PromotionError, match="the inputs differ in dtype and are not promoted"):
        infer_elementwise(*operands, preset=config)
    config = TensorIteratorConfig(check_all_same_dtype=False, static_dtype=torch.int64)
    assert infer_elementwise(*operands, preset=config) == (torch.int64, (2,), (1,), None)


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="promote_integer_inputs_to_float needs promote_inputs_to_common_dtype"):
        TensorIteratorConfig(promote_integer_inputs_to_float=True)
    assert TensorIteratorConfig().check_all_same_dtype
    assert not TensorIteratorConfig(cast_common_dtype_to_outputs=True).check_all_same_dtype


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(KeyError, match="trinary"):
        infer_elementwise(1, 2, preset="trinary")
    assert {"unary", "unary_float", "binary", "binary_float", "comparison", "ternary", "reduce", "nullary"} <= {
        *PRESETS
    }


def test_where_wants_a_bool_condition_and_values_that_promote() -> None:
    values = torch.ones(2), torch.ones(2)
    with pytest.raises(RuntimeError, match="expected condition to be a boolean tensor"):
        torch.where(torch.ones(2, dtype=torch.int8), *values)
    with pytest.raises(PromotionError, match="where expects a bool condition, got int8"):
        infer_where(torch.ones(2, dtype=torch.int8), *values)
    with pytest.raises(PromotionError, match="float8 dtypes promote only with themselves"):
        infer_where(torch.ones(2, dtype=torch.bool), values[0], torch.ones(2, dtype=torch.float8_e5m2))


@pytest.mark.parametrize("number", [1, 2.5, 1j, True])
def test_where_with_a_number(number: Any, default_dtype: torch.dtype) -> None:
    condition = torch.tensor([True, False])
    for dtype, shape in itertools.product(TABLE_DTYPES, ((3, 1), ())):
        values = torch.ones(shape, dtype=dtype)
        result, swapped = torch.where(condition, values, number), torch.where(condition, number, values)
        assert infer_where(condition, values, number)[:3] == (result.dtype, tuple(result.shape), result.stride())
        assert infer_where(condition, number, values).dtype is swapped.dtype
