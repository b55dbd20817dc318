"""The pytest option --record-numerics: what is stored, what is compared, and which tests fail."""

from __future__ import annotations

import gzip
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.pytest_runs import Run, ends, plain_pytester
from torch_promote.cli.program import parse_arguments
from torch_promote.observe.observer import _prepare
from torch_promote.reference import promotion as promotion_table

__all__ = ["plain_pytester"]  # a fixture

pytest_plugins = ["pytester"]

#: `step` is a training step. What is different in it is in the variable PLANTED.
TOP = """
    import os, unittest, pytest, torch, torch_promote as tp

    numerics = pytest.mark.record_numerics
    planted = os.environ.get("PLANTED", "")

    @pytest.fixture
    def model():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        with torch.no_grad():
            model[2].weight[0] *= 1.01 if planted == "weight" else 1
        return model

    def step(model):
        torch.manual_seed(planted == "seed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tp.my_autocast("cpu", overrides={"linear": "fp32"} if planted == "policy" else None):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def run(plain_pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Writes a test file below `TOP`, and runs pytest on it with the plugin and the folder `stored`."""

    def run(code: str, *arguments: str, planted: str = "", processes: bool = False) -> pytest.RunResult:
        monkeypatch.setenv("PLANTED", planted)
        plain_pytester.makepyfile(test_it=TOP + code)
        options = "-p", "_torch_promote_hooks", "-p", "no:cacheprovider", "--strict-markers", "-rA"
        start = plain_pytester.runpytest_subprocess if processes else plain_pytester.runpytest_inprocess
        return start(*options, *(arguments or ("--record-numerics=stored",)))

    return run


def summary(result: pytest.RunResult) -> str:
    """What the plugin says at the end, without the folder."""
    (line,) = [line for line in result.outlines if re.match("torch_promote: .*compared", line)]
    return line.removeprefix("torch_promote: ").rpartition(" (")[0]


def files() -> list[str]:
    """The names in the folder of recordings, without the hash and the suffix."""
    return sorted(re.sub(r"-[0-9a-f]{8}(\.new)?\.jsonl\.gz$", r"\1", name) for name in os.listdir("stored"))


TWO = """
    def test_before(): torch.randn(3)  # from the state of the process

    @numerics
    def test_step(model): step(model)

    @numerics(tolerance=0.02)
    class Test:
        def test_step(self, model): step(model)
"""


def test_a_recording_is_stored_compared_and_replaced(run: Run) -> None:
    first = run(TWO)
    first.assert_outcomes(passed=3)
    assert summary(first) == "recorded 2 new tests, compared 0"
    names = ["test_it-Test-test_step", "test_it-test_step"]
    assert files() == names
    again = run(TWO)
    again.assert_outcomes(passed=3)
    assert summary(again) == "compared 2"
    alone = run(TWO, "--record-numerics=stored", "test_it.py::test_step")  # another state of the generators
    assert summary(alone) == "compared 1"

    changed = run(TWO, planted="weight")
    assert ends(changed) == {"test_before": "PASSED", "test_step": "FAILED", "Test::test_step": "PASSED"}
    assert summary(changed) == "compared 2, 1 differs"
    assert files() == [*names, "test_it-test_step.new"]  # of a test that passes, nothing is kept

    replaced = run(TWO, "--record-numerics=stored", "--record-numerics-update", planted="weight")
    replaced.assert_outcomes(passed=3)
    assert summary(replaced) == "compared 0, replaced 2"
    assert files() == names
    bits = {path.name: path.read_bytes() for path in Path("stored").iterdir()}
    update = "--record-numerics=stored", "--record-numerics-update"
    assert summary(run(TWO, *update, planted="weight")) == "compared 2"
    assert bits == {path.name: path.read_bytes() for path in Path("stored").iterdir()}
    run(TWO).assert_outcomes(passed=2, failed=1)


def test_strict_fails_a_test_without_a_recording(run: Run) -> None:
    strict = "--record-numerics=stored", "--record-numerics-strict"
    first = run(TWO, *strict)
    assert ends(first) == {"test_before": "PASSED", "test_step": "FAILED", "Test::test_step": "FAILED"}
    assert summary(first) == "compared 0, 2 without a recording"
    first.stdout.fnmatch_lines(
        ["record_numerics: this test has no recording, *stored/test_it-test_step-*.jsonl.gz'. Run it once without --r*"]
    )
    assert files() == []
    run(TWO)
    strictly = run(TWO, *strict)
    strictly.assert_outcomes(passed=3)
    assert summary(strictly) == "compared 2"
    run(TWO, *strict, planted="weight").assert_outcomes(passed=2, failed=1)


