"""`infer` on single calls, compared with expected values and with PyTorch's results."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from helpers.operands import LAYOUTS, NDIMS, SIZES, random_tensor
from helpers.random_calls import RandomCall, changed, described, differs, forms, recorded
from torch_promote.reference.ops import infer as rule_table_module
from torch_promote.reference.ops.call import described as described_tensor
from torch_promote.reference.ops.call import signature_of
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import EACH, NO_RULE, Entry, Inference, Term, infer, rule_table
from torch_promote.reference.promotion import Operand, PromotionError

aten = torch.ops.aten
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
NUMBERS = (True, 2, 1, 0, -1, 2.5, 1 + 1j)


def overload(name: str) -> torch._ops.OpOverload | None:
    op, _, overload_name = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, op, None), overload_name or "default", None)


def test_a_line_has_a_rule_for_each_result() -> None:
    for entry in rule_table().values():
        op = overload(entry.op)
        signature = None if op is None else signature_of(op)  # None: an op that another release has
        if entry.terms[0].rule == EACH:
            ((inner,),) = (term.names for term in entry.terms)
            assert rule_table()[f"aten::{inner}"].terms[0].rule != EACH
            assert signature is None or [type_ for type_, _ in signature.returns] == ["List[Tensor]"]
            continue
        for term in entry.terms:
            is_rule = term.rule in DTYPE_RULES or term.rule in ELEMENTWISE_RULES
            assert is_rule != isinstance(getattr(torch, term.rule, None), torch.dtype), entry
        if signature is not None:
            assert len(entry.terms) == len(signature.returns), entry
            names = {argument.name for argument in signature.arguments}
            assert {name for term in entry.terms for name in term.names if not name.isdigit()} <= names, entry
            assert len(entry.terms) == 1 or not any(term.rule in ELEMENTWISE_RULES for term in entry.terms), entry


def test_every_rule_is_used() -> None:
    used = {term.rule for entry in rule_table().values() for term in entry.terms}
    assert set(DTYPE_RULES) | set(ELEMENTWISE_RULES) | {EACH} <= used


F, D, H, I4, I8 = torch.float32, torch.float64, torch.float16, torch.int32, torch.int64


def t(dtype: torch.dtype, *shape: int) -> Operand:
    return Operand(dtype, shape or (2, 2))


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


def test_an_op_without_a_rule() -> None:
    assert infer(torch.ops.prims.svd.default, (torch.ones(2, 2),)) is NO_RULE
    assert not NO_RULE


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


def difference_of(op: Any, args: Any, kwargs: Any) -> str | None:
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
        found = (difference_of(op, *random_call(op, rng)) for _ in range(1000))
        compared = list(itertools.islice((difference for difference in found if difference is not None), 50))
    assert compared, "PyTorch refuses every call"
    assert not any(compared), next(filter(None, compared))


@dataclass
class Comparison:
    """The counts of compared calls, calls without a rule, and calls that PyTorch refuses, by overload."""

    compared: Counter[str] = field(default_factory=Counter)
    unruled: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def make(self, call: RandomCall) -> None:
        """Infers a call, makes it, and compares."""
        name, shown = str(call.op), described((call.args, call.kwargs))
        with default_dtype(call.default_dtype), torch.no_grad():
            try:
                inferred: Any = infer(call.op, call.args, call.kwargs)
            except Exception as error:
                inferred = error
            try:
                result = call.op(*call.args, **call.kwargs)
            except Exception:
                self.refused[name] += 1
                return
        if isinstance(inferred, Inference):
            difference = differs(inferred, call.op, result)
        elif isinstance(inferred, Exception):
            difference = f"raises {inferred!r}"
        else:
            self.unruled[name] += 1
            return
        self.compared[name] += 1
        if difference is not None:
            self.wrong.setdefault(name, f"{shown}, default dtype {call.default_dtype}: {difference}")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(calls: dict[Any, list[RandomCall]], count: int, seed: str = "") -> Comparison:
    """Makes and compares `count` changed calls of each op."""
    comparison = Comparison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, kept in calls.items():
            rng = random.Random(f"{op} {seed}")
            started = [form for call in kept for form in forms(call)]
            for number in range(count):
                try:
                    call = changed(started[number % len(started)], rng)
                except (RuntimeError, TypeError, NotImplementedError):  # a change that its tensors do not take
                    continue
                comparison.make(call)
    return comparison


@functools.cache
def calls_of_the_op_database(most: int, limit: int) -> dict[Any, list[RandomCall]]:
    """Several tests use them. `changed` copies the tensors that it changes."""
    return recorded(most, limit)


def test_calls_of_the_op_database() -> None:
    """Calls of each overload in each dtype: forward, backward, in place, with out= and on lists."""
    result = Comparison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for calls in recorded(12, 2).values():
            for call in calls:
                result.make(call)
    assert result.wrong == {}, "\n".join(f"{name}: {text}" for name, text in result.wrong.items())
    ruled, unruled = result.compared.keys(), result.unruled.keys() - result.compared.keys()
    assert len(ruled) > 700
    assert len(ruled) > 0.95 * len(ruled | unruled), unruled


@pytest.mark.parametrize(
    ("most", "limit", "count"),
    [(6, 1, 10), pytest.param(10, 3, 300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_changed_calls_of_the_op_database(most: int, limit: int, count: int) -> None:
    """`count` changed calls of each overload and its in-place and out= forms."""
    result = compare(calls_of_the_op_database(most, limit), count)
    assert result.wrong == {}, "\n".join(f"{name}: {text}" for name, text in result.wrong.items())
    assert result.unruled == {}
    assert len(result.compared) > 1000
    assert result.compared.total() > count * 400
    # Each kind of form takes part.
    assert sum(name.startswith("aten._foreach") for name in result.compared) > 80
    assert sum("_." in name for name in result.compared) > 150
    assert sum("out" in name for name in result.compared) > 150


def test_no_rule_loses_the_device() -> None:
    """An op's result for CPU tensors equals that for the same tensors on another device."""

    def moved(tensor: torch.Tensor) -> Operand:
        return described_tensor(tensor)._replace(device="cuda")

    compared = 0
    for op, calls in calls_of_the_op_database(6, 1).items():
        for call in calls:
            try:
                on_cpu = infer(call.op, call.args, call.kwargs)
            except PromotionError:  # PyTorch refuses some of its own samples
                continue
            args, kwargs = tree_map_only(torch.Tensor, moved, (call.args, call.kwargs))
            elsewhere = infer(call.op, args, kwargs)
            # CUDA's kernels keep the statistics of half precision in float32.
            if isinstance(on_cpu, Inference) and "statistics" not in on_cpu.rule:
                assert isinstance(elsewhere, Inference), op
                assert (elsewhere.dtypes, elsewhere.shape) == (on_cpu.dtypes, on_cpu.shape), op
                compared += 1
    assert compared > 1000


SHAPES = (((2, 3), (3,)), ((2, 3, 4), (2, 3, 4)))
ADD = {aten.add.Tensor: [RandomCall(aten.add.Tensor, (torch.ones(a), torch.ones(b)), {}) for a, b in SHAPES]}
PLANTED = [
    (Term("unary_float", ()), "dtypes"),
    (Term("binary", ("self",)), "shape"),
    (Term("binary", ("other", "self")), "strides"),
    (Term("unary", ()), "raises"),
]


@pytest.mark.parametrize(("term", "text"), PLANTED, ids=lambda value: str(value))
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, term: Term, text: str) -> None:
    assert compare(ADD, 500).wrong == {}
    monkeypatch.setitem(rule_table(), "aten::add.Tensor", Entry("aten::add.Tensor", (term,), "elementwise"))
    shown = [compare(ADD, 40, seed=str(seed)).wrong.get("aten.add.Tensor", "") for seed in range(25)]
    assert any(text in difference for difference in shown), shown
