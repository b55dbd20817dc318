"""Tunings in several processes, whose ranks use different batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import torch_promote as tp
from helpers.planted_steps import Calls, planted_step

__all__ = ["different_models", "one_rank_fails", "one_rank_raises", "resumed", "verdicts"]


def _tuned(step: Any, model: torch.nn.Module, **options: Any) -> dict[str, Any]:
    tuning = tp.tune(step, model=model, **{"tolerance": 0.06, **options})
    return {
        "overrides": tuning.overrides,
        "errors": dict(tuning.errors),
        "trials": [(one.overrides, one.passed, dict(one.errors)) for one in tuning.trials],
        "order": [one.name for one in tuning.candidates],
        "runs": tuning.runs,
        "planted": getattr(model, "planted", None),
    }


def _of_rank(step: Calls, rank: int) -> Any:
    return lambda number: step(10 * number + rank)


def verdicts(rank: int, world_size: int) -> dict[str, Any]:
    """All ranks have a tuning of the same model."""
    step = planted_step(6, 2, seed=71)
    return _tuned(_of_rank(step, rank), step.model)


def one_rank_fails(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 1 needs an override."""
    step = planted_step(4, 1, seed=72)
    [planted] = step.model.planted  # type: ignore[union-attr, misc]

    def other(number: int) -> torch.Tensor:
        result = step(number)
        if rank == 0:
            with tp.my_autocast("cpu", overrides={planted: "fp32"}):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
                result = step.model(x)
        return result

    return _tuned(other, step.model)


def resumed(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second call repeats no trial."""
    file = Path(os.environ["TUNED_RANKS_FILE"])
    step = planted_step(4, 1, seed=73)
    first = _tuned(_of_rank(step, rank), step.model, resume=file)
    torch.distributed.barrier()
    return first, _tuned(_of_rank(step, rank), step.model, resume=file)


def different_models(rank: int, world_size: int) -> None:
    """The ranks run different ops."""
    model = Scaling(torch.div if rank else torch.mul)
    _tuned(Calls(model), model, tolerance=1e-6)


def one_rank_raises(rank: int, world_size: int) -> None:
    """The step raises on rank 1."""

    def step() -> torch.Tensor:
        if rank:
            raise ZeroDivisionError("mine")
        return torch.ones(())

    _tuned(step, torch.nn.Linear(2, 2))


class Scaling(torch.nn.Module):
    """Overflows."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear, self.op = torch.nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.linear(x), 8.0 if self.op is torch.mul else 1 / 8.0).float().sum()