@pytest.mark.parametrize(
    ("planted", "kind", "verdict"),
    [
        (
            "weight",
            "weight",
            "The parameter 2.weight has other contents (relative L2 *) when aten::linear in 2 reads *",
        ),
        ("policy", "policy", "aten::linear in 0, on equal inputs: float32 -> bfloat16 -> bfloat16 in A, float32 *"),
        pytest.param(
            *("seed", "input", "aten::randn in (model) draws other random numbers: the states of the generator cpu *"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure(run: Run, planted: str, kind: str, verdict: str) -> None:
    run(TWO).assert_outcomes(passed=3)
    result = run(TWO, planted=planted)
    lines = Path("test_it.py").read_text(encoding="utf-8").split("\n")
    number = next(number for number, line in enumerate(lines, 1) if "loss = " in line)
    result.stdout.fnmatch_lines(
        [
            "*_ test_step _*",
            f"Different from step 0 on: {verdict}",
            f"    at test_it.py:{number}",
            "A is the stored recording, and B this run. To store *, run it with --record-numerics-update.",
            f"FAILED *::test_step - Failed: Different from step 0 on: {verdict}",
        ]
    )
    assert "numerics_plugin.py" not in result.stdout.str()
    command = next(line for line in result.outlines if "torch-promote diff" in line).strip()
    stored, new = shlex.split(command)[2:4]
    assert Path(stored).name == Path(new).name.replace(".new", "")
    assert tp.diff(stored, new).kind == kind
    assert callable(parse_arguments(shlex.split(command)[1:]).run)


def test_the_largest_error_is_said_with_a_tolerance(run: Run) -> None:
    code = "    @numerics(tolerance=1e-9)\n    def test_it(model): step(model)"
    run(code)
    run(code, planted="weight").stdout.fnmatch_lines(["    The largest * is *, and the tolerance is 1e-09."])


def test_a_tolerance_does_not_excuse_other_calls(run: Run) -> None:
    code = "    @numerics(tolerance=0.5)\n    def test_it(): torch.ones(2).sin() if planted else torch.ones(2).exp()"
    run(code)
    result = run(code, planted="call")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["    Only A calls aten::exp, at test_it.py:*", "    Only B calls aten::sin, at *"])


PHASES = """
    @pytest.fixture
    def before():
        yield torch.ones(2) * len(planted)
        torch.ones(2).exp()

    @numerics
    def test_fixture(before): before.shape, torch.ones(2) + 1

    @numerics
    def test_fails():
        torch.ones(2) + 1
        assert planted == "nothing"

    @numerics
    def test_skip():
        torch.ones(2) + 1
        pytest.skip("not now")

    @numerics
    @pytest.mark.xfail(strict=True)
    def test_expected():
        torch.ones(2) + 1
        raise ValueError

    @numerics
    def test_subtests(subtests):
        with subtests.test(): torch.ones(2) + 1
        with subtests.test(): torch.ones(2) * 2

    @numerics
    def test_failing_subtests(subtests):
        with subtests.test(): assert not torch.ones(2).any()
        with subtests.test(): torch.ones(2) * 2

    @numerics
    class Test(unittest.TestCase):
        def setUp(self): self.x = torch.ones(2)
        def test_good(self): self.x + 1
        def test_fails(self): self.assertEqual((self.x + 1).sum().item(), 5)
        def test_skip(self): self.x + 1; self.skipTest("not now")
        @unittest.expectedFailure
        def test_expected(self): self.x + 1; self.fail()
        def test_sub(self):
            with self.subTest(): self.x + 1
        def test_failing_sub(self):
            with self.subTest(): self.fail()
            with self.subTest(): self.x + 1
"""


def test_only_the_call_phase_of_tests_that_pass_is_recorded(run: Run) -> None:
    good = ["test_fixture", "Test::test_good", "Test::test_sub", *(["test_subtests"] if _HAS_SUBTESTS else [])]
    result = run(PHASES)
    assert {name: end for name, end in ends(result).items() if name in good} == dict.fromkeys(good, "PASSED")
    assert ends(result)["test_expected"] == ends(result)["Test::test_expected"] == "XFAIL"
    assert ends(result)["test_fails"] == ends(result)["Test::test_fails"] == "FAILED"
    assert files() == sorted("test_it-" + name.replace("::", "-") for name in good)
    assert summary(result) == f"recorded {len(good)} new tests, compared 0"
    assert "numerics_plugin.py" not in result.stdout.str()
    assert summary(run(PHASES, planted="fixture")) == f"compared {len(good)}"


_HAS_SUBTESTS = int(pytest.__version__.partition(".")[0]) >= 9


NAMES = """
    @numerics
    @pytest.mark.parametrize("what", ["a/b\\\\c:d*?", "x" * 500, "x" * 501, "é", "CON", "con", torch.float32])
    def test_it(what): torch.ones(2) + 1

    @numerics
    @pytest.mark.xdist_group("all")
    def test_group(model): step(model)

    @numerics
    def test_differs(): torch.ones(2) + (planted == "some")

    def test_mismatch(): torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)
"""


def test_xdist_and_the_crosscheck(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.int16), torch.int32)  # a bug in the reference
    pytester.makeconftest(  # in the processes, too
        """
        def pytest_runtest_setup():
            import torch
            from torch_promote.reference import promotion

            promotion._TABLE[torch.int8, torch.int16] = torch.int32
        """
    )
    alone = run(NAMES, "--record-numerics=stored", "--torch-promote-crosscheck=bits")
    assert summary(alone) == "recorded 9 new tests, compared 0"
    names = os.listdir("stored")
    assert len({name.lower() for name in names}) == len(names) == 9
    assert all(re.fullmatch(r"test_it-[\w-]+-[0-9a-f]{8}\.jsonl\.gz", name, re.ASCII) for name in names), names
    assert max(map(len, names)) <= 130
    options = "-n2", "--dist=loadgroup", "--torch-promote-crosscheck=bits", "--record-numerics=stored"
    shared = run(NAMES, *options, planted="some", processes=True)
    shared.assert_outcomes(passed=8, failed=2)
    assert summary(shared) == "compared 9, 1 differs"
    shared.stdout.fnmatch_lines(["FAILED *::test_differs - Failed: Different from step 0 on: *"])
    for title in ("tests checked", "calls", "checked against the reference", "mismatches"):
        (mine,), (others,) = ([x for x in result.outlines if x.startswith(f"{title} ")] for result in (alone, shared))
        assert mine == others


def test_a_test_that_the_crosscheck_fails_is_not_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.int16), torch.int32)  # a bug in the reference
    code = """
    def test_first(): pass

    @numerics
    def test_it(): torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)
    """
    result = run(code, "--record-numerics=stored", "--torch-promote-crosscheck")
    assert ends(result) == {"test_first": "PASSED", "test_it": "FAILED"}
    assert files() == []


