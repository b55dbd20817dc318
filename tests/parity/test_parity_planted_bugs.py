"""Bugs planted in ours, in stock and in the reference: the run of an entry finds and names each of them."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.planted_bugs import change_outcomes, change_results
from torch_promote.errors import TorchPromoteError
from torch_promote.parity import entry_run
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch
from torch_promote.parity.outcome import Outcome
from torch_promote.parity.runner import run_entry
from torch_promote.reference import promotion as promotion_table

OURS, REFERENCE_STOCK, REFERENCE_OURS = "ours against stock", "reference against stock", "reference against ours"
MM = Entry("aten::mm", "row")
#: The samples of `MM` that autocast has something to cast in.
CAST = {f"float32/{number}/{kind}" for number in (0, 1) for kind in ("plain", "mixed", "mixed_lower_first")}
#: The package has a function of this module's name.
autocast_plan: Any = importlib.import_module("torch_promote.reference.autocast")


@pytest.fixture
def wrong_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a table in which bfloat16 and float32 promote to bfloat16."""
    for pair in itertools.permutations((torch.bfloat16, torch.float32)):
        monkeypatch.setitem(promotion_table._TABLE, pair, torch.bfloat16)


def override(monkeypatch: pytest.MonkeyPatch, **overrides: str) -> None:
    """Sets other policies than stock's in regions of ours."""
    monkeypatch.setattr(entry_run, "my_autocast", functools.partial(tp.my_autocast, overrides=overrides))


def of_samples(result: EntryResult, *samples: str) -> list[SampleMismatch]:
    return [mismatch for mismatch in result.mismatches if mismatch.sample in samples]


def test_without_a_bug_nothing_is_found() -> None:
    result = run_entry(MM, Options("cpu"))
    assert (result.samples, result.mismatches, result.stale) == (14, (), ())
    assert result.rows == {"aten::mm"}
    assert result.checked["aten.mm.default"] > 0


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_a_flipped_policy(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    override(monkeypatch, mm="fp32")
    result = run_entry(MM, Options(device))
    # The reference's state contains the override, so it agrees with ours.
    assert {mismatch.what for mismatch in result.mismatches} == {OURS}
    assert {mismatch.sample for mismatch in result.mismatches} >= CAST
    (first, *_) = of_samples(result, "float32/0/plain")
    assert first.kind == "dtype"
    lower = "float16" if device == "fake-cuda" else "bfloat16"
    assert f"dtype torch.{lower}, as stock has" in first.text
    assert "torch.float32" in first.text
    assert first.text.startswith("aten::mm(float32[")
    assert first.reproduce == f"torch-promote parity --device {device} --ops aten::mm --sample float32/0/plain"


def test_a_row_that_ours_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    override(monkeypatch, mm="keep")
    # The reference goes by the table, in which the row is.
    monkeypatch.setattr("torch_promote.observe.autocast_state._overrides_of", lambda *_: {})
    result = run_entry(MM, Options("cpu", sample="float32/0/plain"))
    found = {(mismatch.kind, mismatch.what): mismatch.text for mismatch in result.mismatches}
    assert {what for _, what in found} == {OURS, REFERENCE_OURS}
    assert "torch.bfloat16, as stock has" in found["dtype", OURS]
    assert "expected bfloat16\n    got      float32" in found["dtype", REFERENCE_OURS]


def test_a_row_that_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: row for name, row in autocast_plan._rows().items() if name != "aten::mm"}
    autocast_plan._policy_of_row.cache_clear()
    monkeypatch.setattr(autocast_plan, "_rows", lambda: rows)
    # The table answers for the release that it describes, whichever runs.
    monkeypatch.setattr("torch_promote.checking.expectation.TABLE_VERSION", torch.__version__.rpartition(".")[0])
    try:
        result = run_entry(MM, Options("cpu"))
    finally:
        autocast_plan._policy_of_row.cache_clear()
    assert result.rows == frozenset()
    assert {mismatch.what for mismatch in result.mismatches} == {REFERENCE_STOCK, REFERENCE_OURS}
    (first, *_) = of_samples(result, "float32/0/plain")
    assert first.text.startswith("aten.mm.default(float32[")
    assert first.kind == "row"


