"""The report of a parity run: totals, exit status, JSON, the merge of shards, and JUnit XML."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from helpers.stand_in_runner import entries, run_entry
from torch_promote.errors import OptionError
from torch_promote.parity.model import Options, SampleMismatch
from torch_promote.parity.report import ParityReport, about, junit, merged

NAMES = ("good", "good.again", "mismatching", "stale", "refused", "gap", "unruled")


def report(*names: str, device: str = "cpu", shard: str = "1/1") -> ParityReport:
    """Returns a report of entries that the stand-in ran in this process."""
    options = Options(device, ops=names)
    index, count = map(int, shard.split("/"))
    chosen = entries(options)
    results = {place: run_entry(chosen[place], options) for place in range(index - 1, len(chosen), count)}
    return ParityReport(about(device), options, len(chosen), results, (shard,), seconds=2.5)


def test_totals_add_up() -> None:
    of = report(*NAMES)
    totals = of.totals
    assert totals.pop("calls_checked") == 7 * (7 + torch.get_num_threads())
    assert totals.pop("rows_with_policy") == len(of.rows) + len(of.rows_not_reached)
    # One row: aten::mm; aten::exp has no policy on the CPU.
    assert totals == {
        "rows": 1,
        "entries": 7,
        "entries_chosen": 7,
        "samples": 28,
        "refused": 6 + 4,
        "stock_raised": 0,
        "not_generated": 1,
        "nondeterministic": 3,
        "calls_without_rule": 5,
        "ops_checked": 2,
        "ops_without_rule": 1,
        "mismatches": 1,
        "gaps": 2,
        "stale_gaps": 1,
        "seconds": 2.5,
    }
    assert report("good", device="fake-cuda").rows == ["aten::exp", "aten::mm"]
    assert report("good", device="meta").totals["rows_with_policy"] == 0
    other_way_round = dataclasses.replace(of, results=dict(reversed(of.results.items())))
    assert (other_way_round.to_dict(), junit(other_way_round)) == (of.to_dict(), junit(of))


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("good",), 0),
        (("good", "refused", "gap", "unruled"), 0),
        (("good", "mismatching"), 1),
        (("good", "stale"), 1),
        (("refused",), 2),
        (("refused", "stale"), 1),
    ],
)
def test_the_exit_status(names: tuple[str, ...], status: int) -> None:
    assert report(*names).status == status
    assert dataclasses.replace(report(*names), interrupted=True).status == 130


# --- JSON, and shards


def test_json_there_and_back(tmp_path: Path) -> None:
    before = report(*NAMES)
    text = json.dumps(before.to_dict())
    assert ParityReport.from_json(text, "a.json") == before
    before.save(tmp_path / "a.json")
    assert ParityReport.load(tmp_path / "a.json") == before
    before.save(tmp_path / "a.xml")
    assert (tmp_path / "a.xml").read_text() == junit(before)
    data = json.loads(text)
    names = "format torch torch_promote python platform device default_policy options shards interrupted status totals"
    assert list(data) == [*names.split(), "rows_not_reached", "mismatches", "entries"]
    assert list(data["options"]) == ["device", "ops", "dtypes", "sample", "quick", "stock_only", "autocast_dtype"]
    assert list(data["mismatches"][0]) == ["entry", "sample", "kind", "what", "text", "reproduce"]
    fields = "position name source samples refused not_generated mismatches gaps nondeterministic stale rows checked"
    assert list(data["entries"][0]) == [*fields.split(), "no_rule", "stock_raised", "seconds"]
    del data["entries"][0]["samples"]
    for text in (json.dumps(data), "[]", "x"):
        with pytest.raises(OptionError, match=r"^a\.json was not written by `torch-promote parity --json`"):
            ParityReport.from_json(text, "a.json")


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_make_up_the_whole(count: int) -> None:
    complete = report(*NAMES)
    shards = [report(*NAMES, shard=f"{index}/{count}") for index in range(1, count + 1)]
    together = merged([merged(shards[::-1])])
    assert together.results == complete.results
    assert together.status == complete.status == 1
    assert together.totals == {**complete.totals, "seconds": 2.5 * count}
    assert sorted(together.shards) == sorted(shard.shards[0] for shard in shards)


def test_reports_that_are_not_shards_of_one_run_are_refused() -> None:
    first, second = report(*NAMES, shard="1/2"), report(*NAMES, shard="2/2")
    quick = dataclasses.replace(second.options, quick=True)
    for reports, complaint in (
        ([first], "3 of 7 entries are missing in the shards 1/2."),
        ([first, second, first], "4 entries occur twice in the shards 1/2, 2/2, 1/2."),
        ([first, dataclasses.replace(second, interrupted=True)], "shard 2/2 was interrupted. Run it again."),
        ([first, dataclasses.replace(second, entries=8)], "shard 2/2 has number of entries 8, the first report has 7."),
        ([first, dataclasses.replace(second, options=quick)], "shard 2/2 has options Options("),
        *(
            ([first, dataclasses.replace(second, about={**second.about, what: "other"})], f"2/2 has {what} other, the")
            for what in ("torch", "device", "python")
        ),
    ):
        with pytest.raises(OptionError, match=re.escape(complaint)):
            merged(reports)


# --- JUnit


def test_junit_has_a_case_for_each_entry() -> None:
    crash = SampleMismatch("gap", "", "crash", "the entry's process", "SIGSEGV", "torch-promote parity")
    of = report(*NAMES)
    (place,) = (place for place, result in of.results.items() if result.entry.name == "gap")
    crashed = dataclasses.replace(of.results[place], mismatches=(crash,))
    text = junit(dataclasses.replace(of, about={"torch": "2.13.0"}, results={**of.results, place: crashed}))
    (suite,) = ElementTree.fromstring(text)
    counts = {"tests": "7", "failures": "2", "errors": "1", "skipped": "1", "time": "2.500"}
    assert suite.attrib == {"name": "torch-promote parity", **counts}
    outcomes = {case.get("name"): [child.tag for child in case] for case in suite.findall("testcase")}
    assert outcomes == {
        **{name: [] for name in ("good", "good.again", "unruled")},
        **{name: ["failure"] for name in ("mismatching", "stale")},
        "refused": ["skipped"],
        "gap": ["error"],
    }
