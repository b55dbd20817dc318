"""The cases of a suite, their contenders, and the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALREADY_CAST",
    "COMPILE",
    "HAND",
    "INSTRUCTIONS",
    "LOW",
    "OURS",
    "PLAIN",
    "STOCK",
    "Case",
    "Copies",
    "Measured",
    "Prepared",
    "Settings",
    "Target",
    "Timer",
]

#: The contenders.
STOCK = "stock"
OURS = "ours"
HAND = "hand"
PLAIN = "plain"
ALREADY_CAST = "already_cast"

#: The suite of torch.compile, which takes minutes.
COMPILE = "compile"
#: The suite that counts instructions, in a separate process.
INSTRUCTIONS = "instructions"

#: The low-precision dtype of all cases: CPUs and GPUs have fast kernels for it.
LOW = torch.bfloat16

#: Times a contender for a slice; returns nanoseconds per run.
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
        counted: Count kernels and bytes instead of times; `device` is then "cuda". On a GPU, a run with times also
            counts them.
        keep: The folder for callgrind's files, one for each contender of a case; None to delete them.
    """

    device: str = "cpu"
    rounds: int = 31
    threads: int = 1
    slice_seconds: float = 0.005
    tiny: bool = False
    counted: bool = False
    keep: Path | None = None

    @property
    def clock(self) -> str:
        """The clock: "cpu" for CPU time, "wall" for wall-clock time, "kernels" for counts. See timing.py."""
        if self.counted:
            return "kernels"
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"


@dataclass(frozen=True, slots=True)
class Copies:
    """The casts of a run on the stand-in device, and the bytes that the run allocates.

    Attributes:
        forward: The casts of the forward by direction: "widening" to a dtype that takes more bytes, or "narrowing".
        backward: The casts of the backward by direction.
        kernels: The kernels that copy, to another dtype or the same.
        cast_kernels: Of these, the kernels that cast. A `_foreach_copy_` is one kernel, and a cast for each tensor.
        moved_bytes: The bytes that the casts read and write.
        allocated_bytes: The bytes that the run allocates, including those that it frees again.
    """

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    kernels: int
    cast_kernels: int
    moved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a contender's step other than its time. They need no repetition.

    Attributes:
        casts: The number of casts of weights, activations and gradients; empty if they were not counted.
        peak_bytes: The peak memory, in bytes above the memory held before.
        kernels: The number of kernels; None if they were not counted.
        copies: More about the casts, on the stand-in device; None elsewhere.
        compiled: The counts of `count_compiled` for the step, and of a compilation also the calls that it takes; empty
            for steps that run eagerly.
    """

    casts: Mapping[str, int]
    peak_bytes: int
    kernels: int | None = None
    copies: Copies | None = None
    compiled: Mapping[str, int] = field(default_factory=dict)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready to time.

    Attributes:
        timers: The contenders.
        bases: The contenders over which the overhead of ours and of stock is reported.
        measure: Returns the other figures of the contenders' steps.
        weights: The weights of all contenders. On the stand-in device, casts of them count as casts of weights.
        close: Releases what the timers use.
    """

    timers: Mapping[str, Timer]
    bases: Sequence[str] = ()
    measure: Callable[[], Mapping[str, Measured]] = dict
    weights: Sequence[Tensor] = ()
    close: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Target:
    """The target for a figure of ours in a case.

    Attributes:
        base: The contender that ours is compared with.
        at_most: The limit of ours / base; with `over`, of ours' overhead over the base as a share of stock's.
        over: Whether the overhead is compared.
    """

    base: str
    at_most: float
    over: bool = False

    def of(self, values: Mapping[str, float]) -> float:
        """Returns the figure.

        Args:
            values: The measurements, by contender.

        Example:
            >>> Target(HAND, 0.5, over=True).of({STOCK: 5, OURS: 3, HAND: 1})
            0.5
        """
        ours, base = values[OURS], values[self.base]
        return (ours - base) / (values[STOCK] - base) if self.over else ours / base


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a suite.

    Attributes:
        suite: The suite's name.
        name: The case's name.
        prepare: Makes tensors, models and timers.
        target: The target, if there is one.
    """

    suite: str
    name: str
    prepare: Callable[[Settings], Prepared]
    target: Target | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the names of the case as plain data."""
        return {"suite": self.suite, "case": self.name}
