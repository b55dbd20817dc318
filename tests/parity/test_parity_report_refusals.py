"""Errors of a report: incomplete runs, changed files, and gaps of entries that do not exist."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from helpers.parity_reports import NAMES, report
from torch_promote.checking.known_gaps import Nondeterministic, SampleGap
from torch_promote.errors import OptionError
from torch_promote.parity import report as report_module
from torch_promote.parity.junit import junit
from torch_promote.parity.model import Options
from torch_promote.parity.report import Report, merged

# --- files


def read(change: Callable[[dict[str, Any]], object]) -> Report:
    """The file of a whole run, with a change."""
    data = copy.deepcopy(report(*NAMES).to_dict())
    change(data)
    return Report.from_json(json.dumps(data), "a.json")


#: One thing each that `to_dict` does not write.
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a position beyond the end": lambda data: data["entries"][0].update(position=len(NAMES)),
    "a position below 0": lambda data: data["entries"][0].update(position=-1),
    "a position twice": lambda data: data["entries"][0].update(position=1),
    "a field that is unknown": lambda data: data["entries"][0].update(color="red"),
    "a field that is not there": lambda data: data["entries"][0].pop("samples"),
    "an option that is unknown": lambda data: data["options"].update(speed=3),
    "mismatches that are lost": lambda data: data["mismatches"].clear(),
    "mismatches that are counted otherwise": lambda data: data["entries"][0].update(mismatches=1),
    "mismatches of no entry": lambda data: data["mismatches"].append({**data["mismatches"][0], "entry": "nobody"}),
    "no number of entries": lambda data: data["totals"].update(entries_chosen="x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_was_changed_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert read(lambda data: None).results == report(*NAMES).results
    with pytest.raises(OptionError, match=r"^a\.json was not written by `torch-promote parity --json`"):
        read(change)


def test_a_file_that_nests_without_end_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^a\.json was not written by `torch-promote parity --json`"):
        Report.from_json('{"format": ' + "[" * 100_000, "a.json")


@pytest.mark.parametrize("what", ["device", "python"])
def test_shards_of_other_machines_are_refused(what: str) -> None:
    first, second = report(*NAMES, shard="1/2"), report(*NAMES, shard="2/2")
    other = dataclasses.replace(second, about={**second.about, what: "another"})
    assert merged([first, second]).status == 1
    with pytest.raises(OptionError) as caught:
        merged([first, other])
    assert str(caught.value) == (
        f"these are not shards of one run: shard 2/2 has {what} another, the first report has {first.about[what]}."
    )


# --- what a whole run has to have


@pytest.fixture
def nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in ("dispatch_gaps", "sample_gaps", "nondeterministic"):
        monkeypatch.setattr(report_module, listed, lambda: ())


def whole(*names: str) -> Report:
    """As a run that was asked for no names would be."""
    return dataclasses.replace(report(*names), options=Options("cpu"))


GAP = SampleGap("gone*", "bits", "ours against stock", "pytorch", "so it is")
NONDETERMINISTIC = Nondeterministic("g?ne", "atomic additions")


@pytest.mark.usefixtures("nothing_listed")
@pytest.mark.parametrize(("listed", "gap"), [("sample_gaps", GAP), ("nondeterministic", NONDETERMINISTIC)])
def test_a_gap_of_an_entry_that_is_not_there_is_stale(monkeypatch: pytest.MonkeyPatch, listed: str, gap: Any) -> None:
    monkeypatch.setattr(report_module, "_rows_with_a_policy", lambda device_type: ["aten::mm"])
    assert (whole("good").stale, whole("good").status) == ([], 0)
    monkeypatch.setattr(report_module, listed, lambda: (gap,))
    told = f"{gap.entry}: a known gap names this entry, which does not exist ({gap.reason})"
    assert (whole("good").stale, whole("good").status) == ([told], 1)
    assert told in junit(whole("good"))
    monkeypatch.setattr(report_module, listed, lambda: (dataclasses.replace(gap, entry="goo?"),))
    assert whole("good").status == 0
    monkeypatch.setattr(report_module, listed, lambda: (gap,))
    for part in (
        report("good"),
        dataclasses.replace(whole("good"), entries=2),
        *(dataclasses.replace(whole("good"), options=Options("cpu", **part)) for part in PARTS),
    ):
        assert (part.stale, part.status) == ([], 0)


#: Options with which a run has not all samples.
PARTS: list[dict[str, Any]] = [{"quick": True}, {"dtypes": ("float32",)}, {"autocast_dtype": "float16"}]


@pytest.mark.usefixtures("nothing_listed")
def test_a_row_that_a_whole_run_does_not_reach_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_rows_with_a_policy", lambda device_type: ["aten::bmm", "aten::mm"])
    assert (whole("good").unreached, whole("good").status) == (["aten::bmm"], 1)
    assert "aten::bmm: its policy applied to no call" in junit(whole("good"))
    for options in PARTS:
        part = dataclasses.replace(whole("good"), options=Options("cpu", **options))
        assert (part.unreached, part.status) == ([], 0)


@pytest.mark.usefixtures("nothing_listed")
def test_a_run_that_checked_no_call_is_no_pass() -> None:
    of = report("good")
    (result,) = of.ordered
    unchecked = dataclasses.replace(of, results={0: dataclasses.replace(result, checked={})})
    assert (of.status, unchecked.status) == (0, 2)


# --- JUnit


@pytest.mark.usefixtures("nothing_listed")
def test_an_interrupted_run_fails_in_junit() -> None:
    of = report("good", "good.again")
    begun = dataclasses.replace(of, results={0: of.results[0]}, interrupted=True)
    for each, failures in ((of, 0), (begun, 1)):
        (suite,) = ElementTree.fromstring(junit(each))
        assert int(suite.attrib["failures"]) + int(suite.attrib["errors"]) == failures
    texts = [failure.text for failure in suite.iter("failure")]
    assert texts == ["interrupted: the missing entries did not run"]


def test_an_entry_without_samples_says_so() -> None:
    of = report("refused")
    (result,) = of.ordered
    empty = dataclasses.replace(of, results={0: dataclasses.replace(result, samples=0, refused=0)})
    for each, message in ((of, "4 samples, all refused by stock and ours alike"), (empty, "no samples")):
        assert [skipped.get("message") for skipped in ElementTree.fromstring(junit(each)).iter("skipped")] == [message]
