"""`Tuning`, the report of `tune`, and its records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch_promote.numerics.comparison import ROUNDS, Comparison
from torch_promote.policy.files import to_toml
from torch_promote.policy.module_tables import quoted
from torch_promote.policy.policy import Policy
from torch_promote.report.base import Chart, Code, Column, Content, Fact, Listing, Report, Series, Table, size

Level = Literal["op", "module", "site"]
Direction = Literal["accuracy", "speed"]


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
        flops: The floating point operations of its products in the forward: `Site.flops`.
    """

    name: str
    op: str
    module: str
    impact: float
    nonfinite: bool = False
    calls: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A run under overrides.

    Attributes:
        overrides: The names of the candidates that had the override.
        errors: The error of each metric, relative to the reference, for the worst batch.
        passed: Whether all errors were within the tolerance, and `check` returned true.
        why: The purpose of the run: "gate", "prefix", "shrink", "certify", "smaller set", "pattern", "held out",
            "compiled", "speed".
        seconds: Its duration.
        error: The exception that the step raised, or "".
    """

    overrides: tuple[str, ...]
    errors: Mapping[str, float]
    passed: bool
    why: str
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The property of the set of candidates in float32 (if the override is float8, in lower precision) that was proved.

    Attributes:
        kind: "minimum": every smaller set was run and failed. "1-minimal": without any one member it fails. "passes":
            it passed, and the budget ran out before more was proved.
        text: What that means, in sentences.
        violations: Violations of monotonicity (a passing set inside of a failing one), one sentence each.
        held_out: The errors on held-out batches; None if there are none, and `text` says why.
        compiled: The errors of the compiled step; None if nothing is compiled.
    """

    kind: Literal["minimum", "1-minimal", "passes"]
    text: str
    violations: tuple[str, ...] = ()
    held_out: Mapping[str, float] | None = None
    compiled: Mapping[str, float] | None = None


