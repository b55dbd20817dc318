"""`make fuzz`: random training programs under stock autocast and under ours. Every bit has to be the same.

    make fuzz                                                      # 10,000 programs on the CPU
    make fuzz ARGS="--device cuda-stand-in --programs 100000 --seed 7"
    make fuzz ARGS="--mode persistent --json"
    make fuzz ARGS="--program out/fuzz/cpu-0-1234.py"              # a script that was found

A program that differs is made smaller, and written to out/fuzz/, for --program. docs/reliability.md says what is drawn.

Exit status: 0 no program differs; 1 a program differs; 2 wrong options, or something is missing; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import cuda_stand_in

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see the module."""
    options = _options(argv)
    if options.program and not options.program.is_file():
        print(f"make fuzz: error: there is no file {options.program}", file=sys.stderr)
        return 2
    if options.device == "cuda-stand-in":
        if reason := cuda_stand_in.why_not():
            print(f"make fuzz: error: {reason}", file=sys.stderr)
            return 2
        cuda_stand_in.start()
    from fuzz import running
    from fuzz.report import Report, as_json, as_text

    running.computes_in_host_memory(options.device == "cuda-stand-in")
    if options.program:
        return _one(options.program, "cpu" if options.device == "cpu" else "cuda")

    from fuzz import workers
    from torch_promote.cli.output import progress

    work = workers.Work(
        options.device, options.mode, options.seed, options.first, options.programs, options.jobs, options.enough
    )
    report = Report(options.device, options.seed, options.first, options.programs)
    status = 0
    try:
        with progress("programs", options.programs, quiet=True) as step:
            workers.run(work, report, step)
        for found in report.found:
            workers.shrink(work, found)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except workers.GeneratorError as error:
        print(f"make fuzz: error: {error}", file=sys.stderr)
        status = 2
    for found in report.found:
        if found.script:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{options.device}-{options.seed}-{found.number}.py"
            path.write_text(found.script, encoding="utf-8")
            found.path = str(path)
    print(as_json(report) + "\n" if options.json else as_text(report), end="")
    if not status and report.counts.is_mostly_errors:
        print("make fuzz: error: too many programs end with an error, so too little was compared", file=sys.stderr)
        status = 2
    return status or int(bool(report.found))


def _options(argv: list[str] | None) -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=_positive, default=10_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed has other programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda-stand-in", "cuda"), default="cpu")
    parser.add_argument(
        "--mode",
        choices=("weights", "persistent", "all", "none", "mixed"),
        help="the cache mode; mixed: each region has its own (default: each program has one of these)",
    )
    parser.add_argument(
        "--jobs", type=_positive, default=len(os.sched_getaffinity(0)), help="processes (default: one for each core)"
    )
    parser.add_argument(
        "--enough", type=_positive, default=5, help="stop after so many that differ (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", help="where scripts go (default: out/fuzz)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--program", type=Path, metavar="FILE", help="run a script that was found, and nothing else")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("has to be at least 1")
    return number


def _one(path: Path, device: str) -> int:
    from fuzz.running import check_function, quiet

    with quiet():
        module = runpy.run_path(str(path), run_name="found")
        if "program" not in module:
            print(f"make fuzz: error: {path} defines no function `program`", file=sys.stderr)
            return 2
        verdict = check_function(module["program"], device)
    print(f"{path}: {verdict.what}: {verdict.detail or f'{verdict.compared} results compared'}")
    return int(verdict.found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first program
        print("interrupted", file=sys.stderr)
        sys.exit(130)
