"""Known gaps of the parity command: explained differences, stale gaps, and nondeterministic results."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.planted_bugs import change_results, other_values
from torch_promote.checking import known_gaps
from torch_promote.checking.known_gaps import (
    GapError,
    Nondeterministic,
    SampleGap,
    parse_nondeterministic,
    parse_sample_gaps,
)
from torch_promote.parity import entry_run
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.runner import entries, run_entry

OURS = "ours against stock"


def with_gaps(
    monkeypatch: pytest.MonkeyPatch, *, gaps: tuple[SampleGap, ...] = (), listed: tuple[Nondeterministic, ...] = ()
) -> None:
    monkeypatch.setattr(entry_run, "sample_gaps", lambda: gaps)
    monkeypatch.setattr(entry_run, "nondeterministic", lambda: listed)


GAP = SampleGap("aten::m?", "bits", OURS, "ours", "planted", dtype="float32", text="*result*")


def run_mm(**options: Any) -> EntryResult:
    return run_entry(Entry("aten::mm", "row"), Options("cpu", **options))


def test_a_known_gap_explains_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, gaps=(GAP,))
    result = run_mm()
    assert result.gaps["planted"] > 0
    assert result.stale == ()
    left = {mismatch.sample.partition("/")[0] for mismatch in result.mismatches}
    assert "float32" not in left
    assert "bfloat16" in left


@pytest.mark.parametrize(
    "other",
    [
        {"entry": "aten::bmm"},
        {"kind": "dtype"},
        {"what": "reference against ours"},
        {"device": "cuda"},
        {"dtype": "int8"},
        {"text": "bmm*"},
    ],
    ids=str,
)
def test_a_known_gap_explains_nothing_else(monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, gaps=(dataclasses.replace(GAP, **other),))
    result = run_mm()
    assert result.gaps == {}
    assert any(mismatch.sample.startswith("float32/") for mismatch in result.mismatches)


def test_a_known_gap_that_explains_nothing_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gaps(monkeypatch, gaps=(GAP,))
    (stale,) = run_mm().stale
    assert_expected_inline(
        stale, """aten::mm on cpu: the known gap (bits, ours against stock: planted) explains nothing"""
    )
    for partial in ({"quick": True}, {"dtypes": ("float32",)}, {"sample": "float32/0/plain"}, {"stock_only": True}):
        assert run_mm(**partial).stale == ()
    with_gaps(monkeypatch, gaps=(dataclasses.replace(GAP, device="fake-cuda"),))
    assert run_mm().stale == ()


def test_nondeterministic_results_are_compared_without_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_entry(Entry("empty_like", "op_db"), Options("cpu"))
    assert (result.mismatches, result.stale) == ((), ())
    assert result.nondeterministic == {"the op leaves its result uninitialized": result.samples}


def test_unlisted_nondeterministic_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gaps(monkeypatch)
    unpatched, counter = entry_run.run, itertools.count()

    def run(region: Any, bound: Any, **options: Any) -> Any:
        outcome = unpatched(region, bound, **options)
        outcome.result = outcome.result.detach() + next(counter)
        return outcome

    monkeypatch.setattr(entry_run, "run", run)
    found = run_mm(sample="float32/0/plain").mismatches
    assert {mismatch.kind for mismatch in found} == {"bits"}
    assert all("stock against itself" in mismatch.text for mismatch in found)


def test_listed_results_that_repeat_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Nondeterministic("aten::mm", "planted")
    with_gaps(monkeypatch, listed=(listed,))
    (stale,) = run_mm().stale
    assert_expected_inline(stale, """aten::mm on cpu: listed as nondeterministic (planted), but its results repeat""")
    with_gaps(monkeypatch, listed=(dataclasses.replace(listed, always=False),))
    assert run_mm().stale == ()


def test_what_is_listed_is_compared_but_for_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    change_results(monkeypatch, other_values)
    with_gaps(monkeypatch, listed=(Nondeterministic("aten::*", "planted"),))
    assert run_mm().mismatches == ()
    change_results(monkeypatch, torch.Tensor.double)
    assert {mismatch.kind for mismatch in run_mm(dtypes=("float32",)).mismatches} == {"dtype"}


def test_the_file_of_gaps_names_entries_that_exist() -> None:
    for gap in (*known_gaps.sample_gaps(), *known_gaps.nondeterministic()):
        device = "cpu" if gap.device in ("cpu", "*") else "fake-cuda"
        assert any(gap.covers(entry.name, gap.device) for entry in entries(Options(device))), gap


def test_reports_can_count_gaps_by_their_reasons() -> None:
    gaps = known_gaps.dispatch_gaps()
    assert len({gap.reason for gap in gaps}) == len(gaps)


def test_a_file_of_gaps_with_mistakes_says_where() -> None:
    entry = '[[sample]]\nentry = "mm"\nkind = "bits"\nwhat = "{}"\nwrong = "ours"\nreason = "planted"'
    (gap,) = parse_sample_gaps(entry.format(OURS), "f.toml")
    assert gap == SampleGap("mm", "bits", OURS, "ours", "planted")
    with pytest.raises(GapError) as error:
        parse_sample_gaps(entry.format(OURS).replace('"ours"', '"us"'), "f.toml")
    assert_expected_inline(str(error.value), """f.toml, entry 1: wrong is 'us'. Legal: pytorch, reference, ours.""")
    with pytest.raises(GapError) as error:
        parse_nondeterministic('[[nondeterministic]]\nentry = "mm"\nwhy = "x"', "f.toml")
    assert_expected_inline(str(error.value), """f.toml, entry 1: missing reason; unknown why.""")
