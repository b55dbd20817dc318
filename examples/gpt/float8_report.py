"""The output of examples/float8_gpt.py: the trainings, their losses and the layers, as text, plot and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch_promote as tp
from gpt.train import Run
from gpt.tuned_report import deviations, percent
from torch_promote.report.base import Chart, Code, Column, Content, Report, Series, Table

COLORS = ("float32", "bfloat16", "float8", "complex")
#: The curves are means of as many steps.
AVERAGED = 20


@dataclass
class Float8Training(Report):
    """What the trainings and the tuning measured.

    Attributes:
        title: The model and the machine.
        runs: The trainings: in float32, in bfloat16, in float8 everywhere, and in float8 where tune allows it.
        tuning: The tuning.
        tolerance: How far the last loss in tuned float8 may be from bfloat16's, relative to it.
        seconds: The time of everything.
    """

    title: str
    runs: Sequence[Run]
    tuning: tp.Tuning
    tolerance: float
    seconds: float

    @property
    def within(self) -> bool:
        """Whether the last loss in tuned float8 is within the tolerance."""
        return abs(self.gap(self.runs[-1])) <= self.tolerance

    def gap(self, run: Run) -> float:
        """The distance of a run's last loss from bfloat16's, relative to it."""
        return last_loss(run) / last_loss(self.runs[1]) - 1

    def content(self) -> Content:
        """Returns what the report says to people."""
        _, reference, _, tuned = self.runs
        distances = [deviations(run, reference) for run in self.runs]
        trainings = [
            (run.name, f"{run.losses[0]:.4f}", f"{last_loss(run):.4f}", f"{self.gap(run):+.2%}", percent(max(of_run)))
            for run, of_run in zip(self.runs, distances, strict=True)
        ]
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
                Table("Trainings", _TRAININGS, trainings, note="The last loss is the mean of the last tenth of them."),
                self._chart("Loss", "linear", [run.losses for run in self.runs]),
                self._chart("Distance from bfloat16's loss, relative to it", "log", distances),
                Table("Layers", _LAYERS, list(self._layers()), most=30, note=_ABOUT_LAYERS),
                Code("The policy", self.tuning.formats()[".toml"][1]()),
            ),
        )

    def _chart(self, title: str, scale: Any, values: Sequence[Sequence[float]]) -> Chart:
        ends = range(1, len(values[0]) + 1)
        curves = [
            Series(run.name, [fmean(of_run[max(n - AVERAGED, 0) : n]) for n in ends], ends, color, "steps")
            for run, of_run, color in zip(self.runs, values, COLORS, strict=True)
            if any(of_run)
        ]
        note = "Where curves lie on each other, the last one is seen."
        title = f"{title}, mean of the last {AVERAGED} steps"
        return Chart(title, "scatter", curves, x_label="step", y_scale=scale, note=note)

    def _layers(self) -> Iterator[tuple[str, str, float | None, float, float, str]]:
        comparison = self.tuning.comparison
        linear = [site for site in comparison.sites if site.op == "aten::linear"]
        for site in sorted(linear, key=lambda site: comparison.modules.index(site.module)):
            kept_by = "" if site.module in self.tuning.found else site.misfit or "tune"
            runs_in, share = "bfloat16" if kept_by else "float8", site.flops / comparison.flops
            yield site.module, runs_in, site.impact, site.local, share, kept_by


def last_loss(run: Run) -> float:
    """The mean loss of the last tenth of the steps."""
    return fmean(run.losses[-max(len(run.losses) // 10, 1) :])


_TRAININGS = ("variant", "first loss", "last loss", "from bfloat16's", "largest distance of a step")
_LAYERS = ("layer", "runs in", "impact on outputs", "local error", Column("FLOPs", "percent"), "kept by")
_ABOUT_LAYERS = "Impact and local error are those in float8, or in bfloat16 where the layer does not fit."
