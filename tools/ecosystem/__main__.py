"""`make test-ecosystem`: programs of training frameworks, unmodified, under stock autocast and under ours.

Each folder here is a framework: `requirements.txt` pins it, `programs.toml` lists its programs (programs.py documents
the keys), and the programs are written as users of the framework write them. Each framework gets a virtual environment
of its own in .venv-ecosystem/ (environments.py). Each program runs five times (runs.py) and saves its losses and
weights, which are compared bit for bit. Needs the package index for the environments; programs run without a network.

Exit status: 0 every program that ran passed; 1 a program failed; 2 something is missing, or none ran.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from environments import BrokenEnvironmentError, Environment, environment_of
from programs import Program, ProgramsError, frameworks, programs_of
from runs import Verdict, check
from verdicts import draw, plain

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def main() -> int:
    """Runs the command; see the module."""
    options = _options()
    try:
        chosen = _chosen(options.names, options.folder)
        if options.list:
            print("\n".join(f"{program.framework}/{program.name}" for program in chosen))
            return 0
        found = [program for program in chosen if not program.missing and program.script()]
        environments = _environments(found)
    except (ProgramsError, BrokenEnvironmentError) as error:
        print(f"test-ecosystem: error: {error}", file=sys.stderr)
        return 2

    def one(program: Program) -> Verdict:
        if program.missing:
            verdict = Verdict(program, "-", not_run=f"say where its script is: {program.variable}=PATH")
        else:
            verdict = check(program, environments[program.framework], options.out)
        status = "passed" if verdict.passed else "FAILED" if verdict.failed else "not run"
        print(f"{program.framework}/{program.name}: {status} ({verdict.seconds:.0f} s)", file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(one, chosen))
    print(plain(verdicts) if options.json else draw(verdicts, options.out), end="")
    return 1 if any(verdict.failed for verdict in verdicts) else 0 if found else 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make test-ecosystem",
        description="Runs programs of training frameworks under stock autocast and under torch_promote.",
        epilog="Exit status: 0 every program that ran passed; 1 a program failed; 2 something is missing, or none ran.",
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
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)  # for tests of this command
    return parser.parse_args()


def _chosen(names: list[str], folder: Path) -> list[Program]:
    every = [program for framework in frameworks(folder) for program in programs_of(framework)]
    known = sorted({program.framework for program in every})
    chosen = []
    for name in names or ["*"]:
        framework, _, rest = name.partition("/")
        found = [one for one in every if fnmatch(one.framework, framework) and fnmatch(one.name, rest or "*")]
        if not found:
            raise ProgramsError(f"no program matches {name!r}. The frameworks: {', '.join(known)}. See --list")
        chosen += [one for one in found if one not in chosen]
    return chosen


def _environments(chosen: list[Program]) -> dict[str, Environment]:
    folders = {program.framework: program.folder for program in chosen}
    return {name: environment_of(folder, ROOT) for name, folder in folders.items()}


if __name__ == "__main__":
    sys.exit(main())
