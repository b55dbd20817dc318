"""The records of `tune`: candidates, trials, the certificate, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.policy.policy import Policy

__all__ = ["Candidate", "Certificate", "Trial", "TuningRecords"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for an override: an op, a module, or an op in a module.

    Attributes:
        name: Its name in trials: "aten::softmax", "blocks.0.attn", "blocks.0.attn: aten::softmax".
        op: The op; "" at level "module".
        module: The module; "" at level "op", and for the model itself.
        impact: The effect of its sites on the loss: the root of the sum of squares of their impacts.
        nonfinite: Whether a local run of one of its sites overflows.
        calls: The number of calls per run.
    """

    name: str
    op: str
    module: str
    impact: float
    nonfinite: bool = False
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A run under overrides.

    Attributes:
        overrides: The names of the candidates that had the override.
        errors: The error of each metric, relative to the reference, for the worst batch.
        passed: Whether all errors were within the tolerance, and `check` returned true.
        why: The purpose of the run: "gate", "prefix", "shrink", "certify", "smaller set", "pattern", "held out",
            "compiled", "speed".
        predicted: The error of the first metric that the impacts predict; None if they cannot.
        seconds: Its duration.
        error: The exception that the step raised, or "".
    """

    overrides: tuple[str, ...]
    errors: Mapping[str, float]
    passed: bool
    why: str
    predicted: float | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The property of the set of overrides that the runs have proved.

    Attributes:
        kind: "minimum": every smaller set was run and failed. "1-minimal": without any one member it fails. "passes":
            it passed, and the budget ran out before more was proved.
        text: A sentence.
        violations: Violations of monotonicity (a passing set inside of a failing one), one sentence each.
        held_out: The errors on held-out batches; None if there are none, and `text` says why.
        compiled: The errors of the compiled step; None if nothing is compiled.
    """

    kind: Literal["minimum", "1-minimal", "passes"]
    text: str
    violations: tuple[str, ...] = ()
    held_out: Mapping[str, float] | None = None
    compiled: Mapping[str, float] | None = None

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  not monotone: {sentence}" for sentence in self.violations)])


@dataclass(eq=False)
class TuningRecords:
    """The records of `tune`.

    Attributes:
        policy: The whole policy: the candidate with the overrides.
        overrides: The result: ops and their policies at level "op"; otherwise paths or patterns of modules, and their
            tables. A table may restore an op's own policy (or "fallthrough") where a parent's table would override it.
            The overrides of "" also apply outside of modules.
        met: Whether the policy met the tolerance in every run of it, including held-out batches.
        level: "op", "module" or "site".
        direction: "accuracy" or "speed".
        tolerance: The tolerance of each metric.
        errors: The errors of the last run of `policy`.
        certificate: The certificate.
        trials: All runs, in order.
        noise_floor: For each metric, the difference between two runs of the reference.
        candidates: The candidates, in the order of the search.
        predicted_against_measured: For each trial, the names that had the override, the predicted and the measured
            error.
        comparison: The comparison that determined the order.
        budget: The maximum number of runs.
        runs: The number of runs made.
        gain: For direction "speed", the savings: {"bytes": ..., "seconds": ...}.
        notes: Other remarks, one sentence each.
        interrupted: Whether Ctrl-C ended the search.
        found: The names of the candidates that have the override.
    """

    policy: Policy
    overrides: Mapping[str, Any]
    met: bool
    level: str
    direction: str
    tolerance: Mapping[str, float]
    errors: Mapping[str, float]
    certificate: Certificate
    trials: list[Trial]
    noise_floor: Mapping[str, float]
    candidates: list[Candidate]
    predicted_against_measured: list[tuple[tuple[str, ...], float, float]]
    comparison: Comparison
    budget: int
    runs: int
    gain: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    found: tuple[str, ...] = ()
