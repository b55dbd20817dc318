"""`infer` on single calls, compared with expected values and with PyTorch's results."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.operands import LAYOUTS, NDIMS, SIZES, random_tensor
from torch_promote.reference import Operand, PromotionError
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.ops import infer as rule_table_module
from torch_promote.reference.ops.call import signature_of
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import EACH, NO_RULE, Entry, Inference, infer, rule_name, rule_table

aten = torch.ops.aten
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUMBERS = (True, 2, 1, 0, -1, 2.5, 1 + 1j)


def overload(name: str) -> torch._ops.OpOverload | None:
    op, _, overload_name = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, op, None), overload_name or "default", None)


# --- the table


@pytest.mark.parametrize("entry", rule_table().values(), ids=lambda entry: entry.op)
def test_a_line_says_something_of_each_result(entry: Entry) -> None:
    op = overload(entry.op)
    if entry.terms[0].rule == EACH:
        ((inner,),) = (term.names for term in entry.terms)
        assert rule_table()[f"aten::{inner}"].terms[0].rule != EACH
        assert op is None or [type_ for type_, _ in signature_of(op).returns] == ["List[Tensor]"]
        return
    for term in entry.terms:
        dtype = getattr(torch, term.rule, None)
        is_rule = term.rule in DTYPE_RULES or term.rule in ELEMENTWISE_RULES
        assert is_rule != isinstance(dtype, torch.dtype), f"{term.rule} is neither a rule nor a dtype"
    if op is None:  # an op that another release has
        return
    signature = signature_of(op)
    assert len(entry.terms) == len(signature.returns)
    names = {argument.name for argument in signature.arguments}
    assert {name for term in entry.terms for name in term.names if not name.isdigit()} <= names
    elementwise = [term for term in entry.terms if term.rule in ELEMENTWISE_RULES]
    assert not elementwise or len(entry.terms) == 1


def test_every_rule_is_used() -> None:
    used = {term.rule for entry in rule_table().values() for term in entry.terms}
    assert set(DTYPE_RULES) | set(ELEMENTWISE_RULES) | {EACH} <= used


# --- answers by hand

F, D, H, B, I4, I8, C4, C8 = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)


def t(dtype: torch.dtype, *shape: int) -> Operand:
    return Operand(dtype, shape or (2, 2))


@pytest.mark.parametrize(
    ("op", "args", "dtypes"),
    [
        (aten.sum.default, (t(torch.int8),), "int64"),
        (aten.sum.default, (t(H),), "float16"),
        (aten.prod.dim_int, (t(torch.bool), 0), "int64"),
        (aten.cumsum.default, (t(torch.uint8), 0), "int64"),
        (aten.mean.default, (t(H),), "float16"),
        (aten.std_mean.correction, (t(C8),), "float64 complex128"),
        (aten.linalg_vector_norm.default, (t(C4),), "float32"),
        (aten.mm.default, (t(B), t(B)), "bfloat16"),
        (aten.all.default, (t(torch.uint8),), "uint8"),
        (aten.all.default, (t(I4),), "bool"),
        (aten.eq.Tensor, (t(C4), 2.5), "bool"),
        (aten.logical_not.default, (t(F),), "bool"),
        (aten.argmax.default, (t(H),), "int64"),
        (aten.sort.default, (t(H),), "float16 int64"),
        (aten.topk.default, (t(I4), 1), "int32 int64"),
        (aten.abs.default, (t(C4),), "float32"),
        (aten.angle.default, (t(I4),), "float32"),
        (aten.view_as_real.default, (t(C8),), "float64"),
        (aten.view_as_complex.default, (t(F),), "complex64"),
        (aten.complex.default, (t(D), t(D)), "complex128"),
        (aten._fft_r2c.default, (t(F), [0], 0, True), "complex64"),
        (aten._linalg_svd.default, (t(C4),), "complex64 float32 complex64"),
        (aten.div.Tensor, (t(I4), t(I8)), "float32"),
        (aten.div.Tensor_mode, (t(I4), t(I8)), "int64"),
        (aten.cat.default, ([t(torch.int8), t(torch.uint8)],), "int16"),
        (aten.where.self, (t(torch.bool), t(I4), 2.5), "float32"),
        (aten.full.default, ([2], True), "bool"),
        (aten.arange.default, (3,), "int64"),
        (aten.arange.start, (0, 3.0), "float32"),
        (aten.searchsorted.Tensor, (t(F), t(F)), "int64"),
        (aten.bincount.default, (t(I8), t(I8)), "float64"),
        (aten.split.Tensor, (t(H, 5), 2), "float16 float16 float16"),
        (aten.unbind.int, (t(H, 2, 3), 1), "float16 float16 float16"),
        (aten.native_layer_norm.default, (t(B), [2], t(F, 2), t(F, 2), 1e-5), "bfloat16 float32 float32"),
        (aten.add_.Tensor, (t(H), t(F)), "float16"),
        (aten._foreach_add.List, ([t(I4), t(H)], [t(H), 2.5]), "float16 float16"),
        (aten._foreach_add.ScalarList, ([t(I4), t(I4)], [1, 2.5]), "int32 float32"),
        (aten._foreach_norm.Scalar, ([t(C4), t(H)],), "float32 float16"),
        (aten._foreach_lerp.Scalar, ([t(F), t(D)], [t(F), t(D)], 1), "float32 float64"),
        (aten._foreach_pow.ScalarAndTensor, (2.5, [t(I4), t(C8)]), "float32 complex128"),
        (aten.index_put.default, (t(H), [t(torch.bool)], Operand(I8)), "float16"),
        (aten.mse_loss_backward.default, (t(D), t(H), t(F), 0), "float16"),
        (aten._softmax_backward_data.default, (t(D), t(D), 0, H), "float64"),
        (aten._conj.default, (1 + 1j,), "complex128"),
        (aten.add_.Scalar, (2.5, 1), ""),
        (aten.is_same_size.default, (t(H), t(F)), ""),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_lowest_dtypes(op: Any, args: Any, dtypes: str) -> None:
    kwargs = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
    inferred = infer(op, args, kwargs, default_dtype=torch.float32)
    assert isinstance(inferred, Inference)
    assert [dtype_name(dtype) for dtype in inferred.dtypes if dtype is not None] == dtypes.split()


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        (aten.mm.default, (t(F), t(D)), "aten::mm takes tensors of one dtype, got float32 and float64"),
        (aten.dot.default, (t(F, 2), t(H, 2)), "aten::dot takes tensors of one dtype"),
        (aten.mean.default, (t(I8),), "aten::mean is defined for floating and complex dtypes, got int64"),
        (aten.var.correction, (t(torch.bool),), "aten::var.correction is defined for floating and complex dtypes"),
        (aten.add.Tensor, (t(torch.uint16), t(I8)), "uint16 and int64 have no common dtype"),
    ],
)
def test_what_pytorch_refuses(op: Any, args: Any, text: str) -> None:
    with pytest.raises(PromotionError, match=text):
        infer(op, args)
    tensors = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Operand) else x for x in args]
    with pytest.raises(RuntimeError):
        op(*tensors)


def test_no_rule_is_said() -> None:
    unknown = torch.ops.prims.svd.default
    assert infer(unknown, (torch.ones(2, 2),)) is NO_RULE
    assert not NO_RULE
    assert rule_name(unknown) is None


def test_the_rule_of_an_op_without_tensors() -> None:
    assert rule_name(torch.ops.aten.is_same_size.default) == "no tensors"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{line}\n: same\n", r"some\.rules:2: not a rule: ': same'\. Expected an overload and a rule"),
        ("{line}\n\n{line}\n", r"some\.rules:3: aten::\S+ already has a rule in some\.rules\."),
    ],
)
def test_a_line_that_is_wrong(lines: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = next(
        line
        for file in Path(rule_table_module.__file__).parent.glob("rules/*.rules")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "some.rules").write_text(lines.format(line=line), encoding="utf-8")
    monkeypatch.setattr(rule_table_module, "__file__", str(tmp_path / "rule_table.py"))
    with pytest.raises(ValueError, match=message):
        rule_table_module.rule_table.__wrapped__()


def test_undefined_results() -> None:
    x, weight = t(F, 1, 1, 2, 2), t(F, 1, 1, 1, 1)
    args = (x, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    inferred = infer(aten.convolution_backward.default, args)
    assert isinstance(inferred, Inference)
    assert inferred.dtypes == (None, F, None)


def test_a_dtype_that_is_given_as_none_is_not_left_out() -> None:
    for kwargs, dtype in (({}, I8), ({"dtype": None}, D), ({"dtype": I4}, I4)):
        inferred = infer(aten.randint.default, (10, [2]), kwargs, default_dtype=D)
        assert isinstance(inferred, Inference)
        assert inferred.dtypes == (dtype,)


def test_the_default_dtype_is_asked_for() -> None:
    for dtype in FLOATING:
        inferred = infer(aten.sin.default, (t(I4),), default_dtype=dtype)
        assert isinstance(inferred, Inference)
        assert inferred.dtypes == (dtype,)


# --- against PyTorch


def differs(op: Any, args: Any, kwargs: Any) -> str | None:
    """Runs a call and its inference. Returns the difference, "" if there is none, or None if PyTorch raises."""
    shown = [(x.dtype, tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x for x in args]
    try:
        inferred: Any = infer(op, args, kwargs)
    except Exception as error:
        inferred = error
    try:
        result = op(*args, **kwargs)
    except (RuntimeError, TypeError):
        return None
    results = result if isinstance(result, tuple | list) else (result,)
    dtypes = tuple(None if x is None else x.dtype for x in results)
    right = isinstance(inferred, Inference) and inferred.dtypes == dtypes
    if right and inferred.shape is not None:
        right = inferred.shape == tuple(result.shape) and inferred.strides in (None, result.stride())
    return "" if right else f"{op}{shown} {list(kwargs)}: {inferred} against {dtypes}"


def random_call(op: Any, rng: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an elementwise op: tensors that broadcast, in odd layouts and mixed dtypes, and numbers."""
    shape = [rng.choice(SIZES) for _ in range(rng.choice(NDIMS))]
    alike, base, broadcast = rng.random() < 0.6, rng.choice(DTYPES), rng.random() < 0.5
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.real_type)
        dtype = base if alike else rng.choice(DTYPES)
        if kind == "Tensor" and argument.is_out:
            dtype = rng.choice((dtype, base, torch.float32, torch.complex128))
            kwargs[argument.name] = torch.empty(rng.choice((shape, [0])), dtype=dtype)
        elif kind == "Tensor" or (kind == "Optional[Tensor]" and rng.random() < 0.7):
            own = [1 if broadcast and rng.random() < 0.2 else size for size in shape]
            if argument.name in ("mask", "condition"):
                dtype = torch.bool
            tensor = random_tensor(rng, tuple(own), dtype, rng.choice(LAYOUTS))
            # Some kernels loop as often as a value says.
            (tensor if tensor._base is None else tensor._base).fill_(1)
            wrapped = args and dtype is not torch.bool and rng.random() < 0.1
            args.append(rng.choice(NUMBERS) if wrapped else tensor)
        elif argument.kwarg_only:
            if argument.name == "rounding_mode":
                kwargs["rounding_mode"] = rng.choice((None, "floor", "trunc"))
            elif not argument.has_default_value():
                kwargs[argument.name] = 1
        else:
            number = rng.choice(NUMBERS)
            args.append({"number": number, "Optional[number]": number, "int": 1, "float": 0.5, "bool": True}.get(kind))
    return args, kwargs


