"""A crosscheck of a promotion region finds the operands independently of the extension's list of promoting ops."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import run_python
from torch_promote.checking.expectation import JoinedOperands, operands_of
from torch_promote.observe.ops import find_overload
from torch_promote.reference import Operand
from torch_promote.reference.ops.infer import functional_of, rule_table
from torch_promote.regions.promotion_tables import FLOATS, OPAQUE, PromotingOp, promoting_ops

#: Their operands are described, and no kernel runs.
TENSOR = Operand(torch.int32, (2, 3))


def arguments_of(op: torch._ops.OpOverload) -> dict[str, Any]:
    values: Mapping[str, Any] = {"Tensor": TENSOR, "number": 2, "int": 1, "bool": True, "float": 0.5}
    made = {}
    for argument in op._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").rstrip("]")
        if kind.startswith("List["):
            made[argument.name] = [values.get(kind.removeprefix("List["), None)] * 2
        elif kind in ("Tensor", "number") or not argument.has_default_value():
            made[argument.name] = values.get(kind)
    return made


def participants(op: torch._ops.OpOverload, found: JoinedOperands) -> tuple[int, ...]:
    return tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in found.names)


def promoted(name: str) -> PromotingOp | None:
    found = {op.name: op for op in promoting_ops()}.get(name)
    return None if found is None or found.computes == OPAQUE else found


@functools.cache
def ops_of_this_torch() -> set[str]:
    names = {f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in torch._C._jit_get_all_schemas()}
    return {name for name in names if torch._C._dispatch_has_kernel(name)}


#: Composites of ops that promote: the check has a rule for the whole, the extension acts on the parts.
BY_THEIR_PARTS = {"aten::dist"}


@pytest.mark.parametrize("family", sorted({entry.family for entry in rule_table().values()}))
def test_the_operands_found_by_trial_are_those_that_the_extension_knows(family: str) -> None:
    compared = 0
    for name, entry in rule_table().items():
        if entry.family != family or name not in ops_of_this_torch() or name in BY_THEIR_PARTS:
            continue
        op = find_overload(name)
        found, known = operands_of(op, arguments_of(op)), promoted(name)
        assert (found is None) == (known is None), name
        if found is not None and known is not None:
            assert participants(op, found) == tuple(sorted(known.participants)), name
            assert (found.in_step, found.is_product) == (known.each, known.matmul), name
            assert found.divides == (known.computes == FLOATS), name
            compared += 1
    assert compared >= {"elementwise": 200, "foreach": 50, "matrices": 10, "layers": 2, "shapes": 2}.get(family, 0)


def test_ops_that_write_take_the_operands_of_those_that_do_not() -> None:
    compared = 0
    for known in promoting_ops():
        op = find_overload(known.name)
        if not known.functional or known.computes == OPAQUE or known.functional not in rule_table():
            continue
        assert functional_of(op) is not None, known.name
        found = operands_of(op, arguments_of(op))
        assert found is not None, known.name
        assert participants(op, found) == tuple(sorted(known.participants)), known.name
        compared += 1
    assert compared > 300


@pytest.mark.parametrize("name", sorted(BY_THEIR_PARTS))
def test_composites_are_promoted_by_their_parts(name: str) -> None:
    if name not in ops_of_this_torch():
        pytest.skip(f"this PyTorch has no {name}")
    half, brain = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2, dtype=torch.bfloat16)
    with tp.crosscheck() as report, tp.promotion("jax", matmul=True):
        result = find_overload(name)(half, brain)
    assert result.dtype == torch.float32
    assert report.mismatches == []


#: Bugs in the extension's list: its entry of an op, as it is planted (None: the op is missing), a call, the promotion
#: rule of the region, and the mismatch: its kind, the start of the expected value, and the actual value.
PLANTED: dict[str, tuple[str, str, str, tuple[str, str, str]]] = {
    "aten::mul.Tensor": ("None", "torch.mul(ints, singles)", "numpy", ("dtype", "float64", "float32")),
    "aten::mul_.Tensor": (
        "None",
        "singles.clone().mul_(halves)",
        "strict",
        ("error", "an error: aten::mul_.Tensor: the promotion rule", "a result"),
    ),
    "aten::lt.Tensor": (  # its result is bool under every rule
        "None",
        "torch.lt(ints, singles)",
        "strict",
        ("error", "an error: aten::lt.Tensor: the promotion rule", "a result"),
    ),
    "aten::cat": ("None", "torch.cat([ints, singles])", "numpy", ("dtype", "float64", "float32")),
    "aten::sqrt": ("None", "torch.sqrt(ints)", "numpy", ("dtype", "float64", "float32")),
    "aten::addcmul": (
        "op._replace(participants=(0, 1))",
        "torch.addcmul(halves, halves, torch.tensor(1.0))",
        "jax",
        ("dtype", "float32", "float16"),
    ),
    "aten::div.Tensor": (
        "op._replace(computes=0)",  # as if it were a product
        "torch.div(ints, ints)",
        "numpy",
        ("dtype", "float64", "float32"),
    ),
}

SCRIPT = """
import torch, torch_promote as tp
from torch_promote.regions import promotion_tables as hooks

