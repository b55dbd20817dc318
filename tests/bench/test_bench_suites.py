"""Every case of every suite runs, and its contenders compute the same results."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.bench import INSTRUCTIONS, SUITES, Case, Settings, list_cases, missing, report, run
from torch_promote.bench.cases import ALREADY_CAST, COMPILE, HAND, LOW, OURS, PLAIN, STOCK
from torch_promote.bench.programs import PROGRAMS, program
from torch_promote.bench.suite_ops import calls
from torch_promote.policy.op_table import op_table

TINY = Settings(rounds=2, slice_seconds=0, tiny=True)
CASES = list_cases(TINY)
MODELS = {"models", "caches", "programs"}

#: The contenders of a suite: those that each case has, and those that it may have.
CONTENDERS: dict[str, tuple[set[str], set[str]]] = {
    "region": ({STOCK, OURS}, set()),
    "ops": ({OURS}, {STOCK, HAND, ALREADY_CAST, PLAIN}),
    "overrides": ({OURS, HAND}, set()),
    "models": ({STOCK, OURS, HAND, PLAIN}, {ALREADY_CAST}),
    "caches": ({STOCK, OURS, HAND, PLAIN}, {ALREADY_CAST}),
    "programs": ({STOCK, OURS}, set()),
    "import": ({STOCK, OURS}, set()),
}


def everyday_and_slow() -> Iterator[Any]:
    """Cases that differ only in the argument `cache`: the everyday run takes one mode of each."""
    modes = {"caches": itertools.cycle(("weights", "all", "persistent", "none"))}
    modes["programs"] = itertools.cycle(("weights", "all", "persistent"))
    chosen: dict[str, str] = {}
    for case in CASES:
        work, _, mode = case.name.partition(', cache="')
        slow = case.suite in modes and mode.removesuffix('"') != (
            chosen.get(work) or chosen.setdefault(work, next(modes[case.suite]))
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
    assert {case.suite for case in CASES} == set(SUITES) - {COMPILE, INSTRUCTIONS}  # they have test files of their own
    assert len({(case.suite, case.name) for case in CASES}) == len(CASES)


def test_list_cases_keeps_to_the_suites() -> None:
    assert {case.suite for case in list_cases(TINY, ["import", "region"])} == {"import", "region"}


@pytest.mark.parametrize(
    ("suite", "expected"),
    [("caches", {"weights", "persistent", "all", "none"}), ("programs", {"weights", "persistent", "all"})],
)
def test_every_mode_of_the_cast_cache_has_its_cases(suite: str, expected: set[str]) -> None:
    modes = [re.fullmatch(r'(.+), cache="(\w+)"', case.name) for case in CASES if case.suite == suite]
    work: dict[str, set[str]] = {}
    for found in modes:
        assert found
        work.setdefault(found[1], set()).add(found[2])
    assert work
    assert all(there == expected for there in work.values())


# --- programs


def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else find_spec(name))


def test_programs_of_an_absent_package_have_no_case_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_transformers(monkeypatch)
    assert missing() == ["HF Llama, training", "HF BERT, training", "HF Llama, generation"]
    assert not [case for case in list_cases(TINY, ["programs"]) if case.name.startswith("HF")]
    assert report([], TINY, missing())["skipped"] == missing()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in missing()])
def test_a_program_is_the_same_at_every_call_and_leaves_no_memory_behind(name: str) -> None:
    first, second = program(name, TINY), program(name, TINY)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    step = first.step(functools.partial(tp.stock_autocast, "cpu", LOW))
    step()
    assert all(weight.grad is None for weight in first.weights)


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