@dataclass(eq=False, repr=False)
class Tuning(Report):
    """The report of `tune`.

    `print(tuning)` shows a summary, a notebook the page; `save` writes the policy (.toml), a page (.html), or JSON,
    which `load` reads.

    Attributes:
        policy: The whole policy: the policy in force with the overrides.
        overrides: The result: ops and their policies at level "op"; otherwise paths or patterns of modules, and their
            tables. A table may restore an op's own policy (or "fallthrough") where a parent's table would override it.
            The overrides of "" also apply outside of modules.
        met: Whether the policy met the tolerance in every run of it, including held-out batches.
        level: "op", "module" or "site".
        direction: "accuracy": the overrides run candidates in float32. "speed": they run candidates in lower precision,
            or in float8.
        override: The policy that the overrides give: "fp32", "lower_precision_fp", "float8:rowwise".
        tolerance: The tolerance of each metric.
        errors: The errors of the last run of `policy`.
        certificate: What the runs have proved.
        trials: All runs, in order.
        noise_floor: For each metric, the difference between two runs of the reference.
        candidates: The candidates, in the order of the search.
        comparison: The comparison that determined the order.
        budget: The maximum number of runs.
        runs: The number of runs made.
        gain: For direction "speed", the savings: {"bytes": ..., "seconds": ...}. If the override is float8,
            {"float8_share": ..., "seconds": ...}: the share of the floating point operations of all products in the
            forward (`Comparison.flops`) that run in float8.
        notes: Other remarks, one sentence each.
        interrupted: Whether Ctrl-C ended the search.
        found: The names of the candidates that have the override, in both directions.
        reason: Why there was nothing to tune: the policy meets the tolerance without an override, or no op can get one.
            "" if there was a search.
    """

    NOUN: ClassVar[str] = "tuning"
    FORMAT: ClassVar[str] = "torch_promote tuning"

    policy: Policy
    overrides: Mapping[str, Any]
    met: bool
    level: Level
    direction: Direction
    tolerance: Mapping[str, float]
    errors: Mapping[str, float]
    certificate: Certificate
    trials: list[Trial]
    noise_floor: Mapping[str, float]
    candidates: list[Candidate]
    comparison: Comparison
    budget: int
    runs: int
    override: str = ""
    gain: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    found: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        self._policy_file: str = "mine.toml"  # which the page names; not a part of the report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the report, or with the extension ".toml" the policy. Pages that are saved later name that file.

        Args:
            path: The file.

        Raises:
            OptionError, MissingPackageError: As `Report.save`.
        """
        super().save(path)
        if (name := os.fspath(path)).lower().endswith(".toml"):
            self._policy_file = name

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`."""
        return {".toml": ("the policy", lambda: to_toml(self.policy.to_dict())), **super().formats()}

    def content(self) -> Content:
        """Returns what the report says to people."""
        trials = [trial for trial in self.trials if trial.why not in _AFTER_SEARCH]
        chosen, total = set(self.found), self.comparison.flops
        in_float8 = f", {self.override}" if "float8" in self.override else ""
        return Content(
            title=f"tuning for {self.direction}{in_float8}, level {self.level}",
            verdict=self._verdict(),
            facts=self._facts(),
            good=self.met,
            parts=(
                Table(
                    "Overrides", (Column("override", "name"), Column("policy", "code")), self._override_rows(), most=20
                ),
                Table("Errors", _ERROR_COLUMNS, self._error_rows(), note=_ABOUT_ERRORS),
                Listing("What the runs have proved", [self.certificate.text]),
                Listing("Not monotone", self.certificate.violations, most=3),
                Table("Best trials", self._trial_columns(), self._trial_rows(self._best(trials), 3), where="terminal"),
                Code(self._policy_file, to_toml(self.policy.to_dict())),
                Code(
                    "Python",
                    (_USE_TABLES if self.policy.modules else _USE).replace("FILE", quoted(self._policy_file)),
                    _ABOUT_USE.replace("FILE", quoted(self._policy_file)),
                ),
                self._trials_chart(trials),
                Table("Trials", self._trial_columns(), self._trial_rows(self.trials, 12), where="page"),
                Table(
                    "Candidates",
                    (
                        Column("candidate", "name"),
                        Column(f"impact on {self.comparison.loss_or_outputs}", "number"),
                        "calls",
                        "share of FLOPs",
                        "overflows",
                        "override",
                    ),
                    [
                        (
                            one.name,
                            one.impact,
                            one.calls,
                            f"{one.flops / total:.1%}" if one.flops else "",
                            "yes" * one.nonfinite,
                            "yes" * (one.name in chosen),
                        )
                        for one in self.candidates
                    ],
                    note="What could get an override, in the order of the search.",
                    where="page",
                ),
                Listing("Notes", [*self.notes, *self.comparison.notes]),
                Listing("Not compared", [*self.comparison.not_aligned, *self.comparison.not_seen], where="page"),
            ),
        )

    def _verdict(self) -> str:
        certificate = self.certificate
        rounds = "".join(f" {note}" for note in self.comparison.notes if note.startswith(ROUNDS))
        if self.reason:
            return f"Nothing to tune: {self.reason}{rounds * (ROUNDS not in self.reason)}"
        if self.met:
            verdict = "met" if self.found else "met without overrides"
        elif certificate.held_out is not None and not self._meets(certificate.held_out):
            verdict = "met in the search, but not on held-out batches"
        elif certificate.compiled is not None and not self._meets(certificate.compiled):
            verdict = "met in the search, but not in the compiled step"
        else:
            verdict = "not met"
        return f"{'Interrupted. ' * self.interrupted}The tolerance is {verdict}.{rounds}"

    def _meets(self, errors: Mapping[str, float]) -> bool:
        return all(error <= self.tolerance[name] for name, error in errors.items() if name in self.tolerance)

    def _facts(self) -> list[Fact]:
        facts: list[Fact] = [
            ("overrides", f"{len(self.found):,}", f"of {len(self.candidates):,} candidates"),
            ("proved", self.certificate.kind),
        ]
        if "bytes" in self.gain:
            facts.append(("saved", size(self.gain["bytes"]), "casts and saved activations"))
        if "float8_share" in self.gain:
            facts.append(("in float8", f"{self.gain['float8_share']:.1%}", "of the FLOPs of the forward's products"))
        if "seconds" in self.gain:
            seconds = self.gain["seconds"]
            facts.append(("slower" if seconds < 0 else "faster", f"{abs(seconds):.3g} s", "a run"))
        seconds = sum(trial.seconds for trial in self.trials)
        facts.append(("runs", f"{self.runs:,} of {self.budget:,}", f"{seconds:.1f} s"))
        return [*facts, ("torch", self.comparison.torch_version)]

    def _override_rows(self) -> list[tuple[str, str]]:
        def spell(value: Any) -> str:
            if isinstance(value, Mapping):
                return ", ".join(f"{op.removeprefix('aten::')}: {spell(policy)}" for op, policy in value.items())
            return str(getattr(value, "value", value))

        return [(name or "(the model)", spell(value)) for name, value in self.overrides.items()]

    def _error_rows(self) -> list[tuple[str | float | None, ...]]:
        measured = (self.errors, self.certificate.held_out or {}, self.certificate.compiled or {}, self.noise_floor)
        return [(name, limit, *(errors.get(name) for errors in measured)) for name, limit in self.tolerance.items()]

    def _trial_columns(self) -> list[Column | str]:
        return [
            Column("overrides", "count"),
            Column(f"error of {next(iter(self.tolerance))}" if len(self.tolerance) == 1 else "worst error", "number"),
            Column("metric", "name"),
            "outcome",
            "purpose",
            Column("which", "text"),
            Column("ms", "ms", "page"),
            Column("exception", "text", "page"),
        ]

    def _trial_rows(self, trials: list[Trial], most_names: int) -> list[tuple[Any, ...]]:
        def spell(names: Sequence[str]) -> str:
            return ", ".join([*names[:most_names], *(["..."] if names[most_names:] else [])]).replace("aten::", "")

        return [
            (
                len(trial.overrides),
                trial.errors.get(worst := self._worst(trial)),
                worst if len(self.tolerance) > 1 else None,
                "passed" if trial.passed else "failed",
                trial.why,
                spell(trial.overrides),
                1e3 * trial.seconds,
                trial.error,
            )
            for trial in trials
        ]

    def _error(self, trial: Trial) -> float:
        """The error to plot: that of the only metric, or the largest relative to its tolerance."""
        worst = self._worst(trial)
        return trial.errors[worst] / (self.tolerance[worst] if len(self.tolerance) > 1 else 1) if worst else math.inf

    def _worst(self, trial: Trial) -> str:
        """The metric whose error is largest relative to its tolerance; "" if the trial has no errors."""
        known = [name for name in self.tolerance if name in trial.errors]
        return max(known, key=lambda name: trial.errors[name] / self.tolerance[name], default="")

    def _best(self, trials: list[Trial]) -> list[Trial]:
        """The trials that are better than all trials with fewer candidates in float32, fewest first."""
        best: list[Trial] = []
        sign = -1 if self.direction == "speed" else 1
        rank = {id(trial): (not trial.passed, self._error(trial)) for trial in trials}
        for trial in sorted(trials, key=lambda trial: (sign * len(trial.overrides), rank[id(trial)])):
            if not best or rank[id(trial)] < rank[id(best[-1])]:
                best.append(trial)
        return best

    def _trials_chart(self, trials: list[Trial]) -> Chart:
        one = len(self.tolerance) == 1
        limit = next(iter(self.tolerance.values())) if one else 1.0

        def series(name: str, of: list[Trial], mark: Any, color: str = "ink") -> Series:
            return Series(
                name, [self._error(trial) for trial in of], [len(trial.overrides) for trial in of], color, mark
            )

        return Chart(
            "Overrides against error",
            "scatter",
            [
                series("passed", [trial for trial in trials if trial.passed], "o", "passed"),
                series("failed", [trial for trial in trials if not trial.passed], "x", "failed"),
                series("best", self._best(trials), "steps"),
            ],
            x_label="overrides",
            y_label=f"error of {next(iter(self.tolerance))}" if one else "largest error / tolerance",
            x_scale="count",
            y_scale="log",
            lines=[("tolerance", limit)],
            note="Each point is a trial.",
        )


#: The purposes of runs of the final policy, which are not part of the search.
_AFTER_SEARCH = ("held out", "compiled")
_ERROR_COLUMNS = (
    "metric",
    Column("tolerance", "number"),
    Column("error", "number"),
    Column("held out", "number"),
    Column("compiled", "number"),
    Column("noise floor", "number"),
)
_ABOUT_ERRORS = (
    "Errors are relative to the reference, of the worst batch. The noise floor is the difference between two runs of "
    "the reference."
)
_USE = "torch_promote.install(policy=FILE)"
_USE_TABLES = """\
policy = torch_promote.Policy.load(FILE)
policy.apply_to(model)
torch_promote.install(policy=policy)"""
_ABOUT_USE = (
    "It applies to every region of torch.autocast. With set_default_policy in place of install, it applies to those of "
    "my_autocast. "
    "For one region: my_autocast(..., policy=FILE), with model=model if the policy has tables of modules."
)
