"""A report as JSON that can be loaded, as CSV, and as a trace that lines up with one of torch.profiler."""

from __future__ import annotations

import contextlib
import csv
import functools
import html
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import torch_promote as tp
from helpers.made_up_traces import linear, made_up_call, report_of, small_report
from torch_promote.errors import OptionError
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


def saved(report: TraceReport, folder: Path, name: str) -> Path:
    report.save(folder / name)
    return folder / name


def test_json_can_be_read_again(traced: TraceReport, tmp_path: Path) -> None:
    loaded = TraceReport.load(saved(traced, tmp_path, "run.json"))
    assert list(loaded.calls) == list(traced.calls)
    assert str(loaded) == str(traced)
    assert loaded.to_dict() == traced.to_dict()
    assert any(call.values for call in loaded.calls)
    assert loaded.calls.where(casting=True) == traced.calls.where(casting=True)


def test_sums_include_calls_that_the_file_does_not_hold(tmp_path: Path) -> None:
    calls = [linear(f"layers.{number % 3}", number, number % 2, number) for number in range(10)]
    report, whole = report_of(*calls, max_calls=4), report_of(*calls)
    loaded = TraceReport.load(saved(report, tmp_path, "run.json"))
    assert (len(loaded.calls), loaded.dropped) == (4, 6)
    assert loaded.to_dict() == report.to_dict()
    assert (loaded.total, loaded.by_op(), loaded.by_line()) == (whole.total, whole.by_op(), whole.by_line())
    assert loaded.casts() == whole.casts()


def test_the_dict_says_what_it_is_and_is_strict_json(traced: TraceReport) -> None:
    data = traced.to_dict()
    assert (data["format"], data["version"]) == ("torch_promote trace", 2)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    for call, made in zip(data["calls"], traced.calls, strict=True):
        assert [data["tensors"][place] for place in call["inputs"]] == made.to_dict()["inputs"]
    assert len(data["tensors"]) == len({json.dumps(tensor) for tensor in data["tensors"]})


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


DELETED = object()
WRONG: tuple[Any, ...] = (None, "x", -1, 1.5, True, [], {}, 10**400, [1], "\ud800", DELETED)


def places_in(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in JSON, of lists only those in the first two items."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, item in items:
        yield from places_in(item, (*at, key))


@pytest.mark.parametrize("share", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_calls", [100, 1])
def test_a_damaged_file_is_refused_with_its_field_or_can_be_used(max_calls: int, share: int, tmp_path: Path) -> None:
    """With dropped calls, the sums in the file count: then these are damaged, and else all other fields.

    The everyday run has one in eleven of the damages: one wrong value in each place, and each value in other places.
    """
    overrides = {"exp": "fp32", "bmm": "fp32"}
    with (
        tp.trace(values=True, where="casts", max_calls=max_calls) as report,
        tp.my_autocast("cpu", overrides=overrides),
    ):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2)).exp()
    file, text = tmp_path / "run.json", json.dumps(report.to_dict())
    complaints, places = [], 0
    for at in list(places_in(json.loads(text)))[1:]:
        if at[0] != "dropped" and (at[0] in ("groups", "casts")) != bool(report.dropped):
            continue
        places += 1
        for value in WRONG[places % share :: share]:
            changed = json.loads(text)
            holder = functools.reduce(lambda inner, key: inner[key], at[:-1], changed)
            if value is DELETED:
                del holder[at[-1]]
            else:
                holder[at[-1]] = value
            file.write_text(json.dumps(changed))
            try:
                loaded = TraceReport.load(file)
            except OptionError as error:
                complaints.append((at[0], str(error)))
                continue
            print(loaded, loaded.diff(report), loaded.by_op(), loaded.unused_overrides(), file=io.StringIO())
            loaded.formats()[".csv"][1]()
            with contextlib.suppress(OptionError):  # nothing matches any more
                str(loaded.explain("op=mm"))
    assert len(complaints) > 500 / share
    assert all(str(file) in complaint for _, complaint in complaints)
    # An index into the tensors may be what is wrong with these.
    assert all(name in complaint or name == "tensors" for name, complaint in complaints)


def test_an_error_names_the_place_in_the_file(tmp_path: Path) -> None:
    data = small_report().to_dict()
    data["calls"][3]["casts"][1]["bytes"] = "16"
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(OptionError, match=r"\(TypeError: expected int, got '16', at calls\[3\]\.casts\[1\]\.bytes\)"):
        TraceReport.load(tmp_path / "run.json")


@pytest.mark.parametrize("name", ["[x]", "[bold red]", "[/]", ":smile:", "a\x1b[31mb", "**"])
def test_names_are_no_markup(name: str) -> None:
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(2, 2))
    model.forward = lambda x: getattr(model, name)(x)  # type: ignore[method-assign,assignment]
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model(torch.ones(1, 2))
    shown = name.replace("\x1b", r"\x1b")
    explained = report.explain(f"module={name}")
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system=None, width=200).print(explained)
    for text in (str(explained), str(report.by_module()), stream.getvalue()):
        assert shown in text
        assert "\x1b[31m" not in text
    assert f"<code>{html.escape(name)}</code>" in report.formats()[".html"][1]()
