"""The run of an entry finds bugs planted in ours, in stock and in the reference, and explains known gaps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.planted_bugs import change_outcomes, change_results, other_values
from torch_promote.checking import checker, expectation
from torch_promote.checking.known_gaps import KnownGaps, Nondeterministic, SampleGap, known_gaps
from torch_promote.errors import TorchPromoteError
from torch_promote.parity import entry_run, samples
from torch_promote.parity.entry_run import Outcome, copied
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.runner import entries, run_entry
from torch_promote.parity.samples import DTYPES, PAIRS
from torch_promote.reference import autocast as autocast_plan
from torch_promote.reference import promotion as promotion_table
from torch_promote.reference.ops.infer import NO_RULE

OURS, REFERENCE_STOCK, REFERENCE_OURS = "ours against stock", "reference against stock", "reference against ours"
MM = Entry("aten::mm", "row")
PLAIN = Options("cpu", sample="float32/0/plain")
#: The samples of `MM` that autocast has something to cast in.
CAST = {f"float32/{number}/{kind}" for number in (0, 1) for kind in ("plain", "mixed", "mixed_lower_first")}
MonkeyPatch = pytest.MonkeyPatch


def kinds(result: EntryResult) -> set[tuple[str, str]]:
    return {(mismatch.kind, mismatch.what) for mismatch in result.mismatches}


def test_without_a_bug_nothing_is_found() -> None:
    result = run_entry(MM, Options("cpu"))
    assert (result.samples, result.mismatches, result.stale) == (14, (), ())
    assert result.rows == ("aten::mm",)
    assert result.checked["aten.mm.default"] > 0


# --- bugs in ours


def with_override(policy: str) -> Callable[[MonkeyPatch], None]:
    def plant(patch: MonkeyPatch) -> None:
        patch.setattr(entry_run, "my_autocast", functools.partial(tp.my_autocast, overrides={"mm": policy}))

    return plant


def missing_row(patch: MonkeyPatch) -> None:
    """Ours runs mm with no policy, and the reference does not know of the override."""
    with_override("keep")(patch)
    region = autocast_plan.AutocastState.region("cpu")
    patch.setattr(checker, "state_in_force", lambda: region if torch.is_autocast_enabled("cpu") else None)


def wrong_bit(patch: MonkeyPatch) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        flipped = tensor.detach().clone()
        flipped.view(torch.int16).view(-1)[5] ^= 1
        return flipped.requires_grad_(tensor.requires_grad)

    change_results(patch, flip)


def wrong_gradient(patch: MonkeyPatch) -> None:
    change_outcomes(patch, lambda outcome: outcome.gradients[1].view(-1)[0].add_(1))


def wrong_stride(patch: MonkeyPatch) -> None:
    change_results(patch, lambda tensor: tensor.mT.clone(memory_format=torch.contiguous_format).mT)


def written_input(patch: MonkeyPatch) -> None:
    change_outcomes(patch, lambda outcome: outcome.inputs[0][1].detach().view(-1)[0].add_(1))


@pytest.mark.parametrize(
    ("plant", "found", "text"),
    [
        # The reference's state contains the override, so it agrees with ours.
        (with_override("fp32"), {("dtype", OURS), ("bits", OURS)}, "dtype torch.bfloat16, as stock has"),
        (with_override("banned"), {("error", OURS)}, "expected a result, as stock has"),
        (missing_row, {("dtype", OURS), ("bits", OURS), ("dtype", REFERENCE_OURS)}, "bfloat16"),
        (wrong_bit, {("bits", OURS)}, "1 of 15 elements"),
        (wrong_gradient, {("bits", OURS)}, "gradients[1]: bits"),
        (wrong_stride, {("strides", OURS)}, "result"),
        (written_input, {("bits", OURS)}, "inputs[1]: bits"),
    ],
)
def test_a_bug_in_ours(monkeypatch: MonkeyPatch, plant: Any, found: set[tuple[str, str]], text: str) -> None:
    plant(monkeypatch)
    result = run_entry(MM, PLAIN)
    assert kinds(result) == found
    assert any(text in mismatch.text for mismatch in result.mismatches)
    assert not any("against itself" in mismatch.text for mismatch in result.mismatches)
    reproduce = "torch-promote parity --device cpu --ops aten::mm --sample float32/0/plain"
    assert {mismatch.reproduce for mismatch in result.mismatches} == {reproduce}


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_a_wrong_policy_is_found_in_each_sample(monkeypatch: MonkeyPatch, device: str) -> None:
    with_override("fp32")(monkeypatch)
    result = run_entry(MM, Options(device))
    assert {mismatch.what for mismatch in result.mismatches} == {OURS}
    assert {mismatch.sample for mismatch in result.mismatches} >= CAST


@pytest.mark.parametrize("installed", [{}, {"policy": "off"}, {"overrides": {"mm": "fp32"}}], ids=str)
def test_install_changes_no_result(installed: dict[str, Any], monkeypatch: MonkeyPatch) -> None:
    """Otherwise a contender made by torch.autocast would have the results of ours."""
    expected = run_entry(MM, Options("cpu"))
    with tp.installed_as(**installed):
        found = run_entry(MM, Options("cpu"))
        assert run_entry(MM, Options("cpu", stock_only=True)).mismatches == ()
        with_override("fp32")(monkeypatch)
        assert ("dtype", OURS) in kinds(run_entry(MM, PLAIN))
    assert (found.samples, found.mismatches, found.checked) == (expected.samples, (), expected.checked)


# --- errors


def test_an_error_of_stocks_alone(monkeypatch: MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise TorchPromoteError("planted")

    def run(region: Any, bound: Any, **options: Any) -> Any:
        return unpatched(region, (refuse, *bound[1:]) if isinstance(region, torch.autocast) else bound, **options)

    unpatched = entry_run.run
    monkeypatch.setattr(entry_run, "run", run)
    result = run_entry(MM, PLAIN)
    assert (kinds(result), result.stock_raised) == ({("error", OURS)}, 0)


@pytest.mark.parametrize("field", ["error", "backward_error"])
def test_an_error_with_another_message(monkeypatch: MonkeyPatch, field: str) -> None:
    def run(region: Any, bound: Any, **options: Any) -> Outcome:
        outcome = unpatched(region, bound, **options)
        setattr(outcome, field, RuntimeError("something"))
        return outcome

    unpatched = entry_run.run
    monkeypatch.setattr(entry_run, "run", run)
    alike = run_entry(MM, PLAIN)
    assert (alike.refused, alike.mismatches) == (1, ())
    change_outcomes(monkeypatch, lambda outcome: setattr(outcome, field, RuntimeError("something\nelse")))
    result = run_entry(MM, PLAIN)
    assert kinds(result) == {("error", OURS)}
    assert "expected RuntimeError: something" in result.mismatches[0].text


def test_errors_that_differ_on_purpose() -> None:
    banned = run_entry(Entry("aten::binary_cross_entropy", "row"), Options("fake-cuda"))
    assert banned.refused > 0  # ours has a longer text
    promote = run_entry(Entry("cat", "op_db"), Options("cpu", dtypes=("float16",)))
    assert promote.stock_raised > 0
    assert banned.mismatches == promote.mismatches == ()


@pytest.mark.parametrize("stock_only", [False, True])
def test_a_check_that_raises_is_not_a_refusal(monkeypatch: MonkeyPatch, stock_only: bool) -> None:
    """Otherwise an error raised by a check would look like one that stock and ours share."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(checker, "state_in_force", broken)
    assert run_entry(MM, Options("cpu", sample="float32/0/plain", stock_only=stock_only)).mismatches != ()


