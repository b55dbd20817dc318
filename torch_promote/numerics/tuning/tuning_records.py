"""What `tune` records: candidates, trials, what they proved, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.policy.policy import Policy

__all__ = ["Candidate", "Certificate", "Trial", "TuningRecords"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may get an override: an op, a module, or an op in a module.

    Attributes:
        name: Its name in trials: "aten::softmax", "blocks.0.attn", "blocks.0.attn: aten::softmax".
        op: The op; "" at level "module".
        module: The module; "" at level "op", and for the model itself.
        impact: What its sites do to the loss together: the root of the sum of squares of their impacts.
        nonfinite: Whether a local run of one of its sites overflows.
        calls: How many calls a run has.
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
        errors: The error of each metric, of the worst batch, relative to the reference.
        passed: Whether all were within the tolerance, and `check` agreed.
        why: What the run was for: "gate", "prefix", "shrink", "certify", "smaller set", "pattern", "held out",
            "compiled", "speed".
        predicted: The error of the first metric that the impacts predict; None if they cannot.
        seconds: How long it took.
        error: The exception that the step raised; "".
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
    """What the runs have proved of the set of overrides.

    Attributes:
        kind: "minimum": every smaller set was run and failed. "1-minimal": without any one member it fails. "passes":
            it passed, and the budget was out before more was known.
        text: A sentence.
        violations: What was seen that is not monotone: a set that passes inside of one that fails, a sentence each.
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
    """What `tune` records.

    Attributes:
        policy: The whole policy: the candidate, with what was found on top.
        overrides: What was found: ops and their policies at level "op"; else paths or patterns of modules, and their
            tables. A table gives an op back what it has without overrides, "fallthrough" or the policy's own, where
            the table of a module around it would reach too far. The overrides of "" hold outside of modules as well.
        met: Whether the policy met the tolerance in every run that was made of it, on held-out batches, too.
        level: "op", "module" or "site".
        direction: "accuracy" or "speed".
        tolerance: The tolerance of each metric.
        errors: The errors of the last run of `policy`.
        certificate: What has been proved.
        trials: All runs, in order.
        noise_floor: For each metric, the difference between two runs of the reference.
        candidates: What could get an override, in the order of the search.
        predicted_against_measured: For each trial, the names that had the override, the predicted and the measured
            error.
        comparison: What the order came from.
        budget: How many runs were allowed.
        runs: How many were made.
        gain: For direction "speed", what is gained: {"bytes": ..., "seconds": ...}.
        notes: What else a reader has to know, a sentence each.
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
