"""The output of examples/float8_gpt.py: the trainings, the loss curves and the layers, as text, plot and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch_promote as tp
from gpt.train import Run
from gpt.tuned_report import deviations, percent
from torch_promote.report.base import Chart, Code, Column, Content, Report, Series, Table

COLORS = ("float32", "bfloat16", "float8", "complex")
#: The curves are means over as many steps.
SMOOTHED = 20


@dataclass
class Float8Training(Report):
    """Trainings that differ in which layers run in float8.

    Attributes:
        runs: The trainings.
        reference: The one in bfloat16.
        tuned: The one with the tuned policy.
        tuning: The tuning.
        tolerance: How far the tuned training's last loss may be from the reference's, relative to it.
        title: The model and the machine.
        seconds: The time of everything.
    """

    runs: Sequence[Run]
    reference: Run
    tuned: Run
    tuning: tp.Tuning
    tolerance: float
    title: str
    seconds: float

    @property
    def within(self) -> bool:
        """Whether the tuned training's last loss is within the tolerance of the reference's."""
        return abs(self.gap(self.tuned)) <= self.tolerance

    def gap(self, run: Run) -> float:
        """The distance of a run's last loss from the reference's, relative to it."""
        return last_loss(run) / last_loss(self.reference) - 1

    def content(self) -> Content:
        """Returns what the report says to people."""
        tuned, reference = self.tuned, self.reference
        return Content(
            title=self.title,
            verdict=f"{tuned.name}: the last loss {'is' if self.within else 'is NOT'} within {percent(self.tolerance)} "
            f"of bfloat16's: {last_loss(tuned):.4f} and {last_loss(reference):.4f}, {self.gap(tuned):+.2%}.",
            good=self.within,
            facts=[
                ("in float8", f"{self.tuning.gain['float8_share']:.1%}", "of the FLOPs of the forward's products"),
                ("runs of tune", f"{self.tuning.runs} of {self.tuning.budget}"),
                ("time", f"{self.seconds:.0f} s"),
            ],
            parts=(
                Table("Trainings", _RUNS, [self._row(run) for run in self.runs], note=_ABOUT_RUNS),
                self._chart("Loss", [run.losses for run in self.runs]),
                self._chart("Distance from bfloat16's loss", [deviations(run, reference) for run in self.runs], "log"),
                Table("Layers", _LAYERS, self._layers(), most=30, note=_ABOUT_LAYERS),
                Code("The policy", self.tuning.formats()[".toml"][1]()),
            ),
        )

    def _row(self, run: Run) -> tuple[str, ...]:
        largest = percent(max(deviations(run, self.reference)))
        others = ("", "") if run is self.reference else (f"{self.gap(run):+.2%}", largest)
        return run.name, f"{run.losses[0]:.4f}", f"{last_loss(run):.4f}", *others

    def _chart(self, title: str, values: Sequence[Sequence[float]], scale: Any = "linear") -> Chart:
        curves = [
            Series(run.name, smooth(of_run), range(1, len(of_run) + 1), color, "line")
            for run, of_run, color in zip(self.runs, values, COLORS, strict=True)
            if any(of_run)
        ]
        title = f"{title}, mean of the last {SMOOTHED} steps"
        return Chart(title, "scatter", curves, x_label="step", y_scale=scale)

    def _layers(self) -> list[tuple[str, str, float | None, float, float, str]]:
        comparison, found = self.tuning.comparison, self.tuning.found
        order = [name for name, _ in self.tuned.model.named_modules()]
        linear = [site for site in comparison.sites if site.op == "aten::linear"]
        return [
            (
                site.module,
                "float8" if site.module in found else "bfloat16",
                site.impact,
                site.local,
                site.flops / comparison.flops,
                site.misfit or ("" if site.module in found else "tune"),
            )
            for site in sorted(linear, key=lambda site: order.index(site.module))
        ]


def last_loss(run: Run) -> float:
    """The mean loss of the last tenth of the steps."""
    last = run.losses[-max(len(run.losses) // 10, 1) :]
    return sum(last) / len(last)


def smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and up to 19 before it.

    Example:
        >>> smooth([1.0, 2.0, 3.0])
        [1.0, 1.5, 2.0]
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[n] - sums[max(n - SMOOTHED, 0)]) / min(n, SMOOTHED) for n in range(1, len(sums))]


_RUNS = ("variant", "first loss", "last loss", "from bfloat16's", "largest distance of a step")
_ABOUT_RUNS = "The last loss is the mean over the last tenth of the steps."
_LAYERS = ("layer", "runs in", "impact on outputs", "local error", Column("FLOPs", "percent"), "kept by")
_ABOUT_LAYERS = "Impact and local error are those in float8, or in bfloat16 where the layer does not fit."