def elementwise_ops() -> Iterator[Any]:
    """The overloads of an elementwise op, with its in-place and out= forms."""
    for entry in rule_table().values():
        op = overload(entry.op)
        if entry.terms[0].rule in ELEMENTWISE_RULES and op is not None:
            yield op
            packet = op._schema.name.removeprefix("aten::")
            for name in (packet, packet + "_"):
                found = getattr(aten, name, None)
                for other in found.overloads() if found is not None else ():
                    form = getattr(found, other)
                    inputs = [(a.name, str(a.real_type)) for a in form._schema.arguments if not a.is_out]
                    if form is not op and inputs == [(a.name, str(a.real_type)) for a in op._schema.arguments]:
                        yield form


@pytest.mark.parametrize("op", list(elementwise_ops()), ids=str)
def test_elementwise_ops_on_odd_layouts(op: Any) -> None:
    rng = random.Random(str(op))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about outputs that are resized
        found = (differs(op, *random_call(op, rng)) for _ in range(1000))
        compared = list(itertools.islice((difference for difference in found if difference is not None), 50))
    assert compared, "PyTorch refuses every call"
    assert not any(compared), next(filter(None, compared))


def mixed_calls(a: torch.dtype, b: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Calls of ops that are not elementwise, with tensors of two dtypes."""
    x, y, w = torch.rand(2, 4, 3, 3).to(a), torch.rand(2, 4, 3, 3).to(b), torch.rand(4).to(b)
    p, q, v = torch.rand(3, 3).to(a), torch.rand(3, 3).to(b), torch.rand(3).to(b)
    index, stats = torch.zeros(2, dtype=torch.int64), (w.clone(), w.clone())
    for loss in ("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"):
        for reduction in (0, 1):
            yield overload(loss), (x, y, *((None,) if loss == "binary_cross_entropy" else ()), reduction)
    yield aten.binary_cross_entropy_with_logits.default, (x, y, None, None, 0)
    yield aten.native_batch_norm.default, (x, w, w, *stats, True, 0.1, 1e-5)
    yield aten.native_batch_norm.default, (x, None, None, *stats, False, 0.1, 1e-5)
    yield aten._native_batch_norm_legit.no_stats, (x, w, w, True, 0.1, 1e-5)
    yield aten.native_layer_norm.default, (x, [3], v, v, 1e-5)
    yield aten.native_group_norm.default, (x, w, w, 2, 4, 9, 2, 1e-5)
    yield aten.native_batch_norm_backward.default, (x, x, None, *stats, *stats, True, 1e-5, [True] * 3)
    for product in (aten.addmm, aten.addmv, aten.addr, aten.mm, aten.mv, aten.dot, aten.linalg_cross):
        three = (p, q, q) if product is aten.addmm else (v.to(a), q, v) if product is aten.addmv else None
        two = (p, q) if product in (aten.mm, aten.linalg_cross) else (p, v) if product is aten.mv else (v.to(a), v)
        yield product.default, three or ((p, v, v) if product is aten.addr else two)
    yield aten.convolution.default, (x, y[:, :, :1, :1], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    yield aten.cat.default, ([x, y],)
    yield aten.stack.default, ([x, y],)
    yield aten.dist.default, (x, y)
    yield aten._cdist_forward.default, (p, q, 2.0, None)
    yield aten.index_put.default, (x, [index], y)
    yield aten.index_add.default, (x, 0, index, y)
    yield aten.index_copy.default, (p, 0, index[:1], q[:1])
    yield aten.masked_fill.Tensor, (x, x > 0, torch.tensor(1, dtype=b))
    yield aten.normal.Tensor_Tensor, (x, y)
    yield aten.linspace.Tensor_Tensor, (torch.tensor(1, dtype=a), torch.tensor(2, dtype=b), 3)
    yield aten.bincount.default, (index, v[:2])
    yield aten.linalg_vector_norm.default, (x, 2, None, False)
    yield aten.native_dropout.default, (x, 0.5, True)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_mixed_dtypes(a: torch.dtype, b: torch.dtype) -> None:
    found = [differs(op, args, {}) for op, args in mixed_calls(a, b)]
    assert found.count("") >= (len(found) - 1 if a is b else 10), found
    assert not any(found), next(filter(None, found))
