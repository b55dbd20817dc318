"""Runs the tests of one PyTorch file in a separate process, under stock or with install() in force."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Run", "run_file"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        outcome: "passed", "failed", "skipped" or "xfailed" (it failed as PyTorch expects). A process that dies, or that
            is stopped at its limit, counts as the failure of the test that ran.
        message: The first line of the reason for a failure or skip.
        opened: The number of regions of ours that it opened in its own process.
        on_key: The number of these regions that switched torch_promote's key on.
    """

    outcome: str
    message: str = ""
    opened: int = 0
    on_key: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The settings for all files.

    Attributes:
        tests: The folder `test` of PyTorch's sources.
        out: The folder for records and logs.
        limit: The time limit in seconds for all tests of a file, under each of the two.
        on_stand_in: Whether "cuda" is the tests' device of host memory (tools/cuda_stand_in).
    """

    tests: Path
    out: Path
    limit: float
    on_stand_in: bool


def run_file(
    run: Run, file: str, chosen: Sequence[str] | None, install: Mapping[str, Any] | None
) -> dict[str, Outcome]:
    """Runs the chosen tests of a file.

    Args:
        run: The settings for all files.
        file: A path below `run.tests`.
        chosen: The names of the test functions to run; None for all.
        install: The arguments of `install`; None for plain PyTorch.

    Returns:
        The outcome of each test by its id. A test for which no time was left has none.
    """
    name = f"{file.removesuffix('.py').replace('/', '.')}.{'stock' if install is None else 'ours'}"
    record, log, plan = (run.out / f"{name}.{kind}" for kind in ("jsonl", "log", "plan.json"))
    for old in (record, log):
        old.unlink(missing_ok=True)
    end = time.monotonic() + run.limit
    outcomes: dict[str, Outcome] = {}
    while True:
        values = {"install": install, "chosen": chosen, "done": list(outcomes), "record": str(record.resolve())}
        plan.write_text(json.dumps(values), encoding="utf-8")
        died = _run(run, file, plan.resolve(), log, install is not None, end - time.monotonic())
        found, is_whole = read(record, died, outcomes)
        if is_whole or time.monotonic() >= end:
            return found
        if len(found) == len(outcomes):  # it died before it ran a test
            return {**found, file: Outcome("failed", f"{died}: see {log}")}
        outcomes = found  # another process runs the tests after the one that it died of


def read(record: Path, died: str, before: Mapping[str, Outcome]) -> tuple[dict[str, Outcome], bool]:
    """Reads a record.

    Args:
        record: The file; it may be missing.
        died: The message for a test that the last process started but did not finish.
        before: The outcomes before the last process.

    Returns:
        The outcomes, and whether the last process reached its end.
    """
    outcomes = dict(before)
    is_whole = False
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        values = json.loads(line)
        is_whole = "end" in values
        if is_whole or values["test"] in before:
            continue
        test = values.pop("test")
        outcomes[test] = Outcome("failed", died) if values["outcome"] == "started" else Outcome(**values)
    return outcomes, is_whole


def _run(run: Run, file: str, plan: Path, log: Path, installs: bool, seconds: float) -> str:
    """Runs pytest once. Returns a message for the test during which it died."""
    options = ["-p", "recording_plugin", "--pytorch-plan", str(plan), "-p", "no:_torch_promote_hooks"]
    # Not PyTorch's settings and conftest, which are written for its own runner and version of pytest.
    options += ["-c", os.devnull, "--rootdir", str(run.tests), "--noconftest", "-p", "no:cacheprovider"]
    options += ["--quiet", "--tb=short", "--show-capture=no"]
    if find_spec("pytest_timeout") is not None:
        options += ["--timeout", "600"]
    stand_in = ["-m", "cuda_stand_in"] if run.on_stand_in else []
    with log.open("a", encoding="utf-8") as text:
        process = subprocess.Popen(
            # -P: the folder that holds the file comes first on the path, as if it were run as a program.
            [sys.executable, "-P", *stand_in, "-m", "pytest", *options, file],
            cwd=run.tests,
            env=_environment(installs),
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to stop what it starts with it
        )
        try:
            return f"the process died with exit status {process.wait(max(seconds, 0))}"
        except subprocess.TimeoutExpired:
            return "stopped: the file has reached its limit"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment(installs: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_PROMOTE_")}
    paths = [str(_HERE), str(_HERE.parent), str(_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if installs:
        kept["TORCH_PROMOTE_AUTOCAST"] = "1"  # for processes that tests start
    return kept
