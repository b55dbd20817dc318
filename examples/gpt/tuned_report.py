"""The output of examples/tune_gpt.py: the failure, the table, the verdict and the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from gpt.train import Run


def indent(text: str) -> str:
    """Indents a text below its heading."""
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())


def skipped(run: Run, loss_scale: float) -> int:
    """The number of steps that GradScaler skipped: it halves its scale at each, and grows it only after 2000 steps.

    Example:
        >>> run = type("", (), {"scaler": type("", (), {"get_scale": lambda self: 256.0})()})()
        >>> skipped(run, 1024.0)
        2
    """
    return round(math.log2(loss_scale / run.scaler.get_scale()))


def failure(run: Run, loss_scale: float) -> str:
    """Returns the result of a training without overrides in a sentence."""
    steps, bad = len(run.losses), [loss for loss in run.losses if not math.isfinite(loss)]
    if not bad:
        return f"All {steps} losses are finite."
    return (
        f"The loss is not finite in {len(bad)} of {steps} steps (the first: {bad[0]}), and GradScaler skipped "
        f"{skipped(run, loss_scale)} of them."
    )


def deviations(run: Run, reference: Run) -> list[float]:
    """The distance of each loss from the reference's, relative to it; infinite if it is not finite.

    Example:
        >>> one, other = (type("", (), {"losses": losses}) for losses in ([2.0, float("nan")], [1.0, 1.0]))
        >>> deviations(one, other)
        [1.0, inf]
    """
    differences = (abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=False))
    return [one if math.isfinite(one) else math.inf for one in differences]


def percent(part: float) -> str:
    """Returns a share as a percentage with two digits.

    Example:
        >>> percent(0.01), percent(0.000876), percent(float("inf"))
        ('1%', '0.088%', 'inf')
    """
    return f"{100 * part:.2g}%" if math.isfinite(part) else str(part)


def results_table(runs: Sequence[Run], reference: Run, loss_scale: float) -> Table:
    """Returns the table: a row for each run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\nvariant", no_wrap=True)
    for column in ("\nsteps", "steps\nskipped", "first\nloss", "last\nloss", "largest\ndeviation", "ms per\nstep"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            str(len(run.losses)),
            str(skipped(run, loss_scale)),
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            "" if run is reference else percent(max(deviations(run, reference))),
            f"{median(run.milliseconds):.1f}",
        )
    return table


def verdict(found: Sequence[float], policy: Path, tolerance: float) -> str:
    """Returns a sentence about whether each loss was within the tolerance."""
    largest = max(found)
    where = f"the largest deviation is {percent(largest)}, at step {found.index(largest) + 1}"
    outside = sum(one > tolerance for one in found)
    if not outside:
        held = f"stayed within {percent(tolerance)} of float32 in each of {len(found)} steps"
        return f"float16 with {policy.name} {held}: {where}."
    missed = f"did NOT stay within {percent(tolerance)} of float32: {outside} of {len(found)} steps are outside"
    return f"float16 with {policy.name} {missed}, and {where}."


def save_plot(path: Path, reference: Run, tuned: Run, low: Run, tolerance: float, subtitle: str) -> None:
    """Draws the loss curves, and below them the distance of each loss from the reference's."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for run, color, style, width in ((reference, "tab:blue", "-", 4.0), (tuned, "black", "--", 1.2)):
        curves.plot(range(1, len(run.losses) + 1), run.losses, color=color, ls=style, lw=width, label=run.name)
    bad = sum(not math.isfinite(loss) for loss in low.losses)
    if bad:
        label = f"{low.name}: not finite in {bad} of {len(low.losses)} steps"
        first = next(step for step, loss in enumerate(low.losses, 1) if not math.isfinite(loss))
        curves.axvspan(first, len(low.losses), color="tab:red", alpha=0.25, label=label)
    curves.set_title(f"A small GPT on the standard library's source\n{subtitle}", fontsize=11)
    curves.set_ylabel("loss (nats per character)")
    curves.legend()
    steps = range(1, len(tuned.losses) + 1)
    below.semilogy(steps, [max(one, 1e-8) for one in deviations(tuned, reference)], color="black", lw=1.0)
    below.axhline(tolerance, color="tab:red", ls=":", label="tolerance")
    below.set_ylabel(f"deviation of\n{tuned.name}")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend()
    for axes in (curves, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
