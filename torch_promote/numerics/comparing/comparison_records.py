"""The records of `compare`: metrics, gradients and sites."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_promote.numerics.comparing.site import Site
from torch_promote.policy.policy import Policy

__all__ = ["ComparisonRecords", "GradientError", "Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A value that the step returned, for the worst batch.

    Attributes:
        name: Its name: "loss".
        reference: The reference's value, if it is one number.
        candidate: The candidate's value, if it is one number.
        error: Their distance, relative to the reference; see `runs.results.distance`.
    """

    name: str
    reference: float | None
    candidate: float | None
    error: float


@dataclass(frozen=True, slots=True)
class GradientError:
    """The gradient of a parameter.

    Attributes:
        name: The parameter: "blocks.0.q.weight".
        error: The relative L2 norm of the difference; infinite if the candidate's is not finite.
        norm: The norm of the reference's gradient.
    """

    name: str
    error: float
    norm: float


@dataclass(eq=False)
class ComparisonRecords:
    """The records of `compare`.

    Attributes:
        reference: The policy of the reference.
        candidate: The policy that was compared with it.
        sites: The sites, largest impact first, then largest local error first.
        metrics: The values that the step returned.
        gradients: The gradients of parameters, the largest error first; empty without `gradients=True`.
        modules: The paths of all modules of the model, in its order.
        runs: The number of runs of the step.
        backwards: The number of backwards, including those of the step.
        random_cotangents: Whether random cotangents replaced gradients that are zero.
        noise: The difference between two runs of the reference, for each name in `metrics`.
        not_aligned: Calls made in only one of the runs, one sentence each.
        not_seen: Computations that ran and were not compared, one sentence each.
        notes: Other remarks, one sentence each.
        torch_version: PyTorch's version.
    """

    reference: Policy
    candidate: Policy
    sites: list[Site]
    metrics: list[Metric]
    gradients: list[GradientError] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    runs: int = 0
    backwards: int = 0
    random_cotangents: bool = False
    noise: dict[str, float] = field(default_factory=dict)
    not_aligned: list[str] = field(default_factory=list)
    not_seen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    torch_version: str = ""
