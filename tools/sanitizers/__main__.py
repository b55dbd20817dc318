"""`make sanitize`: the tests of the C++ code, with the extension built with GCC's sanitizers.

    make sanitize                              # both sanitizers, one by one
    make sanitize ARGS="thread tests/cache"    # one of them, some tests
    make sanitize ARGS=--planted               # does each find its planted bugs (planted.py)?

`address` finds uses of memory that is not there, leaks and undefined behaviour (AddressSanitizer, LeakSanitizer,
UndefinedBehaviorSanitizer, libstdc++'s assertions); `thread` finds data races (ThreadSanitizer). Each is built in a
copy of the checkout, in build/sanitize/, and the checkout's own extension stays as it is. The processes that tests
start are checked too. docs/reliability.md says what the sanitizers cannot see.

Exit status: 0 all tests passed without a report; 1 a test failed, or there is a report; 2 something is missing, or does
not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from planted import PLANTED, Planted
from reports import Report, read

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

_FOR_ALL = ("-O1", "-g", "-fno-omit-frame-pointer")
#: The compiler's options by sanitizer.
FLAGS: dict[str, tuple[str, ...]] = {
    "address": (
        *_FOR_ALL,
        "-fsanitize=address,undefined",
        # Python's own options contain -fwrapv, which makes overflow defined, so that it would not be reported.
        "-fno-wrapv",
        # A report does not end the process: the tests after it run too.
        "-fsanitize-recover=address",
        # The check of virtual calls needs type information that libtorch does not export.
        "-fno-sanitize=vptr",
        # Checks indices and empty optionals. Changes no layout, so libtorch does not have to be built with it.
        "-D_GLIBCXX_ASSERTIONS",
        # GCC documents false positives of this warning in instrumented code.
        "-Wno-error=maybe-uninitialized",
    ),
    "thread": (
        *_FOR_ALL,
        "-fsanitize=thread",
        # TSan does not know fences, and PyTorch's headers have one; docs/reliability.md.
        "-Wno-tsan",
    ),
}
#: Folders of tests/ whose tests call C++, by sanitizer. Those of one thread have nothing to tell TSan.
FOLDERS = {
    "address": ("native", "cache", "cast", "dispatch", "regions", "checking", "integrations", "cuda"),
    "thread": ("native", "cache", "regions", "checking", "integrations", "cuda"),
}
#: Tests that do not run with a sanitizer: the beginnings of their ids. These need an address that is used again, and
#: AddressSanitizer keeps freed memory, to detect its use.
EXCLUDED: dict[str, tuple[str, ...]] = {
    "address": (
        "tests/cache/test_cache_activations.py::test_new_tensors_at_the_address_of_dead_ones_are_cast_again",
        "tests/cache/test_cast_lifetimes.py::test_weights_at_the_address_of_dead_ones_get_casts_of_their_own",
    ),
    # Starts threads in a forked child, which ThreadSanitizer ends if it uses a thread's address again.
    "thread": ("tests/ends/test_ends_of_processes.py::test_workers_that_start_in_a_region",),
}
#: Python itself has no sanitizer in it, so the runtime has to be there before its first allocation.
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
_NO_TESTS = 5  # pytest's exit status if it has deselected all


class MissingError(Exception):
    """Something is not installed, or the extension does not compile."""


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    bad = False
    try:
        for sanitizer in [options.sanitizer] if options.sanitizer != "all" else list(FLAGS):
            out = options.out.resolve() / sanitizer
            environment(sanitizer, out)  # before minutes of compiling
            shutil.rmtree(out, ignore_errors=True)
            (out / "reports").mkdir(parents=True)
            wrong = _planted(sanitizer, out, options.limit) if options.planted else _tests(sanitizer, out, options)
            bad = bad or wrong
    except MissingError as error:
        print(f"sanitize: error: {error}", file=sys.stderr)
        return 2
    return int(bad)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizer", nargs="?", choices=[*FLAGS, "all"], default="all", help="default: one by one")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="as for pytest; default: folders whose tests call C++")
    parser.add_argument("--planted", action="store_true", help="check the sanitizers themselves, with planted bugs")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one pytest (default: %(default)d)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "sanitize", help="where logs and reports go (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.planted and options.tests:
        parser.error("--planted has tests of its own")
    return options


def _tests(sanitizer: str, out: Path, options: argparse.Namespace) -> bool:
    """Runs tests, prints what was found, and returns whether something is wrong."""
    build(sanitizer)
    # One pytest for each folder: tests on the stand-in device need a process of their own.
    groups: dict[str, list[str]] = {} if options.tests else {name: [f"tests/{name}"] for name in FOLDERS[sanitizer]}
    for test in options.tests:
        groups.setdefault("cuda" if "cuda" in Path(test).parts else "chosen", []).append(test)
    failures = [line for name, tests in groups.items() for line in run(sanitizer, name, tests, out, options.limit)]
    found = read(out / "reports")
    print(f"\n{sanitizer}: {len(failures)} failures, {len(found)} reports; logs are in {out}")
    print("".join(f"  not run: {test}\n" for test in EXCLUDED[sanitizer]), end="")
    print("".join(f"  {failure}\n" for failure in failures), end="")
    first: dict[tuple[str, str], Report] = {}
    for report in found:
        first.setdefault((report.kind, report.place), report)
    for place, number in Counter((report.kind, report.place) for report in found).most_common():
        print(f"  {number} x {place[0]}: {place[1]} (first in {first[place].log})")
    return bool(failures or found)


def _planted(sanitizer: str, out: Path, limit: float) -> bool:
    """Builds each bug alone, as it may end the process or corrupt its memory; returns whether one has no report."""
    missed = []
    for number, bug in enumerate(PLANTED[sanitizer]):
        build(sanitizer, bug)
        run(sanitizer, f"planted-{number}", [bug.test], out, limit)
        if not any(bug.explains(report) for report in read(out / "reports")):
            missed.append(bug)
    count = len(PLANTED[sanitizer])
    print(f"{sanitizer}: {count - len(missed)} of {count} planted bugs have a report")
    print("".join(f"  NO REPORT: {bug.kind} in {bug.file}\n" for bug in missed), end="")
    return bool(missed)


def build(sanitizer: str, bug: Planted | None = None) -> None:
    """Copies the sources and compiles the extension there, with a bug if one is given; only what has changed."""
    copy = _copy(sanitizer)
    print(f"{sanitizer}: building in {copy}", file=sys.stderr, flush=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise MissingError(f"{ROOT} has to be a git repository, which says what belongs to the sources")
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for old in [*copy.glob("csrc/**/*.*"), *copy.glob("t*/**/*.py")]:
        if str(old.relative_to(copy)) not in names:
            old.unlink()
    for name in names:
        source, target = ROOT / name, copy / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with the time of now, so that it is compiled
    if bug is not None:
        bug.plant(copy)
    flags = " ".join(FLAGS[sanitizer])
    env = {**os.environ, "TORCH_PROMOTE_CXXFLAGS": flags, "TORCH_PROMOTE_LDFLAGS": flags}
    env.pop("TORCH_PROMOTE_EXTENSION", None)
    setup = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(setup, cwd=copy, env=env, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise MissingError(f"the extension does not compile with {flags}:\n{done.stdout}{done.stderr}")


def _copy(sanitizer: str) -> Path:
    return ROOT / "build" / "sanitize" / sanitizer


def environment(sanitizer: str, out: Path) -> dict[str, str]:
    """Returns the environment in which Python loads an extension with this sanitizer."""
    logs, copy = out / "reports", _copy(sanitizer)
    options = {
        "ASAN_OPTIONS": (
            f"log_path={logs}/asan",
            "halt_on_error=0",
            "detect_stack_use_after_return=1",
            "allocator_may_return_null=1",  # tests ask for more memory than there is
            "quarantine_size_mb=32",  # less than what the tests free whose subject is the process's memory
            "detect_leaks=1",
            "exitcode=0",  # a leak of Python's fails no process; `reports.read` chooses ours
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
        # libstdc++ too: the runtime looks for the original of `__cxa_throw` when it starts.
        "LD_PRELOAD": " ".join(_library(name) for name in (*RUNTIMES[sanitizer], "libstdc++.so")),
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


def run(sanitizer: str, name: str, tests: Sequence[str], out: Path, limit: float) -> list[str]:
    """Runs one pytest with a sanitizer, and returns the tests that failed; what it prints goes to NAME.log."""
    arguments = ["-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-o", "timeout=900", *tests]
    arguments += ["--capture=sys"]  # what C++ writes to stderr goes to the log
    arguments += [f"--deselect={test}" for test in EXCLUDED[sanitizer]]
    if "cuda" in Path(tests[0]).parts:
        arguments += ["--device=cuda-stand-in", "-m", "not needs_gpu and not slow"]
    log = out / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_copy(sanitizer),
            env=environment(sanitizer, out),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    # UndefinedBehaviorSanitizer of GCC writes to stderr if AddressSanitizer is there too.
    if ": runtime error: " in said:
        (out / "reports" / f"stderr.{name}").write_text(said, encoding="utf-8")
    lines = said.splitlines() or ["no output"]
    print(f"{name}: {lines[-1]}", file=sys.stderr, flush=True)
    failures = [line for line in lines if re.match(r"(FAILED|ERROR) tests/", line)]
    if status is None:
        failures.append(f"{name} reached its time limit")
    elif status not in (0, 1) or (status == 1 and not failures):
        failures.append(f"{name}: " + ("no test ran" if status == _NO_TESTS else f"pytest ended with status {status}"))
    return failures


if __name__ == "__main__":
    sys.exit(main())
