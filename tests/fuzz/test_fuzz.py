"""Random programs: some of them in every run, and what `make fuzz` does with those that differ."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from fuzz import shrinking
from fuzz.drawing import MODES, draw_program, function_of, script_of
from fuzz.planted import BUGS
from fuzz.report import Counts
from fuzz.running import Maker, check, quiet
from fuzz.tree import KINDS, Program, names
from helpers import subprocesses

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def first_found(bug: Maker, mode: str, limit: int) -> Program | None:
    """The first program that differs."""
    for number in range(limit):
        program = draw_program(0, number, "cpu", mode)
        if check(program, bug).found:
            return program
    return None


def test_bits_of_programs_are_stocks() -> None:
    counts = Counts()
    for number in range(100):
        program = draw_program(0, number, "cpu")
        verdict = check(program)
        assert not verdict.found, script_of(program, f"{number}: {verdict.detail}")
        counts.add(program, verdict)
    assert counts.outcomes["same"] >= 90
    assert counts.losses > 150
    assert counts.others > 700


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_of_statement_is_drawn(device: str) -> None:
    drawn = Counter(name for number in range(2000) for name in names(draw_program(2, number, device)))
    assert {name for name, kind in KINDS.items() if device in kind.devices} == set(drawn)


def test_a_seed_draws_the_same_program_again() -> None:
    one, other = (function_of(draw_program(3, 14, "cpu")) for _ in range(2))
    assert one == other
    assert one != function_of(draw_program(4, 14, "cpu"))


# --- planted bugs


@pytest.mark.parametrize("mode", MODES[:4])
def test_planted_bugs_are_found(mode: str) -> None:
    bugs = [bug for bug in BUGS.values() if mode in bug.modes and not bug.is_rare]
    assert len(bugs) >= 2
    assert [bug.__name__ for bug in bugs if first_found(bug, mode, 1000) is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.is_rare])
def test_rare_planted_bugs_are_found(name: str) -> None:
    for mode in BUGS[name].modes:
        assert first_found(BUGS[name], mode, 10_000) is not None, mode


def test_a_program_with_a_planted_bug_shrinks_to_a_few_lines() -> None:
    bug = BUGS["NestedDtypeIgnored"]
    found = draw_program(0, 31, "cpu", "weights")
    assert check(found, bug).found
    before = copy.deepcopy(found)
    small = shrinking.shrunk(found, lambda program: check(program, bug).found)
    assert found == before
    assert check(small, bug).found
    assert not check(small).found
    assert_expected_inline(
        function_of(small),
        """\
def program(autocast, note):
    torch.default_generator.manual_seed(7)
    m = nn.ModuleList([nn.Linear(8, 8)])
    x = torch.linspace(-2, 2, 32).view(4, 8)
    h, losses = x, []
    with autocast(dtype=torch.float16, cache="weights"):
        with autocast(dtype=torch.bfloat16, cache="weights"):
            h = m[0](h)
    if any(loss.requires_grad for loss in losses):
        sum(losses).backward()
    note(h, *losses, *(p.grad for p in m.parameters()), *m.parameters())
""",
    )


#: In a process of its own: autograd's threads do not survive the forks of `workers`, and other tests have started them.
FIND_AND_SHRINK = """
from fuzz import workers
from fuzz.planted import BUGS
from fuzz.report import Report
work = workers.Work("cpu", "none", 0, 0, 200, ours=BUGS["ModeIgnored"], enough=1)
report = Report("cpu", 0, 0, 200)
workers.run(work, report)
found = report.found[0]
workers.shrink(work, found)
assert found.statements < 10
print(found.script, end="")
"""
FOLDER = Path(__file__).parents[2] / "tools" / "fuzz"


def command(*arguments: str) -> subprocesses.Program:
    # Programs import what the compiler does.
    code = f"import runpy; runpy.run_path({str(FOLDER)!r}, run_name='__main__')"
    return subprocesses.Program(code, *arguments, compiler=True)


def test_a_program_that_differs_becomes_a_file_that_the_command_runs(tmp_path: Path) -> None:
    script = subprocesses.run_python(FIND_AND_SHRINK, quiet=True, compiler=True).stdout
    file = tmp_path / "found.py"
    file.write_text(script)
    done = command("--program", str(file)).wait()  # the bug is not in the file
    assert (done.returncode, done.stderr) == (0, "")
    assert ": same: " in done.stdout
    # A result that is longer under stock.
    file.write_text(script.replace("    note(", "    note(torch.ones(len(type(autocast).__name__)))\n    note(", 1))
    done = command("--program", str(file)).wait()
    assert done.returncode == 1
    assert "differs: result 0: shape" in done.stdout


# --- crashes, and the command


#: In a process of its own, as above.
CRASH = """
import os, signal
from fuzz import workers
from fuzz.planted import BUGS
from fuzz.report import Report
from fuzz.tree import names

class Crashes(BUGS["ModeIgnored"]):
    def weights_were_written(self):
        os.kill(os.getpid(), signal.SIGSEGV)

work = workers.Work("cpu", "weights", 0, 0, 50, ours=Crashes, enough=1000)
report = Report("cpu", 0, 0, 50)
workers.run(work, report)
crashed = [found for found in report.found if found.detail == "the process died: SIGSEGV"]
assert crashed == report.found
assert crashed
assert all("step_inside" in names(work.program(found.number)) for found in crashed)
assert report.counts.programs >= 10
assert report.counts.outcomes["same"] >= 10
workers.shrink(work, crashed[0])
assert crashed[0].statements <= 4
print("found")
"""


def test_a_crash_is_found_and_the_run_goes_on() -> None:
    done = subprocesses.run_python(CRASH, quiet=True)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_the_report_says_what_was_compared() -> None:
    done = command("--programs", "40", "--seed", "4", "--mode", "all", "--jobs", "2", "--json").wait()
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["seed"], report["asked"], report["found"]) == (4, 40, [])
    counts = report["counts"]
    assert counts["programs"] == sum(counts["outcomes"].values()) == 40
    assert counts["modes"] == {"all": 40}
    assert counts["losses"] > 40
    done = command("--programs", "5", "--jobs", "1").wait()
    assert "5 programs of seed 0 ran on cpu under stock and ours:" in done.stdout
    assert "0 differ" in done.stdout


def test_wrong_options() -> None:
    for arguments, message in (
        (("--programs", "0"), "make fuzz: error: argument --programs: has to be at least 1\n"),
        (("--program", "nothing.py"), "make fuzz: error: there is no file nothing.py\n"),
    ):
        done = command(*arguments).wait()
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(message)


def test_ctrl_c_prints_what_has_run() -> None:
    running = command("--programs", "1000000", "--jobs", "1")
    while not Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text():  # no worker yet
        time.sleep(0.05)
    time.sleep(1)
    os.kill(running.pid, signal.SIGINT)
    done = running.wait()
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert "(of 1,000,000):" in done.stdout or done.stdout == ""


def test_programs_that_raise_compare_too_little() -> None:
    def counts(errors: int) -> Counts:
        return Counts(programs=10, outcomes=Counter({"same": 10 - errors, "same error": errors}))

    assert not counts(2).is_mostly_errors
    assert counts(3).is_mostly_errors
