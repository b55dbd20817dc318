"""The run of an entry finds bugs planted in ours, in stock and in the reference, and explains known gaps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from torch_promote.checking import crosscheck as checker
from torch_promote.checking.comparison import copy_with_strides
from torch_promote.checking.known_gaps import KnownGaps, Nondeterministic, SampleGap, known_gaps
from torch_promote.errors import TorchPromoteError
from torch_promote.parity import runner
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.runner import Outcome, entries, run_entry
from torch_promote.reference import autocast as autocast_plan
from torch_promote.reference import promotion as promotion_table

MonkeyPatch = pytest.MonkeyPatch


def change_outcomes(
    monkeypatch: MonkeyPatch, change: Callable[[Outcome], object], kinds: tuple[str, ...] = ("ours",)
) -> None:
    """Changes the outcomes of calls in regions of ours, or of stock."""

    def run(region: Any, bound: Any, **options: Any) -> Outcome:
        outcome = unpatched(region, bound, **options)
        if ("stock" if isinstance(region, torch.autocast) else "ours") in kinds:
            change(outcome)
        return outcome

    unpatched = runner.run
    monkeypatch.setattr(runner, "run", run)


def change_results(monkeypatch: MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the tensors that calls return in regions of ours."""
    change_outcomes(
        monkeypatch, lambda outcome: vars(outcome).update(result=tree_map_only(torch.Tensor, change, outcome.result))
    )


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Adds one to the first element: each sample with a result then shows up in a mismatch, with its values."""
    changed = copy_with_strides(tensor)
    if tensor.numel():
        changed.view(-1)[0] += 1
    return changed.requires_grad_(tensor.requires_grad)


OURS, REFERENCE_STOCK, REFERENCE_OURS = "ours against stock", "reference against stock", "reference against ours"
MM = Entry("aten::mm", "row")
PLAIN = Options("cpu", sample="float32/0/plain")


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
        patch.setattr(runner, "my_autocast", functools.partial(tp.my_autocast, overrides={"mm": policy}))

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


@pytest.mark.parametrize("installed", [{}, {"policy": "off"}, {"overrides": {"mm": "fp32"}}], ids=str)
def test_install_changes_no_result(installed: dict[str, Any], monkeypatch: MonkeyPatch) -> None:
    """Otherwise a contender made by torch.autocast would have the results of ours."""
    expected = run_entry(MM, Options("cpu"))
    with tp.install(**installed):
        found = run_entry(MM, Options("cpu"))
        assert run_entry(MM, Options("cpu", stock_only=True)).mismatches == ()
        with_override("fp32")(monkeypatch)
        assert ("dtype", OURS) in kinds(run_entry(MM, PLAIN))
    assert (found.samples, found.mismatches, found.checked) == (expected.samples, (), expected.checked)


# --- errors


def test_an_error_of_stocks_alone(monkeypatch: MonkeyPatch) -> None:
    error = TorchPromoteError("planted")
    change_outcomes(monkeypatch, lambda outcome: vars(outcome).update(result=None, error=error), ("stock",))
    result = run_entry(MM, PLAIN)
    assert (kinds(result), result.stock_raised) == ({("error", OURS)}, 0)


def test_errors_that_differ_on_purpose() -> None:
    banned = run_entry(Entry("aten::binary_cross_entropy", "row"), Options("fake-cuda"))
    assert banned.refused > 0  # ours has a longer text
    promote = run_entry(Entry("cat", "op_db"), Options("cpu", dtypes=("float16",)))
    assert promote.stock_raised > 0
    assert banned.mismatches == promote.mismatches == ()


# --- bugs in the reference, and in stock


@pytest.mark.parametrize("stock_only", [False, True])
def test_a_wrong_cell_of_the_promotion_table(monkeypatch: MonkeyPatch, stock_only: bool) -> None:
    for pair in itertools.permutations((torch.bfloat16, torch.float32)):
        monkeypatch.setitem(promotion_table._TABLE, pair, torch.bfloat16)
    if stock_only:
        monkeypatch.setattr(runner, "my_autocast", None)
    result = run_entry(Entry("add", "op_db"), Options("cpu", sample="float32/0/mixed", stock_only=stock_only))
    assert kinds(result) == {("dtype", REFERENCE_STOCK), *([] if stock_only else [("dtype", REFERENCE_OURS)])}
    assert "aten.add.Tensor(float32[" in result.mismatches[0].text
    assert "expected bfloat16\n    got      float32" in result.mismatches[0].text
    assert result.mismatches[0].reproduce.endswith("--stock-only") == stock_only


# --- known gaps

GAP = SampleGap("aten::m?", "bits", OURS, "ours", "planted", dtype="float32", text="*result*")


def with_gaps(monkeypatch: MonkeyPatch, *gaps: SampleGap, listed: tuple[Nondeterministic, ...] = ()) -> None:
    monkeypatch.setattr(runner, "known_gaps", lambda: KnownGaps(samples=gaps, nondeterministic=listed))


def test_a_gap_explains_what_it_names(monkeypatch: MonkeyPatch) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, GAP)
    result = run_entry(MM, Options("cpu"))
    assert (result.gaps["planted"] > 0, result.stale) == (True, ())
    left = {mismatch.sample.partition("/")[0] for mismatch in result.mismatches}
    assert "bfloat16" in left
    assert "float32" not in left


def test_a_gap_explains_nothing_else(monkeypatch: MonkeyPatch) -> None:
    change_results(monkeypatch, other_values)
    changes = {"entry": "aten::bmm", "kind": "dtype", "what": REFERENCE_OURS, "device": "cuda", "dtype": "int8"}
    for change in [*({name: value} for name, value in changes.items()), {"text": "bmm*"}]:
        with_gaps(monkeypatch, dataclasses.replace(GAP, **change))
        result = run_entry(MM, PLAIN)
        assert (result.gaps, kinds(result)) == ({}, {("bits", OURS)}), change


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

    def count(outcome: Outcome) -> None:
        outcome.result = outcome.result.detach() + next(counter)

    counter = itertools.count()
    with_gaps(monkeypatch)
    with monkeypatch.context() as patch:
        change_outcomes(patch, count, ("ours", "stock"))
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


def test_a_copy_of_an_expanded_argument_is_expanded_and_copied_once() -> None:
    row = torch.ones(1).expand(3)
    first, second = runner.copied([row, row])
    assert first.stride() == (0,)
    assert first is second is not row
