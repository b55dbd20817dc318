"""Every command at every width: no word is broken and nothing is left out, and a pipe gets each row as one line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest

from helpers.command_line import Capture, terminal_of_80_columns
from helpers.made_up_comparisons import comparison_of, made_up_site
from helpers.made_up_traces import small_report
from helpers.made_up_tunings import gpt_tuning
from helpers.parity_reports import report as parity_report_of
from torch_promote.bench import Case, Result
from torch_promote.bench.cases import Prepared
from torch_promote.bench.figures import Overhead, Spread
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.cli import parity_report
from torch_promote.cli.bench import _draw as draw_bench
from torch_promote.cli.bench_counts import CountTable
from torch_promote.cli.bench_instructions import instruction_table
from torch_promote.cli.program import main
from torch_promote.cli.terminal import render
from torch_promote.numerics.comparing.comparison_text import comparison_text
from torch_promote.numerics.tuning.tuning_text import tuning_text
from torch_promote.observe.pages import Layout
from torch_promote.observe.trace_report import drawings

__all__ = ["terminal_of_80_columns"]  # a fixture

WIDTHS = [60, 80, 100, 200]

COMMANDS = [
    "policies",
    "policies --op norm",
    "policies --op gelu",
    "policies --op add",
    "policies --op *relu*",
    "policies --policy cuda",
    "policies --diff fp32_safe stock",
    "policies --diff cpu cuda",
    "info",
    "parity --list --ops *softmax*",
    "bench --list",
]

_SPREAD = Spread(0.5, 0.25, 0.75)
_TIMES = dict.fromkeys(("ours", "stock", "hand", "already_cast", "plain"), Spread(4970.0, 1, 2))
_NAME = "a Llama-like stack of many layers, training step"
_COUNTS = {"narrowing": 10, "widening": 2}
_COPIES = {"forward": _COUNTS, "backward": _COUNTS, "kernels": 30, "cast_kernels": 20}


def _bench() -> dict[str, Any]:
    results = [
        Result(
            Case("models", f"{_NAME}, {number}", lambda settings: Prepared({})),
            _SPREAD,
            _SPREAD,
            overheads={base: Overhead(_SPREAD) for base in ("hand", "already_cast", "plain")},
            times_ns=_TIMES,
        )
        for number in range(3)
    ]
    casts = {"weights": 40, "activations": 1, "gradients": 2}
    compiled = {"kernels": 7, "graphs": 1, "graph_breaks": 0, "frames": 1, "guards": 40}
    data = [
        {
            **result.as_dict(),
            "casts": dict.fromkeys(("ours", "stock"), casts),
            "compiled": dict.fromkeys(("ours", "stock"), compiled),
            "peak_bytes": dict.fromkeys(("ours", "stock"), 10_000_000),
            "kernels": dict.fromkeys(("ours", "stock"), 1234),
        }
        for result in results
    ]
    about = {"torch": "2.13.0", "device": "cpu", "device_name": "a processor with a long name", "threads": 3}
    more = {"rounds": 31, "clock": "cpu", "skipped": ["HF Llama, training"], "default_policy": "", "interrupted": True}
    return {**about, **more, "cases": 9, "results": data}


def _counts() -> list[Any]:
    names = ("stock", "ours")
    result = {
        "case": _NAME,
        "kernels": dict.fromkeys(names, 123),
        "casts": {name: {"weights": 40, "activations": 1, "gradients": 2} for name in names},
        "copies": {name: {**_COPIES, "moved_bytes": 99_999, "allocated_bytes": 9} for name in names},
        "peak_bytes": dict.fromkeys(names, 12_345_678),
    }
    return [CountTable([result])]


def _instructions() -> list[Any]:
    counts = {"ours": 1_234_567_890.0, "stock": 2_345_678_901.0, "hand": 3.0, "already_cast": 4.0, "plain": 5.0}
    target = {"base": "hand", "over": True, "at_most": 0.4, "measured": 0.31}
    return [instruction_table([{"case": _NAME, "instructions": counts, "target": target}])]


def _crosscheck() -> list[Any]:
    report = CrosscheckReport(default_policy="Policy.named('cuda'), from TORCH_PROMOTE_POLICY=cuda")
    report.checked.update({f"aten.op_{number}.default": 10_000 + number for number in range(30)})
    report.no_rule.update(report.checked)
    report.mismatches.append(
        Mismatch("bits", "aten.mm.default", "float32[3, 4], float32[4, 5]", "1.0", "2.0", "a.py:3")
    )
    return [str(report)]


def _lines(text: str) -> list[Any]:
    class Lines:
        def lines(self, width: int | None) -> list[str]:
            return text.splitlines()

    return [Lines()]


DRAWINGS: dict[str, Callable[[int | None], list[Any]]] = {
    "bench": lambda width: draw_bench(_bench()),
    "bench on the stand-in": lambda width: _counts(),
    "bench of instructions": lambda width: _instructions(),
    "parity": lambda width: parity_report.draw(parity_report_of("good", "mismatching", "gap")),
    "crosscheck": lambda width: _crosscheck(),
    "compare": lambda width: _lines(
        comparison_text(
            comparison_of(
                *(made_up_site("aten::scaled_dot_product_attention", f"model.layers.{i}.self_attn") for i in range(9))
            ),
            Layout(width),
        )
    ),
    "tune": lambda width: _lines(tuning_text(gpt_tuning(), Layout(width))),
    "trace": lambda width: list(drawings(small_report(), width)),
}


#: The headers of columns that move below their rows.
HEADERS_OF_NOTES = {"notes", "policy"}


def words_of(text: str) -> set[str]:
    return set(text.split())


def check(wide: str, narrow: str, width: int) -> None:
    assert words_of(wide) - HEADERS_OF_NOTES <= words_of(narrow)
    # Nothing was cut.
    assert "\u2026" not in narrow
    too_long = [line for line in narrow.splitlines() if len(line) > width and len(line.split()) > 1]
    assert too_long == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        assert main(command.split()) in (0, 1)
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", str(width))
    narrow = text()
    monkeypatch.delenv("COLUMNS")
    check(text(), narrow, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", DRAWINGS)
def test_reports(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    wide = render(DRAWINGS[name](None), io.StringIO())
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = render(DRAWINGS[name](width), io.StringIO())
    if name == "bench on the stand-in" and width < 80:  # other headers, and each row has the name of the case
        wide = "\n".join(wide.splitlines()[3:])
    check(wide, narrow, width)


def test_a_pipe_gets_each_row_as_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"norm\.ScalarOpt_dim +fallthrough +fp32_append_dtype +calls .+", line) for line in lines)
    row = render(draw_bench(_bench()), io.StringIO()).splitlines()[2]
    assert row.startswith(_NAME)
    assert row.endswith("4.97 us")


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", [["policies", "--op", "sofmax"], ["why", "float33[2] + 1"], ["bench", "--nothing"]])
def test_errors_on_a_terminal(command: list[str], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real terminal, whose width is not in the environment."""
    monkeypatch.delenv("COLUMNS")
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with open(reader, "rb", buffering=0) as terminal, open(writer, "w") as stderr:
        with contextlib.redirect_stderr(stderr):
            assert status_of(command) == 2
        stderr.write("end")
        stderr.flush()
        read = b""
        while not read.endswith(b"end"):
            read += terminal.read(4000)
    lines = read.decode().splitlines()[:-1]
    assert lines[0].startswith(("torch-promote: error: ", "torch-promote why: "))
    assert all(len(line) <= width for line in lines)
    assert len(lines) > 1 or width == 200
    with contextlib.redirect_stderr(io.StringIO()) as pipe:
        assert status_of(command) == 2
    assert words_of("\n".join(lines)) == words_of(pipe.getvalue())


def status_of(command: list[str]) -> int | str | None:
    try:
        return main(command)
    except SystemExit as end:  # from argparse
        return end.code


def test_the_width_is_that_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_promote.cli import terminal

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("COLUMNS")
    assert terminal.width_of_output(io.StringIO()) is None
    assert terminal.width_of_output(Terminal()) == 80  # a terminal of unknown width
    monkeypatch.setenv("COLUMNS", "61")
    assert terminal.width_of_output(io.StringIO()) == 61
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    terminal.say("one " * 30, is_report=True)
    assert max(map(len, err.getvalue().splitlines())) <= 61
    terminal.say("two " * 30)  # a message, which stays one line in a pipe
    assert err.getvalue().splitlines()[-1].count("two") == 30
