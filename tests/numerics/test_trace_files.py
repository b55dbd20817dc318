"""A report as JSON that can be loaded, as CSV, and as a trace that lines up with one of torch.profiler."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.made_up_traces import BF16, START, info, linear, made_up_call, report_of, small_report
from torch_promote.errors import OptionError
from torch_promote.observe import trace_report as trace_files
from torch_promote.observe.trace import trace
from torch_promote.observe.trace_report import TraceReport


@pytest.fixture(scope="module")
def traced() -> TraceReport:
    """A training step with values."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tp.trace(model, values=True) as report:
        with tp.my_autocast("cpu", overrides={"layer_norm": "fp32"}):
            loss = torch.nn.functional.mse_loss(model(torch.ones(4, 8).t()[:, :4].t()), torch.ones(4, 8))
        loss.backward()
        optimizer.step()
    return report


def everything(report: TraceReport) -> Any:
    """All content that equal reports share."""
    tables = (report.by_op(), report.by_module(), report.by_line(), report.casts(), report.total)
    return list(report.calls), tables, report.not_seen, report.steps, report.dropped, report.torch_version, report.asked


def saved(report: TraceReport, folder: Path, name: str) -> Path:
    report.save(folder / name)
    return folder / name


def test_json_can_be_read_again(traced: TraceReport, tmp_path: Path) -> None:
    loaded = TraceReport.load(saved(traced, tmp_path, "run.json"))
    assert everything(loaded) == everything(traced)
    assert str(loaded) == str(traced)
    assert loaded.to_dict() == traced.to_dict()
    assert any(call.values for call in loaded.calls)
    assert loaded.calls.where(casting=True) == traced.calls.where(casting=True)


def test_sums_include_calls_that_the_file_does_not_hold(tmp_path: Path) -> None:
    calls = [linear(f"layers.{number % 3}", number, number % 2, number) for number in range(10)]
    report, whole = report_of(*calls, max_calls=4), report_of(*calls)
    loaded = TraceReport.load(saved(report, tmp_path, "run.json"))
    assert (len(loaded.calls), loaded.dropped) == (4, 6)
    assert everything(loaded) == everything(report)
    assert loaded.total == whole.total


def test_the_dict_says_what_it_is_and_is_strict_json(traced: TraceReport) -> None:
    data = traced.to_dict()
    assert (data["format"], data["version"]) == ("torch_promote trace", 1)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    for call, made in zip(data["calls"], traced.calls, strict=True):
        assert [data["tensors"][place] for place in call["inputs"]] == made.to_dict()["inputs"]
    assert len(data["tensors"]) == len({json.dumps(tensor) for tensor in data["tensors"]})


