"""`infer` on randomly changed calls: it infers correctly every call that PyTorch accepts."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from helpers.op_db_coverage import described, differs
from helpers.random_calls import RandomCall, changed, forms, recorded
from torch_promote.reference.ops.call import described as described_tensor
from torch_promote.reference.ops.infer import Entry, Inference, Term, infer, rule_table
from torch_promote.reference.promotion import Operand, PromotionError

aten = torch.ops.aten


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
    """Two tests use them. `changed` copies the tensors that it changes."""
    return recorded(most, limit)


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


def test_every_form_of_an_op_is_made() -> None:
    result = compare(ADD, 500)
    assert {"aten.add.Tensor", "aten.add_.Tensor", "aten.add.out"} <= set(result.compared)
    # Both answers of PyTorch are seen.
    assert 50 < result.refused.total() < 450
