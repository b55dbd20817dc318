"""`make coverage`: which lines of the package, of Python and of C++, the suite executes.

    make coverage                                # the whole suite, in about 20 minutes
    make coverage ARGS="tests/cache -k weights"  # some tests
    make coverage ARGS=--report                  # the last run again

It copies the sources to build/coverage/tree, builds the extension there with counters, runs pytest in the copy under
coverage.py, and prints the tables of coverage.py and gcovr; build/coverage/html shows the lines in the sources.
Processes that tests start or fork count too; processes that are killed do not. Coverage is a tool to find code that
nothing needs or nothing tests: there is no target.

Exit status: that of pytest; 2 if something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tools")]

from helpers.source_copies import SourceCopyError, build_extension, copy_sources

HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "coverage"
COPY = OUT / "tree"
#: -O0, so that each line has instructions of its own. Threads count without losing counts of each other.
COUNTING = "-O0 -g --coverage -fprofile-update=atomic"
SETTINGS = f"""\
[run]
include =
    {COPY}/torch_promote/*
    {COPY}/_torch_promote_hooks.py
data_file = {OUT}/python/counts
parallel = true
patch = _exit, execv, fork, subprocess
plugins = gcov_at_exit
disable_warnings = no-data-collected, module-not-measured, already-imported, trace-changed, couldnt-parse
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
skip_covered = true
show_missing = true
"""


def build() -> None:
    """Copies the sources, as a git repository, and builds the extension of the copy with counters."""
    COPY.mkdir(parents=True, exist_ok=True)
    names = copy_sources(ROOT, COPY)
    git = ("git", "-C", str(COPY))  # tests ask git which files the sources have
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "read-tree", "--empty"], check=True)
    subprocess.run([*git, "update-index", "--add", "-z", "--stdin"], input="\0".join(names), text=True, check=True)
    writer = COPY / "build" / "write_counts.o"
    writer.parent.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-c", "-fPIC", str(HERE / "write_counts.cpp"), "-o", str(writer)], check=True)
    build_extension(COPY, COUNTING, f"--coverage '{writer}'")


def run_suite(arguments: list[str]) -> int:
    """Runs pytest in the copy, whose processes count their lines, and returns its exit status."""
    shutil.rmtree(OUT / "python", ignore_errors=True)
    (OUT / "python").mkdir()
    for file in COPY.glob("build/**/*.gcda"):
        file.unlink()
    paths = [COPY, COPY / "tests", COPY / "tools", HERE / "hooks"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "COVERAGE_PROCESS_START": str(OUT / "coverage.ini")}
    # One process: pytest-xdist kills workers that take more than ten seconds to write their counts.
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=COPY, env={**os.environ, **variables}, check=False).returncode


def report() -> None:
    """Prints the tables, and writes the pages."""
    settings = f"--rcfile={OUT / 'coverage.ini'}"
    coverage = [sys.executable, "-m", "coverage"]
    for command in (
        ["combine", "--keep", settings],
        ["report", settings],
        ["html", settings, "-d", OUT / "html/python"],
    ):
        subprocess.run([*coverage, *map(str, command)], cwd=COPY, check=False)
    page = OUT / "html" / "cpp" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    gcovr = [
        sys.executable,
        "-m",
        "gcovr",
        "--root",
        COPY,
        "--filter",
        f"{COPY}/csrc/",
        "--txt",
        "--html-details",
        page,
    ]
    subprocess.run([*map(str, gcovr), str(COPY / "build")], cwd=COPY, check=False)


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(
        prog="make coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other arguments are pytest's.",
    )
    parser.add_argument("--report", action="store_true", help="run no tests: report on the last run")
    options, arguments = parser.parse_known_args()
    missing = [name for name in ("coverage", "gcovr") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"install {' and '.join(missing)}: pip install -e '.[coverage]'")
    status = 0
    if not options.report:
        try:
            build()
        except SourceCopyError as error:
            parser.error(str(error))
        (OUT / "coverage.ini").write_text(SETTINGS, encoding="utf-8")
        status = run_suite(arguments)
    report()
    return status


if __name__ == "__main__":
    sys.exit(main())
