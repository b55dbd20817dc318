"""`make sanitize`: the tests of the C++ code, with the extension built with GCC's sanitizers.

`address` finds uses of memory that is not there, leaks and undefined behaviour (AddressSanitizer, LeakSanitizer,
UndefinedBehaviorSanitizer, libstdc++'s assertions); `thread` finds data races (ThreadSanitizer). Each is built in a
copy of the checkout, in build/sanitize/ (building.py), and the checkout's own extension stays as it is. The processes
that tests start are checked too. docs/reliability.md says what the sanitizers cannot see.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tools")]

from building import FLAGS, ROOT, build
from planted import PLANTED, plant, undetected
from reports import Report, counted, read
from suites import FOLDERS, MissingError, Outcome, environment, excluded, run

from helpers.source_copies import SourceCopyError


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    bad = False
    try:
        for sanitizer in [options.sanitizer] if options.sanitizer != "all" else list(FLAGS):
            copy, out = ROOT / "build" / "sanitize" / sanitizer, options.out / sanitizer
            environment(sanitizer, copy, out)  # before minutes of compiling
            print(f"{sanitizer}: building in {copy}", file=sys.stderr, flush=True)
            shutil.rmtree(out, ignore_errors=True)
            (out / "reports").mkdir(parents=True)
            outcomes = []
            for change, groups in (
                _planted(sanitizer) if options.planted else [(None, _chosen(sanitizer, options.tests))]
            ):
                build(sanitizer, copy, change)
                for name, tests in groups.items():
                    outcomes.append(run(sanitizer, name, tests, copy, out, options.limit))
                    print(_line(outcomes[-1]), file=sys.stderr, flush=True)
            found = list(counted(read(out / "reports")))
            print(_summary(sanitizer, outcomes, found, out), end="")
            if options.planted:
                bad = not _all_planted_are_found(sanitizer, found) or bad
            else:
                bad = bool(found) or any(outcome.failures for outcome in outcomes) or bad
    except (SourceCopyError, MissingError) as error:
        print(f"sanitize: error: {error}", file=sys.stderr)
        return 2
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make sanitize",
        description="Runs the tests of the C++ code with GCC's sanitizers in the extension.",
        epilog="Exit status: 0 all tests passed without a report; 1 a test failed, or there is a report; 2 something "
        "is missing, or does not compile.",
    )
    parser.add_argument("sanitizer", nargs="?", choices=[*FLAGS, "all"], default="all", help="default: one by one")
    parser.add_argument(
        "tests",
        nargs="*",
        metavar="TEST",
        help="folders, files or tests, as for pytest; default: the folders of tests/ whose tests call C++ "
        f"({', '.join(FOLDERS['address'])})",
    )
    parser.add_argument(
        "--planted",
        action="store_true",
        help="check the sanitizers themselves: build bugs into the copy (tools/sanitizers/planted.py), run their tests "
        "only, and fail unless each bug has a report",
    )
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for the tests of one folder (default: %(default)d)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "sanitize", help="where logs and reports go (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.planted and options.tests:
        parser.error("--planted has tests of its own")
    options.out = options.out.resolve()
    return options


def _chosen(sanitizer: str, tests: list[str]) -> dict[str, list[str]]:
    """What one pytest runs each, by name: those on the stand-in device need a process of their own."""
    if not tests:
        return {folder: [f"tests/{folder}"] for folder in FOLDERS[sanitizer]}
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault("cuda" if "cuda" in Path(test).parts else "chosen", []).append(test)
    return groups


def _planted(sanitizer: str) -> Iterator[tuple[Callable[[Path], None], dict[str, list[str]]]]:
    """Yields each planted bug and its test. Each is built alone: it may end the process, or corrupt its memory."""
    for number, bug in enumerate(PLANTED[sanitizer]):
        yield functools.partial(plant, bug), {f"planted-{number}": [bug.test]}


def _all_planted_are_found(sanitizer: str, found: list[Report]) -> bool:
    missed = undetected(sanitizer, found)
    count = len(PLANTED[sanitizer])
    print(f"{sanitizer}: {count - len(missed)} of {count} planted bugs have a report")
    for bug in missed:
        print(f"  NO REPORT: {bug.kind} in {bug.file}")
    return not missed


def _line(outcome: Outcome) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items() if number)
    return f"{outcome.name}: {counts or 'nothing ran'} ({outcome.seconds:.0f} s)"


def _summary(sanitizer: str, outcomes: list[Outcome], found: list[Report], out: Path) -> str:
    total = Counter[str]()
    for outcome in outcomes:
        total.update(outcome.counts)
    lines = [f"\n{sanitizer}: {total['passed']} tests passed, {total['failed']} failed, {total['skipped']} skipped"]
    lines += [f"  FAILED {outcome.name}: {failure}" for outcome in outcomes for failure in outcome.failures]
    lines += [f"  not run: {entry.tests} ({entry.reason})" for entry in excluded(sanitizer)]
    lines.append(f"{sanitizer}: {len(found)} reports" + (f", in {out / 'reports'}" if found else ""))
    places = Counter((report.kind, report.place) for report in found).most_common()
    first = {(report.kind, report.place): report.log for report in reversed(found)}
    lines += [f"  {number} x {kind}: {place} (first in {first[kind, place]})" for (kind, place), number in places]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