ops = hooks.promoting_ops()
planted = {planted}
if planted:  # before the first region, which registers the kernels
    changed = [planted.get(op.name, lambda op: op)(op) for op in ops]
    hooks.promoting_ops = lambda: [op for op in changed if op is not None]
halves, singles = torch.ones(2, 2).half(), torch.ones(2, 2)
ints = singles.int()
calls = {calls}
for rule, call in calls:
    with tp.crosscheck() as report, tp.promotion(rule):
        try:
            call()
        except tp.errors.PromotionRuleError:
            pass
    for found in report.mismatches:
        print(found.op, found.kind, found.expected, found.got, sep="|")
"""


def mismatches(planted: str) -> list[str]:
    calls = ", ".join(f"({rule!r}, lambda: {call})" for _, call, rule, _ in PLANTED.values())
    script = SCRIPT.format(planted=planted, calls=f"[{calls}]")
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bugs_in_the_list_of_promoting_ops_are_found() -> None:
    assert mismatches("{}") == []
    planted = ", ".join(f"{name!r}: lambda op: {change}" for name, (change, *_) in PLANTED.items())
    lines = mismatches(f"{{{planted}}}")
    assert len(lines) == len(PLANTED)
    for line, (name, (_, _, _, expected)) in zip(lines, PLANTED.items(), strict=True):
        op, kind, should_be, got = line.split("|")
        assert find_overload(name) is eval(op, {"aten": torch.ops.aten})
        assert (kind, got) == (expected[0], expected[2]), line
        assert should_be.startswith(expected[1]), line


@pytest.mark.parametrize("rule", ["jax", "numpy", "torch"])
@pytest.mark.parametrize("level", ["dtype", "bits"])
def test_no_alarm_for_products_of_two_dtypes_under_autocast(rule: str, level: Any) -> None:
    x = torch.randn(3, 3)
    products = {
        "mm": torch.mm,
        "matmul": torch.matmul,
        "linear": torch.nn.functional.linear,
        "bmm": lambda a, b: torch.bmm(a[None], b[None]),
        "addmm": lambda a, b: torch.addmm(a, a, b),
        "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    }
    for name, product in products.items():
        for other in (x.bfloat16(), x.half(), x):
            with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"), tp.promotion(rule, matmul=True):
                product(x, other)
            assert report.ok, (name, report)
        if rule != "torch":
            with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"), tp.promotion(rule, matmul=True):
                assert product(x, x.double()).dtype is torch.float64
            assert report.ok, (name, report)


def test_no_alarm_for_a_call_with_numbers_alone() -> None:
    with tp.crosscheck() as report, tp.promotion("numpy"):
        assert torch.where(torch.ones(2) > 0, 1.0, 2).dtype is torch.float32
    assert report.mismatches == []
    assert report.checked["aten.where.self"] == 1
