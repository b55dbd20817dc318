"""The output of `make test-pytorch`, and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from comparison import VERDICTS, Result
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["as_json", "show"]

_STYLES = dict(zip(VERDICTS, ("green", "dim", "red", "cyan", "red", "red"), strict=True))


def show(console: Console, files: Mapping[str, Sequence[Result]], messages: Iterable[str]) -> None:
    """Prints a row for each file, every test with different outcomes, and the messages."""
    results = [result for found in files.values() for result in found]
    shown = [verdict for verdict in VERDICTS if any(result.verdict == verdict for result in results)]
    table = Table()
    table.add_column("file", overflow="fold")
    for heading in ("tests", "passed", *shown, "regions"):
        table.add_column(heading, justify="right", style=_STYLES.get(heading))
    for name, found in [*files.items(), ("all", results)]:
        counts = Counter(result.verdict for result in found)
        passed = sum(result.ours is not None and result.ours.outcome == "passed" for result in found)
        cells = [len(found), passed, *(counts[verdict] for verdict in shown), opened(found)]
        table.add_row(name, *map(str, cells), end_section=name == [*files, ""][-2])
    console.print(table)
    for result in results:
        if result.verdict != "same" or result.is_stale:
            console.print(_lines(result), soft_wrap=True, highlight=False)
    for message in messages:
        console.print(escape(message), soft_wrap=True, highlight=False)


def opened(results: Iterable[Result]) -> int:
    """The number of regions of ours that tests opened."""
    return sum(result.ours.opened for result in results if result.ours is not None)


def _lines(result: Result) -> str:
    style = _STYLES[result.verdict]
    lines = [f"[{style}]{result.verdict}[/]: {escape(result.test)}"]
    for name, outcome in (("stock", result.stock), ("ours", result.ours)):
        said = "did not run" if outcome is None else f"{outcome.outcome} {outcome.message}".strip()
        lines.append(f"    {name}: {escape(said)}")
    if result.explanation is not None:
        lines.append(f"    explained: {escape(result.explanation.reason)} ({escape(result.explanation.row)} ...)")
    if result.is_stale:
        lines.append("    [red]It passes: remove it from explained.toml.[/]")
    return "\n".join(lines)


def as_json(torch_version: str, files: Mapping[str, Sequence[Result]], messages: Sequence[str]) -> dict[str, Any]:
    """Returns the results as a value for JSON."""
    results = [result for found in files.values() for result in found]
    return {
        "torch": torch_version,
        "tests": len(results),
        "verdicts": Counter(result.verdict for result in results),
        "regions": opened(results),
        "messages": list(messages),
        "files": {name: [_values(result) for result in found] for name, found in files.items()},
    }


def _values(result: Result) -> dict[str, Any]:
    return {**asdict(result), "verdict": result.verdict, "wrong": result.is_wrong}
