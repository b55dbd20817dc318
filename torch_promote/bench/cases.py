"""What a suite is made of: cases, each with its contenders. And what a run is told: device, rounds, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ALREADY_CAST", "HAND", "LOW", "OURS", "PLAIN", "STOCK", "Case", "Measured", "Prepared", "Settings", "Timer"]

#: The contenders.
STOCK = "stock"
OURS = "ours"
HAND = "hand"
PLAIN = "plain"
ALREADY_CAST = "already_cast"

#: What is cast to, everywhere: CPUs and GPUs have fast kernels for it.
LOW = torch.bfloat16

#: Times a contender for a slice; returns nanoseconds a run.
Timer = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a benchmark is run.

    Attributes:
        device: "cpu" or "cuda".
        rounds: How often each contender of a case is timed, 2 or more.
        threads: What PyTorch may compute in.
        slice_seconds: How long a contender is timed in each round, about.
        tiny: Whether the models are small enough for a test.
    """

    device: str = "cpu"
    rounds: int = 31
    threads: int = 1
    slice_seconds: float = 0.005
    tiny: bool = False

    @property
    def clock(self) -> str:
        """What time is: "cpu", that of this process, or "wall", that of the day. See torch_promote/bench/timing.py."""
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step of a contender does that is not time, and needs no repetition.

    Attributes:
        casts: How many casts of weights, activations and gradients it makes.
        peak_bytes: The most memory it holds at a time, beyond what was held before.
    """

    casts: Mapping[str, int]
    peak_bytes: int


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready to be timed.

    Attributes:
        timers: The contenders.
        bases: The contenders over which the cost of ours and of stock is told.
        measure: Measures the contenders' steps otherwise than by time.
        close: Ends what the timers need.
    """

    timers: Mapping[str, Timer]
    bases: Sequence[str] = ()
    measure: Callable[[], Mapping[str, Measured]] = dict
    close: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a suite.

    Attributes:
        suite: The suite's name.
        name: What is timed.
        prepare: Makes tensors, models and timers.
    """

    suite: str
    name: str
    prepare: Callable[[Settings], Prepared]

    def as_dict(self) -> dict[str, Any]:
        """The case as plain data, without what makes it run."""
        return {"suite": self.suite, "case": self.name}
