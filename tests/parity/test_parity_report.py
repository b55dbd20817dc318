"""torch_promote/parity/report.py and junit.py: totals, exit status, JSON round trips, shards, and XML."""

from __future__ import annotations

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest
import torch
from expecttest import assert_expected_inline

import torch_promote
from helpers.parity_reports import NAMES, report
from torch_promote.checking.known_gaps import Gap
from torch_promote.errors import OptionError
from torch_promote.parity import report as report_module
from torch_promote.parity.junit import junit
from torch_promote.parity.model import EntryResult, Options, SampleMismatch
from torch_promote.parity.report import Report, about, merged
from torch_promote.policy.op_table import CastPolicy, op_table, registered


def test_about_names_what_ran() -> None:
    assert about("fake-cuda")["device"] == "fake-cuda"
    assert (about("cpu")["torch"], about("cpu")["torch_promote"]) == (torch.__version__, torch_promote.__version__)


def test_totals_add_up() -> None:
    totals = report(*NAMES).totals
    assert totals.pop("calls_checked") == 7 * (7 + torch.get_num_threads())
    assert totals == {
        "rows": 1,  # aten::mm; aten::exp has no policy on the CPU
        "rows_with_policy": sum(
            row.policy("cpu") is not CastPolicy.fallthrough and row.name in registered("cpu") for row in op_table()
        ),
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


def test_rows_are_those_of_the_device() -> None:
    assert report("good").rows == ["aten::mm"]
    assert report("good", device="fake-cuda").rows == ["aten::exp", "aten::mm"]
    for device in ("cpu", "fake-cuda"):
        of = report("good", device=device)
        assert not set(of.rows) & set(of.rows_not_reached)
        assert len(of.rows) + len(of.rows_not_reached) == of.totals["rows_with_policy"]
    meta = report("good", device="meta")
    assert (meta.rows, meta.rows_not_reached, meta.totals["rows_with_policy"]) == ([], [], 0)


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


def test_a_gap_of_calls_that_a_whole_run_does_not_see_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def gap(op: str, reason: str, fake: bool = False) -> Gap:
        return Gap(op=op, kind="bits", wrong="pytorch", reason=reason, fake=fake)

    gaps = (gap("aten::mm", "unseen"), gap("aten::bmm", "not run"), gap("*", "fake", fake=True))
    gaps += (gap("*", "the kernel reads what it has not written"),)
    monkeypatch.setattr(report_module, "dispatch_gaps", lambda: gaps)
    for listed in ("sample_gaps", "nondeterministic"):
        monkeypatch.setattr(report_module, listed, lambda: ())
    chosen = report("good", "gap")
    whole = dataclasses.replace(chosen, options=Options("cpu"))
    unseen = "aten::mm on cpu: the known gap (bits: unseen) explains nothing"
    assert (whole.stale, whole.status) == ([unseen], 1)
    assert unseen in junit(whole)
    on_fake = dataclasses.replace(chosen, options=Options("fake-cuda"))
    assert [line.partition(" on ")[0] for line in on_fake.stale] == ["aten::mm", "*"]
    for part in (
        chosen,
        dataclasses.replace(whole, entries=3),
        dataclasses.replace(whole, options=Options("cpu", quick=True)),
        dataclasses.replace(whole, options=Options("cpu", dtypes=("float32",))),
    ):
        assert part.stale == []


def test_the_order_is_that_of_the_entries_whichever_was_done_first() -> None:
    of = report(*NAMES)
    other_way_round = dataclasses.replace(of, results=dict(reversed(of.results.items())))
    assert other_way_round.ordered == of.ordered
    assert other_way_round.to_dict() == of.to_dict()
    assert junit(other_way_round) == junit(of)


# --- JSON


def test_json_there_and_back() -> None:
    before = report(*NAMES)
    text = json.dumps(before.to_dict())
    assert Report.from_json(text, "a.json") == before
    data = json.loads(text)
    assert list(data) == [
        *("format", "torch", "torch_promote", "python", "platform", "device", "default_policy", "options", "shards"),
        *("interrupted", "status", "totals", "rows_not_reached", "mismatches", "entries"),
    ]
    assert data["options"] == {
        "device": "cpu",
        "ops": list(NAMES),
        "dtypes": [],
        "sample": None,
        "quick": False,
        "stock_only": False,
        "autocast_dtype": None,
    }
    (mismatch,) = data["mismatches"]
    assert list(mismatch) == [field.name for field in dataclasses.fields(SampleMismatch)]
    fields = {field.name for field in dataclasses.fields(EntryResult)} - {"entry"}
    for entry, result in zip(data["entries"], before.ordered, strict=True):
        assert set(entry) == {"position", "name", "source", *fields}
        assert (entry["name"], entry["source"]) == (result.entry.name, result.entry.source)
        assert entry["mismatches"] == len(result.mismatches)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "torch": 2}', "\x00"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^a\.json was not written by `torch-promote parity --json`"):
        Report.from_json(text, "a.json")


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^a\.json has format 99; this version reads format 1\.$"):
        Report.from_json('{"format": 99}', "a.json")


