"""`torch-promote parity` asked for what cannot be, or telling where nobody listens. The other commands too."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command_line import Capture, error_of, terminal_of_80_columns, wide
from helpers.stand_in_runner import stand_in
from helpers.subprocesses import environment, run_python
from torch_promote.checking import expectation
from torch_promote.cli import progress as _progress
from torch_promote.cli.program import main
from torch_promote.reference import promotion as promotion_table
from torch_promote.reference.ops.infer import NO_RULE

__all__ = ["stand_in", "terminal_of_80_columns", "wide"]  # fixtures

#: The package has a class of this module's name.
crosscheck: Any = importlib.import_module("torch_promote.checking.crosscheck")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")


# --- what was asked for


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "--ops mm --autocast-dtype float32",
            "autocast on the CPU does not support 'float32': regions would be disabled.",
        ),
        ("--ops mm --autocast-dtype float64", "autocast on the CPU does not support 'float64'"),
        ("--ops mm --device cpu:0 --stock-only", "device 'cpu:0' has an index. Use the device type only: cpu."),
        ("--ops mm --device meta:0 --stock-only", "device 'meta:0' has an index. Use the device type only: meta."),
        ("--ops mm --sample float32/0/plain --quick", "--sample selects a single sample. Remove --quick and"),
        ("--ops mm --sample float32/0/plain --dtypes float32", "--sample selects a single sample."),
        ("--ops mm --json a.txt --junit a.txt", "--json and --junit both name a.txt. Use a different file for each."),
        ("--ops add aten::mm --dtypes int8", "no sample of 'aten::mm' has one of the dtypes int8."),
        ("--quick --ops aten::mm --dtypes int8", "no sample of the selected entries has dtype 'int8'."),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(capsys, "parity", "--jobs", "0", *arguments.split())
    assert error.startswith(f"torch-promote: error: {complaint}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "--bogus", "nonsense", "info --bogus", "policies --device cdua", "policies --bogus", "parity --bogus"),
        *("parity --ops", "parity --merge", "parity mm", "parity --bogus"),
        *("why", "why --bogus 1+1", "why --default-dtype int8 1+1"),
    ],
)
def test_what_no_parser_takes_is_one_line_and_status_2(capsys: Capture, arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    assert re.fullmatch(r"torch-promote: error: .+\. See `torch-promote[a-z ]* --help`\.\n", captured.err)


# --- nothing to be had


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "infer", lambda *args: NO_RULE)


def without_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosscheck, "observe_dispatch", lambda checker: contextlib.nullcontext())


@pytest.mark.parametrize("plant", [without_rules, without_the_observer])
@pytest.mark.parametrize("only", [[], ["--stock-only"]])
def test_a_run_that_checks_no_call_is_no_pass(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, plant: Any, only: list[str]
) -> None:
    arguments = ["parity", "--ops", "aten::mm", "--dtypes", "float32", "--jobs", "0", *only]
    assert main(arguments) == 0
    capsys.readouterr()
    plant(monkeypatch)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith("\n\nNothing was checked.\n")
    assert captured.err.startswith("torch-promote: error: nothing was checked")
    assert captured.err.count("\n") == 1


def test_a_wrong_cell_of_two_integers_is_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.uint8), torch.int32)
    assert main(["parity", "--ops", "promotion.add", "--jobs", "0"]) == 1
    out = capsys.readouterr().out
    found = set(re.findall(r"(?m)^promotion\.add, sample (\w+)/\d+/([\w-]+): (\w+), reference", out))
    assert ("int8", "uint8-dim-dim", "dtype") in found
    assert {(first, second.partition("-")[0]) for first, second, _ in found} == {("int8", "uint8")}


# --- where nobody listens


#: As most people run it, what is written comes to the file when stdout is flushed; in containers, mostly at once.
BUFFERING = pytest.mark.parametrize("unbuffered", ["", "1"])


def process(
    *arguments: str, code: str = "pass", unbuffered: str = "", **streams: Any
) -> subprocess.CompletedProcess[str]:
    """The command with the stand-in's entries."""
    program = f"from helpers.stand_in_runner import main; {code}; raise SystemExit(main({list(arguments)}))"
    return run_python(program, env=environment(PYTHONUNBUFFERED=unbuffered), quiet=True, **streams)


TALKATIVE = "from torch_promote.cli import progress as _progress; _progress._SECONDS_BETWEEN_LINES = 0.0"
RUN = ("parity", "--ops", "good*", "mismatching", "--jobs", "0")


@BUFFERING
def test_a_reader_of_stderr_who_goes_away_ends_nothing(tmp_path: Path, unbuffered: str) -> None:
    file = tmp_path / "a.json"
    read, write = os.pipe()
    os.close(read)
    try:
        gone = process(*RUN, "--json", str(file), code=TALKATIVE, unbuffered=unbuffered, stderr=write)
    finally:
        os.close(write)
    data = json.loads(file.read_text())
    assert (data["status"], data["totals"]["entries"]) == (1, 3)
    heard = process(*RUN, code=TALKATIVE)
    assert heard.stderr.count("parity: ") == 3
    assert heard.returncode == 1
    assert without_seconds(gone.stdout) == without_seconds(heard.stdout)
    assert gone.returncode == 1


def without_seconds(text: str) -> str:
    return re.sub(r"(?m)^seconds +[\d.]+", "seconds", text)


@pytest.mark.usefixtures("stand_in")
def test_progress_that_cannot_be_written_is_let_be(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def isatty(self) -> bool:
            return False

        def flush(self) -> None:
            pass

        def write(self, text: str) -> int:
            nonlocal tried
            tried += 1
            raise BrokenPipeError

    tried = 0
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(RUN) == 1
    assert tried == 3
    assert "Mismatches: 1." in capsys.readouterr().out


@needs_full
@pytest.mark.parametrize("arguments", [RUN, (*RUN, "--json"), ("info",)])
@BUFFERING
def test_a_full_stdout_is_one_line_and_status_2(arguments: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        came = process(*arguments, unbuffered=unbuffered, stdout=full.fileno())
    assert (came.returncode, came.stderr) == (
        2,
        "torch-promote: error: cannot write to stdout: No space left on device.\n",
    )


def test_a_closed_stdout_is_one_line_and_status_2() -> None:
    # Closed before Python starts, so that it has none.
    program = f"from helpers.stand_in_runner import main; raise SystemExit(main({list(RUN)}))"
    command = ["sh", "-c", 'exec "$0" -W ignore -c "$1" >&-', sys.executable, program]
    came = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (came.returncode, came.stderr) == (2, "torch-promote: error: cannot write: stdout is closed.\n")


@needs_full
@pytest.mark.usefixtures("stand_in", "wide")
@pytest.mark.parametrize("options", [["--json"], ["--junit"]])
def test_a_file_that_cannot_be_written_costs_no_table(capsys: Capture, options: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    others = ["--junit" if options == ["--json"] else "--json", str(other)]
    assert main([*RUN, *options, "/dev/full", *others]) == 2
    captured = capsys.readouterr()
    assert "\n\nMismatches: 1." in captured.out
    assert captured.err == "torch-promote: error: cannot write /dev/full: No space left on device.\n"
    assert "mismatching" in other.read_text()


@needs_full
def test_a_list_that_cannot_be_written_is_one_line(capsys: Capture) -> None:
    assert error_of(capsys, "parity", "--list", "--ops", "mm", "--json", "/dev/full") == (
        "torch-promote: error: cannot write /dev/full: No space left on device.\n"
    )