# --- misuse


def test_an_unreadable_recording(run: Run) -> None:
    code = "    @numerics\n    def test_it(): torch.ones(2) + 1"
    run(code)
    (path,) = Path("stored").iterdir()
    lines = gzip.decompress(path.read_bytes())
    for data, said in (
        (b"nothing", "cannot read the recording *: it is not a gzip file, *"),
        (gzip.compress(lines.replace(b'"version":2', b'"version":99')), "cannot read * its version is 99, and this *"),
    ):
        path.write_bytes(data)
        result = run(code)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"record_numerics: {said} run it with --record-numerics-update."])
    run(code, "--record-numerics=stored", "--record-numerics-update").assert_outcomes(passed=1)
    run(code).assert_outcomes(passed=1)


def test_markers_that_mean_nothing(run: Run) -> None:
    code = """
    @numerics
    def test_nothing(): torch.manual_seed(0)

    @numerics(1e-3, depth=3)
    def test_arguments(): pass

    @numerics(tolerance=-1)
    def test_tolerance(): pass
    """
    result = run(code)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "record_numerics: no call of an op was recorded. * Call the model in the test, or remove the marker.",
            "marker record_numerics takes tolerance= only, got 0.001, depth.",
            "marker record_numerics: tolerance=-1 is not a relative L2 error. Legal: a number from 0 up, or None.",
        ]
    )
    assert os.listdir("stored") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record-numerics=test_it.py"], "ERROR: *: cannot record to '*test_it.py': it is a file. *=DIR."),
        (["--record-numerics=/dev/null/a"], "ERROR: --record-numerics: * '/dev/null/a': it cannot be created. *=DIR."),
        (["--record-numerics="], "*--record-numerics: the name of the folder is empty."),
        (["--record-numerics-update"], "ERROR: --record-numerics-update needs --record-numerics=DIR, *"),
        (["--record-numerics-strict"], "ERROR: --record-numerics-strict needs --record-numerics=DIR, *"),
        (
            ["--record-numerics=a", "--record-numerics-strict", "--record-numerics-update"],
            "ERROR: --record-numerics-strict stores nothing, and --record-numerics-update * Give one of them.",
        ),
    ],
)
def test_an_invalid_folder(run: Run, arguments: list[str], message: str) -> None:
    result = run("    def test_it(): pass", *arguments)
    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert "Traceback" not in result.stderr.str()


def test_a_run_without_a_marked_test_says_so(run: Run) -> None:
    result = run("    def test_it(): torch.ones(2) + 1", "--record-numerics=stored", "--record-numerics-strict")
    assert result.ret is pytest.ExitCode.OK
    assert summary(result) == "compared 0: no test with the marker record_numerics passed"


def test_a_dispatch_key_that_another_library_uses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        raise RuntimeError("taken")

    _prepare.cache_clear()
    monkeypatch.setattr("torch_promote._C.register_dispatch_observer", register)
    result = run("    @numerics\n    def test_it(): torch.ones(2) + 1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["record_numerics: the dispatch key * is taken in this process: another library *"])
