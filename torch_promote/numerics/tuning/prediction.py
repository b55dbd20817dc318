"""The errors that impacts predict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.tuning.tuning_records import Candidate, Trial

__all__ = ["Prediction"]

#: The purposes of runs whose errors impacts cannot predict: they use other batches, or are compiled.
_ELSEWHERE = ("held out", "compiled")


class Prediction:
    """Predicts the error of the first metric that is one number.

    Args:
        comparison: Provides the reference's values.
        candidates: The candidates, with their impacts.
        metrics: The names of the metrics that are judged.
        known: Whether the impacts are known.
    """

    def __init__(
        self, comparison: Comparison, candidates: Sequence[Candidate], metrics: Iterable[str], known: bool
    ) -> None:
        judged = set(metrics)
        numbers = ((one.name, one.reference) for one in comparison.metrics if one.name in judged)
        self._name, self._value = next(
            ((name, value) for name, value in numbers if known and value is not None and math.isfinite(value)),
            ("", 0.0),
        )
        self._candidates = candidates

    def error(self, given: frozenset[str]) -> float | None:
        """Returns the first-order error if the other candidates stay low, or None if it cannot be predicted."""
        if not self._name:
            return None
        left = math.sqrt(sum(one.impact**2 for one in self._candidates if one.name not in given))
        return left / abs(self._value) if self._value else left

    def pairs(self, trials: Iterable[Trial]) -> list[tuple[tuple[str, ...], float, float]]:
        """Returns for each trial the names with the override, the predicted and the measured error."""
        return [
            (one.overrides, one.predicted, one.errors[self._name])
            for one in trials
            if one.predicted is not None and self._name in one.errors and not one.error and one.why not in _ELSEWHERE
        ]
