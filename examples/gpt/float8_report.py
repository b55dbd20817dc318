"""The output of examples/float8_gpt.py: the trainings, their losses and the layers, as text, plot and page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch_promote as tp
from gpt.train import Run
from gpt.tuned_report import deviations, percent
from torch_promote.report.base import Chart, Code, Column, Content, Report, Series, Table

COLORS = ("float32", "bfloat16", "float8", "complex")
#: The curves are means of as many steps.
AVERAGED = 20
TRAININGS = ("variant", "first loss", "last loss", "from bfloat16's", "largest distance of a step")
LAYERS = ("layer", "runs in", "impact on outputs", "local error", Column("FLOPs", "percent"), "kept by")


class Float8Report(Report):
    """What the trainings and the tuning measured.

    Args:
        title: The model and the machine.
        runs: The trainings: in float32, in bfloat16, in float8 everywhere, and in float8 where tune allows it.
        tuning: The tuning.
        tolerance: How far the last loss in tuned float8 may be from bfloat16's, relative to it.
    """

    def __init__(self, title: str, runs: Sequence[Run], tuning: tp.types.Tuning, tolerance: float) -> None:
        self.title, self.runs, self.tuning, self.tolerance = title, runs, tuning, tolerance

    def content(self) -> Content:
        """Returns what the report says to people."""
        last = [fmean(run.losses[-max(len(run.losses) // 10, 1) :]) for run in self.runs]
        gaps = [loss / last[1] - 1 for loss in last]
        distances = [deviations(run, self.runs[1]) for run in self.runs]
        trainings = [
            (run.name, f"{run.losses[0]:.4f}", f"{loss:.4f}", f"{gap:+.2%}", percent(max(of_run)))
            for run, loss, gap, of_run in zip(self.runs, last, gaps, distances, strict=True)
        ]
        good = abs(gaps[-1]) <= self.tolerance
        verdict = f"the last loss {'is' if good else 'is NOT'} within {percent(self.tolerance)} of bfloat16's"
        return Content(
            title=self.title,
            verdict=f"{self.runs[-1].name}: {verdict}: {last[-1]:.4f} and {last[1]:.4f}, {gaps[-1]:+.2%}.",
            good=good,
            facts=[
                ("in float8", f"{self.tuning.gain['float8_share']:.1%}", "of the FLOPs of the forward's products"),
                ("runs of tune", f"{self.tuning.runs} of {self.tuning.budget}"),
            ],
            parts=(
                Table("Trainings", TRAININGS, trainings, note="Last loss: the mean over the last tenth of the steps."),
                self._chart("Loss", "linear", [run.losses for run in self.runs]),
                self._chart("Distance from bfloat16's loss, relative to it", "log", distances),
                Table("Layers", LAYERS, self._layers(), 30, "Errors: in float8, or in bfloat16 if kept by a misfit."),
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
        note = f"Each point is the mean of the last {AVERAGED} steps. Of curves that coincide, the last one is seen."
        return Chart(title, "scatter", curves, x_label="step", y_scale=scale, note=note)

    def _layers(self) -> list[tuple[str, str, float | None, float, float, str]]:
        comparison, rows = self.tuning.comparison, []
        linear = [site for site in comparison.sites if site.op == "aten::linear"]
        for site in sorted(linear, key=lambda site: comparison.modules.index(site.module)):
            kept_by = "" if site.module in self.tuning.found else site.misfit or "tune"
            share = site.flops / comparison.flops
            rows.append((site.module, "bfloat16" if kept_by else "float8", site.impact, site.local, share, kept_by))
        return rows
