"""Writing to a given tensor: which outputs `out=` and in-place ops accept, resize and refuse, compared with PyTorch."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helpers.operands import LAYOUTS, random_operands, random_tensor
from torch_promote.checking.comparison import same_bits
from torch_promote.reference import PromotionError
from torch_promote.reference.dtypes import ALL_DTYPES, Kind, dtype_name, kind
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.strides import ShapeError
from torch_promote.reference.tensor_iterator import infer_elementwise


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Resizing an output that has elements warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stock_message(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """PyTorch's error message, or "" if it does not raise."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return ""


def our_message(*operands: Any, **kwargs: Any) -> str:
    try:
        infer_elementwise(*operands, **kwargs)
    except (PromotionError, ShapeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("a", TABLE_DTYPES, ids=dtype_name)
def test_add_out_of_every_dtype(a: torch.dtype) -> None:
    """Every pair of dtypes into every dtype: the same are refused, and what is written is the sum, cast."""
    x = torch.ones(2, 3, dtype=a)
    for b, dtype in itertools.product(TABLE_DTYPES, repeat=2):
        y, out = torch.ones(3, dtype=b), torch.empty(2, 3, dtype=dtype)
        stock, ours = stock_message(torch.add, x, y, out=out), our_message(x, y, out=out)
        assert bool(stock) == bool(ours), (a, b, dtype, stock, ours)
        if stock:
            assert "result type" in stock
            assert ours.startswith(f"result type {dtype_name((x + y).dtype)} can't be cast to the desired output type")
        else:
            inferred = infer_elementwise(x, y, out=out)
            assert inferred.computation_dtype is (x + y).dtype
            assert inferred.dtype is out.dtype
            assert same_bits(out, (x + y).to(dtype))


YOUNGER = tuple(d for d in ALL_DTYPES if d not in TABLE_DTYPES and kind(d) is not Kind.OPAQUE)


@pytest.mark.parametrize("dtype", [*TABLE_DTYPES, *YOUNGER], ids=dtype_name)
def test_add_out_with_the_younger_dtypes(dtype: torch.dtype) -> None:
    """Where either an operand or the output is of a dtype outside the table. Missing kernels are no answer."""
    checked = 0
    out = torch.empty(2, dtype=dtype)
    for a, b in itertools.product((*TABLE_DTYPES, *YOUNGER), repeat=2):
        x, y = torch.empty(2, dtype=a), torch.empty(2, dtype=b)
        stock = stock_message(torch.add, x, y, out=out)
        if "not implemented for" not in stock:
            checked += 1
            assert bool(stock) == bool(our_message(x, y, out=out)), (a, b, stock)
    assert checked > 500


OTHER_FUNCTIONS: list[tuple[str, Callable[..., Any], tuple[torch.dtype, ...]]] = [
    ("binary_float", torch.true_divide, TABLE_DTYPES),
    ("comparison", torch.eq, TABLE_DTYPES),
]


@pytest.mark.parametrize(("preset", "function", "dtypes"), OTHER_FUNCTIONS, ids=[name for name, *_ in OTHER_FUNCTIONS])
def test_other_presets_into_every_dtype(
    preset: str, function: Callable[..., Any], dtypes: tuple[torch.dtype, ...]
) -> None:
    checked = 0
    for a, b, dtype in itertools.product(dtypes, repeat=3):
        x, y, out = torch.ones(2, dtype=a), torch.ones(2, dtype=b), torch.empty(2, dtype=dtype)
        stock = stock_message(function, x, y, out=out)
        if "not implemented for" in stock:
            continue
        checked += 1
        assert bool(stock) == bool(our_message(x, y, out=out, preset=preset)), (a, b, dtype, stock)
        if not stock:
            assert infer_elementwise(x, y, preset=preset).dtype is function(x, y).dtype
    assert checked > 1_500


@pytest.mark.parametrize("function", [torch.exp, torch.sin], ids=["exp", "sin"])
def test_unary_float_into_every_dtype(function: Callable[..., Any]) -> None:
    checked = 0
    for a, dtype in itertools.product(TABLE_DTYPES, repeat=2):
        x, out = torch.ones(2, dtype=a), torch.empty(2, dtype=dtype)
        stock = stock_message(function, x, out=out)
        if "not implemented for" not in stock:
            checked += 1
            assert bool(stock) == bool(our_message(x, out=out, preset="unary_float")), (a, dtype, stock)
    assert checked > 140


@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=dtype_name)
def test_unary_wants_one_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(2, dtype=torch.int32)
    stock, ours = (
        stock_message(torch.neg, x, out=torch.empty(2, dtype=dtype)),
        our_message(x, out=torch.empty(2, dtype=dtype), preset="unary"),
    )
    assert bool(stock) == bool(ours) == (dtype is not torch.int32)
    if ours:
        assert ours == f"found dtype {dtype_name(dtype)} but expected int32."
        assert "Found dtype" in stock


