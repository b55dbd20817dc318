"""Writes docs/gpu.md from the results of the steps of `make gpu`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steps import Outcome

__all__ = ["page"]


def page(outcomes: Sequence[Outcome], machine: Mapping[str, str]) -> str:
    """Returns the page.

    Args:
        outcomes: The outcomes of the steps.
        machine: The versions and the GPU, by name.
    """
    parts = [
        "# On a GPU",
        "`make gpu` ran the tests that need a CUDA device, the parity run and the benchmark, and wrote this page.",
        _table(("", ""), machine.items()),
        "## Checks",
        _table(("step", "result", "counts", "seconds"), (_line(outcome) for outcome in outcomes)),
    ]
    skipped = [(outcome.step.name, reason, n) for outcome in outcomes for reason, n in outcome.skipped.items()]
    if skipped:
        parts += ["### Skipped tests", _table(("step", "reason", "tests"), skipped)]
    limits = [(outcome.step.name, reason, n) for outcome in outcomes for reason, n in outcome.limits.items()]
    if limits:
        parts += ["### Known differences", _table(("step", "reason", "tests or samples"), limits)]
    parts.append("Known limits: [differences.md](differences.md#limits); those of the cache: [casts.md](casts.md).")
    failed = [outcome for outcome in outcomes if outcome.log]
    for outcome in failed:
        parts += [f"### {outcome.step.name}: {outcome.status}", f"```text\n{outcome.log}\n```"]
    bench = next((outcome for outcome in outcomes if outcome.step.name == "bench"), None)
    if bench is not None and bench.counts:
        parts += _benchmark(json.loads(bench.step.output.read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _line(outcome: Outcome) -> tuple[str, str, str, str]:
    counts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in outcome.counts.items() if number)
    return outcome.step.name, outcome.status, counts, f"{outcome.seconds:.0f}"


def _benchmark(data: Mapping[str, Any]) -> list[str]:
    results = data["results"]
    parts = ["## Benchmark", "stock is `torch.autocast`, ours is `my_autocast`; both alternate in one process."]
    timed = [result for result in results if {"stock", "ours"} <= result["times_ns"].keys()]
    if timed:
        lines = (
            (
                f"{result['suite']}: {result['case']}",
                *(_time(result["times_ns"][name]["median"]) for name in ("stock", "ours")),
                f"{result['ratio']['median']:.2f} ({result['ratio']['low']:.2f} to {result['ratio']['high']:.2f})",
            )
            for result in timed
        )
        text = f"Wall-clock time of a step, the median of {data['rounds']} rounds; the ratio with its quartiles."
        parts += [text, _table(("case", "stock", "ours", "ours / stock"), lines)]
    counted = [result for result in results if result["kernels"].get("stock") and result["kernels"].get("ours")]
    if counted:
        lines = (
            (
                f"{result['suite']}: {result['case']}",
                *(result["kernels"][name] for name in ("stock", "ours")),
                *(_bytes(result["peak_bytes"][name]) for name in ("stock", "ours")),
            )
            for result in counted
        )
        head = ("case", "kernels, stock", "kernels, ours", "peak, stock", "peak, ours")
        parts += [_COUNTS, _table(head, lines)]
    return parts


_COUNTS = (
    "Kernels of one step, after a first one in the same region; and the peak memory of two such steps, above the "
    "memory held before the region. Casts that persist are held before it."
)


def _time(nanoseconds: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("ms", 1e6), ("us", 1e3)) if nanoseconds >= size), ("ns", 1))
    return f"{nanoseconds / size:.3g} {unit}"


def _bytes(count: int) -> str:
    unit, size = next(((unit, size) for unit, size in (("MiB", 2**20), ("KiB", 2**10)) if count >= size), ("bytes", 1))
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count} bytes"


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
