"""The command `torch-promote bench`: times regions, ops and models under ours and stock autocast."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_promote.bench import INSTRUCTIONS, SUITES, Case, Result, Settings, list_cases, missing, report, run
from torch_promote.bench.callgrind import check_valgrind
from torch_promote.bench.cases import COMPILE, OURS, STOCK
from torch_promote.bench.plot import check_plot, save_plot
from torch_promote.cli.bench_compile import compile_table
from torch_promote.cli.bench_counts import FOOTNOTE, CountTable, column
from torch_promote.cli.bench_instructions import instruction_table
from torch_promote.cli.exit_status import INTERRUPTED
from torch_promote.cli.progress import progress
from torch_promote.cli.terminal import Table, check_rich, show
from torch_promote.errors import OptionError, UnsupportedDeviceError, did_you_mean
from torch_promote.checking.autocast_in_force import STAND_IN

__all__ = ["add_parser"]

_DESCRIPTION = """\
Times regions, single ops and small models under torch.autocast (stock) and
my_autocast (ours). For comparison, it times the same work with explicit casts
in the code (hand) and without autocast (plain). All of them alternate, round by
round, in one process and one thread.

columns:
  ours / stock  time under ours divided by time under stock: below 1 is faster
                than stock, 0.5 is twice as fast
  ours / hand   the same relative to explicit casts, which are the limit
  over ...      the overhead of ours over a baseline, divided by the overhead
                of stock over it: 1 is stock's overhead, 0 is none, below 0 is
                faster than the baseline. The baselines are hand, plain, and
                cast before: the op on inputs, or the model with weights, that
                need no cast. The column says noise if stock's overhead is
                within its noise, and no cost if stock is not slower than the
                baseline

Each figure is the median over the rounds, with the quartiles in brackets.
Absolute times come last, to give a sense of scale.

The suite instructions counts instructions in place of times, and has targets
for some cases. Two counts of a case differ by less than 0.5%, also on a busy
machine. It runs only if you ask for it: it needs valgrind, and takes a quarter
of an hour, most of it for compiled steps.

On cuda, tables of kernels and peak bytes follow those of times.

On cuda-stand-in, a CUDA device of host memory that source checkouts have, times
mean nothing. The tables show kernels, casts and bytes. They do not vary, so
there are no rounds. Models have few features.

suites:
  region     construct, enter and leave a region; one object; a decorated
             function; nested
  ops        calls with nothing to cast, activations to cast (4 x 4 to
             256 x 256; with and without gradients), cached weights, each cast
             policy
  overrides  calls with a user's policy, which stock does not support; compared
             with explicit casts
  models     an MLP of many small layers, a Llama-like stack, an LSTM, a conv
             net: forward, training step, evaluation loop; also the casts in a
             step, and the memory that it takes
  caches     the modes of the cast cache on such models
  programs   these modes in programs: gradient accumulation, checkpoints, LoRA,
             EMA, evaluation, generation; with transformers installed, also
             its Llama and BERT
  import     an op outside of regions, with this package imported and not, in
             two processes
  compile    steps compiled by torch.compile on the CPU, and the compilation;
             kernels, graph breaks, guards. It takes ten minutes, and runs only
             if you name it
  instructions
             instructions of calls, of small models, and of compiled steps,
             counted by callgrind in a process of its own

for stable figures:
  Close other programs, and plug in a laptop. One thread (the default) is more
  stable than several: on a CPU, it is timed in CPU time of the process, which
  other programs hardly affect. If the quartiles are far apart, the machine was
  busy: repeat the run with more rounds. Compare ratios within one run, not
  times of two runs.
"""

_EPILOG = """\
examples:
  torch-promote bench                            all but the last two; minutes
  torch-promote bench --suite region --suite ops
  torch-promote bench --case '*Llama*' --rounds 101
  torch-promote bench --plot bench.png           a plot of the ratios
  torch-promote bench --json > bench.json        JSON
  torch-promote bench --device cuda --suite models
  torch-promote bench --device cuda-stand-in     kernels and bytes, no GPU
  torch-promote bench --suite instructions       instructions; needs valgrind
  torch-promote bench --list                     the cases to choose from

Ctrl-C ends the run and prints the cases that are finished.

