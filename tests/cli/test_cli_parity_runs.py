"""`torch-promote parity` on the real samples, as a process, in shards, and interrupted."""

from __future__ import annotations

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
import torch

import torch_promote
from helpers import stand_in_runner
from helpers.command_line import Capture, cells_of, error_of, terminal_of_80_columns, text_of, wide
from helpers.stand_in_runner import stand_in
from helpers.subprocesses import environment, run_python
from torch_promote import my_autocast
from torch_promote.cli.program import main
from torch_promote.parity import entry_run

__all__ = ["stand_in", "terminal_of_80_columns", "wide"]  # fixtures

ROOT = Path(torch_promote.__file__).parent.parent


# --- the real samples


def test_entries_pass(capsys: Capture, wide: None) -> None:
    lines = cells_of(text_of(capsys, "parity", "--ops", "aten::mm", "mm", "--dtypes", "float32", "--jobs", "0"))
    figures = {" ".join(line[:2]): line[2:] for line in lines if line}
    assert figures["rows checked"][0] == "1"
    assert ["entries", "2"] in lines
    assert ["mismatches", "0"] in lines
    assert ["No", "mismatch,", "and", "no", "stale", "known", "gap."] in lines


def test_a_planted_bug_is_found_and_its_line_reproduces_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    def flipped(*arguments: Any) -> my_autocast:
        return my_autocast(*arguments, overrides={"bmm": "fp32"})

    with monkeypatch.context() as planted:
        planted.setattr(entry_run, "my_autocast", flipped)
        assert main(["parity", "--ops", "mm", "bmm", "--dtypes", "float32", "--jobs", "0"]) == 1
        out = capsys.readouterr().out
        lines = re.findall(r"(?m)^    reproduce with: (torch-promote .*)$", out)
        assert lines
        assert all(" --ops bmm " in line for line in lines)
        assert re.search(r"(?m)^bmm, sample float32/\d+/\w+: dtype, ours against stock$", out)
        again = shlex.split(lines[0])[1:]
        assert main([*again, "--jobs", "0"]) == 1
        assert lines[0] in capsys.readouterr().out
    assert main([*again, "--jobs", "0"]) == 0
    assert ["samples", "1"] in [line[:2] for line in cells_of(capsys.readouterr().out)]


def test_as_a_process_with_workers() -> None:
    command = [sys.executable, "-m", "torch_promote", "parity", "--ops", "aten::mm", "--jobs", "2", "--json"]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    # A PyTorch built for CUDA says where there is none.
    said = [line for line in process.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (process.returncode, said) == (0, [])
    data = json.loads(process.stdout)
    assert (data["torch"], data["status"], data["totals"]["mismatches"]) == (torch.__version__, 0, 0)
    assert [entry["rows"] for entry in data["entries"]] == [["aten::mm"]]


def test_list(capsys: Capture) -> None:
    everything = json.loads(text_of(capsys, "parity", "--list", "--json"))
    assert {entry["source"] for entry in everything} == {"row", "promotion", "autocast_lists", "op_db"}
    shards = [json.loads(text_of(capsys, "parity", "--list", "--shard", f"{n}/3", "--json")) for n in (1, 2, 3)]
    assert sorted(itertools.chain(*shards), key=everything.index) == everything
    assert text_of(capsys, "parity", "--list", "--ops", "aten::mm", "bmm") == (
        "entry     source\naten::mm  row\nbmm       op_db\n\nentries: 2 (op_db 1, row 1)\n"
    )


# --- files and shards


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
    assert ["entries", "2", "of", "4", "(shard", "1/2)"] in cells_of(capsys.readouterr().out)
    assert main(["parity", "--merge", *files, "--junit", str(xml)]) == 1
    merged = re.sub(r" \\\n +", " ", capsys.readouterr().out)  # a shell joins these lines
    assert "reproduce with: torch-promote parity --device cpu --ops mismatching --sample float32/0/mixed" in merged
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


# --- as a process


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
    assert out.endswith("\n\nInterrupted after 1 of 3 entries.\n")
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
    code = "import sys; sys.modules['expecttest'] = None; from torch_promote import cli; sys.exit(cli.main(['parity']))"
    process = run_python(code)
    assert (process.returncode, process.stdout, process.stderr) == (
        2,
        "",
        "torch-promote: error: PyTorch's samples need expecttest, which is not installed: "
        "pip install numpy expecttest.\n",
    )


@pytest.mark.usefixtures("stand_in")
def test_a_dead_worker_is_found_as_a_mismatch(capsys: Capture) -> None:
    assert main(["parity", "--ops", "segfault", "good*", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "segfault: crash, the entry's process\n    the process that ran it died: SIGSEGV\n    Fatal Python error: Seg"
    )
    assert "    reproduce with: torch-promote parity --device cpu --ops segfault\n" in out
    assert ["entries", "3"] in cells_of(out)
