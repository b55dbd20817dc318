"""`make soak`: makes new modules, regions, policies, rules, ops and threads many times, and looks for growth.

    python tools/soak --iterations 20000 --seed 0        # all features, drawn at random
    python tools/soak --only overrides --only rules      # some features, to name the one that grows

It measures the resident memory, what malloc has handed out, Python's blocks and objects, and the sizes of the
registries and caches of torch_promote. A measure is flat if its slope over the last three quarters of the run is at
most a bound, with a confidence of 99%. Ops under new names and torch.compile make PyTorch itself grow; not drawn.

Exit status: 0 everything is flat; 1 something grows, or the run is too short to tell; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if __name__ == "__main__" and "MALLOC_ARENA_MAX" not in os.environ:
    # One arena: otherwise memory of ended threads stays in theirs, and grows for 60,000 iterations.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

import torch
from features import FEATURES
from growth import Growth, growth_of, read
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

import torch_promote as tp

#: The growth of an iteration up to which a measure counts as flat; registries have the last one.
BOUNDS = {"resident": 64.0, "allocated": 32.0, "python blocks": 0.1, "tensors": 0.001, "ours": 0.01}
BOUND_OF_REGISTRIES = 0.005
READINGS = 100


def soak(names: list[str], iterations: int, seed: int, *, quiet: bool) -> dict[str, Growth]:
    """Runs iterations, each of which draws one or two features, and returns the growth of each measure."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", tp.errors.UnusedOverrideWarning)  # a feature of its own asks for them
    every = max(1, iterations // min(READINGS, max(8, iterations // 40)))
    numbers: list[int] = []
    readings: list[dict[str, int]] = []
    console = Console(stderr=True, quiet=quiet)
    for number in track(range(iterations + 1), "soak", console=console, disable=quiet):
        if number % every == 0:
            numbers.append(number)
            readings.append(read())
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(number)
        for name in draw.sample(names, min(len(names), draw.choice((1, 1, 2)))):
            try:
                FEATURES[name](draw, number)
            except Exception as error:
                # Random policies may give an op operands of two dtypes, which PyTorch refuses.
                if isinstance(error, RuntimeError) and "same dtype" in str(error):
                    continue
                error.add_note(f"in iteration {number} of the feature {name}, with seed {seed}")
                raise
    measures = sorted({name for reading in readings for name in reading}, key=lambda name: (name not in BOUNDS, name))
    return {name: growth_of(numbers, [reading.get(name, 0) for reading in readings]) for name in measures}


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], choices=list(FEATURES), help="a feature; repeatable")
    parser.add_argument("--json", action="store_true", help="print the growth of each measure as JSON")
    options = parser.parse_args()
    names = options.only or list(FEATURES)
    if options.iterations < 8:
        parser.error("argument --iterations: a slope needs 8 iterations or more")
    growth = soak(names, options.iterations, options.seed, quiet=options.json)
    verdicts = {name: found.verdict(BOUNDS.get(name, BOUND_OF_REGISTRIES)) for name, found in growth.items()}
    if options.json:
        values = {name: {**vars(found), "verdict": verdicts[name]} for name, found in growth.items()}
        print(json.dumps({"features": names, "seed": options.seed, "measures": values}, indent=1))
    else:
        table = Table(Column("measure", no_wrap=True), "after 1/4", "at the end", "per iteration", "at most", "verdict")
        for name, found in growth.items():
            if name in BOUNDS or found.first != found.last:
                cells = (f"{found.first:,.0f}", f"{found.last:,.0f}", f"{found.slope:.4f}", f"{found.high:.4f}")
                table.add_row(name, *cells, verdicts[name], style="" if verdicts[name] == "flat" else "red")
        Console().print(table)
    return int(set(verdicts.values()) != {"flat"})


if __name__ == "__main__":
    sys.exit(main())