def test_json_is_small(traced: TraceReport, tmp_path: Path) -> None:
    calls = [linear(f"model.layers.{number % 40}.mlp", number, number) for number in range(3000)]
    assert saved(report_of(*calls), tmp_path, "run.json").stat().st_size < 3000 * 800


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "it is not JSON"),
        ("[1]", """its "format" is None, not 'torch_promote trace'."""),
        ('{"format": "something"}', """its "format" is 'something', not 'torch_promote trace'."""),
        ('{"traceEvents": []}', "it is a trace for Perfetto"),
        (
            '{"format": "torch_promote trace", "version": 9}',
            "its version is 9, and this torch_promote reads version 1.",
        ),
        ('{"format": "torch_promote trace", "version": 1}', "it is incomplete or was changed (KeyError: 'calls')"),
        (
            '{"format": "torch_promote trace", "version": 1, "calls": 3}',
            "it is incomplete or was changed (TypeError",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(OptionError) as caught:
        TraceReport.load(file)
    assert str(caught.value).startswith(f"cannot read the trace {str(file)!r}: {complaint}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"run\.json': No such file or directory\. Pass a file that report\.save"):
        TraceReport.load(tmp_path / "run.json")


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="it is not JSON"):
        TraceReport.load(tmp_path / "run.json")


@pytest.mark.parametrize("name", ["run.txt", "run", "json", "run.json.gz"])
def test_the_ending_of_a_name_says_the_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Legal: \.html .*\.json .*\.trace\.json .*\.csv"):
        small_report().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "complaint"), [("no/run.html", "there is no folder '.*no'. Create it first"), ("x.html", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_page_is_made(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.html").mkdir()
    monkeypatch.setitem(trace_files._MAKERS, ".html", lambda report: pytest.fail("it was made"))
    with pytest.raises(OptionError, match=complaint):
        small_report().save(tmp_path / name)


@pytest.mark.parametrize("ending", ["html", "json", "csv", "trace.json"])
def test_a_write_that_fails_leaves_the_old_file(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"run.{ending}"
    file.write_text("old")

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OptionError, match=r"cannot save the trace as .*: No space left on device"):
        small_report().save(file)
    assert file.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "run.json").symlink_to("target.json")
    small_report().save(tmp_path / "run.json")
    assert (tmp_path / "run.json").is_symlink()
    assert TraceReport.load(tmp_path / "target.json").total == small_report().total


def test_names_in_capital_letters_and_strings_are_paths_too(tmp_path: Path) -> None:
    small_report().save(str(tmp_path / "RUN.TRACE.JSON"))
    assert "traceEvents" in json.loads((tmp_path / "RUN.TRACE.JSON").read_text())


def test_csv_has_a_row_for_each_call(traced: TraceReport, tmp_path: Path) -> None:
    with saved(traced, tmp_path, "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == [call.op for call in traced.calls]
    for row, call in zip(rows, traced.calls, strict=True):
        assert (row["module"], row["phase"], row["line"]) == (call.module, call.phase, call.line)
        assert row["inputs"] == "; ".join(map(str, call.inputs))
        assert (row["policy"], row["said_by"]) == (call.policy_name, call.said_by)
        assert int(row["cast_bytes"]) == sum(cast.bytes for cast in call.casts if not cast.reused)
        assert row["nans"] == "; ".join(str(values.nans) for values in call.values)


def test_csv_has_no_formulas(tmp_path: Path) -> None:
    """A spreadsheet would run them."""

    class Formula(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    model = torch.nn.ModuleDict({name: Formula() for name in ("=1+1", "@SUM(A1)", "-2", "plain")})
    with trace(model) as report:
        for module in model.values():
            module(torch.ones(2))
    with saved(report, tmp_path, "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["module"] for row in rows if row["op"] == "aten::neg"] == ["'=1+1", "'@SUM(A1)", "'-2", "plain"]
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())


def test_csv_quotes_what_names_contain(tmp_path: Path) -> None:
    odd = 'a,"b"\nc; d'
    report = report_of(made_up_call(module=odd, line=f"{odd}:1"))
    with saved(report, tmp_path, "run.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["module"], row["line"]) == (odd, f"{odd}:1")
    assert "amax" not in row


def test_names_that_are_not_unicode_can_be_written(tmp_path: Path) -> None:
    report = report_of(made_up_call(module="\udcff"))
    for ending in ("html", "csv", "trace.json", "json"):
        report.save(tmp_path / f"run.{ending}")
    assert TraceReport.load(tmp_path / "run.json").calls == report.calls


# --- Perfetto


def events(file: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == phase]


def test_slices_have_what_a_call_has_and_casts_stand_out(tmp_path: Path) -> None:
    norm, query, key, loss, mm = events(saved(small_report(), tmp_path, "run.trace.json"))
    assert [event["cat"] for event in (norm, query, key, loss, mm)] == ["op", "cast", "cast", "cast", "op"]
    assert (norm["name"], query["name"]) == ("aten::layer_norm", "aten::linear [cast to bfloat16]")
    assert (query["dur"], query["tid"], query["ts"]) == (100.0, 11, 5_000_300.0)
    assert query["args"] == {
        "dtypes": "float32 -> bfloat16 -> bfloat16",
        "module": "blocks.0.query",
        "phase": "forward",
        "line": "/code/model.py:12",
        "policy": "lower_precision_fp",
        "said by": "PyTorch's table",
        "casts": ["input: float32 -> bfloat16, 1,024 bytes", "weight: float32 -> bfloat16, 32,768 bytes"],
        "cast time (us)": 10.0,
        "inputs": ["input: float32[4, 128]", "weight: float32[128, 128]"],
        "ran with": ["input: bfloat16[4, 128]", "weight: bfloat16[128, 128]"],
        "outputs": ["0: bfloat16[4, 128]"],
        "autocast": {"cpu": "bfloat16"},
    }
    counts = [event["args"]["bytes"] for event in events(tmp_path / "run.trace.json", "C")]
    assert counts == [33_792, 34_816, 34_848]


def test_slices_of_inner_ops_lie_in_those_of_composite_ones(tmp_path: Path) -> None:
    inner = made_up_call("aten::mm", "", start=START + 100, duration=50)
    outer = made_up_call("aten::matmul", "", start=START, duration=1000, composite=True)
    first, second = events(saved(report_of(inner, outer), tmp_path, "run.trace.json"))
    assert (first["name"], second["name"]) == ("aten::matmul", "aten::mm")
    assert first["ts"] <= second["ts"]
    assert second["ts"] + second["dur"] <= first["ts"] + first["dur"]


def test_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    report = report_of(made_up_call(), made_up_call(thread=12))
    names = [event["args"]["name"] for event in events(saved(report, tmp_path, "run.trace.json"), "M")]
    assert names == ["torch_promote trace", "thread 11", "thread 12"]


@pytest.mark.parametrize("report", [report_of(), report_of(made_up_call())], ids=["no call", "one call"])
def test_small_reports_are_traces_too(report: TraceReport, tmp_path: Path) -> None:
    assert len(events(saved(report, tmp_path, "run.trace.json"))) == len(report.calls)


def test_slices_line_up_with_those_of_the_profiler(tmp_path: Path) -> None:
    a = torch.ones(300, 300)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.mm(a, a)
        with tp.trace() as report, tp.my_autocast("cpu"):
            for _ in range(20):
                torch.mm(a, a).exp()
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    profile = json.loads((tmp_path / "profile.json").read_text())
    ours = json.loads(saved(report, tmp_path, "run.trace.json").read_text())
    assert ours["baseTimeNanoseconds"] == profile["baseTimeNanoseconds"]
    theirs = [
        event for event in profile["traceEvents"] if event.get("cat") == "cpu_op" and event["name"] == "aten::exp"
    ]
    exps = [event for event in events(tmp_path / "run.trace.json") if event["name"] == "aten::exp"]
    assert len(theirs) == len(exps) == 20
    # The profiler's clock is calibrated; most events are within microseconds. A busy machine delays single ones.
    apart = sorted(abs(one["ts"] - other["ts"]) for one, other in zip(theirs, exps, strict=True))
    assert apart[10] < 1000


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_files_of_stock_autocast_are_the_same_but_for_times(stock: bool, tmp_path: Path) -> None:
    region = torch.autocast("cpu", BF16) if stock else tp.my_autocast("cpu", BF16)
    with tp.trace() as report, region:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    data = json.loads(saved(report, tmp_path, "run.json").read_text())
    calls = Counter((call["op"], call["policy"], call["said_by"]) for call in data["calls"])
    assert calls["aten::mm", "lower_precision_fp", "PyTorch's table"] == 1


def test_a_call_reads_its_own_dict_again() -> None:
    call = dataclasses.replace(linear("a", 0, 1), inputs=(dataclasses.replace(info("self"), strides=(1, 2)),))
    assert type(call).from_dict(json.loads(json.dumps(call.to_dict()))) == call
