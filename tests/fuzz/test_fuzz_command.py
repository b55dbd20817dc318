"""The command `make fuzz`: its report, its exit status, and what it does with a script."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fuzz.drawing import draw_program
from fuzz.script import script_of
from helpers.subprocesses import Program

FOLDER = Path(__file__).parents[2] / "tools" / "fuzz"
CODE = f"import runpy; runpy.run_path({str(FOLDER)!r}, run_name='__main__')"


def command(*arguments: str) -> Program:
    return Program(CODE, *arguments)


def test_the_report_as_json() -> None:
    done = command("--programs", "40", "--seed", "4", "--mode", "all", "--jobs", "2", "--json").wait()
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["seed"], report["asked"], report["found"]) == (4, 40, [])
    counts = report["counts"]
    assert counts["programs"] == 40
    assert counts["modes"] == {"all": 40}
    assert counts["losses"] > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--programs", "0"), "make fuzz: error: argument --programs: has to be at least 1\n"),
        (("--program", "nothing.py"), "make fuzz: error: there is no file nothing.py\n"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments).wait()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith(message)


def test_ctrl_c_prints_what_has_run() -> None:
    running = command("--programs", "1000000", "--jobs", "1")
    time.sleep(4)
    os.kill(running.pid, signal.SIGINT)
    done = running.wait()
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert "(of 1,000,000):" in done.stdout or done.stdout == ""


def test_a_script_is_run(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(script_of(draw_program(0, 3, "cpu"), "A program."))
    done = command("--program", str(script)).wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert ": same: " in done.stdout
    # A result that is longer under stock.
    more = "    note(torch.ones(len(type(autocast).__name__)))\n    h, losses"
    script.write_text(script.read_text().replace("    h, losses", more, 1))
    done = command("--program", str(script)).wait()
    assert done.returncode == 1
    assert "differs: result 0: shape" in done.stdout
