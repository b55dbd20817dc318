"""The command line of the benchmarks: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_STAND_IN = "cuda-stand-in"

if _STAND_IN in sys.argv:  # PyTorch looks for devices while it is imported
    sys.path.insert(0, str(_ROOT / "tools"))
    import cuda_stand_in

    cuda_stand_in.start()

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import benchmarks
import torch_promote
from benchmarks.callgrind import ValgrindError, measure_instructions
from benchmarks.cases import ALREADY_CAST, OURS, PLAIN, STOCK, Settings, measure
from benchmarks.suites import SUITES
from torch_promote.regions.defaults import spell_default_policy

_ON_REQUEST = ("compile", "float8", "instructions")
_ON_CPU = ("compile", "instructions")
_CONTENDERS = (OURS, STOCK, ALREADY_CAST, PLAIN)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = arguments.device.removesuffix("-stand-in")
    counted = arguments.device == _STAND_IN
    settings = Settings(device, arguments.rounds, arguments.threads, tiny=arguments.tiny, counted=counted)
    suites = arguments.suite or [suite for suite in SUITES if suite not in _ON_REQUEST]
    if device != "cpu" and (wrong := [suite for suite in suites if suite in _ON_CPU]):
        parser.error(f"suite {wrong[0]} runs on the CPU, not on {arguments.device}. Remove one of them.")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device. Legal: cpu, cuda-stand-in.")
    wanted = arguments.case or ["*"]
    cases = [
        (suite, name)
        for suite in suites
        for name in SUITES[suite]
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)
    ]
    if not cases:
        parser.error(f"--case {' '.join(wanted)}: no case of the suites matches. See --list.")
    if arguments.list:
        print("\n".join(f"{suite:13} {name}" for suite, name in cases))
        return 0
    try:
        results, interrupted = _measured(cases, settings, quiet=arguments.json)
    except ValgrindError as error:
        parser.error(str(error))
    report = {
        "torch": torch.__version__,
        "torch_promote": torch_promote.__version__,
        "device": device,
        "device_name": _device_name(device),
        "threads": settings.threads,
        "rounds": settings.rounds,
        "clock": settings.clock,
        "default_policy": spell_default_policy(),
        "interrupted": interrupted,
        "results": results,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 130 if interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this suite; repeatable")
    parser.add_argument("--case", action="append", metavar="GLOB", help="only cases whose name matches; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda", _STAND_IN), default="cpu", help="default: cpu")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="rounds of a case, 2 or more (default: 31)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of PyTorch (default: 1)")
    parser.add_argument("--tiny", action="store_true", help="models so small that the figures mean little")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _measured(
    cases: Sequence[tuple[str, str]], settings: Settings, *, quiet: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the results, and whether Ctrl-C ended the run before the last one."""
    counted = [name for suite, name in cases if suite == "instructions"]
    found = (
        {"suite": suite, "case": name, **measure(SUITES[suite][name], settings)}
        for suite, name in cases
        if suite != "instructions"
    )
    running = itertools.chain(found, measure_instructions(counted, settings) if counted else ())
    results: list[dict[str, Any]] = []
    # No automatic refresh: drawing would disturb the times.
    shown = track(running, "benchmarks", len(cases), console=Console(stderr=True), auto_refresh=False, disable=quiet)
    try:
        results.extend(shown)
    except KeyboardInterrupt:
        return results, True
    return results, False


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


# Text


def _print(report: Mapping[str, Any]) -> None:
    """Prints a table for each suite, with a row for each contender of a case."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for suite, group in itertools.groupby(report["results"], lambda result: result["suite"]):
        rows = [(result, name, _cells(result, name)) for result in group for name in _CONTENDERS]
        rows = [row for row in rows if any(row[2].values())]
        columns = list(dict.fromkeys(key for _, _, cells in rows for key, cell in cells.items() if cell))
        table = Table(title=suite, title_justify="left", box=None, show_edge=False)
        for number, name in enumerate(["case", "contender", *columns]):
            table.add_column(name, justify="right" if number > 1 else "left", overflow="fold")
        for result, name, cells in rows:
            table.add_row(result["case"] if name == OURS else "", name, *(cells.get(key) or "-" for key in columns))
        console.print(table)
    if report["default_policy"]:
        console.print(f"ours ran under the default policy, {report['default_policy']}.")
    clock = {"cpu": "CPU time", "wall": "wall-clock time", "kernels": "counts on the stand-in device"}[report["clock"]]
    where = f"{report['device']} ({report['device_name']})"
    console.print(
        f"torch {report['torch']}, {where}, threads: {report['threads']}, rounds: {report['rounds']}, {clock}; "
        "medians with their quartiles."
    )


def _cells(result: Mapping[str, Any], name: str) -> dict[str, str]:
    """Returns what is known of a contender, by the name of the column. Below 1, ours is faster than stock.

    "over" a base is the overhead of ours over it, divided by that of stock.
    """
    cells: dict[str, Any] = {}
    if name == OURS:
        cells["/ stock"] = _spread(result.get("ratio"))
        for base, share in result.get("overheads", {}).items():
            cells[f"over {base}"] = _spread(share) or "noise"
    counted = result.get("instructions", {})
    if name == OURS and STOCK in counted:
        cells["/ stock"] = f"{counted[OURS] / counted[STOCK]:.3f}"
    if name in counted:
        cells["instructions"] = f"{counted[name]:,.0f}"
    if name in result.get("times_ns", {}):
        cells["time"] = _time(result["times_ns"][name]["median"])
    cells["kernels"] = result.get("kernels", {}).get(name)
    cells |= {f"{kind} cast": count for kind, count in result.get("casts", {}).get(name, {}).items()}
    cells |= {kind.replace("_", " "): count for kind, count in result.get("compiled", {}).get(name, {}).items()}
    for column, key in (("KiB moved", "moved_bytes"), ("peak KiB", "peak_bytes")):
        if name in result.get(key, {}):
            cells[column] = f"{result[key][name] / 1024:.1f}"
    return {key: str(cell) for key, cell in cells.items() if cell is not None}


def _spread(spread: Mapping[str, float] | None) -> str | None:
    return None if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _time(value: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("ms", 1e6), ("us", 1e3)) if value >= size), ("ns", 1))
    return f"{value / size:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
