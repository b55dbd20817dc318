"""Runs tests with a sanitizer: one pytest for each folder, and the environment that the sanitizers need."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from building import FLAGS

__all__ = ["FOLDERS", "Excluded", "MissingError", "Outcome", "environment", "excluded", "run"]

HERE = Path(__file__).parent
#: Folders of tests/ whose tests call C++, by sanitizer. Those of one thread have nothing to tell TSan.
FOLDERS: dict[str, tuple[str, ...]] = {
    "address": (
        "native",
        "cache",
        "cast",
        "dispatch",
        "regions",
        "promoting",
        "modules",
        "checking",
        "integrations",
        "cuda",
    ),
    "thread": ("native", "cache", "regions", "checking", "integrations", "cuda"),
}
#: In a report of UndefinedBehaviorSanitizer. GCC's writes them to stderr if AddressSanitizer is there too.
_UNDEFINED = ": runtime error: "
_NO_TESTS = 5  # pytest's exit status if it has deselected all


class MissingError(Exception):
    """The compiler or its runtime is not installed."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """Tests that do not run with a sanitizer.

    Attributes:
        tests: The beginning of their ids.
        sanitizers: With which ones.
        reason: Why.
    """

    tests: str
    sanitizers: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class Outcome:
    """What became of the tests of a folder.

    Attributes:
        name: The folder.
        counts: The numbers of tests that passed, failed and were skipped.
        failures: The ids of those that failed. If pytest itself failed, how.
        seconds: How long they ran.
    """

    name: str
    counts: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[str] = ()
    seconds: float = 0.0


def excluded(sanitizer: str) -> list[Excluded]:
    """Returns the tests that do not run with a sanitizer, from excluded.toml."""
    tables = tomllib.loads((HERE / "excluded.toml").read_text(encoding="utf-8"))["excluded"]
    entries = [Excluded(table["tests"], tuple(table["sanitizers"]), table["reason"]) for table in tables]
    return [entry for entry in entries if sanitizer in entry.sanitizers]


def environment(sanitizer: str, copy: Path, logs: Path) -> dict[str, str]:
    """Returns the environment in which Python loads an extension with this sanitizer.

    Args:
        sanitizer: A key of `FLAGS`.
        copy: The copy of the checkout (building.py).
        logs: The folder for the reports. Each process writes a file of its own, if it has a report.

    Raises:
        MissingError: The compiler has no such library.
    """
    # Python itself has no sanitizer in it, so the runtime has to be there before its first allocation. libstdc++ too:
    # the runtime looks for the original of `__cxa_throw` when it starts.
    libraries = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}[sanitizer]
    options = {
        "ASAN_OPTIONS": (
            f"log_path={logs}/asan",
            "halt_on_error=0",
            "detect_stack_use_after_return=1",
            "allocator_may_return_null=1",  # tests ask for more memory than there is
            "quarantine_size_mb=32",  # less than what the tests free whose subject is the process's memory
            "detect_leaks=1",
            "exitcode=0",  # a leak of Python's fails no process; `reports.counted` chooses ours
        ),
        "LSAN_OPTIONS": (f"suppressions={HERE / 'address.supp'}", "print_suppressions=0"),
        "UBSAN_OPTIONS": (f"log_path={logs}/ubsan", "print_stacktrace=1"),
        "TSAN_OPTIONS": (
            f"log_path={logs}/tsan",
            "halt_on_error=0",
            "exitcode=0",
            "die_after_fork=0",
            "history_size=7",
            "second_deadlock_stack=1",
            # libtorch and Python are not instrumented. TSan sees some of their accesses, and less of what orders them.
            "ignore_noninstrumented_modules=1",
            f"suppressions={HERE / 'thread.supp'}",
        ),
    }
    return {
        **os.environ,
        **{name: ":".join(words) for name, words in options.items()},
        "LD_PRELOAD": " ".join(_library(name) for name in (*libraries, "libstdc++.so")),
        "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tests"), str(copy / "tools")]),
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide what becomes of its blocks
        "TORCH_PROMOTE_CXXFLAGS": " ".join(FLAGS[sanitizer]),  # for the stand-in device, which tests compile
    }


def _library(name: str) -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise MissingError("there is no g++. Install it.")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).is_absolute():
        raise MissingError(f"{compiler} has no {name}. Install the libraries of GCC's sanitizers.")
    return str(Path(found.strip()).resolve())


def run(sanitizer: str, name: str, tests: Sequence[str], copy: Path, out: Path, limit: float) -> Outcome:
    """Runs tests in one process with a sanitizer.

    Args:
        sanitizer: A key of `FLAGS`.
        name: A word for the table and for files.
        tests: Arguments of pytest.
        copy: The copy of the checkout.
        out: The folder for the log of pytest; the reports are in its folder `reports`.
        limit: The time limit in seconds.
    """
    results, log = out / f"{name}.xml", out / f"{name}.log"
    results.unlink(missing_ok=True)
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=900", f"--junit-xml={results}", *tests]
    arguments += ["--capture=sys"]  # what C++ writes to stderr goes to the log
    arguments += [f"--deselect={entry.tests}" for entry in excluded(sanitizer)]
    arguments += (
        ["--device=cuda-stand-in", "-m", "not needs_gpu and not slow"] if "cuda" in Path(tests[0]).parts else []
    )
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=copy,
            env=environment(sanitizer, copy, out / "reports"),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    if _UNDEFINED in said:
        (out / "reports" / f"stderr.{name}").write_text(said, encoding="utf-8")
    return _outcome(name, results, status, time.monotonic() - begin)


def _outcome(name: str, results: Path, status: int | None, seconds: float) -> Outcome:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    if results.exists():
        for case in ElementTree.parse(results).iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts[kind] += 1
            if kind == "failed":
                failures.append(f"{case.get('classname')}::{case.get('name')}")
    if status is None:
        failures.append("it reached its time limit")
    elif not results.exists():
        failures.append(f"pytest wrote no results and ended with status {status}")
    elif status not in (0, 1) or (status == 1 and not failures):
        failures.append("no test ran" if status == _NO_TESTS else f"pytest ended with status {status}")
    return Outcome(name, counts, failures, seconds)
