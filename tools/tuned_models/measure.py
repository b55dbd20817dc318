"""Tunes a model for a fraction of the error in low precision, and trains it with the resulting policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case, loss_of
from torch import nn

import torch_promote as tp

__all__ = ["Row", "measure"]

#: How many steps in float32 come before tune: what it tunes is a training on its way.
_WARM_UP = 20
_BATCHES = 4
#: How many batches come after those that are tuned on, for tune to hold out.
_HELD_OUT = 5 * _BATCHES
_LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Row:
    """A row of the table: a model, a dtype and a level.

    Attributes:
        model, dtype, level: The tuned model, dtype and level.
        before: The error of the logits in the low precision.
        tolerance: The tolerance.
        overrides: The overrides that tune found, as text.
        candidates: The number of candidates.
        certificate: "minimum", "1-minimal" or "passes".
        runs: The number of runs.
        seconds: The duration.
        after: The error of the logits on the batches of the tuning.
        held_out: The error on as many other batches; None if there were none left.
        met: Whether both are within the tolerance.
        without: How far the losses of a training without overrides are from float32's: the mean over the steps.
        with_policy: The same with the policy.
    """

    model: str
    dtype: str
    level: str
    before: float
    tolerance: float
    overrides: str
    candidates: int
    certificate: str
    runs: int
    seconds: float
    after: float
    held_out: float | None
    met: bool
    without: float
    with_policy: float


def measure(
    case: Case, dtype: torch.dtype, asked: Iterable[tuple[str, int]], *, budget: int, steps: int
) -> Iterator[Row]:
    """Yields a row for each level and part: part 2 tunes for half of the error without overrides."""
    model, step = _step(case, dtype)
    comparison = tp.compare(step, model=model, batches=_BATCHES)
    before = next(metric.error for metric in comparison.metrics if metric.name == "logits")
    float32 = _losses(case, steps, dtype, tp.Policy.named("off"))
    without = _deviation(_losses(case, steps, dtype, tp.Policy.stock()), float32)
    for level, part in asked:
        tolerance = float(f"{before / part:.1e}")
        began = time.monotonic()
        tuning = tp.tune(
            step,
            model=model,
            tolerance={"logits": tolerance},
            metric="logits",
            batches=_BATCHES,
            budget=budget,
            level=level,  # type: ignore[arg-type]
            progress=False,
        )
        seconds = time.monotonic() - began
        yield Row(
            model=case.name,
            dtype=str(dtype).removeprefix("torch."),
            level=level,
            before=before,
            tolerance=tolerance,
            overrides=_describe(tuning),
            candidates=len(tuning.candidates),
            certificate=tuning.certificate.kind,
            runs=tuning.runs,
            seconds=seconds,
            after=tuning.errors["logits"],
            held_out=(tuning.certificate.held_out or {}).get("logits"),
            met=tuning.met,
            without=without,
            with_policy=_deviation(_losses(case, steps, dtype, tuning.policy), float32),
        )


def _describe(tuning: tp.Tuning) -> str:
    """The overrides if they are few, or else how many candidates have one."""
    if tuning.level == "op":
        names = [_short(op) for op in tuning.overrides]
    else:
        names = [f"{module}: {_short(op)}" for module, table in tuning.overrides.items() for op in table]
    if len(names) <= 3:
        return ", ".join(f"`{name}`" for name in sorted(names))
    count = len(next(trial for trial in reversed(tuning.trials) if trial.passed).overrides)
    return f"{count} of {len(tuning.candidates)} {tuning.level}s"


def _short(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


def _step(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    """Returns a model after some steps in float32, and a forward and backward of it."""
    training = _Training(case, _WARM_UP + _BATCHES + _HELD_OUT)
    for number in range(_WARM_UP):
        training.step(number)
    model, batches = training.model, training.batches[_WARM_UP:]

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs, labels = batches[number]
        with torch.autocast("cpu", dtype):
            logits = case.logits(model, inputs)
            loss = loss_of(logits, labels)
        loss.backward()
        return {"loss": loss, "logits": logits}

    return model, step


@dataclass
class _Training:
    """A training of a model from its beginning."""

    case: Case
    steps: int
    seed: int = 0
    batches: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.case.make()
        self.batches = self.case.batches(self.steps, self.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.case.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=_LOSS_SCALE)

    def step(self, number: int, dtype: torch.dtype = torch.bfloat16, policy: tp.Policy | None = None) -> float:
        """Trains a step and returns the loss; without a policy in float32."""
        inputs, labels = self.batches[number]
        torch.manual_seed(number)  # of dropout
        policy = policy or tp.Policy.named("off")
        with tp.my_autocast("cpu", dtype, policy=policy, model=self.model):
            loss = loss_of(self.case.logits(self.model, inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(loss.detach())


def _losses(case: Case, steps: int, dtype: torch.dtype, policy: tp.Policy) -> torch.Tensor:
    training = _Training(case, steps)
    return torch.tensor([training.step(number, dtype, policy) for number in range(steps)])


def _deviation(losses: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((losses - reference).abs() / reference.abs()).mean())
