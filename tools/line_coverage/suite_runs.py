"""Runs the suite in the measured copy. Each of its processes counts the lines that it executes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["forget_counts", "run_suite", "variables", "write_settings"]

HERE = Path(__file__).resolve().parent
#: What coverage.py would write to the stderr of processes, which tests read.
_QUIET = "no-data-collected, module-not-measured, already-imported, trace-changed, no-sysmon, couldnt-parse"
#: Tests that do not run while lines are counted, with the reason.
_LEFT_OUT = {
    "tests/regions/test_installation_like_stock.py::test_an_interrupt_leaves_no_region_open_and_no_object_held": (
        "it interrupts a loop every few microseconds, and reaches its time limit"
    ),
    "tests/docs/test_differences.py::test_an_interrupt_leaves_no_region_open": "it does the same",
    "tests/test_coverage_command.py::test_lines_of_forks_and_replaced_processes_count": (
        "it reads counts with coverage.py, which then loses those of its own process"
    ),
}


def write_settings(copy: Path, out: Path) -> Path:
    """Writes the settings with which coverage.py measures and reports, and returns their file."""
    # From Python 3.12 on, lines can be counted without a trace function, which Dynamo and some tests would notice.
    core = "sysmon" if sys.version_info >= (3, 12) else "ctrace"
    file = out / "coverage.ini"
    file.write_text(
        "[run]\n"
        f"core = {core}\n"
        f"include =\n    {copy}/torch_promote/*\n    {copy}/torch_promote_*.py\n"
        f"data_file = {out}/python/counts\n"
        "parallel = true\n"
        "patch = _exit, execv, fork, subprocess\n"
        "plugins = gcov_at_exit\n"
        f"disable_warnings = {_QUIET}\n"
        "[report]\n"
        "exclude_also =\n    if TYPE_CHECKING:\n    @overload\n",
        encoding="utf-8",
    )
    return file


def forget_counts(objects: Path, out: Path) -> None:
    """Deletes the counts of earlier runs."""
    shutil.rmtree(out / "python", ignore_errors=True)
    (out / "python").mkdir(parents=True)
    for file in objects.glob("*.gcda"):
        file.unlink()


def variables(copy: Path, settings: Path) -> dict[str, str]:
    """Returns the environment variables of a process that is measured, and in which Python finds the copy."""
    paths = [str(copy), str(copy / "tests"), str(copy / "tools"), str(HERE / "hooks"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "COVERAGE_PROCESS_START": str(settings),  # coverage.py's .pth file starts it in each process
    }


def run_suite(copy: Path, settings: Path, jobs: int, arguments: Sequence[str]) -> int:
    """Runs pytest in the copy, with its output on stderr, and returns its exit status."""
    env = {**os.environ, **variables(copy, settings)}
    command = [sys.executable, "-m", "pytest", "--numprocesses", str(jobs), "--dist", "worksteal", *arguments]
    command += ["-p", "patient_workers"]
    command += [f"--deselect={test}" for test in _LEFT_OUT]
    return subprocess.run(command, cwd=copy, env=env, stdout=sys.stderr, check=False).returncode