def test_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.bfloat16:
            return tensor
        flipped = tensor.detach().clone()
        flipped.view(torch.int16).view(-1)[5] ^= 1
        return flipped.requires_grad_(tensor.requires_grad)

    change_results(monkeypatch, flip)
    result = run_entry(MM, Options("cpu", dtypes=("float32", "float64")))
    assert {mismatch.sample for mismatch in result.mismatches} == CAST
    assert {(mismatch.kind, mismatch.what) for mismatch in result.mismatches} == {("bits", OURS)}
    assert all("1 of " in mismatch.text for mismatch in result.mismatches)
    assert not any("against itself" in mismatch.text for mismatch in result.mismatches)


def test_a_wrong_bit_in_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(outcome: Outcome) -> None:
        outcome.gradients[1].view(-1)[0] += 1

    change_outcomes(monkeypatch, change)
    (found,) = run_entry(MM, Options("cpu", sample="float32/0/plain")).mismatches
    assert found.kind == "bits"
    assert "gradients[1]" in found.text


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_a_wrong_stride(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    change_results(monkeypatch, lambda tensor: tensor.mT.clone(memory_format=torch.contiguous_format).mT)
    result = run_entry(MM, Options(device, sample="float32/0/plain"))
    assert [(mismatch.kind, mismatch.what) for mismatch in result.mismatches] == [("strides", OURS)]


@pytest.mark.usefixtures("wrong_cell")
def test_a_wrong_cell_of_the_promotion_table() -> None:
    entry, options = Entry("add", "op_db"), Options("cpu", sample="float32/0/mixed")
    result = run_entry(entry, options)
    assert [(m.kind, m.what) for m in result.mismatches] == [("dtype", REFERENCE_STOCK), ("dtype", REFERENCE_OURS)]
    assert "aten.add.Tensor(float32[" in result.mismatches[0].text
    assert "expected bfloat16\n    got      float32" in result.mismatches[0].text


def test_an_error_of_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    override(monkeypatch, mm="banned")
    (found,) = run_entry(MM, Options("cpu", sample="float32/0/plain")).mismatches
    assert (found.kind, found.what) == ("error", OURS)
    assert "expected a result, as stock has" in found.text
    assert "aten::mm" in found.text.partition("got")[2]


def test_an_error_of_stocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise TorchPromoteError("planted")

    def run(region: Any, bound: Any, **options: Any) -> Any:
        if isinstance(region, torch.autocast):
            bound = (refuse, *bound[1:])
        return unpatched(region, bound, **options)

    unpatched = entry_run.run
    monkeypatch.setattr(entry_run, "run", run)
    result = run_entry(MM, Options("cpu", sample="float32/0/plain"))
    assert [(mismatch.kind, mismatch.what) for mismatch in result.mismatches] == [("error", OURS)]
    assert result.stock_raised == 0


def test_promote_where_only_ours_has_an_answer_is_counted() -> None:
    result = run_entry(Entry("cat", "op_db"), Options("cpu", dtypes=("float16",)))
    assert result.stock_raised > 0
    assert result.mismatches == ()


@pytest.mark.usefixtures("wrong_cell")
def test_stock_that_the_reference_does_not_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ours: our key is not used, and the same bug is found in PyTorch's place."""
    monkeypatch.setattr(entry_run, "my_autocast", None)
    options = Options("cpu", sample="float32/0/mixed", stock_only=True)
    (found,) = run_entry(Entry("add", "op_db"), options).mismatches
    assert (found.kind, found.what) == ("dtype", REFERENCE_STOCK)
    assert found.reproduce.endswith("--stock-only")


def test_a_check_that_raises_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an error raised by a check would look like one that stock and ours share."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr("torch_promote.checking.checker.state_in_force", broken)
    for stock_only in (False, True):
        options = Options("cpu", sample="float32/0/plain", stock_only=stock_only)
        assert run_entry(MM, options).mismatches != ()
