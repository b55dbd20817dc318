"""`make test-ecosystem`: programs of training frameworks, unmodified, under stock autocast and under ours.

frameworks.toml lists them, with the pinned versions of the frameworks; programs/ has them as users of the frameworks
write them. Each framework gets a virtual environment of its own in .venv-ecosystem/ (frameworks.py). Each program runs
five times (runs.py) and saves its losses and weights, which are compared bit for bit. Needs the package index for the
environments; programs run without a network.

Exit status: 0 every program passed; 1 a program failed; 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from frameworks import ROOT, EcosystemError, Framework, Program, frameworks
from rich.console import Console
from rich.table import Table
from runs import Verdict, check


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(
        prog="make test-ecosystem", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a framework, or FRAMEWORK/PROGRAM; patterns work; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the programs and exit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--jobs", type=int, default=1, help="programs that run at the same time (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "ecosystem", help="where logs and results go (default: %(default)s)"
    )
    options = parser.parse_args()
    known = {framework.name: framework for framework in frameworks()}
    try:
        chosen = _chosen(options.names, list(known.values()))
        if options.list:
            print("\n".join(f"{program.framework}/{program.name}" for program in chosen))
            return 0
        for name in {program.framework for program in chosen}:
            known[name].make_environment()
    except EcosystemError as error:
        print(f"test-ecosystem: error: {error}", file=sys.stderr)
        return 2

    def one(program: Program) -> Verdict:
        verdict = check(program, known[program.framework], options.out)
        print(f"{program.framework}/{program.name}: {verdict.status}", file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(one, chosen))
    if options.json:
        print(json.dumps([{**asdict(verdict), "status": verdict.status} for verdict in verdicts], indent=2))
    else:
        _print(verdicts, options.out)
    return int(any(verdict.status == "FAILED" for verdict in verdicts))


def _chosen(names: list[str], known: list[Framework]) -> list[Program]:
    every = [program for framework in known for program in framework.programs]
    chosen: list[Program] = []
    for name in names or ["*"]:
        framework, _, rest = name.partition("/")
        found = [one for one in every if fnmatch(one.framework, framework) and fnmatch(one.name, rest or "*")]
        if not found:
            raise EcosystemError(f"no program matches {name!r}. The frameworks: {', '.join(one.name for one in known)}")
        chosen += [one for one in found if one not in chosen]
    return chosen


def _print(verdicts: Sequence[Verdict], out: Path) -> None:
    """Prints a table, and the problems."""
    table = Table("framework", "version", "program", "status", "bits", "key ran", "override acts", "seconds")
    cells = {None: "-", True: "yes", False: "NO"}
    for verdict in verdicts:
        program = verdict.program
        acts = cells if program.autocast else {None: "-", True: "no regions", False: "UNEXPECTED"}
        table.add_row(
            program.framework,
            verdict.version,
            program.name,
            verdict.status,
            cells[verdict.same_bits],
            acts[verdict.key_ran],
            acts[verdict.override_acts],
            f"{verdict.seconds:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(table)
    for verdict in verdicts:
        for line in verdict.problems:
            console.print(f"{verdict.program.framework}/{verdict.program.name}: {line}", soft_wrap=True)
    console.print(f"logs are in {out}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
