"""`make soak`: runs iterations that make new modules, regions, policies, rules, ops and threads, and looks for growth.

    python tools/soak --iterations 20000 --seed 0        # all features, drawn at random, in this process
    python tools/soak --only overrides --only rules      # some features
    python tools/soak --each --iterations 2000           # each feature in a process of its own, and what it grows by

It measures the resident memory, what malloc has handed out, Python's blocks and objects, and the size of every registry
and cache of torch_promote. A measure is flat if its slope over the last three quarters of the run is at most a bound,
with a confidence of 99%. Features that make PyTorch itself grow run with --each only; from the growth of these, the
growth of the same program without torch_promote is subtracted.

Exit status: 0 everything is flat or bounded; 1 something grows, or the run is too short to tell; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if __name__ == "__main__" and "MALLOC_ARENA_MAX" not in os.environ:
    # Registries that keep thousands of entries move from the memory of the main thread, which fills them, to that of
    # the threads that replace the entries. It takes 60,000 iterations until both stay as large as they are.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

from each import soak_each
from features import FEATURES
from soaking import names_of, soak
from table import failed, plot, print_soak, to_json, write_json
from tool_features import ALONE

from torch_promote.cli.output import progress


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see the module."""
    options = _options(argv)
    names = names_of(options.only)
    if options.each:
        return soak_each(options.only or list(FEATURES), options.iterations, options.seed, options.json)
    with progress("soak", options.iterations, quiet=options.json is not None and options.json.name == "-") as tell:
        result = soak(
            names, options.iterations, options.seed, stock=options.stock, full=not options.not_full, tell=tell
        )
    judged = result.judge()
    if options.json is None or options.json.name != "-":
        print_soak(result, judged)
    if options.json is not None:
        write_json(options.json, to_json(result, judged))
    if options.plot is not None:
        plot(result, options.plot)
    return int(failed(judged))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=_iterations, default=20_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], choices=list(FEATURES), help="a feature; repeatable")
    parser.add_argument("--each", action="store_true", help="run each feature in a process of its own")
    parser.add_argument("--stock", action="store_true", help=f"without torch_promote, for: {', '.join(ALONE)}")
    parser.add_argument("--not-full", action="store_true", help="do not fill the registries of the last entries first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write readings and verdicts; - is stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the readings; needs matplotlib")
    options = parser.parse_args(argv)
    if options.stock and not set(options.only or ["all"]) <= set(ALONE):
        parser.error(f"--stock runs the features that it names with --only, of {', '.join(ALONE)}")
    return options


def _iterations(text: str) -> int:
    number = int(text)
    if number < 8:
        raise argparse.ArgumentTypeError(f"a slope needs 8 iterations or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
