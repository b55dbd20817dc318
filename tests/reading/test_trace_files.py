"""The files of a report: its recording, whole, cut off and damaged, its JSON and its page."""

from __future__ import annotations

import contextlib
import functools
import gzip
import html
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import torch_promote as tp
from helpers.command_line import Capture
from helpers.made_up_traces import linear, made_up_call, report_of, small_report
from torch_promote.errors import OptionError
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import SUFFIX


@pytest.fixture(scope="module")
def traced() -> TraceReport:
    """Two training steps with values."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with tp.trace(model, values=True) as report:
        for _ in range(2):
            with tp.my_autocast("cpu", overrides={"layer_norm": "fp32"}):
                loss = torch.nn.functional.mse_loss(model(torch.ones(4, 8).t()[:, :4].t()), torch.ones(4, 8))
            loss.backward()
            optimizer.step()
    return report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"run{SUFFIX}"


def test_a_recording_without_values_or_calls(path: Path) -> None:
    for calls in ((), (linear("a", 0, 1), made_up_call())):
        report = report_of(*calls)
        report.save(path)
        read = tp.load(path)
        assert (read.values, read.sources, len(read.calls), read.total.calls) == ({}, [], len(calls), len(calls))
        assert [call.op for call in read.calls] == [call.op for call in report.calls]


def test_arguments_that_are_equal_and_not_the_same(path: Path) -> None:
    numbers = [0.0, -0.0, 1, True, 1.0]
    with tp.trace(record=path):
        for number in numbers:
            torch.ones(2) * number
    assert repr([dict(call.arguments).get("other") for call in tp.load(path).calls][1::2]) == repr(numbers)


def test_sums_include_calls_that_are_not_kept(path: Path) -> None:
    calls = [linear(f"layers.{number % 3}", number, number % 2, number) for number in range(10)]
    whole = report_of(*calls)
    whole.save(path)
    loaded = TraceReport.load(path, max_calls=4)
    assert (len(loaded.calls), loaded.dropped) == (4, 6)
    assert loaded.total == tp.load(path).total == whole.total
    assert [one.bytes for one in loaded.casts()] == [one.bytes for one in whole.casts()]
    with pytest.raises(OptionError, match="cannot save 6 calls beyond `max_calls`"):
        loaded.save(path)
    assert len(tp.load(path).calls) == 10


def test_the_dict_says_what_it_is_and_is_strict_json(traced: TraceReport) -> None:
    data = traced.to_dict()
    assert (data["format"], data["version"]) == ("torch_promote trace", 3)
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text)["calls"] == json.loads(json.dumps(data["calls"]))
    for call, made in zip(data["calls"], traced.calls, strict=True):
        assert [data["tensors"][place] for place in call["inputs"]] == made.to_dict()["inputs"]
    assert len(data["tensors"]) == len({json.dumps(tensor) for tensor in data["tensors"]})


@pytest.mark.parametrize("ending", ["html", "json", "jsonl.gz"])
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


def test_names_that_are_not_unicode_can_be_written(tmp_path: Path) -> None:
    report = report_of(made_up_call(module="\udcff"))
    for ending in ("html", "json", "jsonl.gz"):
        report.save(tmp_path / f"run.{ending}")
    assert [call.module for call in tp.load(tmp_path / "run.jsonl.gz").calls] == ["\udcff"]


# --- files that were cut off or damaged


def use(report: TraceReport, other: TraceReport) -> None:
    """Whatever a file says, its report can be shown."""
    print(report, report.diff(other), other.diff(report), report.by_op(), report.unused_overrides(), file=io.StringIO())
    json.dumps(report.to_dict())
    with contextlib.suppress(OptionError):  # nothing matches any more
        str(report.explain("op=linear"))


@pytest.mark.parametrize("inner_first", [False, True])
def test_two_recordings_of_one_name_are_two_files(
    inner_first: bool, path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """As of two ranks that record at the same time: the later one to write has another name."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    weight = torch.ones(2, requires_grad=True)
    with tp.trace(record=path):
        weight.sin().sum().backward()
        if not inner_first:
            torch.optim.SGD([weight], lr=0.1).step()  # the end of a step is written at once
        with tp.trace(record=path):
            torch.ones(2).cos()
    named = path.with_name(path.name.replace(SUFFIX, f".rank1{SUFFIX}"))
    outer, inner = (named, path) if inner_first else (path, named)
    has_sin = [any(call.op == "aten::sin" for call in tp.load(one).calls) for one in (outer, inner)]
    assert (has_sin, set(path.parent.iterdir())) == ([True, False], {path, named})
    said = f"torch-promote: another recording has been written to {path} meanwhile, so this one is {named}.\n"
    assert capfd.readouterr().err == said
    with tp.trace(record=path):  # neither is written any more
        torch.ones(2).exp()
    assert any(call.op == "aten::exp" for call in tp.load(path).calls)


