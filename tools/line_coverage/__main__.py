"""`make coverage`: which lines of the package, of Python and of C++, the suite executes.

It copies the sources to build/coverage/tree, builds the extension there with counters (measured_copy.py), and runs the
suite in the copy (suite_runs.py). Processes that tests start or fork count too. Then it prints a table of the folders
and the lines that were not executed. The pages in build/coverage/html show them in the sources.

Exit status: 0 the tests passed and executed every line; 1 a test failed or a line was not executed; 2 something is
missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tools")]

from helpers.source_copies import SourceCopyError, copy_sources

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "coverage"


def main() -> int:
    """Runs the command; see the module."""
    options, arguments = _options()
    missing = [name for name in ("coverage", "gcovr") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"coverage: error: install {' and '.join(missing)}: pip install -e '.[coverage]'", file=sys.stderr)
        return 2

    import measured_copy
    import suite_runs
    from counted_lines import lines_of_cpp, lines_of_python
    from coverage_report import draw, plain

    out, copy = options.out, options.out / "tree"
    out.mkdir(parents=True, exist_ok=True)
    settings = suite_runs.write_settings(copy, out)
    failed = 0
    try:
        if not options.report:
            copy.mkdir(exist_ok=True)
            measured_copy.make_repository(copy, copy_sources(ROOT, copy))
            measured_copy.build_counting_extension(copy)
            if not options.append:
                suite_runs.forget_counts(measured_copy.objects_of(copy), out)
            failed = suite_runs.run_suite(copy, settings, options.jobs, arguments)
        files = lines_of_python(copy, settings, out / "html" / "python")
        files += lines_of_cpp(copy, measured_copy.objects_of(copy), out / "html" / "cpp")
    except (SourceCopyError, measured_copy.CoverageError) as error:
        print(f"coverage: error: {error}", file=sys.stderr)
        return 2
    print(plain(files) if options.json else draw(files), end="")
    return 1 if failed or any(one.not_executed for one in files) else 0


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="make coverage",
        description="Runs the tests and prints the lines of the package that they do not execute.",
        epilog="Other arguments are pytest's, such as tests/cache or -m ''. Exit status: 0 the tests passed and "
        "executed every line; 1 a test failed or a line was not executed; 2 something is missing.",
    )
    parser.add_argument("--report", action="store_true", help="run no tests: report on the last run")
    parser.add_argument("--append", action="store_true", help="add to the counts of the last run, of the same sources")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the copy and the pages go (default: %(default)s)")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
