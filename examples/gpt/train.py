"""Trains several variants in lockstep from the same start on the same batches, and compares their bits at every step.

The variants alternate, so that their step times are measured under the same load, and so that gradients can be compared
without storing them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.data import Batches
from gpt.model import GPT, Config

LEARNING_RATE = 3e-3
LARGEST_GRADIENT_NORM = 1.0

Region = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of a batch, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Comparison:
    """A comparison of a run's losses and gradients with those of the reference.

    Attributes:
        tensors: The number of compared tensors.
        steps_that_differ: The steps at which the bits of a tensor differed.
        first: The name of the first such tensor; "" if there was none.
    """

    tensors: int = 0
    steps_that_differ: list[int] = field(default_factory=list)
    first: str = ""

    @property
    def same(self) -> bool:
        """Whether tensors were compared and all had the same bits."""
        return self.tensors > 0 and not self.steps_that_differ

    def add(self, step: int, run: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> None:
        """Compares a step's tensors by name."""
        different = names_that_differ(run, reference)
        self.tensors += len(reference)
        if different:
            self.steps_that_differ.append(step)
            self.first = self.first or different[0]


def names_that_differ(run: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> list[str]:
    """Returns the names of tensors whose bits differ, in the order of the reference.

    Example:
        >>> names_that_differ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)})
        ['a']
    """
    names = dict.fromkeys([*reference, *run])
    return [name for name in names if not same_bits(run.get(name), reference.get(name))]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two floating tensors have the same dtype, shape and bits: NaN equals itself, 0.0 differs from -0.0."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_as_integers(a), _as_integers(b))


def _as_integers(tensor: Tensor) -> Tensor:
    same_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(same_size)


@dataclass
class Run:
    """One variant of the training.

    Attributes:
        name: Its name in the report.
        region: Makes the region for forward and loss, the only difference between variants.
        device: "cpu" or "cuda".
        model: The model, trained in place.
        scaler: Scales the loss for float16.
        loss_of: The loss of logits and targets.
        learning_rate: The learning rate of AdamW.
        losses: The loss of each step.
        milliseconds: The time of each step, without the comparison.
        comparison: The comparison with the reference, step by step.
        casts: The number of casts in one forward and backward; None until counted.
    """

    name: str
    region: Region
    device: str
    model: GPT
    scaler: torch.amp.GradScaler
    loss_of: Loss = cross_entropy
    learning_rate: float = LEARNING_RATE
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)
    casts: int | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)

    def backward(self, ids: Tensor, targets: Tensor) -> None:
        """Runs the first half of a step, up to the gradients."""
        start = self._now()
        self._loss_and_gradients(ids, targets)
        self.milliseconds.append(self._now() - start)
        self.losses.append(self.loss.item())

    def _loss_and_gradients(self, ids: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with self.region():
            self.loss = self.loss_of(self.model(ids), targets)
        self.scaler.scale(self.loss).backward()

    def update(self) -> None:
        """Runs the second half of a step: clips the gradients and updates the weights."""
        start = self._now()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.milliseconds[-1] += self._now() - start

    def tensors(self) -> dict[str, Tensor | None]:
        """Returns the loss and every gradient of the current step, by name."""
        gradients = {f"gradient of {name}": weight.grad for name, weight in self.model.named_parameters()}
        return {"loss": self.loss, **gradients}

    def count_casts(self, ids: Tensor, targets: Tensor) -> None:
        """Runs one more forward and backward, and stores only the number of casts."""
        with CastCounter() as counter:
            self._loss_and_gradients(ids, targets)
        self.casts = counter.casts

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3


class CastCounter(TorchDispatchMode):
    """Counts the copies that change a tensor's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is not args[0].dtype:
            self.casts += 1
        return result


def start_runs(
    regions: Mapping[str, Region],
    config: Config,
    *,
    device: str,
    seed: int,
    scale_loss: bool,
    learning_rate: float = LEARNING_RATE,
) -> dict[str, Run]:
    """Returns a run for each region, all with the same weights."""
    runs = {}
    for name, region in regions.items():
        torch.manual_seed(seed)
        model = GPT(config).to(device)
        scaler = torch.amp.GradScaler(device, enabled=scale_loss)
        runs[name] = Run(name, region, device, model, scaler, learning_rate=learning_rate)
    return runs


def train(runs: Sequence[Run], reference: Run, batches: Batches, steps: int) -> Iterator[int]:
    """Trains all runs side by side and compares each with the reference; yields the number of every step done."""
    for step in range(1, steps + 1):
        ids, targets = batches.next()
        # Rotate the first run, so that CPU caches do not favour one of them.
        first = step % len(runs)
        turns = [*runs[first:], *runs[:first]]
        for run in turns:
            run.backward(ids, targets)
        expected = reference.tensors()
        for run in runs:
            if run is not reference:
                run.comparison.add(step, run.tensors(), expected)
        for run in turns:
            run.update()
        yield step
