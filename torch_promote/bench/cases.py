"""The cases of a suite, their contenders, and the settings of a run."""

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

#: The low-precision dtype of all cases: CPUs and GPUs have fast kernels for it.
LOW = torch.bfloat16

#: Times a contender for a slice; returns nanoseconds per run. In a run that counts: the kernels of one run.
Timer = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a benchmark run.

    Attributes:
        device: "cpu" or "cuda".
        rounds: The number of times that each contender of a case is timed, 2 or more.
        threads: The number of threads that PyTorch computes in.
        slice_seconds: The approximate time that a contender runs in each round.
        tiny: Whether the models are small enough for a test.
        counted: Count kernels and bytes in place of times; `device` is "cuda" then. On a GPU, a run with times counts
            them too.
    """

    device: str = "cpu"
    rounds: int = 31
    threads: int = 1
    slice_seconds: float = 0.005
    tiny: bool = False
    counted: bool = False

    @property
    def clock(self) -> str:
        """The clock: "cpu" for CPU time, "wall" for wall-clock time, "kernels" for counts. See timing.py."""
        if self.counted:
            return "kernels"
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a contender's step other than its time. They need no repetition.

    Attributes:
        casts: The number of casts of weights, activations and gradients; empty if they were not counted.
        peak_bytes: The peak memory, in bytes above the memory held before.
        kernels: The number of kernels; None if they were not counted.
    """

    casts: Mapping[str, int]
    peak_bytes: int
    kernels: int | None = None


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready to time.

    Attributes:
        timers: The contenders.
        bases: The contenders over which the overhead of ours and of stock is reported.
        measure: Returns the other figures of the contenders' steps.
        close: Releases what the timers use.
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
        name: The case's name.
        prepare: Makes tensors, models and timers.
    """

    suite: str
    name: str
    prepare: Callable[[Settings], Prepared]

    def as_dict(self) -> dict[str, Any]:
        """Returns the names of the case as plain data."""
        return {"suite": self.suite, "case": self.name}
