"""Every case of every suite runs, and its contenders compute the same thing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.bench import SUITES, Case, Settings, list_cases, run
from torch_promote.bench.cases import ALREADY_CAST, HAND, LOW, OURS, PLAIN, STOCK
from torch_promote.bench.suite_ops import calls
from torch_promote.policy.op_table import op_table

TINY = Settings(rounds=2, slice_seconds=0, tiny=True)
CASES = list_cases(TINY)
MODELS = {"models", "caches"}

#: The contenders of a suite: those that each case has, and those that it may have.
CONTENDERS: dict[str, tuple[set[str], set[str]]] = {
    "region": ({STOCK, OURS}, set()),
    "ops": ({OURS}, {STOCK, HAND, ALREADY_CAST, PLAIN}),
    "overrides": ({OURS, HAND}, set()),
    "models": ({STOCK, OURS, HAND, PLAIN}, {ALREADY_CAST}),
    "caches": ({STOCK, OURS, HAND, PLAIN}, {ALREADY_CAST}),
    "import": ({STOCK, OURS}, set()),
}


def everyday_and_slow() -> Iterator[Any]:
    """The same work under each cache mode differs in the argument `cache` alone: every day, one mode of each."""
    modes = itertools.cycle(("weights", "all", "persistent", "none"))
    chosen: dict[str, str] = {}
    for case in CASES:
        work, _, mode = case.name.partition(', cache="')
        slow = case.suite == "caches" and mode.removesuffix('"') != (
            chosen.get(work) or chosen.setdefault(work, next(modes))
        )
        yield pytest.param(case, marks=[pytest.mark.slow] * slow, id=f"{case.suite}: {case.name}")


@pytest.mark.parametrize("case", list(everyday_and_slow()))
def test_every_case_runs(case: Case) -> None:
    [result] = run([case], TINY)
    always, sometimes = CONTENDERS[case.suite]
    assert always <= set(result.times_ns) <= always | sometimes
    for times in result.times_ns.values():
        assert 0 < times.low <= times.median <= times.high
    assert result.main_ratio is not None
    assert (result.ratio is None) == (STOCK not in result.times_ns)
    assert (result.ratio_to_hand is None) == (HAND not in result.times_ns)
    assert set(result.measured) == (set(result.times_ns) if case.suite in MODELS else set())


def test_the_suites_have_cases_of_their_own_with_names_of_their_own() -> None:
    assert {case.suite for case in CASES} == set(SUITES)
    assert len({(case.suite, case.name) for case in CASES}) == len(CASES)


def test_list_cases_keeps_to_the_suites() -> None:
    assert {case.suite for case in list_cases(TINY, ["import", "region"])} == {"import", "region"}


def test_every_mode_of_the_cast_cache_has_its_cases() -> None:
    modes = [re.fullmatch(r'(.+), cache="(\w+)"', case.name) for case in CASES if case.suite == "caches"]
    work: dict[str, set[str]] = {}
    for found in modes:
        assert found
        work.setdefault(found[1], set()).add(found[2])
    assert work
    assert all(there == {"weights", "persistent", "all", "none"} for there in work.values())


# --- ops: what stands for a call is that call

CALLS = calls(TINY)


def _value(statement: str, names: Any, region: Any = None) -> list[torch.Tensor]:
    if region is None:
        found = eval(statement, dict(names))
    else:
        with region("cpu", LOW):
            found = eval(statement, dict(names))
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_hand_and_on_cast_inputs_give_what_autocast_gives(name: str) -> None:
    call, make_names = CALLS[name]
    names = make_names(TINY)
    stock = _value(call.statement, names, tp.stock_autocast)
    assert _same(_value(call.statement, names, tp.my_autocast), stock)
    if call.hand:
        assert _same(_value(call.hand, names), stock)
    else:
        assert _same(_value(call.plain, names), stock)  # nothing to cast
    if call.already_cast:
        # Gradients come in the dtype of the inputs, which are low.
        found = _value(call.already_cast, names)
        assert _same([tensor.to(like.dtype) for tensor, like in zip(found, stock, strict=True)], stock)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_cast_policy_of_a_device_has_a_call(device: str) -> None:
    there = {getattr(row, device).value for row in op_table()} - {"banned"}
    named = {name.split()[1] for name in calls(Settings(device)) if name.startswith("policy ")}
    assert named == there


def test_rows_of_the_other_device_only() -> None:
    rows = {row.name: row for row in op_table()}
    assert (rows["aten::exp"].cpu.value, rows["aten::trace"].cuda.value) == ("fallthrough", "fallthrough")
    assert "exp, a row of CUDA only" in calls(Settings("cpu"))
    assert "trace, a row of the CPU only" in calls(Settings("cuda"))
