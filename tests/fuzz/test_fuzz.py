"""Random programs: some of them in every run, and what `make fuzz` does with those that differ."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import expecttest
import pytest

from fuzz import shrinking, workers
from fuzz.drawing import MODES, draw_program
from fuzz.planted import BUGS
from fuzz.report import Counts, Report, as_json, as_text
from fuzz.running import Maker, check, quiet
from fuzz.script import function_of, script_of
from fuzz.tree import KINDS, Program, names
from helpers.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def first_found(bug: Maker, mode: str, limit: int, seed: int = 0) -> Program | None:
    """The first program that differs."""
    for number in range(limit):
        program = draw_program(seed, number, "cpu", mode)
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_bits_of_many_programs_are_stocks(mode: str) -> None:
    for number in range(2000):
        program = draw_program(1, number, "cpu", mode)
        verdict = check(program)
        assert not verdict.found, script_of(program, f"{number}: {verdict.detail}")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_of_statement_is_drawn(device: str) -> None:
    drawn = Counter(name for number in range(3000) for name in names(draw_program(2, number, device)))
    assert {name for name, kind in KINDS.items() if device in kind.devices} == set(drawn)


def test_a_seed_draws_the_same_program_again() -> None:
    one, other = (function_of(draw_program(3, 14, "cpu")) for _ in range(2))
    assert one == other
    assert one != function_of(draw_program(4, 14, "cpu"))


@pytest.mark.parametrize("first", ["drawing", "script", "workers"])
def test_the_order_of_imports_changes_no_program(first: str) -> None:
    drawn = (
        f"import fuzz.{first}, fuzz.drawing, fuzz.script\n"
        "for number in range(20): print(fuzz.script.function_of(fuzz.drawing.draw_program(3, number, 'cpu')))"
    )
    done = run_python(drawn)
    assert done.stdout == "".join(function_of(draw_program(3, number, "cpu")) + "\n" for number in range(20))


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


class TestShrinking(expecttest.TestCase):
    """What a program with a planted bug shrinks to."""

    def test_a_few_lines_are_left(self) -> None:
        bug = BUGS["NestedDtypeIgnored"]
        found = first_found(bug, "weights", 100)
        assert found is not None
        before = copy.deepcopy(found)
        small = shrinking.shrunk(found, lambda program: check(program, bug).found)
        assert found == before
        assert check(small, bug).found
        assert not check(small).found
        self.assertExpectedInline(
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


def test_a_program_that_differs_becomes_a_script_that_runs_by_itself() -> None:
    script = run_python(FIND_AND_SHRINK, quiet=True).stdout
    compile(script, "script", "exec")
    # The bug is not in the script: without it, the results are the same.
    done = run_python(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" results are the same\n")
    # With the bug in the script it fails, as the program did.
    after = "\n\n    def weights_were"
    wrong = script.replace(f"**options){after}", f"**{{**options, 'cache': 'weights'}}){after}")
    assert wrong != script
    done = run_python(wrong)
    assert done.returncode == 1
    assert "AssertionError: result " in done.stderr


def test_scripts_of_all_kinds_run_by_themselves() -> None:
    wanted, scripts = {"overriding", "thread", "custom_fwd", "checkpoint", "step_each", "module_policy"}, []
    number = 0
    while wanted:
        program = draw_program(5, number, "cpu")
        if new := wanted & set(names(program)):
            wanted -= new
            scripts.append(script_of(program, f"Program {number}."))
        number += 1
    for script in scripts:
        done = run_python(script, quiet=True)
        assert (done.returncode, done.stderr) == (0, ""), script


# --- crashes and reports


class _Crashes(BUGS["ModeIgnored"]):  # type: ignore[misc, valid-type]
    def weights_were_written(self) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_is_found_and_the_run_goes_on() -> None:
    work = workers.Work("cpu", "weights", 0, 0, 120, ours=_Crashes, enough=1000)
    report = Report("cpu", 0, 0, 120)
    workers.run(work, report)
    crashed = [found for found in report.found if found.detail == "the process died: SIGSEGV"]
    assert crashed == report.found
    assert crashed
    assert all("step_inside" in names(work.program(found.number)) for found in crashed)
    assert report.counts.programs >= 20
    workers.shrink(work, crashed[0])
    assert crashed[0].statements <= 4


def test_the_report_says_what_was_compared() -> None:
    report = Report("cpu", 6, 0, 60)
    workers.run(workers.Work("cpu", None, 6, 0, 60, jobs=2), report)
    counts = report.counts
    assert counts.programs == sum(counts.outcomes.values()) == 60
    text = as_text(report)
    assert "60 programs of seed 6 ran on cpu under stock and ours:" in text
    assert f"compared bit for bit: {counts.losses:,} losses" in text
    assert "none differs" in text
    assert '"found": []' in as_json(report)


def test_programs_that_raise_compare_too_little() -> None:
    def counts(errors: int) -> Counts:
        return Counts(programs=10, outcomes=Counter({"same": 10 - errors, "same error": errors}))

    assert not counts(2).is_mostly_errors
    assert counts(3).is_mostly_errors
