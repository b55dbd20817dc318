"""`make tuned-models`: tunes and trains small models of transformers and timm, and prints the table of docs/tuning.md.

    python tools/tuned_models --models BERT --dtypes bfloat16 --levels op

The models are built from configs and trained on local text and digits, so no network is needed. Each is tuned in
float16 and bfloat16 for a fraction of the error of its logits in that dtype without overrides: half of it at the levels
op and site, and a tenth at the level site.

Exit status: 0; 2 if transformers or timm is not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch
from cases import MODELS, declare_ops_of_torchvision
from measure import Row, measure

#: The levels and the parts of the error that they are tuned for.
_ASKED = (("op", 2), ("site", 2), ("site", 10))
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_HEAD = (
    "model", "dtype", "level", "error without", "tolerance", "overrides", "error with", "held out", "proved", "runs",
    "seconds", "training without", "training with",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(prog="tools/tuned_models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="", help="only models whose name contains this")
    parser.add_argument("--dtypes", nargs="*", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--levels", nargs="*", choices=("op", "site"), default=["op", "site"])
    parser.add_argument("--budget", type=int, default=60, help="runs of tune (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of training (default: %(default)s)")
    options = parser.parse_args(argv)
    missing = [name for name in ("transformers", "timm") if find_spec(name) is None]
    if missing:
        print(f"tools/tuned_models: error: {' and '.join(missing)} not installed: make tuned-models", file=sys.stderr)
        return 2
    declare_ops_of_torchvision()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the frameworks
    print(f"torch {torch.__version__}, transformers {version('transformers')}, timm {version('timm')}\n")
    asked = [(level, part) for level, part in _ASKED if level in options.levels]
    cases = [case for case in MODELS if options.models.lower() in case.name.lower()]
    print_table(
        row
        for case in cases
        for dtype in options.dtypes
        for row in measure(case, _DTYPES[dtype], asked, budget=options.budget, steps=options.steps)
    )
    return 0


def print_table(rows: Iterable[Row]) -> None:
    """Prints rows as they are computed, in Markdown."""
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}", flush=True)
    for row in rows:
        held_out = ("-" if row.held_out is None else f"{row.held_out:.1e}") + ("" if row.met else ", not met")
        cells = (
            row.model, row.dtype, row.level, f"{row.before:.1e}", f"{row.tolerance:.1e}", row.overrides,
            f"{row.after:.1e}", held_out, row.certificate, str(row.runs), f"{row.seconds:.0f}",
            f"{row.without:.1e}", f"{row.with_policy:.1e}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
