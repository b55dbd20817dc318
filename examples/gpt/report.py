"""The output of the training: progress bars, table, verdict, plot and JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpt.train import Run

PLOT_FORMATS = frozenset(FigureCanvasAgg.get_supported_filetypes())


def show_progress(console: Console, runs: Sequence[Run], steps: Iterable[int], total: int) -> None:
    """Runs the steps and shows a bar with the current loss for each run, or ten lines without a terminal."""
    columns = (
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = [progress.add_task(run.name, total=total, loss=float("nan")) for run in runs]
        for step in steps:
            for bar, run in zip(bars, runs, strict=True):
                progress.update(bar, completed=step, loss=run.losses[-1])
            if not console.is_terminal and step % max(total // 10, 1) == 0:
                losses = ", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs)
                console.print(f"step {step} of {total}, loss: {losses}", soft_wrap=True)


def results_table(runs: Sequence[Run], reference: Run) -> Table:
    """Returns the table: a row for each run. Times and ratios are medians over the steps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\nvariant", no_wrap=True)
    for column in ("first\nloss", "last\nloss", "ms per\nstep", "ratio\nto stock", "casts\nper step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same bits\nas stock", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{median(run.milliseconds):.2f}",
            f"{_ratio(run, reference):.2f}",
            str(run.casts),
            _same_bits_cell(run, reference),
        )
    return table


def _ratio(run: Run, reference: Run) -> float:
    # Step by step, because other load on the machine affects all runs of a step.
    return median(a / b for a, b in zip(run.milliseconds, reference.milliseconds, strict=True))


def _same_bits_cell(run: Run, reference: Run) -> str:
    if run is reference:
        return "is stock"
    if run.comparison.same:
        return "[bold green]yes[/]"
    return f"no, first at step {run.comparison.steps_that_differ[0]}"


def verdict(run: Run) -> str:
    """Returns the result of a run's comparison in a sentence."""
    steps, comparison = len(run.losses), run.comparison
    if comparison.same:
        return (
            f"{run.name} gave the bits of torch.autocast: {comparison.tensors:,} tensors compared, "
            f"the loss and every gradient at each of {steps:,} steps."
        )
    return (
        f"{run.name} did NOT give the bits of torch.autocast: {len(comparison.steps_that_differ):,} of {steps:,} steps "
        f"differ, the first is step {comparison.steps_that_differ[0]}, in the {comparison.first}."
    )


def save_plot(path: Path, runs: Sequence[Run], reference: Run, subtitle: str) -> None:
    """Draws the loss curves, and below them their distances from the reference."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    styles = [("tab:orange", "-", 1.2), ("tab:blue", "-", 4.0), ("black", "--", 1.2)]
    for run, (color, line, width) in zip(runs, styles, strict=True):
        style: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": width, "label": run.name}
        style["alpha"] = 0.5 if run is reference else 1.0
        steps = range(1, len(run.losses) + 1)
        curves.plot(steps, run.losses, **style)
        if run is not reference:
            gaps.plot(steps, [a - b for a, b in zip(run.losses, reference.losses, strict=True)], **style)
    curves.set_title(f"A small GPT on the standard library's source\n{subtitle}", fontsize=11)
    curves.set_ylabel("loss (nats per character)")
    curves.legend()
    gaps.set_ylabel(f"loss minus that of\n{reference.name}")
    gaps.set_xlabel("step")
    gaps.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def save_json(path: Path, settings: dict[str, Any], runs: Sequence[Run], reference: Run) -> None:
    """Writes all measurements."""
    variants = {
        run.name: {
            "losses": run.losses,
            "median_step_ms": median(run.milliseconds),
            "median_ratio_to_stock": _ratio(run, reference),
            "casts_per_step": run.casts,
            "same_bits": None if run is reference else run.comparison.same,
            "tensors_compared": run.comparison.tensors,
            "steps_that_differ": len(run.comparison.steps_that_differ),
            "first_difference": run.comparison.first or None,
        }
        for run in runs
    }
    path.write_text(json.dumps({**settings, "variants": variants}, indent=2) + "\n", encoding="utf-8")
