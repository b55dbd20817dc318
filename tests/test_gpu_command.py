"""`make gpu` (tests/gpu/): the outcomes of its steps, the page that it writes, and its exit status."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cuda_stand_in
from helpers.subprocesses import environment

FOLDER = Path(__file__).with_name("gpu")
CASES = {
    "passed": '<testcase name="a"/>',
    "failed": '<testcase name="a"><failure message="wrong"/></testcase>',
    "skipped": '<testcase name="a"><skipped type="pytest.skip" message="needs a GPU"/></testcase>',
    "expected": '<testcase name="a"><skipped type="pytest.xfail" message="a limit"/></testcase>',
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("steps")


@pytest.fixture
def page(steps: ModuleType) -> ModuleType:
    return importlib.import_module("page")


def result(*kinds: str) -> str:
    """The result file of pytest for tests of these kinds."""
    counts = f'tests="{len(kinds)}" failures="{kinds.count("failed")}" errors="0"'
    skipped = kinds.count("skipped") + kinds.count("expected")
    cases = "".join(CASES[kind] for kind in kinds)
    return f'<testsuites><testsuite {counts} skipped="{skipped}">{cases}</testsuite></testsuites>'


def outcome_of(steps: ModuleType, folder: Path, text: str, code: int = 0, *, may_be_empty: bool = False) -> Any:
    """The outcome of a step that writes a text and exits with a status."""
    output = folder / "step.xml"
    program = f"import sys; open({str(output)!r}, 'w').write({text!r}); print('the end'); sys.exit({code})"
    step = steps.Step("step", ["-c", program], output, steps._tests, 20, may_be_empty=may_be_empty)
    return steps.run(step, folder / "step.log", 20)


@pytest.mark.parametrize(
    ("kinds", "code", "on_stand_in", "on_gpu"),
    [
        (["passed", "skipped", "expected"], 0, "passed", "passed"),
        (["passed", "failed"], 1, "failed", "failed"),
        (["skipped"], 0, "skipped", "failed"),
        ([], 5, "skipped", "failed"),  # every test is deselected
        (["passed"], 3, "failed", "failed"),  # pytest's internal error
    ],
)
def test_what_becomes_of_a_step(
    steps: ModuleType, tmp_path: Path, kinds: list[str], code: int, on_stand_in: str, on_gpu: str
) -> None:
    for expected, may_be_empty in ((on_stand_in, True), (on_gpu, False)):
        outcome = outcome_of(steps, tmp_path, result(*kinds), code, may_be_empty=may_be_empty)
        assert outcome.status == expected
        assert outcome.log == ("the end" if expected == "failed" else "")
        assert outcome.counts == {
            "passed": kinds.count("passed"),
            "failed": kinds.count("failed"),
            "skipped": kinds.count("skipped"),
            "expected_failures": kinds.count("expected"),
        }
        assert outcome.skipped == ({"needs a GPU": 1} if "skipped" in kinds else {})
        assert outcome.limits == ({"a limit": 1} if "expected" in kinds else {})


def test_a_step_that_writes_no_result_failed(steps: ModuleType, tmp_path: Path) -> None:
    assert outcome_of(steps, tmp_path, "").status == "failed"


def test_a_step_is_stopped_at_its_limit_and_without_time_not_run(steps: ModuleType, tmp_path: Path) -> None:
    step = steps.Step("step", ["-c", "import time; time.sleep(60)"], tmp_path / "step.xml", steps._tests, 0.3)
    outcome = steps.run(step, tmp_path / "step.log", 20)
    assert (outcome.status, outcome.seconds < 20) == ("stopped", True)
    assert steps.run(step, tmp_path / "step.log", 0).status == "not run"


def test_a_gpu_has_every_test_that_is_not_about_the_stand_in(steps: ModuleType, tmp_path: Path) -> None:
    names = {
        device: [step.name for step in steps.steps(device, tmp_path, tiny=False)]
        for device in ("cuda", "cuda-stand-in")
    }
    assert all(len(set(found)) == len(found) for found in names.values())
    assert set(names["cuda-stand-in"]) - set(names["cuda"]) == {
        "stand_in",
        "counts_of_stand_in",
        "commands_on_stand_in",
    }
    assert set(names["cuda"]) - set(names["cuda-stand-in"]) == {"distributed"}
    assert names["cuda"][-2:] == ["parity", "bench"]
    assert not any(step.may_be_empty for step in steps.steps("cuda", tmp_path, tiny=False))


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median * 0.9, "high": median * 1.1}


BENCH = {
    "rounds": 11,
    "results": [
        {
            "suite": "models",
            "case": "MLP | forward",
            "ratio": spread(0.8),
            "times_ns": {"stock": spread(2.5e6), "ours": spread(2e6), "plain": spread(10)},
            "kernels": {"stock": 13, "ours": 12, "plain": 9},
            "peak_bytes": {"stock": 3 * 2**20, "ours": 2560},
        },
        {"suite": "overrides", "case": "ours", "ratio": None, "times_ns": {"ours": spread(5)}, "kernels": {"ours": 1}},
    ],
}


def test_the_page(steps: ModuleType, page: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "bench.json"
    results.write_text(json.dumps(BENCH), encoding="utf-8")
    bench = steps.Step("bench", [], results, steps._bench, 1)
    tests = steps.Step("graphs", [], tmp_path / "graphs.xml", steps._tests, 1)
    outcomes = [
        steps.Outcome(
            tests, "failed", 3, {"passed": 1200, "failed": 1}, {"one GPU": 2}, {"a limit": 1}, "assert 1 == 2"
        ),
        steps.Outcome(bench, "passed", 60, {"cases": 2}),
    ]
    lines = page.page(outcomes, {"GPU": "H200", "torch": "2.13.0+cu130"}).splitlines()
    for line in (
        "| GPU | H200 |",
        "| graphs | failed | 1,200 passed, 1 failed | 3 |",
        "| graphs | one GPU | 2 |",
        "| graphs | a limit | 1 |",
        "assert 1 == 2",
        "| models: MLP \\| forward | 2.5 ms | 2 ms | 0.80 (0.72 to 0.88) |",
        "| models: MLP \\| forward | 13 | 12 | 3.00 MiB | 2.50 KiB |",
    ):
        assert line in lines
    assert not any("overrides" in line for line in lines)  # stock has no such feature


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER), *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_without_a_gpu_the_command_says_what_to_do() -> None:
    done = command(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "finds no GPU: it is" in done.stderr
    assert "make gpu ARGS='--device cuda-stand-in'" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_the_command_on_the_stand_in(tmp_path: Path) -> None:
    if reason := cuda_stand_in.why_not():
        pytest.skip(reason)
    chosen = [f"--step={name}" for name in ("cuda_captured_steps", "bench_counts", "parity", "bench")]
    done = command("--device", "cuda-stand-in", "--tiny", "--no-build", "--out", os.fspath(tmp_path), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| models: MLP, forward | 13 | 13 | " in text
    assert "| bench_counts | needs a GPU; run with --device cuda | 1 |" in text
    assert "| 0 failed" not in text
