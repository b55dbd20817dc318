"""Runs each feature of a soak in a process of its own, to name the one that grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from soaking import BOUNDS
from table import write_json
from tool_features import ALONE

from torch_promote.cli.output import progress

__all__ = ["soak_each", "verdict_of"]

_HERE = Path(__file__).parent

#: How much more than stock's twin a feature may grow by: compiled code differs a little from run to run.
_ABOVE_STOCK = 0.05


def soak_each(names: list[str], iterations: int, seed: int, file: Path | None) -> int:
    """Prints a line for each feature. Returns the exit status of the command."""
    print(f"{iterations} iterations with seed {seed}, each feature in a process of its own; per iteration\n")
    head = ("feature", "resident", "allocated", "blocks", "stock's", "objects", "verdict")
    print(f"{head[0]:20}" + "".join(f"{name:>11}" for name in head[1:-1]) + f"  {head[-1]}", flush=True)
    found: dict[str, Any] = {}
    with progress("soak", len(names), quiet=True) as tell:
        for name in names:
            ours = _run(name, iterations, seed)
            stock = _run(name, iterations, seed, "--stock") if name in ALONE else None
            verdict = verdict_of(ours, stock)
            found[name] = {"ours": ours, "stock": stock, "verdict": verdict}
            slopes = [ours["measures"][measure]["slope"] for measure in ("resident", "allocated", "python blocks")]
            of_stock = f"{stock['measures']['allocated']['slope']:11.1f}" if stock else f"{'':11}"
            columns = "".join(f"{slope:11.2f}" for slope in slopes) + of_stock
            print(f"{name:20}{columns}{ours['measures']['ours']['slope']:11.3f}  {verdict}", flush=True)
            tell(name)
    if file is not None:
        write_json(file, found)
    return int(any(one["verdict"] != "flat" for one in found.values()))


def verdict_of(ours: dict[str, Any], stock: dict[str, Any] | None) -> str:
    """Returns "flat", or the measures that grow or may grow, with stock's growth subtracted from the memory's."""
    bad = []
    for name, measure in ours["measures"].items():
        if measure["verdict"] in ("flat", "bounded"):
            continue
        if stock is not None and name in BOUNDS:
            allowed = stock["measures"][name]["high"] * (1 + _ABOVE_STOCK) + measure["bound"]
            if measure["low"] <= allowed:
                continue
        bad.append(f"{name} {'grows' if measure['verdict'] == 'grows' else 'is unclear'} ({measure['slope']:.3g})")
    return "; ".join(bad) or "flat"


def _run(name: str, iterations: int, seed: int, *more: str) -> Any:
    command = [sys.executable, str(_HERE), "--only", name, "--iterations", str(iterations), "--seed", str(seed)]
    done = subprocess.run([*command, "--json", "-", *more], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"the soak of {name} failed with status {done.returncode}")
    return json.loads(done.stdout)
