"""Runs of a step that are judged, within a budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_promote import _C
from torch_promote.numerics.runs.step_runs import Results, StepRuns
from torch_promote.numerics.tuning.search import OutOfBudgetError
from torch_promote.numerics.tuning.verdict import Judge, Measured
from torch_promote.policy.policy import Policy

__all__ = ["MeasuredRuns"]


class MeasuredRuns(StepRuns):
    """Runs of a step, each with its metrics.

    Args:
        step: As in `StepRuns`.
        model: As in `StepRuns`.
        judge: Reads the metrics.
        budget: The maximum number of runs.
        options: More arguments of `StepRuns`.

    Attributes:
        log: The results of each run, in order, and its policy.
        before: The number of runs of the budget that an earlier process made.
    """

    def __init__(
        self, step: Callable[..., Any], model: nn.Module | None, judge: Judge, budget: int, **options: Any
    ) -> None:
        super().__init__(step, model, **options)
        self.judge = judge
        self.budget = budget
        self.before = 0
        self.log: list[tuple[Policy, Measured]] = []

    def __enter__(self) -> MeasuredRuns:
        super().__enter__()
        return self

    @property
    def spent(self) -> int:
        """The number of runs made, including those of an earlier process."""
        return self.before + self.count

    @property
    def left(self) -> int:
        """The number of runs left in the budget."""
        return self.budget - self.spent

    def hashes(self) -> dict[str, str]:
        """Returns a hash of each part of the state before the step."""
        assert self._state is not None
        return self._state.hashes()

    def check_state(self) -> None:
        """Checks that the state before the step has been restored.

        Raises:
            StepError: It has not.
        """
        assert self._state is not None
        self._state.check()

    def run(
        self,
        policy: Policy,
        *,
        around: contextlib.AbstractContextManager[Any] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
        held_out: int = 0,
        eager: bool | None = None,
    ) -> Results:
        """Like `StepRuns.run`, within the budget.

        Raises:
            OutOfBudgetError: No runs are left.
        """
        if self.left < 1:
            raise OutOfBudgetError
        measured = Measured()
        self.log.append((policy, measured))

        def judged(number: int, result: Any) -> None:
            with torch.no_grad(), _unobserved():
                measured.agreed &= self.judge.agrees(result)
                metrics = self.judge.compute(result)
                measured.results += [] if metrics is None else [metrics]
            if on_result is not None:
                on_result(number, result)

        started = time.perf_counter()
        try:
            results = super().run(policy, around=around, on_result=judged, held_out=held_out, eager=eager)
            measured.results = measured.results or [self.judge.choose(one) for one in results]
            return results
        except Exception as error:
            measured.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            measured.seconds = time.perf_counter() - started


def _unobserved() -> contextlib.AbstractContextManager[Any]:
    """Hides the judge's computations from observers."""
    keys: Any = torch._C
    guard: contextlib.AbstractContextManager[Any] = keys._ExcludeDispatchKeyGuard(
        keys.DispatchKeySet(keys._dispatch_key_parse(_C.dispatch_observer_key()))
    )
    return guard
