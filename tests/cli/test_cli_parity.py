"""`torch-promote parity`: what it prints, and what it says to a wrong command line."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from helpers import stand_in_runner
from helpers.command_line import Capture, cells_of, error_of, terminal_of_80_columns, text_of, wide
from helpers.stand_in_runner import stand_in
from helpers.subprocesses import environment, run_python
from torch_promote import my_autocast
from torch_promote.checking import expectation
from torch_promote.cli.program import main
from torch_promote.parity import entry_run
from torch_promote.reference.ops.infer import NO_RULE

__all__ = ["stand_in", "terminal_of_80_columns", "wide"]  # fixtures

#: The package has a class of this module's name.
crosscheck: Any = importlib.import_module("torch_promote.checking.crosscheck")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")


def printed(capsys: Capture, *arguments: str, status: int) -> str:
    """What goes to stdout, of a command that writes nothing to stderr."""
    assert main(["parity", "--jobs", "0", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.usefixtures("stand_in", "wide")
def test_it_prints_the_report(capsys: Capture) -> None:
    """The report's own tests are in tests/parity."""
    text = printed(capsys, "--ops", "good*", status=0)
    assert text.startswith("parity: cpu, torch ")
    assert "\nNo mismatch, and no stale known gap.\n" in text
    names = ("good", "mismatching", "stale", "refused", "unruled", "gap")
    text = printed(capsys, "--device", "fake-cuda", "--quick", "--stock-only", "--ops", *names, status=1)
    assert "\nMismatches: 1. Stale gaps: 1.\n" in text
    assert "torch-promote parity --device fake-cuda --ops mismatching --sample float32/0/mixed\n" in text
    lines = cells_of(text)
    for line in ("entries 6", "known gaps 2 (differences with a reason)", "aten._strange.default 5", "gap of stale"):
        assert line.split() in lines


@pytest.mark.usefixtures("stand_in")
def test_what_an_op_prints_is_not_in_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--ops", "noisy", "--jobs", "1", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["totals"]["samples"] == 4
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--ops mmm", "no entry is called 'mmm'. Closest: mm, bmm, minimum."),
        ("--sample float32/0/plain", "--sample 'float32/0/plain' needs one entry,"),
        ("--ops bmm --shard 9/9", "--shard 9/9 is empty: there are 1 entries."),
        ("--jobs=-1", "--jobs -1 is not a number of processes."),
        ("--json /no/such/folder/a.json", "--json /no/such/folder/a.json: there is no folder '/no/such/folder'."),
        ("--merge /no/such/file", "cannot read /no/such/file:"),
        ("--merge a.json --quick", "--merge runs nothing, so the only other options that it accepts are --json and"),
        ("--ops mm --sample float32/0/plain --quick", "--sample selects a single sample. Remove --quick and"),
        ("--ops mm --json a.txt --junit a.txt", "--json and --junit both name a.txt. Use a different file for each."),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(capsys: Capture, arguments: str, complaint: str) -> None:
    assert error_of(capsys, "parity", *arguments.split()).startswith(f"torch-promote: error: {complaint}")