@pytest.mark.parametrize(("device", "stock_only"), [("cpu", False), ("cpu", True), ("fake-cuda", False)])
def test_samples_that_cannot_be_generated(monkeypatch: MonkeyPatch, device: str, stock_only: bool) -> None:
    def generated(op: Any, dtype: torch.dtype, options: Options) -> Any:
        if dtype is torch.float64:
            raise MemoryError("out of memory")
        return unpatched(op, dtype, options)

    unpatched = samples._generated
    monkeypatch.setattr(samples, "_generated", generated)
    result = run_entry(Entry("mm", "op_db"), Options(device, dtypes=("float32", "float64"), stock_only=stock_only))
    (found,) = result.mismatches
    assert (found.kind, found.what, found.sample) == ("samples", "PyTorch", "float64/0/plain")
    assert "MemoryError: out of memory" in found.text
    assert " --ops mm --sample float64/0/plain" in found.reproduce
    assert result.samples > 0


def test_samples_without_a_fake_form_are_expected() -> None:
    result = run_entry(Entry("sparse.mm.reduce", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert (list(result.not_generated), result.samples, result.mismatches) == (["float32"], 0, ())


# --- bugs in the reference, and in stock


@pytest.mark.parametrize("stock_only", [False, True])
def test_a_wrong_cell_of_the_promotion_table(monkeypatch: MonkeyPatch, stock_only: bool) -> None:
    for pair in itertools.permutations((torch.bfloat16, torch.float32)):
        monkeypatch.setitem(promotion_table._TABLE, pair, torch.bfloat16)
    if stock_only:
        monkeypatch.setattr(entry_run, "my_autocast", None)
    result = run_entry(Entry("add", "op_db"), Options("cpu", sample="float32/0/mixed", stock_only=stock_only))
    assert kinds(result) == {("dtype", REFERENCE_STOCK), *([] if stock_only else [("dtype", REFERENCE_OURS)])}
    assert "aten.add.Tensor(float32[" in result.mismatches[0].text
    assert "expected bfloat16\n    got      float32" in result.mismatches[0].text
    assert result.mismatches[0].reproduce.endswith("--stock-only") == stock_only


@pytest.mark.parametrize("pair", [(torch.int8, torch.uint8), (torch.int64, torch.float16), (torch.bool, torch.int16)])
@pytest.mark.parametrize("name", ["promotion.add", "promotion.where"])
def test_each_wrong_cell_is_found(monkeypatch: MonkeyPatch, name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    monkeypatch.setitem(promotion_table._TABLE, pair, torch.complex128)
    first, second = (str(dtype).removeprefix("torch.") for dtype in pair)
    result = run_entry(Entry(name, "promotion"), Options("cpu", dtypes=(first,)))
    assert {mismatch.kind for mismatch in result.mismatches} == {"dtype"}
    assert {mismatch.sample.rpartition("/")[2].partition("-")[0] for mismatch in result.mismatches} == {second}


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_of_dtypes_runs(name: str) -> None:
    result = run_entry(Entry(name, "promotion"), Options("cpu", dtypes=("int8", "bfloat16", "complex64")))
    assert (result.samples, result.mismatches) == (3 * len(DTYPES) * 4, ())


def test_a_row_that_the_table_lacks(monkeypatch: MonkeyPatch) -> None:
    rows = {name: row for name, row in autocast_plan._rows().items() if name != "aten::mm"}
    autocast_plan._policy_of_row.cache_clear()
    monkeypatch.setattr(autocast_plan, "_rows", lambda: rows)
    # The table answers for the release that it describes, whichever runs.
    monkeypatch.setattr(expectation, "TABLE_VERSION", torch.__version__.rpartition(".")[0])
    try:
        result = run_entry(MM, Options("cpu"))
    finally:
        autocast_plan._policy_of_row.cache_clear()
    assert result.rows == ()
    assert kinds(result) == {("row", REFERENCE_STOCK), ("row", REFERENCE_OURS)}


def test_a_reference_that_breaks_is_not_a_known_gap(monkeypatch: MonkeyPatch) -> None:
    """In an entry with a known gap of kind "error", for which the crash would pass."""

    def broken(op: Any, args: Any, state: Any) -> Any:
        if str(op) == "aten.bmm.default":
            raise ZeroDivisionError("planted")
        return unpatched(op, args, state)

    unpatched = checker.expect
    assert any(gap.covers("linalg.pinv", "cpu") and gap.kind == "error" for gap in known_gaps().samples)
    monkeypatch.setattr(checker, "expect", broken)
    found = run_entry(Entry("linalg.pinv", "op_db"), Options("cpu", dtypes=("float32",))).mismatches
    assert {mismatch.kind for mismatch in found} == {"reference"}
    assert all("got      ZeroDivisionError: planted" in mismatch.text for mismatch in found)


@pytest.mark.parametrize(
    ("place", "replacement"),
    [
        ("expectation.infer", lambda *args: NO_RULE),
        ("crosscheck.observe_dispatch", lambda checker: contextlib.nullcontext()),
    ],
)
def test_nothing_counts_as_checked_where_nothing_was(monkeypatch: MonkeyPatch, place: str, replacement: Any) -> None:
    monkeypatch.setattr(f"torch_promote.checking.{place}", replacement)
    result = run_entry(MM, PLAIN)
    assert (result.samples, sum(result.checked.values())) == (1, 0)


# --- known gaps

GAP = SampleGap("aten::m?", "bits", OURS, "ours", "planted", dtype="float32", text="*result*")


def with_gaps(monkeypatch: MonkeyPatch, *gaps: SampleGap, listed: tuple[Nondeterministic, ...] = ()) -> None:
    monkeypatch.setattr(entry_run, "known_gaps", lambda: KnownGaps(samples=gaps, nondeterministic=listed))


def test_a_gap_explains_what_it_names(monkeypatch: MonkeyPatch) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, GAP)
    result = run_entry(MM, Options("cpu"))
    assert (result.gaps["planted"] > 0, result.stale) == (True, ())
    left = {mismatch.sample.partition("/")[0] for mismatch in result.mismatches}
    assert "bfloat16" in left
    assert "float32" not in left


@pytest.mark.parametrize(
    "other",
    [
        {"entry": "aten::bmm"},
        {"kind": "dtype"},
        {"what": REFERENCE_OURS},
        {"device": "cuda"},
        {"dtype": "int8"},
        {"text": "bmm*"},
    ],
    ids=str,
)
def test_a_gap_explains_nothing_else(monkeypatch: MonkeyPatch, other: dict[str, str]) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, dataclasses.replace(GAP, **other))
    result = run_entry(MM, PLAIN)
    assert (result.gaps, kinds(result)) == ({}, {("bits", OURS)})


def test_a_gap_that_explains_nothing_is_stale(monkeypatch: MonkeyPatch) -> None:
    with_gaps(monkeypatch, GAP)
    (stale,) = run_entry(MM, Options("cpu")).stale
    assert stale == "aten::mm on cpu: the known gap (bits, ours against stock: planted) explains nothing"
    for partial in ({"quick": True}, {"dtypes": ("float32",)}, {"sample": "float32/0/plain"}, {"stock_only": True}):
        assert run_entry(MM, Options("cpu", **partial)).stale == ()
    with_gaps(monkeypatch, dataclasses.replace(GAP, device="fake-cuda"))
    assert run_entry(MM, Options("cpu")).stale == ()


def test_nondeterministic_results(monkeypatch: MonkeyPatch) -> None:
    listed = run_entry(Entry("empty_like", "op_db"), Options("cpu"))
    assert (listed.mismatches, listed.stale) == ((), ())
    assert listed.nondeterministic == {"the op leaves its result uninitialized": listed.samples}

    def run(region: Any, bound: Any, **options: Any) -> Any:
        outcome = unpatched(region, bound, **options)
        outcome.result = outcome.result.detach() + next(counter)
        return outcome

    unpatched, counter = entry_run.run, itertools.count()
    with_gaps(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(entry_run, "run", run)
        unlisted = run_entry(MM, PLAIN)
    assert {mismatch.kind for mismatch in unlisted.mismatches} == {"bits"}
    assert all("stock against itself" in mismatch.text for mismatch in unlisted.mismatches)

    with_gaps(monkeypatch, listed=(Nondeterministic("aten::*", "planted"),))
    (stale,) = run_entry(MM, Options("cpu")).stale
    assert stale == "aten::mm on cpu: listed as nondeterministic (planted), but its results repeat"
    with monkeypatch.context() as patch:
        change_results(patch, other_values)
        assert run_entry(MM, PLAIN).mismatches == ()
        change_results(patch, torch.Tensor.double)
        assert {mismatch.kind for mismatch in run_entry(MM, PLAIN).mismatches} == {"dtype"}
    with_gaps(monkeypatch, listed=(Nondeterministic("aten::*", "planted", always=False),))
    assert run_entry(MM, Options("cpu")).stale == ()


def test_the_file_of_gaps_names_entries_that_exist() -> None:
    for gap in (*known_gaps().samples, *known_gaps().nondeterministic):
        device = "cpu" if gap.device in ("cpu", "*") else "fake-cuda"
        assert any(gap.covers(entry.name, gap.device) for entry in entries(Options(device))), gap


# --- copies


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6)[::2, 1::3],
        torch.rand(3, 1).expand(3, 4),
        torch.rand(2, 3, dtype=torch.complex64).mT.conj(),
        torch.rand(2, 2, dtype=torch.complex64).conj().imag,
        torch.rand(0, 3),
        torch.rand(6).as_strided((2, 3), (1, 1)),
        torch.rand(3, 4).to_sparse(),
    ],
    ids=["gaps", "expanded", "conjugate", "negative", "empty", "overlapping", "sparse"],
)
def test_copies_have_the_strides_and_values(tensor: torch.Tensor) -> None:
    first, (second,) = copied([tensor, (tensor,)])
    assert first is second
    assert entry_run.compare(first, tensor) == []
    if tensor.layout is torch.strided and tensor.numel():
        assert first.data_ptr() != tensor.data_ptr()