# --- shards


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_make_up_the_whole(count: int) -> None:
    whole = report(*NAMES)
    shards = [report(*NAMES, shard=f"{index}/{count}") for index in range(1, count + 1)]
    together = merged(shards[::-1])
    assert together.results == whole.results
    assert together.ordered == whole.ordered
    assert together.status == whole.status == 1
    assert together.totals == {**whole.totals, "seconds": 2.5 * count}
    assert sorted(together.shards) == sorted(shard.shards[0] for shard in shards)


def test_merged_reports_merge_again() -> None:
    first, second, third = (report(*NAMES, shard=f"{index}/3") for index in (1, 2, 3))
    with pytest.raises(OptionError, match="entries are missing"):
        merged([first, second])
    assert merged([merged([first, second, third])]).results == report(*NAMES).results


def test_reports_that_are_not_shards_of_one_run_are_refused() -> None:
    first, second = report(*NAMES, shard="1/2"), report(*NAMES, shard="2/2")
    older = dataclasses.replace(second, about={**second.about, "torch": "2.0.0"})
    for reports, complaint in (
        ([first], "3 of 7 entries are missing in the shards 1/2."),
        ([first, second, first], "4 entries occur twice in the shards 1/2, 2/2, 1/2."),
        ([first, dataclasses.replace(second, interrupted=True)], "shard 2/2 was interrupted. Run it again."),
        (
            [first, older],
            f"these are not shards of one run: shard 2/2 has torch 2.0.0, the first report has {torch.__version__}.",
        ),
        (
            [first, dataclasses.replace(second, entries=8)],
            "these are not shards of one run: shard 2/2 has number of entries 8, the first report has 7.",
        ),
    ):
        with pytest.raises(OptionError) as caught:
            merged(reports)
        assert str(caught.value) == complaint
    quick = dataclasses.replace(second, options=dataclasses.replace(second.options, quick=True))
    with pytest.raises(OptionError, match=r"^these are not shards of one run: shard 2/2 has options "):
        merged([first, quick])


# --- JUnit


def test_junit_has_a_case_for_each_entry() -> None:
    crash = SampleMismatch("gap", "", "crash", "the entry's process", "SIGSEGV", "torch-promote parity")
    of = report(*NAMES)
    (place,) = (place for place, result in of.results.items() if result.entry.name == "gap")
    crashed = dataclasses.replace(of.results[place], mismatches=(crash,))
    text = junit(dataclasses.replace(of, about={"torch": "2.13.0"}, results={**of.results, place: crashed}))
    root = ElementTree.fromstring(text)
    (suite,) = root
    assert suite.attrib == {
        "name": "torch-promote parity",
        "tests": "7",
        "failures": "2",
        "errors": "1",
        "skipped": "1",
        "time": "2.500",
    }
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [result.entry.name for result in of.ordered]
    assert {case.get("classname") for case in cases} == {"parity.cpu.op_db"}
    outcomes = {case.get("name"): [child.tag for child in case] for case in cases}
    assert outcomes == {
        **{name: [] for name in ("good", "good.again", "unruled")},
        "mismatching": ["failure"],
        "stale": ["failure"],
        "refused": ["skipped"],
        "gap": ["error"],
    }
    assert_expected_inline(
        re.sub(r"(?s)</properties>.*name=\"good\" time=\"0.250\" />\n", "...\n", text[: text.index('name="stale"')]),
        """\
<?xml version='1.0' encoding='utf-8'?>
<testsuites tests="7" failures="2" errors="1" skipped="1" time="2.500">
  <testsuite name="torch-promote parity" tests="7" failures="2" errors="1" skipped="1" time="2.500">
    <properties>
      <property name="torch" value="2.13.0" />
      <property name="options.device" value="cpu" />
      <property name="options.autocast_dtype" value="bfloat16" />
      <property name="options.quick" value="false" />
      <property name="options.stock_only" value="false" />
      <property name="shards" value="1/1" />
    ...
    <testcase classname="parity.cpu.op_db" name="mismatching" time="0.250">
      <failure type="dtype" message="1 mismatches, 0 stale gaps">float32/0/mixed dtype ours against stock
aten.mm.default(float32[2, 3], float32[3, 2])
expected bfloat16
got      ?[31mfloat32
torch-promote parity --device cpu --ops mismatching --sample float32/0/mixed</failure>
    </testcase>
    <testcase classname="parity.cpu.op_db" """,
    )
