"""The output of examples/float8_gpt.py: the trainings, the loss curves and the layers, as text, plot and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch_promote as tp
from gpt.train import Run
from gpt.tuned_report import deviations, percent
from torch_promote.report.base import Chart, Code, Column, Content, Report, Series, Table

COLORS = ("float32", "bfloat16", "float8", "complex")


@dataclass
class Float8Training(Report):
    """Trainings that differ in which layers run in float8.

    Attributes:
        runs: The trainings.
        reference: The one in bfloat16.
        tuned: The one with the tuned policy.
        tuning: The tuning.
        tolerance: How far the tuned loss may be from the reference's, relative to it.
        subtitle: The model and the machine.
        seconds: The time of everything.
    """

    NOUN: ClassVar[str] = "training"
    FORMAT: ClassVar[str] = "torch_promote float8 training"

    runs: Sequence[Run]
    reference: Run
    tuned: Run
    tuning: tp.Tuning
    tolerance: float
    subtitle: str
    seconds: float

    @property
    def within(self) -> bool:
        """Whether the tuned training's last losses are within the tolerance of the reference's."""
        return abs(self.gap(self.tuned)) <= self.tolerance

    def gap(self, run: Run) -> float:
        """The distance of a run's last loss from the reference's, relative to it."""
        return last_loss(run) / last_loss(self.reference) - 1

    def content(self) -> Content:
        """Returns what the report says to people."""
        steps = len(self.tuned.losses)
        held = "is" if self.within else "is NOT"
        return Content(
            title=f"A small GPT in float8: {self.subtitle}",
            verdict=f"With the tuned policy, the loss after {steps} steps {held} within {percent(self.tolerance)} of "
            f"bfloat16's: {last_loss(self.tuned):.4f} and {last_loss(self.reference):.4f}, {self.gap(self.tuned):+.2%}.",
            good=self.within,
            facts=[
                ("in float8", f"{self.tuning.gain['float8_share']:.1%}", "of the FLOPs of the forward's products"),
                ("runs of tune", f"{self.tuning.runs} of {self.tuning.budget}"),
                ("time", f"{self.seconds:.0f} s"),
            ],
            parts=(
                Table("Trainings", _RUNS, [self._row(run) for run in self.runs], note=_ABOUT_RUNS),
                Chart("Loss", "scatter", _curves(self.runs, [run.losses for run in self.runs]), x_label="step"),
                Chart(
                    f"Distance of each loss from that in {self.reference.name}",
                    "scatter",
                    _curves(self.runs, [deviations(run, self.reference) for run in self.runs])[::-1],
                    x_label="step",
                    y_scale="log",
                    lines=[("tolerance of the last loss", self.tolerance)],
                ),
                Table("Layers", _LAYERS, self._layers(), most=30, note=_ABOUT_LAYERS),
                Code("The policy", self.tuning.formats()[".toml"][1]()),
            ),
        )

    def _row(self, run: Run) -> tuple[str, str, str, str, str]:
        largest = percent(max(deviations(run, self.reference)))
        if run is self.reference:
            return run.name, f"{run.losses[0]:.4f}", f"{last_loss(run):.4f}", "", ""
        return run.name, f"{run.losses[0]:.4f}", f"{last_loss(run):.4f}", f"{self.gap(run):+.2%}", largest

    def _layers(self) -> list[tuple[str, str, float | None, float, float, str]]:
        comparison, found = self.tuning.comparison, set(self.tuning.found)
        rows = []
        order = [name for name, _ in self.tuned.model.named_modules()]
        for site in sorted(comparison.sites, key=lambda site: order.index(site.module)):
            if site.op == "aten::linear":
                runs_in = "float8" if site.module in found else "bfloat16"
                why = site.misfit or ("" if site.module in found else "tune")
                rows.append((site.module, runs_in, site.impact, site.local, site.flops / comparison.flops, why))
        return rows


def last_loss(run: Run) -> float:
    """The mean loss of the last tenth of the steps."""
    last = run.losses[-max(len(run.losses) // 10, 1) :]
    return sum(last) / len(last)


def _curves(runs: Sequence[Run], values: Sequence[Sequence[float]]) -> list[Series]:
    return [
        Series(run.name, losses, range(1, len(losses) + 1), color, "line")
        for run, losses, color in zip(runs, values, COLORS, strict=True)
    ]


_RUNS = (
    Column("variant", "text"),
    Column("first loss", "text"),
    Column("last loss", "text"),
    Column("from bfloat16's", "text"),
    Column("largest distance of a step", "text"),
)
_ABOUT_RUNS = "The last loss is the mean over the last tenth of the steps."
_LAYERS = (
    Column("layer", "name"),
    "runs in",
    Column("impact on outputs", "number"),
    Column("local error", "number"),
    Column("FLOPs", "percent"),
    Column("kept by", "text"),
)
_ABOUT_LAYERS = "Impact and local error are those in float8, or in bfloat16 where the layer does not fit."
