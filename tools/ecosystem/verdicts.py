"""The output of `make test-ecosystem`: a table, or JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table
from runs import Verdict

__all__ = ["draw", "plain"]


def plain(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts as JSON."""
    data = [
        {
            "framework": verdict.program.framework,
            "version": verdict.version,
            "program": verdict.program.name,
            "override": verdict.program.override,
            "autocast": verdict.program.autocast,
            "same_bits": verdict.same_bits,
            "key_ran": verdict.key_ran,
            "override_acts": verdict.override_acts,
            "passed": verdict.passed,
            "problems": verdict.problems,
            "not_run": verdict.not_run,
            "seconds": round(verdict.seconds, 1),
        }
        for verdict in verdicts
    ]
    return json.dumps(data, indent=2) + "\n"


def draw(verdicts: Sequence[Verdict], out: Path) -> str:
    """Returns the verdicts as a table, the problems, and a summary."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("framework", "version", "program", "bits", "key ran", "override acts"):
        table.add_column(column)
    table.add_column("seconds", justify="right")
    for verdict in verdicts:
        program = verdict.program
        regions = ("yes", "NO") if program.autocast else ("no regions", "UNEXPECTED")
        table.add_row(
            program.framework,
            verdict.version,
            program.name,
            _cell(verdict.same_bits, "stock's", "DIFFER"),
            _cell(verdict.key_ran, *regions),
            _cell(verdict.override_acts, *regions),
            f"{verdict.seconds:.0f}",
        )
    text = StringIO()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    console = Console(file=text, force_terminal=sys.stdout.isatty() or None, width=width, highlight=False, markup=False)
    console.print(table)
    for verdict in verdicts:
        lines = verdict.problems if verdict.not_run is None else [f"not run: {verdict.not_run}"]
        for line in lines:
            console.print(f"{verdict.program.framework}/{verdict.program.name}: {line}", soft_wrap=True)
    passed = sum(verdict.passed for verdict in verdicts)
    missing = sum(verdict.not_run is not None for verdict in verdicts)
    counted = f"{passed} of {len(verdicts)} programs passed" + (f", {missing} not run" if missing else "")
    console.print(f"{counted}; logs are in {out}", soft_wrap=True)
    return text.getvalue()


def _cell(fine: bool | None, good: str, bad: str) -> str:
    return "-" if fine is None else good if fine else bad
