"""promote_types, can_cast and result_type compared with PyTorch's, for every dtype."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torch_promote.reference import (
    Operand,
    PromotionError,
    can_cast,
    promote_types,
    result_type,
)
from torch_promote.reference.dtypes import (
    ALL_DTYPES,
    Family,
    default_complex,
    dtype_name,
    family,
    is_complex,
    is_floating,
    is_integral,
    to_complex,
    to_real,
    typecode,
)
from torch_promote.reference.promotion import TABLE_DTYPES, number_dtype

DEFAULT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (True, 3, 2.5, 1j, 2**63)
RAISES = "raises"


pytestmark = pytest.mark.filterwarnings("ignore")  # making a tensor of an experimental dtype warns


def ours(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except PromotionError:
        return RAISES


def stock(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except RuntimeError:  # NotImplementedError is one
        return RAISES


def test_promote_types_of_every_ordered_pair() -> None:
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    differing = [(a, b) for a, b in pairs if ours(promote_types, a, b) != stock(torch.promote_types, a, b)]
    assert len(pairs) >= 46**2
    assert differing == []


def test_can_cast_of_every_ordered_pair() -> None:
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    assert [(a, b) for a, b in pairs if can_cast(a, b) != torch.can_cast(a, b)] == []


def test_result_type_of_every_pair_of_operands(default_dtype: torch.dtype) -> None:
    operands: list[Any] = [torch.empty(shape, dtype=dtype) for shape in ((2,), ()) for dtype in ALL_DTYPES]
    operands += NUMBERS
    pairs = list(itertools.product(operands, operands))
    assert len(pairs) >= 97**2
    assert [
        (describe(a), describe(b)) for a, b in pairs if ours(result_type, a, b) != stock(torch.result_type, a, b)
    ] == []


#: A dtype without kernels.
BCOMPLEX32 = getattr(torch, "bcomplex32", None)
#: The dtypes whose tensors can be converted to any other on the CPU, which a kernel of three operands does first.
CONVERTIBLE = (
    *TABLE_DTYPES,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    *(d for d in ALL_DTYPES if family(d) is Family.FLOAT8),
)


def stock_in_a_chain(operands: Sequence[Any]) -> Any:
    """The common dtype of any operands, by stock's functions of two, joined as result_type does.

    Within a state, dtypes are promoted pairwise; across states, the weakest two are joined first. What two states give
    stands for one operand in the stronger of the two.
    """
    try:
        weaker: Any = None  # a number, then a 0-dim tensor: an operand that stands for the weaker states
        numbers = [operand for operand in operands if not isinstance(operand, torch.Tensor)]
        if numbers:
            dtype = functools.reduce(torch.promote_types, (torch.result_type(n, n) for n in numbers))
            weaker = next(n for n in NUMBERS if torch.result_type(n, n) is dtype)
        for shape in ((), (2,)):
            dtypes = [o.dtype for o in operands if isinstance(o, torch.Tensor) and tuple(o.shape) == shape]
            if dtypes:
                stronger = torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes))
                dtype = stronger.dtype if weaker is None else torch.result_type(stronger, weaker)
                weaker = torch.empty((), dtype=dtype)
        return dtype
    except RuntimeError:
        return RAISES


@pytest.mark.parametrize("count", [2_500, pytest.param(12_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_numbers", [False, True])
def test_result_type_of_random_triples(default_dtype: torch.dtype, with_numbers: bool, count: int) -> None:
    rng = random.Random(f"triples under {default_dtype}")
    tensors = [torch.empty(shape, dtype=dtype) for shape in ((2,), ()) for dtype in CONVERTIBLE]
    for _ in range(count):  # of four default dtypes, with numbers and without
        triple = [rng.choice(NUMBERS if with_numbers and rng.random() < 0.4 else tensors) for _ in range(3)]
        found = ours(result_type, *triple)
        assert found == stock_in_a_chain(triple), ([describe(operand) for operand in triple], found)
        if not with_numbers:
            # torch.result_type takes two operands, but block_diag promotes any number of tensors.
            made = stock(torch.block_diag, *triple)
            assert found in (getattr(made, "dtype", made), BCOMPLEX32), [describe(operand) for operand in triple]


def describe(operand: Any) -> str:
    return f"{dtype_name(operand.dtype)}{list(operand.shape)}" if isinstance(operand, torch.Tensor) else repr(operand)


def test_a_dtype_counts_as_a_tensor_with_dimensions_and_an_operand_as_what_it_says() -> None:
    for default in DEFAULT_DTYPES:
        assert result_type(torch.int32, 5.5, default_dtype=default) is default
        assert result_type(torch.int32, 1j, default_dtype=default) is default_complex(default)
    assert result_type(torch.int8, torch.tensor(1)) is torch.int8
    assert result_type(torch.int8, Operand(torch.int64)) is torch.int8
    assert result_type(torch.int8, Operand(torch.int64, (3,))) is torch.int64
    wrapped = Operand(torch.float64, wrapped=True)
    assert result_type(torch.int8, wrapped, default_dtype=torch.float16) is torch.float16


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_counts_as_what_stock_wraps_it_in(number: Any, default_dtype: torch.dtype) -> None:
    assert number_dtype(number) is torch.result_type(number, number)


def test_predicates_say_what_the_dtype_objects_say() -> None:
    for dtype in ALL_DTYPES:
        assert is_floating(dtype) == dtype.is_floating_point
        assert is_complex(dtype) == dtype.is_complex
        if typecode(dtype) is not None and (is_floating(dtype) or is_complex(dtype)):
            assert to_complex(dtype) is dtype.to_complex()
            assert to_real(dtype) is dtype.to_real()
    assert [dtype_name(d) for d in ALL_DTYPES if is_integral(d)] == [
        *("int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8")
    ]


def test_bits_with_another_dtype_are_undefined_and_the_next_operand_overwrites_them() -> None:
    assert result_type(torch.bits8, torch.float32, torch.int8) is torch.int8


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((torch.float8_e5m2, torch.float32), "float8 dtypes promote only with themselves. Convert one of them first."),
        ((torch.qint8, torch.int8), "quantized dtypes promote only with themselves."),
        ((torch.bits8, torch.int8), "Bits dtypes promote only with themselves. Convert the operands first."),
        ((torch.int4, torch.int8), "PyTorch's table has no row for int4."),
        ((torch.float8_e5m2, 1j), "float8_e5m2 would have to become complex, and no complex dtype has such parts."),
        ((torch.int8, 2**64), "fits neither int64 nor uint64, so no tensor can hold it."),
        ((torch.int8, "1"), "an operand is a tensor, a Python number, a torch.dtype or an Operand, got '1'."),
    ],
)
def test_operands_without_a_common_dtype(operands: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PromotionError, match=re.escape(message)):
        result_type(*operands)