@pytest.mark.parametrize("preset", ["add", "addcmul"])
def test_shapes_and_strides_of_an_output(preset: str) -> None:
    """Outputs of the right shape keep their strides, others are resized to what would have been allocated."""
    rng = random.Random(preset)
    function = {"add": torch.add, "addcmul": torch.addcmul}[preset]
    dtypes = ((torch.float32, torch.float64),) * (2 if preset == "add" else 3)
    resized = kept = 0
    for operands in random_operands(5_000, seed=3, dtypes=dtypes):
        shape = tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
        wrong = rng.random() < 0.4
        dtype = rng.choice((torch.float32, torch.float64, torch.complex64, torch.bfloat16))
        out = random_tensor(rng, (*shape, 2)[1:] if wrong else shape, dtype, rng.choice(LAYOUTS))
        kwargs: dict[str, Any] = {"out": out, "preset": "binary" if preset == "add" else "ternary"}
        ours: Any = our_message(*operands, **kwargs) or infer_elementwise(*operands, **kwargs)
        stock = stock_message(function, *operands, out=out)
        if stock:
            assert isinstance(ours, str), (stock, ours)
            continue
        assert ours[:3] == (out.dtype, tuple(out.shape), out.stride())
        resized, kept = resized + wrong, kept + (not wrong)
    assert min(resized, kept) > 500


IN_PLACE = [(torch.int32, torch.float32), (torch.bool, torch.int8), (torch.float32, torch.complex64), (torch.int8,) * 2]


@pytest.mark.parametrize(("own", "other"), [*IN_PLACE, *((b, a) for a, b in IN_PLACE)])
def test_an_in_place_op_writes_to_its_first_operand(own: torch.dtype, other: torch.dtype) -> None:
    x, y = torch.ones(3, dtype=own), torch.ones(3, dtype=other)
    assert bool(our_message(x, y, out=x)) == bool(stock_message(x.add_, y))


def test_an_in_place_op_does_not_resize() -> None:
    x, y = torch.ones(3), torch.ones(2, 3)
    assert "doesn't match the broadcast shape" in stock_message(x.add_, y)
    assert our_message(x, y, out=x) == "out has shape [3], which the op may not resize to [2, 3]."


def test_an_expanded_output_is_refused() -> None:
    x, out = torch.ones(2, 3), torch.ones(3).expand(2, 3)
    assert "more than one element of the written-to tensor" in stock_message(torch.add, x, x, out=out)
    assert our_message(x, x, out=out) == (
        "out of shape [2, 3] and strides [0, 1] uses elements of its memory more than once. Use out.clone() instead."
    )


def test_a_refused_cast_says_what_to_do() -> None:
    assert our_message(torch.ones(2), 1, out=torch.empty(2, dtype=torch.int64)) == (
        "result type float32 can't be cast to the desired output type int64: the output is of a lower kind. "
        "Use an output of the result's kind, or cast the result."
    )
