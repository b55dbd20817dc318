"""Judges whether a run meets the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.errors import OptionError, StepError, did_you_mean
from torch_promote.numerics.pages.spelling import spell_tolerance
from torch_promote.numerics.runs.results import distances, read_result

__all__ = ["Judge", "Measured", "Results", "describe"]

#: For each batch the metrics, as named tensors.
Results = list[dict[str, torch.Tensor]]


@dataclass
class Measured:
    """The measurements of a run.

    Attributes:
        results: For each batch the metrics.
        agreed: Whether `check` returned true for each batch's result.
        seconds: Its duration.
        error: The exception that the step raised, or "".
    """

    results: Results = field(default_factory=list)
    agreed: bool = True
    seconds: float = 0.0
    error: str = ""


class Judge:
    """Compares runs with the reference.

    Args:
        tolerance: For all metrics, or by name.
        metric: The value to compare: a function of the step's result, the name of a part of it, or None for all.
        check: A function of the step's result that must return true for each batch.

    Attributes:
        tolerance: The tolerance of each metric; empty before `name_metrics`.

    Raises:
        OptionError: An argument is invalid.

    Example:
        >>> judge = Judge(0.1)
        >>> judge.name_metrics([{"loss": torch.tensor(2.0)}])
        >>> judge.meets({"loss": 0.05}), judge.meets({"loss": 0.2})
        (True, False)
    """

    def __init__(
        self,
        tolerance: float | Mapping[str, float],
        metric: Callable[[Any], Any] | str | None = None,
        check: Callable[[Any], bool] | None = None,
    ) -> None:
        values = list(tolerance.values()) if isinstance(tolerance, Mapping) else [tolerance]
        if not values or not all(map(_is_tolerance, values)):
            raise OptionError(
                f"tolerance must be a finite number above 0 (relative to the reference), or a mapping of metrics to "
                f"such numbers, got {tolerance!r}. For example tolerance=1e-3 or tolerance={{'loss': 1e-3}}."
            )
        if metric is not None and not isinstance(metric, str) and not callable(metric):
            raise OptionError(
                f"metric must be a function of the step's result, the name of a part of it, or None for all of it, got "
                f"{metric!r}."
            )
        if check is not None and not callable(check):
            raise OptionError(f"check must be a function of the step's result that returns a bool, got {check!r}.")
        self._asked = dict(tolerance) if isinstance(tolerance, Mapping) else float(tolerance)
        self._metric = metric
        self._check = check
        self.tolerance: dict[str, float] = {}

    def agrees(self, result: Any) -> bool:
        """Whether `check` returns true for a step's result."""
        return self._check is None or bool(self._check(result))

    def compute(self, result: Any) -> dict[str, torch.Tensor] | None:
        """Returns the results of the metric function for a step's result; None if the metric is not a function.

        Raises:
            StepError: The function returned nothing to compare.
        """
        return self._named(read_result(self._metric(result))) if callable(self._metric) else None

    def choose(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the metrics among the named tensors that a step returned.

        Raises:
            OptionError: There is no metric of that name.
        """
        if not isinstance(self._metric, str):
            return found
        if self._metric not in found:
            raise OptionError(
                f"metric={self._metric!r}: step() returned no such name.{did_you_mean(self._metric, found)} "
                f"Legal: {', '.join(found)}."
            )
        return {self._metric: found[self._metric]}

    def _named(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names the single number that a function returned: by the tolerance's only name, or by the function."""
        if list(found) != ["loss"]:
            return found
        asked = list(self._asked) if isinstance(self._asked, dict) else []
        name = getattr(self._metric, "__name__", "metric")
        return {asked[0] if len(asked) == 1 else "metric" if name == "<lambda>" else name: found["loss"]}

    def name_metrics(self, results: Results) -> None:
        """Sets `tolerance` from the names of the reference's metrics.

        Raises:
            OptionError: The tolerance names others.
        """
        names = list(results[0])
        if not isinstance(self._asked, dict):
            self.tolerance = dict.fromkeys(names, self._asked)
            return
        unknown = [name for name in self._asked if name not in names]
        if unknown:
            raise OptionError(
                f"tolerance names {', '.join(map(repr, unknown))}, and step() returned {', '.join(map(repr, names))}."
                f"{did_you_mean(unknown[0], names)}"
            )
        self.tolerance = {name: float(value) for name, value in self._asked.items()}

    def errors(self, results: Results, reference: Results) -> dict[str, float]:
        """Returns the error of each metric for the worst batch.

        Raises:
            StepError: The names, the shapes or the number of batches differ.
        """
        if len(results) != len(reference):
            raise StepError(f"the run ended after {len(results)} of {len(reference)} batches.")
        worst: dict[str, float] = {}
        for ours, theirs in zip(results, reference, strict=True):
            for name, error in distances(ours, theirs).items():
                worst[name] = max(worst.get(name, 0.0), math.inf if math.isnan(error) else error)
        return worst

    def meets(self, errors: Mapping[str, float]) -> bool:
        """Whether errors are within the tolerance."""
        return all(errors.get(name, math.inf) <= limit for name, limit in self.tolerance.items())

    def describe(self, errors: Mapping[str, float]) -> str:
        """Returns errors and tolerances as text: "loss 0.02 (tolerance 1e-3)"."""
        return describe({name: errors.get(name, math.inf) for name in self.tolerance}, self.tolerance)


def describe(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    """Returns errors as text, furthest beyond their tolerance first.

    Example:
        >>> describe({"loss": 0.02, "output": 0.5}, {"loss": 0.001, "output": 0.1})
        'loss 0.02 (tolerance 1e-3), output 0.5 (tolerance 0.1)'
    """
    shown = sorted(errors, key=lambda name: -errors[name] / tolerance[name])
    return ", ".join(f"{name} {_digits(errors[name])} (tolerance {spell_tolerance(tolerance[name])})" for name in shown)


def _digits(error: float) -> str:
    """Formats with three digits, so that an error near its tolerance does not look equal to it."""
    return spell_tolerance(float(f"{error:.3g}"))


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