@pytest.mark.usefixtures("stand_in")
def test_nothing_checked_is_not_a_pass(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert main(["parity", "--ops", "refused", "--jobs", "0", "--json", str(file)]) == 2
    captured = capsys.readouterr()
    assert "\nNothing was checked.\n" in captured.out
    assert captured.err == (
        "torch-promote: error: nothing was checked: PyTorch has no sample for this selection that it can run.\n"
    )
    assert json.loads(file.read_text())["status"] == 2
    assert main(["parity", "--merge", str(file)]) == 2


# the real samples


def test_a_planted_bug_is_found_and_its_line_reproduces_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    def flipped(*arguments: Any) -> my_autocast:
        return my_autocast(*arguments, overrides={"bmm": "fp32"})

    with monkeypatch.context() as planted:
        planted.setattr(entry_run, "my_autocast", flipped)
        assert main(["parity", "--ops", "mm", "bmm", "--dtypes", "float32", "--jobs", "0"]) == 1
        out = capsys.readouterr().out
        lines = re.findall(r"(?m)^ +reproduce with: (torch-promote .*)$", out)
        assert lines
        assert all(" --ops bmm " in line for line in lines)
        assert re.search(r"(?m)^ *bmm, sample float32/\d+/\w+: dtype, ours against stock$", out)
        again = shlex.split(lines[0])[1:]
        assert main([*again, "--jobs", "0"]) == 1
        assert lines[0] in capsys.readouterr().out
    assert main([*again, "--jobs", "0"]) == 0
    assert ["samples", "1"] in [line[:2] for line in cells_of(capsys.readouterr().out)]


def test_list(capsys: Capture) -> None:
    everything = json.loads(text_of(capsys, "parity", "--list", "--json"))
    assert {entry["source"] for entry in everything} == {"row", "promotion", "op_db"}
    shards = [json.loads(text_of(capsys, "parity", "--list", "--shard", f"{n}/3", "--json")) for n in (1, 2, 3)]
    assert sorted(itertools.chain(*shards), key=everything.index) == everything
    assert text_of(capsys, "parity", "--list", "--ops", "aten::mm", "bmm") == (
        "entry     source\naten::mm  row\nbmm       op_db\n\nentries: 2 (op_db 1, row 1)\n"
    )


# files and shards


@pytest.mark.usefixtures("stand_in")
def test_shards_in_files_are_merged(capsys: Capture, tmp_path: Path) -> None:
    names = ("good*", "mismatching", "gap")
    files = [str(tmp_path / f"{index}.json") for index in (1, 2)]
    xml = tmp_path / "all.xml"
    statuses = [
        main(["parity", "--ops", *names, "--jobs", "0", "--shard", f"{index}/2", "--json", file])
        for index, file in enumerate(files, start=1)
    ]
    assert statuses == [0, 1]
    assert ["entries", "2", "(of", "4,", "shard", "1/2)"] in cells_of(capsys.readouterr().out)
    assert main(["parity", "--merge", *files, "--junit", str(xml)]) == 1
    # On a terminal, too, a command to copy is one line.
    line = "reproduce with: torch-promote parity --device cpu --ops mismatching --sample float32/0/mixed\n"
    assert line in capsys.readouterr().out
    assert len(list(ElementTree.parse(xml).iter("testcase"))) == 4
    assert main(["parity", "--merge", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    whole = json_of_status(capsys, 1, "--ops", *names, "--jobs", "0")
    for seconds_of in (data, whole):
        seconds_of["totals"].pop("seconds")
    assert data == {**whole, "shards": ["1/2", "2/2"]}
    assert error_of(capsys, "parity", "--merge", files[0]) == (
        "torch-promote: error: 2 of 4 entries are missing in the shards 1/2.\n"
    )


def json_of_status(capsys: Capture, status: int, *arguments: str) -> dict[str, Any]:
    assert main(["parity", *arguments, "--json"]) == status
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


# as a process


def test_interrupted_it_stops_its_workers_and_tells_what_it_has(capsys: Capture, tmp_path: Path) -> None:
    marker, file = tmp_path / "pid", tmp_path / "a.json"
    arguments = ["parity", "--ops", "good", "slow", "good.again", "--jobs", "1", "--json", str(file)]
    command = [
        sys.executable,
        "-c",
        f"import sys; from helpers import stand_in_runner; sys.exit(stand_in_runner.main({arguments}))",
    ]
    pipe = subprocess.PIPE
    variables = environment(**{stand_in_runner.MARKER: str(marker)})
    # A group of its own, all of which gets the signal, as all in front of a terminal gets Ctrl-C.
    process = subprocess.Popen(command, env=variables, text=True, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        worker = wait_for(marker)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    assert "\nInterrupted after 1 of 3 entries.\n" in out
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    data = json.loads(file.read_text())
    assert (data["status"], data["interrupted"], [entry["name"] for entry in data["entries"]]) == (130, True, ["good"])
    assert error_of(capsys, "parity", "--merge", str(file)) == (
        "torch-promote: error: shard 1/1 was interrupted. Run it again.\n"
    )


def wait_for(marker: Path) -> int:
    """The number in a file, once that is there."""
    for _ in range(600):
        if marker.exists() and (text := marker.read_text()):
            return int(text)
        time.sleep(0.1)
    pytest.fail("the worker process has not come so far")


def test_without_what_the_samples_need_it_says_so() -> None:
    code = "import sys; sys.modules['expecttest'] = None; from torch_promote.cli.program import main"
    process = run_python(f"{code}; sys.exit(main(['parity']))")
    assert (process.returncode, process.stdout, process.stderr) == (
        2,
        "",
        "torch-promote: error: PyTorch's samples need expecttest, which is not installed: "
        "pip install numpy expecttest.\n",
    )


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
    assert "\nNothing was checked.\n" in captured.out
    assert captured.err.startswith("torch-promote: error: nothing was checked")
    assert captured.err.count("\n") == 1


RUN = ("parity", "--ops", "good*", "mismatching", "--jobs", "0")


@needs_full
@pytest.mark.usefixtures("stand_in", "wide")
@pytest.mark.parametrize("options", [["--json"], ["--junit"]])
def test_a_file_that_cannot_be_written_costs_no_table(capsys: Capture, options: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    others = ["--junit" if options == ["--json"] else "--json", str(other)]
    assert main([*RUN, *options, "/dev/full", *others]) == 2
    captured = capsys.readouterr()
    assert "\nMismatches: 1." in captured.out
    assert captured.err == "torch-promote: error: cannot write /dev/full: No space left on device.\n"
    assert "mismatching" in other.read_text()
