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
from benchmarks.callgrind import ValgrindError, check_valgrind, measure_instructions
from benchmarks.cases import Case, Settings, measure
from benchmarks.programs import missing
from benchmarks.suites import SUITES
from torch_promote.regions.defaults import spell_default_policy

_ON_REQUEST = ("compile", "instructions")
_CONTENDERS = ("ours", "stock", "hand", "already_cast", "plain")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments. None: those of the process.

    Returns:
        The exit status: 0, 2 if the command line is invalid, 130 after Ctrl-C.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = arguments.device.removesuffix("-stand-in")
    counted = arguments.device == _STAND_IN
    settings = Settings(
        device, arguments.rounds, arguments.threads, tiny=arguments.tiny, counted=counted, keep=arguments.callgrind
    )
    suites = arguments.suite or [suite for suite in SUITES if suite not in _ON_REQUEST]
    if device != "cpu" and (wrong := [suite for suite in suites if suite in _ON_REQUEST]):
        parser.error(f"suite {wrong[0]} runs on the CPU, not on {arguments.device}. Remove one of them.")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device. Legal: cpu, cuda-stand-in.")
    cases = [case for suite in suites for case in SUITES[suite](settings)]
    if arguments.case:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, each) for each in arguments.case)]
    if not cases:
        parser.error(f"--case {' '.join(arguments.case)}: no case of the suites matches. See --list.")
    if arguments.list:
        print("\n".join(f"{case.suite:13} {case.name}" for case in cases))
        return 0
    try:
        if "instructions" in suites:
            check_valgrind()
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
        "skipped": missing() if "programs" in suites and not arguments.case else [],
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
    parser.add_argument("--callgrind", type=Path, metavar="FOLDER", help="keep the files for callgrind_annotate")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _measured(cases: Sequence[Case], settings: Settings, *, quiet: bool) -> tuple[list[dict[str, Any]], bool]:
    """Returns the results, and whether Ctrl-C ended the run before the last one."""
    timed = [case for case in cases if case.suite != "instructions"]
    counted = [case for case in cases if case.suite == "instructions"]
    found = (measure(case, settings) for case in timed)
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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for suite, group in itertools.groupby(report["results"], lambda result: result["suite"]):
        results = list(group)
        for table in (_times(suite, results), _instructions(suite, results), _counts(suite, results)):
            if table.row_count:
                console.print(table)
    if report["skipped"]:
        console.print(f"skipped, because transformers is not installed: {', '.join(report['skipped'])}")
    if report["default_policy"]:
        console.print(f"ours ran under the default policy, {report['default_policy']}.")
    clock = {"cpu": "CPU time", "wall": "wall-clock time", "kernels": "counts on the stand-in device"}[report["clock"]]
    where = f"{report['device']} ({report['device_name']})"
    console.print(
        f"torch {report['torch']}, {where}, threads: {report['threads']}, rounds: {report['rounds']}, {clock}; "
        "medians with their quartiles"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _times(suite: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Ratios: below 1 is faster than stock. "over": the overhead of ours over a base, divided by that of stock."""
    timed = [result for result in results if result.get("times_ns")]
    bases = [name for name in _CONTENDERS if any(name in result["overheads"] for result in timed)]
    there = [name for name in _CONTENDERS if any(name in result["times_ns"] for result in timed)]
    table = _table(suite, "case", "ours / stock", "ours / hand", *(f"over {name}" for name in bases), *there)
    for result in timed:
        shares = [result["overheads"].get(name, {}) for name in bases]
        cells = [_spread(result["ratio"]), _spread(result["ratio_to_hand"])]
        cells += [_spread(share.get("spread")) if not share.get("reason") else "noise" for share in shares]
        table.add_row(result["case"], *cells, *(_time(result["times_ns"].get(name)) for name in there))
    return table


def _instructions(suite: str, results: Sequence[Mapping[str, Any]]) -> Table:
    counted = [result["instructions"] for result in results if result.get("instructions")]
    there = [name for name in _CONTENDERS if any(name in counts for counts in counted)]
    table = _table(suite, "case", "ours / stock", *there)
    for result, counts in zip(results, counted, strict=False):
        ratio = f"{counts['ours'] / counts['stock']:.3f}" if "stock" in counts else "-"
        table.add_row(result["case"], ratio, *(f"{counts[name]:,.0f}" if name in counts else "-" for name in there))
    return table


def _counts(suite: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Casts, memory, kernels and what is compiled, with a row for each contender."""
    rows: list[tuple[str, dict[str, str]]] = []
    for result in results:
        for name in (name for name in _CONTENDERS if name in result.get("peak_bytes", ())):
            copies = result["copies"].get(name, {})
            cells = {"kernels": result["kernels"].get(name)}
            cells |= {"copies": copies.get("kernels"), "cast kernels": copies.get("cast_kernels")}
            cells |= {f"casts of {kind}": count for kind, count in result["casts"].get(name, {}).items()}
            for phase in ("forward", "backward"):
                cells[phase] = copies and f"{copies[phase]['narrowing']}+{copies[phase]['widening']}"
            cells |= {kind.replace("_", " "): count for kind, count in result["compiled"].get(name, {}).items()}
            cells |= {"KiB moved": _kib(copies.get("moved_bytes")), "allocated": _kib(copies.get("allocated_bytes"))}
            cells["peak KiB"] = _kib(result["peak_bytes"][name])
            rows.append((f"{result['case']}: {name}", {key: str(cell) for key, cell in cells.items() if cell != {}}))
    columns = list(dict.fromkeys(key for _, cells in rows for key in cells))
    columns = [key for key in columns if any(cells.get(key, "None") != "None" for _, cells in rows)]
    table = _table(f"{suite}: counts (forward, backward: casts to fewer + to more bytes)", "case: contender", *columns)
    for label, cells in rows:
        table.add_row(label, *(cells.get(key, "-").replace("None", "-") for key in columns))
    return table


def _spread(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _time(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    value = spread["median"]
    unit, size = next(((unit, size) for unit, size in (("ms", 1e6), ("us", 1e3)) if value >= size), ("ns", 1))
    return f"{value / size:.3g} {unit}"


def _kib(size: int | None) -> str | None:
    return None if size is None else f"{size / 1024:.1f}"


if __name__ == "__main__":
    sys.exit(main())
