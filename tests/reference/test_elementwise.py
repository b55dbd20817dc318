"""`infer_elementwise`, strides and memory formats compared with PyTorch: presets, numbers, layouts, outputs, errors."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.operands import LAYOUTS, random_operands, random_tensor
from helpers.operands import OPS as STRIDE_OPS
from helpers.subprocesses import run_module
from torch_promote.reference import Operand, PromotionError
from torch_promote.reference.dtypes import ALL_DTYPES, Kind, kind
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.strides import (
    ShapeError,
    broadcast_shapes,
    contiguous_strides,
    has_internal_overlap,
    is_contiguous,
    is_non_overlapping_and_dense,
    temporary_strides,
)
from torch_promote.reference.tensor_iterator import (
    ElementwiseResult,
    TensorIteratorConfig,
    infer_elementwise,
    infer_where,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # complex32 is experimental, and warns


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


def test_nullary_ops_have_the_dtype_and_strides_of_what_they_fill() -> None:
    out = torch.empty(2, 3, dtype=torch.int16).t()
    assert infer_elementwise(preset="nullary", out=out) == (torch.int16, (3, 2), out.random_().stride(), None)
    with pytest.raises(PromotionError, match="so the result's dtype is undefined"):
        infer_elementwise(preset="nullary")


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


PAIRS, TRIPLES = 20_000, 5_000
F32 = torch.float32
#: How many operands are made for fake tensors, which are slow.
fake_counts = pytest.mark.parametrize("count", [150, pytest.param(PAIRS, marks=pytest.mark.slow)])


def same(ours: ElementwiseResult, tensor: torch.Tensor) -> bool:
    return ours[:3] == (tensor.dtype, tuple(tensor.shape), tensor.stride())


def layout(operands: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(operand.dtype, tuple(operand.shape), operand.stride()) for operand in operands]


@pytest.mark.parametrize(("name", "count"), [("add", PAIRS), ("where", TRIPLES), ("addcmul", TRIPLES)])
def test_results_of_cpu_tensors(name: str, count: int) -> None:
    stock, ours, dtypes = STRIDE_OPS[name]
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
    done = run_module("helpers.operands", name, str(count), timeout=280, compiler=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{name}: {count} cases, 0 differ from TensorIterator"


def test_where_takes_a_uint8_condition() -> None:
    dtypes = ((torch.uint8,), TABLE_DTYPES, TABLE_DTYPES)
    for operands in random_operands(500, seed=9, dtypes=dtypes):
        assert same(infer_where(*operands), torch.where(*operands)), layout(operands)


def test_temporaries_are_made_on_the_cpu_only() -> None:
    expanded = torch.empty_strided((1, 2), (2, 0), dtype=torch.float32)
    plain = torch.empty_strided((1, 2), (1, 1), dtype=torch.float64)
    # Its copy in float64 is dense and contiguous; the original's stride of 0 does not decide, so `plain` does.
    assert temporary_strides((1, 2), (2, 0)) == (2, 1)
    assert infer_elementwise(expanded, plain).strides == (expanded + plain).stride() == (2, 1)
    assert infer_elementwise(expanded, plain, device_type="cuda").strides == (1, 1)
    assert infer_elementwise(expanded.double(), plain).strides == (2, 1)


SHAPES = [
    *itertools.product((1, 2, 4), repeat=4),
    *itertools.product((1, 3), repeat=5),
    *itertools.product((0, 1, 2), repeat=3),
]


@pytest.mark.parametrize("layout_name", sorted(set(LAYOUTS)))
def test_layouts_are_those_of_tensors(layout_name: str) -> None:
    rng = random.Random(layout_name)
    for shape in SHAPES:
        tensor = random_tensor(rng, shape, torch.float32, layout_name)
        strides = tensor.stride()
        assert is_contiguous(shape, strides) == tensor.is_contiguous()
        assert is_non_overlapping_and_dense(shape, strides) == torch.ops.aten.is_non_overlapping_and_dense(tensor)
        assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2,), (3,), (1,)), ((4, 1, 2), (3, 3))])
def test_shapes_that_do_not_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        functools.reduce(torch.add, map(torch.empty, shapes))
    with pytest.raises(ShapeError, match="do not broadcast: dimension"):
        broadcast_shapes(*shapes)


def test_an_expanded_tensor_overlaps_itself() -> None:
    for (operand,) in random_operands(2_000, seed=8, dtypes=((torch.float32,),)):
        try:
            operand.add_(1)
            stock = ""
        except RuntimeError as error:
            stock = str(error)
        overlaps = "more than one element of the written-to tensor" in stock
        assert has_internal_overlap(tuple(operand.shape), operand.stride()) == overlaps == bool(stock)


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


#: Every dtype that promotes: those of the table, and the younger ones.
DTYPES = (*TABLE_DTYPES, *(d for d in ALL_DTYPES if d not in TABLE_DTYPES and kind(d) is not Kind.OPAQUE))


@pytest.mark.parametrize(
    ("preset", "function", "dtypes"),
    [
        ("binary", torch.add, (DTYPES, DTYPES)),
        ("binary_float", torch.true_divide, (TABLE_DTYPES, TABLE_DTYPES)),
        ("comparison", torch.eq, (TABLE_DTYPES, TABLE_DTYPES)),
        ("unary_float", torch.exp, (TABLE_DTYPES,)),
        ("unary", torch.neg, (TABLE_DTYPES,)),
    ],
)
def test_into_every_dtype(preset: str, function: Callable[..., Any], dtypes: Sequence[Sequence[torch.dtype]]) -> None:
    """PyTorch refuses the same operands. Missing kernels are no answer."""
    checked = 0
    for *own, dtype in itertools.product(*dtypes, dtypes[0]):
        operands, out = [torch.empty(2, dtype=one) for one in own], torch.empty(2, dtype=dtype)
        stock, ours = stock_message(function, *operands, out=out), our_message(*operands, out=out, preset=preset)
        if "not implemented for" in stock or "not supported" in stock:
            continue
        checked += 1
        assert bool(stock) == bool(ours), (own, dtype, stock, ours)
        if not stock:
            found = infer_elementwise(*operands, preset=preset, out=out)
            assert found[:3] == (dtype, (2,), (1,)), (own, dtype)
            assert preset != "binary" or found[3] is torch.result_type(*operands), (own, dtype)
    assert checked > (100 if len(dtypes) == 1 else 1_000)


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


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ([Operand(torch.int32, (2,))], {"preset": "unary", "out": Operand(torch.int8, (2,))}, "found dtype int8 but"),
        (
            [Operand(torch.float32, (2,))],
            {"out": Operand(torch.int64, (2,))},
            "can't be cast to the desired output type",
        ),
        ([Operand(torch.int8, (2,))], {"out": Operand(torch.int8, (2, 3), (0, 1))}, "uses elements of its memory more"),
        (
            [Operand(torch.int8, (2,)), Operand(torch.int16, (2,))],
            {"preset": TensorIteratorConfig(check_all_same_dtype=False)},
            "the inputs differ in dtype and are not promoted",
        ),
    ],
)
def test_what_is_refused(operands: list[Operand], options: dict[str, Any], message: str) -> None:
    with pytest.raises((PromotionError, ShapeError), match=message):
        infer_elementwise(*operands, **options)


@pytest.mark.parametrize(
    ("own", "other"), list(itertools.permutations((torch.bool, torch.int8, F32, torch.complex64), 2))
)
def test_an_in_place_op_writes_to_its_first_operand_and_does_not_resize_it(
    own: torch.dtype, other: torch.dtype
) -> None:
    x, y = torch.ones(3, dtype=own), torch.ones(3, dtype=other)
    assert bool(our_message(x, y, out=x)) == bool(stock_message(x.add_, y))
    wider = torch.ones(2, 3, dtype=own)
    assert "doesn't match the broadcast shape" in stock_message(x.add_, wider)
    assert our_message(x, wider, out=x) == "out has shape [3], which the op may not resize to [2, 3]."
