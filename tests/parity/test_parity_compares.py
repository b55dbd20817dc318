"""The run of an entry also compares messages, inputs and every pair of dtypes; samples that cannot be generated."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.planted_bugs import change_outcomes
from torch_promote.checking import expectation
from torch_promote.errors import OptionError
from torch_promote.observe.ops import is_fake
from torch_promote.parity import entry_run, samples
from torch_promote.parity.devices import on_device
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.outcome import Outcome, without_bits
from torch_promote.parity.promotion import DTYPES, ENTRIES, promotion_calls
from torch_promote.parity.runner import entries, run_entry
from torch_promote.reference import promotion as promotion_table
from torch_promote.reference.ops.infer import NO_RULE

OURS = "ours against stock"
MM = Entry("aten::mm", "row")
PLAIN = Options("cpu", sample="float32/0/plain")
#: The package has a class of this module's name.
checker: Any = importlib.import_module("torch_promote.checking.checker")


def kinds(result: EntryResult) -> set[tuple[str, str]]:
    return {(mismatch.kind, mismatch.what) for mismatch in result.mismatches}


# --- errors


@pytest.mark.parametrize("field", ["error", "backward_error"])
def test_an_error_with_another_message_is_found(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    def other_words(outcome: Outcome) -> None:
        setattr(outcome, field, RuntimeError("something\nentirely different"))

    def run(region: Any, bound: Any, **options: Any) -> Outcome:
        outcome = unpatched(region, bound, **options)
        setattr(outcome, field, RuntimeError("something"))
        return outcome

    unpatched = entry_run.run
    monkeypatch.setattr(entry_run, "run", run)
    alike = run_entry(MM, PLAIN)
    assert (alike.refused, alike.mismatches) == (1, ())
    change_outcomes(monkeypatch, other_words)
    result = run_entry(MM, PLAIN)
    assert kinds(result) == {("error", OURS)}
    assert "expected RuntimeError: something" in result.mismatches[0].text


def test_what_is_banned_is_refused_in_words_of_our_own() -> None:
    result = run_entry(Entry("aten::binary_cross_entropy", "row"), Options("fake-cuda"))
    assert result.refused > 0
    assert result.mismatches == ()


# --- inputs


def test_an_input_that_is_written_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(outcome: Outcome) -> None:
        outcome.inputs[0][1].detach().view(-1)[0] += 1

    change_outcomes(monkeypatch, write)
    result = run_entry(MM, PLAIN)
    assert kinds(result) == {("bits", OURS)}
    assert all("inputs[1]: bits" in mismatch.text for mismatch in result.mismatches)


def test_a_write_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are right, but a wrapper of ours changes a copy of the argument."""

    class LostWrites(tp.my_autocast):
        def __enter__(self) -> Any:
            monkeypatch.setattr(torch.nn.functional, "batch_norm", on_copies)
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            monkeypatch.setattr(torch.nn.functional, "batch_norm", unpatched)
            return super().__exit__(*error)

    def on_copies(x: torch.Tensor, mean: Any, variance: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies = [None if each is None else each.clone() for each in (mean, variance)]
        return unpatched(x, *copies, *args, **kwargs)

    def call(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, training=True)

    unpatched = torch.nn.functional.batch_norm
    monkeypatch.setattr(samples, "_from_op_database", functools.partial(one_sample, call))
    entry = Entry("nn.functional.batch_norm", "op_db")
    assert run_entry(entry, Options("cpu", quick=True)).mismatches == ()
    monkeypatch.setattr(entry_run, "my_autocast", LostWrites)
    result = run_entry(entry, Options("cpu", quick=True))
    assert kinds(result) == {("bits", OURS)}
    assert {mismatch.text.partition("expected ")[2][:9] for mismatch in result.mismatches} == {"inputs[1]", "inputs[2]"}


def one_sample(call: Any, name: str, options: Options) -> Iterator[samples.Sample]:
    yield samples.Sample("float32/0/plain", (call, (torch.randn(3, 2), torch.zeros(2), torch.ones(2)), {}))


# --- samples that cannot be made


@pytest.mark.parametrize(("device", "stock_only"), [("cpu", False), ("cpu", True), ("fake-cuda", False)])
def test_samples_that_cannot_be_made_are_found(monkeypatch: pytest.MonkeyPatch, device: str, stock_only: bool) -> None:
    def generated(name: str, dtype: torch.dtype, options: Options) -> Any:
        if dtype is torch.float64:
            raise MemoryError("out of memory")
        return unpatched(name, dtype, options)

    unpatched = samples.generated
    monkeypatch.setattr(samples, "generated", generated)
    options = Options(device, dtypes=("float32", "float64"), stock_only=stock_only)
    result = run_entry(Entry("mm", "op_db"), options)
    (found,) = result.mismatches
    assert (found.kind, found.what, found.sample) == ("samples", "PyTorch", "float64/0/plain")
    assert "MemoryError: out of memory" in found.text
    assert " --ops mm --sample float64/0/plain" in found.reproduce
    assert result.samples > 0


def test_samples_of_which_there_is_no_fake_form_are_expected() -> None:
    result = run_entry(Entry("sparse.mm.reduce", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert (list(result.not_generated), result.mismatches) == (["float32"], ())


# --- the reference


def test_a_reference_that_breaks_is_no_known_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an entry with a known gap of kind "error", for which the crash would pass."""

    def broken(op: Any, args: Any, state: Any) -> Any:
        if str(op) == "aten.bmm.default":
            raise ZeroDivisionError("planted")
        return unpatched(op, args, state)

    unpatched = checker.expect
    entry, options = Entry("linalg.pinv", "op_db"), Options("cpu", dtypes=("float32",), quick=True)
    gapped = [gap for gap in entry_run.sample_gaps() if gap.kind == "error"]
    assert any(gap.covers(entry.name, "cpu") for gap in gapped)
    monkeypatch.setattr(checker, "expect", broken)
    found = run_entry(Entry("bmm", "op_db"), options).mismatches
    assert {mismatch.kind for mismatch in found} == {"reference"}
    assert all("got      ZeroDivisionError: planted" in mismatch.text for mismatch in found)
    assert not any(
        gap.explains("reference", mismatch.what, mismatch.sample, "") for gap in gapped for mismatch in found
    )
    in_pinv = run_entry(entry, Options("cpu", dtypes=("float32",))).mismatches
    assert {mismatch.kind for mismatch in in_pinv} == {"reference"}


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "infer", lambda *args: NO_RULE)


def without_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_promote.checking.crosscheck.observe_dispatch", lambda checker: contextlib.nullcontext())


@pytest.mark.parametrize("plant", [without_rules, without_the_observer])
def test_nothing_is_counted_as_checked_where_nothing_was(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    """test_cli_parity_wrong.py has the run's exit status."""
    plant(monkeypatch)
    result = run_entry(MM, PLAIN)
    assert (result.samples, sum(result.checked.values())) == (1, 0)


# --- pairs of dtypes


@pytest.mark.parametrize("name", ENTRIES)
def test_every_pair_of_dtypes_is_looked_at(name: str) -> None:
    options = Options("cpu", dtypes=("int8", "bfloat16", "complex64"))
    result = run_entry(Entry(name, "promotion"), options)
    assert result.samples == 3 * len(DTYPES) * 4
    assert result.mismatches == ()


@pytest.mark.parametrize("pair", [(torch.int8, torch.uint8), (torch.int64, torch.float16), (torch.bool, torch.int16)])
@pytest.mark.parametrize("name", ["promotion.add", "promotion.where"])
def test_each_wrong_cell_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, pair: tuple[torch.dtype, torch.dtype]
) -> None:
    monkeypatch.setitem(promotion_table._TABLE, pair, torch.complex128)
    first, second = (str(dtype).removeprefix("torch.") for dtype in pair)
    result = run_entry(Entry(name, "promotion"), Options("cpu", dtypes=(first,)))
    assert result.mismatches != ()
    assert {mismatch.kind for mismatch in result.mismatches} == {"dtype"}
    assert {mismatch.sample.rpartition("/")[2].partition("-")[0] for mismatch in result.mismatches} == {second}
    again = Options("cpu", sample=result.mismatches[0].sample)
    assert kinds(run_entry(Entry(name, "promotion"), again)) == kinds(result)


def test_pairs_are_checked_on_any_device_type() -> None:
    names = [entry.name for entry in entries(Options("meta", ops=("promotion.*",), stock_only=True))]
    assert names == list(ENTRIES)
    result = run_entry(Entry("promotion.add", "promotion"), Options("meta", dtypes=("int8",), stock_only=True))
    assert (result.samples, result.mismatches) == (len(DTYPES) * 4, ())


# --- filters


def test_pairs_on_the_fake_device_are_fake() -> None:
    options = Options("fake-cuda")
    with on_device(options):
        _, (first, second) = next(promotion_calls(torch.int8, options))
    assert (first.device.type, second.device.type, is_fake(first)) == ("cuda", "cuda", True)


def test_values_of_other_layouts_are_left_out_too() -> None:
    sparse = torch.eye(2).to_sparse()
    outcome = Outcome(result=(sparse, torch.ones(2)), error=None)
    blank = without_bits(outcome)
    assert [leaf.layout for leaf in blank.result] == [torch.sparse_coo, torch.strided]
    assert not any(leaf.to_dense().any() for leaf in blank.result)
    raised = Outcome(result=(), error=ValueError("no result"))
    assert without_bits(raised, (0,)) is raised


def test_calls_of_pytorchs_lists_have_no_dtype_to_ask_for() -> None:
    for name in itertools.islice(samples.listed_entries(samples.autocast_lists("cpu")), 3):
        entry = Entry(name, "autocast_lists")
        assert list(samples.samples(entry, Options("cpu")))
        assert list(samples.samples(entry, Options("cpu", dtypes=("float32",)))) == []


def test_quick_runs_the_dtypes_that_are_asked_for() -> None:
    for dtype in ("int64", "float64"):
        result = run_entry(Entry("add", "op_db"), Options("cpu", quick=True, dtypes=(dtype,)))
        assert 0 < result.samples <= 3
    assert run_entry(Entry("add", "op_db"), Options("cpu", quick=True)).samples < 15


def test_a_glob_that_the_dtypes_leave_nothing_of_is_an_error() -> None:
    options = Options("cpu", ops=("add", "aten::mm"), dtypes=("int8",))
    with pytest.raises(OptionError, match=r"^no sample of 'aten::mm' has one of the dtypes int8\.$"):
        entries(options)