exit status: 0 success, independent of the figures; 2 invalid command line, or a
device, package or valgrind is missing; 130 interrupted.
"""


def add_parser(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "bench",
        help="time regions, ops and models against stock autocast",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.add_argument_group("selection")
    chosen.add_argument(
        "--suite", choices=list(SUITES), action="append", metavar="SUITE", help="run only this suite; repeatable"
    )
    chosen.add_argument("--case", action="append", metavar="GLOB", help="run only cases whose name matches; repeatable")
    chosen.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", STAND_IN),
        metavar="DEVICE",
        help=f"cpu (the default), cuda, or {STAND_IN}, which counts kernels, casts and bytes",
    )
    chosen.add_argument("--list", action="store_true", help="run nothing; print the cases")
    how = parser.add_argument_group("execution and output")
    how.add_argument(
        "--rounds", type=_rounds, default=31, metavar="N", help="the number of rounds of each case (default 31)"
    )
    how.add_argument(
        "--threads", type=_threads, default=1, metavar="N", help="the number of PyTorch threads (default 1)"
    )
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the ratios to a file")
    how.add_argument(
        "--callgrind", type=Path, metavar="DIR", help="keep the files of suite instructions, for callgrind_annotate"
    )
    parser.set_defaults(run=_run)


def _rounds(text: str) -> int:
    return _number(text, 2, "rounds")


def _threads(text: str) -> int:
    return _number(text, 1, "threads")


def _number(text: str, least: int, what: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a number of {what}, {least} or more, got {text!r}")
    return number


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        check_rich()
    settings = Settings(
        arguments.device.removesuffix("-stand-in"),
        arguments.rounds,
        arguments.threads,
        counted=arguments.device == STAND_IN,
        keep=arguments.callgrind,
    )
    if settings.counted and arguments.plot is not None:
        raise OptionError(f"--plot draws times, and {STAND_IN} has none. Remove one of them.")
    if settings.counted and "import" in (arguments.suite or ()):
        raise OptionError(f"suite import times two processes, and {STAND_IN} counts kernels. Remove one of them.")
    if COMPILE in (arguments.suite or ()) and arguments.device != "cpu":
        raise OptionError(f"suite compile compiles for the CPU, not for {arguments.device}. Remove one of them.")
    if INSTRUCTIONS in (arguments.suite or ()):
        _check_instructions(arguments)
    elif arguments.callgrind is not None:
        raise OptionError("--callgrind keeps the files of suite instructions. Add --suite instructions.")
    cases = _chosen(list_cases(settings, arguments.suite or ()), arguments.case)
    if arguments.list:
        return show({"cases": [case.as_dict() for case in cases]}, _draw_list, arguments.json)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedDeviceError("--device cuda: PyTorch finds no CUDA device. Legal: cpu.")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    results, interrupted = _timed(cases, settings, quiet=arguments.json)
    if interrupted and not results:
        raise KeyboardInterrupt  # there is nothing to print
    # With patterns, you have named what you want.
    skipped = missing() if "programs" in (arguments.suite or SUITES) and arguments.case is None else []
    data = {**report(results, settings, skipped), "interrupted": interrupted, "cases": len(cases)}
    show(data, _draw, arguments.json)
    if arguments.plot is not None:
        save_plot(arguments.plot, results, settings)
    return INTERRUPTED if interrupted else 0


def _check_instructions(arguments: argparse.Namespace) -> None:
    if arguments.device != "cpu":
        raise OptionError(f"suite instructions counts on the CPU, not on {arguments.device}. Remove one of them.")
    if arguments.plot is not None:
        raise OptionError("--plot draws times, and suite instructions has none. Remove one of them.")
    if not arguments.list:
        check_valgrind()


def _chosen(cases: Sequence[Case], patterns: Sequence[str] | None) -> list[Case]:
    if patterns is None:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            close = did_you_mean(pattern, [case.name for case in cases])
            raise OptionError(f"--case {pattern!r} matches no selected case. See --list.{close}")
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


def _timed(cases: Sequence[Case], settings: Settings, *, quiet: bool) -> tuple[list[Result], bool]:
    """Returns the results, and whether Ctrl-C ended the run before the last one."""
    results: list[Result] = []
    try:
        with progress("bench", len(cases), quiet=quiet, still=True) as step:
            for result in run(cases, settings):
                results.append(result)
                step(result.case.name)
    except KeyboardInterrupt:
        return results, True
    return results, False


# --- text output


_Data = Mapping[str, Any]


def _draw_list(data: _Data) -> list[Any]:
    listing = Table("suite", "case", prose=["case"])
    for case in data["cases"]:
        listing.add_row(case["suite"], case["case"])
    return [listing]


def _draw(data: _Data) -> list[Any]:
    default = data["default_policy"]
    notes = [f"note: ours ran under the default policy, {default}."] if default else []
    if data["interrupted"]:
        notes.append(f"Interrupted after {len(data['results'])} of {data['cases']} cases.")
    return [*_draw_suites(data), *notes]


def _draw_suites(data: _Data) -> list[Any]:
    drawn: list[Any] = []
    for suite, group in itertools.groupby(data["results"], lambda result: result["suite"]):
        results = list(group)
        if data["clock"] == "kernels":
            drawn += [suite, CountTable(results), ""]
            continue
        if suite == INSTRUCTIONS:
            drawn += [suite, instruction_table(results), ""]
            continue
        drawn += [suite, _ratios(results)]
        counted = [result for result in results if result["casts"]]
        drawn += ["", _steps(counted)] if counted else []
        compiled = [result for result in results if result["compiled"]]
        drawn += ["", compile_table(compiled)] if compiled else []
        drawn += ["", "kernels in a run, peak bytes of two", _counts(results)] if results[0]["kernels"] else []
        drawn.append("")
    if data["skipped"]:
        drawn += [f"skipped, because transformers is not installed: {', '.join(data['skipped'])}", ""]
    if data["clock"] == "kernels":
        return [*drawn, FOOTNOTE, "", f"torch {data['torch']}, {STAND_IN}"]
    if all(result["suite"] == INSTRUCTIONS for result in data["results"]):
        return [*drawn, f"torch {data['torch']}, {data['device']} ({data['device_name']}): instructions in a run"]
    threads = "1 thread" if data["threads"] == 1 else f"{data['threads']} threads"
    rounds = f"{data['rounds']} rounds"
    clock = "CPU time" if data["clock"] == "cpu" else "wall-clock time"
    return [*drawn, f"torch {data['torch']}, {data['device']} ({data['device_name']}), {threads}, {rounds}, {clock}"]


_TIMES = ("ours", "stock", "hand", "already_cast", "plain")


def _ratios(results: Sequence[_Data]) -> Any:
    """The table of ratios and times."""
    times = [name for name in _TIMES if any(name in result["times_ns"] for result in results)]
    ratios = {"ratio": "ours / stock", "ratio_to_hand": "ours / hand"}
    ratios = {key: head for key, head in ratios.items() if any(result[key] for result in results)}
    bases = [name for name in _TIMES if any(_has_share(result, name) for result in results)]
    heads = (*ratios.values(), *(f"over {column(base)}" for base in bases), *map(column, times))
    listing = Table("case", *heads)
    for result in results:
        shown = (_spread(result[key]) for key in ratios)
        shares = (_overhead(result["overheads"].get(base)) for base in bases)
        listing.add_row(result["case"], *shown, *shares, *(_time(result["times_ns"].get(name)) for name in times))
    return listing


def _counts(results: Sequence[_Data]) -> Any:
    """The table of kernels and memory."""
    shown = [name for name in _TIMES if any(name in result["kernels"] for result in results)]
    weighed = [name for name in (OURS, STOCK) if name in shown]
    listing = Table("case", *map(column, shown), *(f"{name}, bytes" for name in weighed))
    for result in results:
        kernels = (result["kernels"].get(name, "-") for name in shown)
        peaks = (result["peak_bytes"].get(name, "-") for name in weighed)
        listing.add_row(result["case"], *map(str, (*kernels, *peaks)))
    return listing


def _has_share(result: _Data, base: str) -> bool:
    return base in result["overheads"] and result["overheads"][base]["spread"] is not None


def _steps(results: Sequence[_Data]) -> Any:
    """The table of casts and memory in one step."""
    listing = Table("case: contender", "casts of weights", "of activations", "of gradients", "peak, KiB")
    for result in results:
        for contender, casts in result["casts"].items():
            counts = (str(casts[kind]) for kind in ("weights", "activations", "gradients"))
            peak = f"{result['peak_bytes'][contender] / 1024:.1f}"
            listing.add_row(f"{result['case']}: {column(contender)}", *counts, peak)
    return listing


def _spread(spread: _Data | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _overhead(overhead: _Data | None) -> str:
    if overhead is None:
        return "-"
    if overhead["spread"] is None:
        return "no cost" if overhead["reason"].startswith("stock takes no longer") else "noise"
    return _spread(overhead["spread"])


def _time(spread: _Data | None) -> str:
    if spread is None:
        return "-"
    value = spread["median"]
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} ns"