def test_a_file_can_be_read_wherever_it_ends(traced: TraceReport, path: Path) -> None:
    """The last lines are cut at every place, as a kill does, the others at some; the compressed file as well."""
    traced.save(path)
    data = path.read_bytes()
    text = gzip.decompress(data)
    last = sum(map(len, text.splitlines(keepends=True)[-3:]))
    ends = [*range(text.index(b"\n") + 1, len(text) - last, 2999), *range(len(text) - last, len(text), 97)]
    before = -1
    for end in ends:
        path.write_bytes(gzip.compress(text[:end], 1))
        read = tp.load(path)
        assert [one.kind for one in read.not_seen] == ["unfinished"]
        assert before <= len(read.calls) <= len(traced.calls)
        before = len(read.calls)
    assert before == len(traced.calls)
    use(read, traced)
    for end in (*range(0, len(data), 4999), len(data) - 1):
        path.write_bytes(data[:end])
        with contextlib.suppress(OptionError):  # not even the first line is there
            assert tp.load(path).not_seen[-1].kind == "unfinished"


DELETED = object()
WRONG: tuple[Any, ...] = (None, "x", -1, 1.5, True, [], {}, 10**400, [1], "\ud800", DELETED)


def places_in(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in JSON, of lists only those in the first three items."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data[:3]) if isinstance(data, list) else ()
    for key, item in items:
        yield from places_in(item, (*at, key))


@pytest.mark.parametrize("number", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_refused_or_can_be_used(number: int, traced: TraceReport, path: Path) -> None:
    """Wrong values in random places of random lines, lines that are missing, doubled or swapped, and other bytes."""
    traced.save(path)
    data = path.read_bytes()
    lines = gzip.decompress(data).splitlines()
    draw = random.Random(0)
    refused: list[str] = []
    for turn in range(number):
        changed, place = list(lines), draw.randrange(len(lines))
        if turn % 10 == 0:
            changed[place : place + 1] = draw.choice([[], [changed[place]] * 2, [changed[-place], changed[place]]])
        elif turn % 10 == 1:
            at = draw.randrange(len(changed[place]))
            changed[place] = changed[place][:at] + bytes([draw.randrange(256)]) + changed[place][at + 1 :]
        else:
            line = json.loads(changed[place])
            at = draw.choice([*places_in(line)][1:])
            holder = functools.reduce(lambda inner, key: inner[key], at[:-1], line)
            value = draw.choice(WRONG)
            if value is DELETED:
                del holder[at[-1]]
            else:
                holder[at[-1]] = value
            changed[place] = json.dumps(line).encode()
        path.write_bytes(gzip.compress(b"".join(one + b"\n" for one in changed), 1))
        try:
            report = tp.load(path)
        except OptionError as error:
            refused.append(str(error))
            continue
        use(report, traced)
    assert number / 4 < len(refused) < number
    assert all(str(path) in one for one in refused)
    for _ in range(number):
        at = draw.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        with contextlib.suppress(OptionError):
            use(tp.load(path), traced)


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
