"""`Comparison`, the report of `compare`, and its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from torch_promote.policy.overrides import converts
from torch_promote.policy.policy import Policy
from torch_promote.report.base import (
    Branch,
    Chart,
    Column,
    Content,
    Fact,
    Listing,
    Report,
    Series,
    Table,
    Tree,
    heat_shares,
    module_name,
    short_line,
    spell_number,
)

_Scale = tuple[float, float] | None
#: The largest relative error of a rounding, by dtype.
_ROUNDING = {
    str(dtype).removeprefix("torch."): torch.finfo(dtype).eps / 2
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}


@dataclass(frozen=True, slots=True)
class Site:
    """The calls of one overload in one module, in the forward, or of an optimizer inside of a region.

    The conversions that a module makes, as with `to`, are a site for each line.

    Errors are those of the candidate relative to the reference, over all calls together: over their results, and the
    arguments that they wrote to, such as those of foreach ops and the running statistics of batch norm. The local error
    is that of the op alone: on the reference's inputs, cast to the dtypes in which the candidate ran it. The
    accumulated error is that of the candidate's own run, including the errors of its inputs. Values beyond 1e30, which
    stand for infinity in masks, are ignored.

    An op without a policy that casts runs in lower precision because its inputs were rounded. Its local error is that
    of the op on the rounded inputs: their rounding is the error of the op, or the conversion, that returned them.

    Attributes:
        op: The op: "aten::linear".
        overload: Its overload: "", "int".
        module: The path of the module that calls it; "" in the model itself and outside of it.
        calls: The number of calls per run.
        line: "path:number" of the line that made the first call.
        dtypes: The dtypes in which the candidate ran the op: "float16", "float16, float32".
        policy: The candidate's policy for the op: "lower_precision_fp"; "" if there is none.
        local: The local error, as a relative L2 norm. Infinite if a result is not finite where the reference's is.
        local_ulp: The largest local error of an element, in units in the last place of the candidate's result dtype;
            None if a result is not finite.
        local_sqnr: The local signal to quantization noise ratio in dB; infinite without an error. None if the local
            error is infinite.
        accumulated: The accumulated error, as a relative L2 norm; None if the candidate made no such call.
        accumulated_ulp: The largest accumulated error of an element, like `local_ulp`.
        accumulated_sqnr: The accumulated signal to quantization noise ratio in dB, like `local_sqnr`.
        impact: The change of the loss by the local errors, first order, in the loss's unit: abs(sum(g * d)) with the
            gradients g of the loss and the local errors d; for several batches, the root of the sum of squares. Where
            no gradient reaches a result of the site, the change of the loss in a run with the local errors added to
            the results. Infinite if a non-finite error reaches the loss. None if unknown. Of a step that returns no
            loss, from random cotangents of its outputs: the root mean square over the cotangents of the sum for each
            sample, which approximates the L2 norm of the change of the outputs; or `impact_spread` if there is one
            backward.
        signed_impact: sum(g * d) over all batches. None if unknown, and with random cotangents.
        impact_spread: sqrt(sum((g * d) ** 2)), in which the errors of elements do not cancel each other: the expected
            impact for other inputs if their roundings are independent.
        nonfinite: The number of elements that are finite in the reference and infinite or NaN in a local run.
        bytes: The size of the results of all calls, in the reference.
        flops: The floating point operations of the calls if they multiply matrices, without the backward: 2 * m * n * k
            for each product of matrices of shapes (m, k) and (k, n).
        misfit: Why calls under a float8 policy ran in lower precision; "" if all ran in float8.
        in_region: Whether an autocast region is open at the site, so that a policy applies.
    """

    op: str
    overload: str
    module: str
    calls: int
    line: str = ""
    dtypes: str = ""
    policy: str = ""
    local: float = 0.0
    local_ulp: float | None = 0.0
    local_sqnr: float | None = math.inf
    accumulated: float | None = None
    accumulated_ulp: float | None = None
    accumulated_sqnr: float | None = None
    impact: float | None = None
    signed_impact: float | None = None
    impact_spread: float | None = None
    nonfinite: int = 0
    bytes: int = 0
    flops: int = 0
    misfit: str = ""
    in_region: bool = True

    @property
    def name(self) -> str:
        """The overload's full name: "aten::softmax.int"."""
        return f"{self.op}.{self.overload}" if self.overload else self.op

    @property
    def rounding(self) -> float:
        """The largest relative error of one rounding to the lowest of `dtypes`: 4.9e-4 for float16."""
        return max((_ROUNDING[name] for name in self.dtypes.split(", ") if name in _ROUNDING), default=0.0)

    def __str__(self) -> str:
        return f"{self.name.removeprefix('aten::')} in {self._place}"

    @property
    def _place(self) -> str:
        at = f", {short_line(self.line)}" if self.line and converts(self.name) else ""
        return module_name(self.module) + at

    def __repr__(self) -> str:
        errors = ", ".join(f"{name} {spell_number(getattr(self, name))}" for name in _MEASURES)
        return f"<Site {self}, {self.line or 'line unknown'}: {self.dtypes}, {errors}>"


@dataclass(frozen=True, slots=True)
class Metric:
    """A value that the step returned, for the worst batch.

    Attributes:
        name: Its name: "loss".
        reference: The reference's value, if it is one number.
        candidate: The candidate's value, if it is one number.
        error: Their distance, relative to the reference: for one number |a - b| / |b|, for several the relative L2
            norm. Infinite if only one of the two is finite.
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
        vanishes: Whether the gradient is zero up to rounding errors on both sides, as that of a bias before a batch
            norm. Its error says nothing then.
    """

    name: str
    error: float
    norm: float
    vanishes: bool = False


@dataclass(eq=False, repr=False)
class Comparison(Report):
    """The report of `compare`.

    `print(comparison)` shows a summary, a notebook the page; `save` writes a page (.html) or JSON, which `load` reads.

    Attributes:
        reference: The policy of the reference.
        candidate: The policy that was compared with it.
        sites: The sites, largest impact first, then largest local error first.
        metrics: The values that the step returned, without gradients that vanish.
        gradients: The gradients of parameters, the largest error first, those that vanish last; without
            `gradients=True` only those of the step's results that vanish.
        modules: The paths of all modules of the model, in its order.
        runs: The number of runs of the step.
        backwards: The number of backwards, including those of the step.
        random_cotangents: Whether the step returned no loss. Impacts are then on its outputs, from random cotangents.
        noise: The difference between two runs of the reference, for each name in `metrics`.
        flops: The floating point operations of all products in the forward, like `Site.flops`.
        not_aligned: Calls made in only one of the runs, one sentence for each op in a module.
        not_seen: Computations that ran and were not compared, one sentence each.
        notes: Other remarks, one sentence each.
        torch_version: PyTorch's version.
    """

    NOUN: ClassVar[str] = "comparison"
    FORMAT: ClassVar[str] = "torch_promote comparison"

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
    flops: int = 0
    not_aligned: list[str] = field(default_factory=list)
    not_seen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    torch_version: str = ""

    def content(self) -> Content:
        """Returns what the report says to people."""
        return Content(
            title=f"comparison of {_name_of(self.candidate)} with {_name_of(self.reference)}",
            verdict=self._verdict(),
            facts=self._facts(),
            parts=(
                Table("", ("metric", "reference", "candidate", Column("error", "number")), self._metric_rows()),
                Table(
                    "Ops",
                    (
                        Column("op", "name"),
                        Column("module", "name"),
                        "calls",
                        Column("dtypes", "dtypes"),
                        Column("local", "number"),
                        Column("accumulated", "number"),
                        Column(f"impact on {self.loss_or_outputs}", "number"),
                        Column("inf or NaN", "count"),
                        Column("line", "line", "page"),
                    ),
                    [
                        (
                            site.name,
                            site._place,
                            *(getattr(site, name) for name in _SITE_CELLS),
                            site.nonfinite or None,
                            site.line,
                        )
                        for site in self.sites
                    ],
                    note=_ABOUT_SITES + (_ABOUT_COTANGENTS if self.random_cotangents else ""),
                ),
                Table(
                    "Gradients",
                    (Column("parameter", "name"), Column("error", "number"), Column("norm", "number")),
                    [(one.name, one.error, one.norm) for one in self.gradients if not one.vanishes],
                    most=5,
                ),
                _heat_chart(self.sites, self.loss_or_outputs, self._scales()),
                self._module_tree(),
                Listing("Not in float8", [f"{site}: {site.misfit}" for site in self.sites if site.misfit]),
                Listing("Calls that only one of the runs made", self.not_aligned),
                Listing("Not compared", self.not_seen),
                Listing("Notes", [*self.notes, *self._about_vanishing()]),
            ),
        )

    @property
    def loss_or_outputs(self) -> str:
        """What the impacts are on, in whose unit they are: "outputs" with random cotangents, else "loss"."""
        return "outputs" if self.random_cotangents else "loss"

    def _verdict(self) -> str:
        worst = max(self.metrics, key=lambda metric: metric.error, default=None)
        broken = next((note for note in self.notes if note.startswith(BROKEN)), None)
        if broken is not None and worst is not None and math.isfinite(worst.error):
            return broken
        if worst is None or not (worst.error or any(site.local or site.nonfinite for site in self.sites)):
            if any(note.startswith(NOTHING) for note in self.notes):
                return "The results are identical: no op ran in another dtype than in the reference."
            return "No op that was compared has an error, and the results are identical."
        if not worst.error:
            return "The results are identical, although ops have errors."
        if not math.isfinite(worst.error):
            if worst.candidate is None or worst.reference is None:
                return f"The candidate's {worst.name} is missing or not finite."
            return (
                f"The candidate's {worst.name} is {worst.candidate:.7g}, and the reference's is {worst.reference:.7g}."
            )
        said = "".join(f" {note}" for note in self.notes if note.startswith((CHOSE, ROUNDS)))
        return f"The largest relative error of a result is {spell_number(worst.error)}, that of {worst.name}.{said}"

    def _facts(self) -> list[Fact]:
        facts: list[Fact] = []
        first, overflowing = next(iter(self.sites), None), [site for site in self.sites if site.nonfinite]
        if overflowing:
            facts.append(("overflows", str(overflowing[0]), f"sites that make inf or NaN: {len(overflowing)}"))
        largest = next((site for site in self.sites if site.impact), None)
        if first is not None and first.impact is None and (first.local or first.accumulated):
            accumulated = "" if first.accumulated is None else f", accumulated {spell_number(first.accumulated)}"
            label = "unknown impact" if largest else "largest error"
            facts.append((label, str(first), f"local {spell_number(first.local)}{accumulated}"))
        if largest is not None and largest.impact:
            # A loss that is returned would not be identical.
            of = "" if any(metric.error for metric in self.metrics) or self.random_cotangents else " of its backward"
            change = f"estimated to change the {self.loss_or_outputs}{of} by {spell_number(largest.impact)}"
            if converts(f"{largest.op}."):
                change += "; no override acts on it: change the conversion in the code"
            facts.append(("largest impact", str(largest), change))
        facts += self._yardstick()
        facts.append(("runs", f"{self.runs:,}", f"backwards: {self.backwards:,}"))
        return [*facts, *([("torch", self.torch_version)] if self.torch_version else [])]

    def _yardstick(self) -> list[Fact]:
        """The largest local error in units of what rounding explains."""
        sites = [site for site in self.sites if site.rounding and 0 < site.local < math.inf]
        if not sites:
            return []
        worst = max(sites, key=lambda site: site.local / site.rounding)
        lowest = max((name for name in worst.dtypes.split(", ") if name in _ROUNDING), key=_ROUNDING.__getitem__)
        rounding = f"{lowest}: {spell_number(worst.rounding)}"
        times = worst.local / worst.rounding
        if times <= _AS_EXPECTED:  # of no site in particular
            return [("local errors", f"up to {spell_number(worst.local)}", f"as expected of {rounding}")]
        text = f"{spell_number(worst.local)}, {spell_number(times)} times a rounding to {rounding}"
        return [("largest local error", str(worst), text)]

    def _scales(self) -> tuple[_Scale, _Scale, _Scale]:
        """The ends of the scales of colours: a rounding is pale, and an error as large as the value is dark."""
        rounding = max((site.rounding for site in self.sites), default=0.0)
        losses = [abs(one.reference or 0.0) for one in self.metrics if one.name == "loss"]
        size = 0.0 if self.random_cotangents else max(losses, default=0.0)
        of_errors = (rounding, 1.0) if rounding else None
        return of_errors, of_errors, (rounding * size, size) if rounding and size else None

    def _about_vanishing(self) -> list[str]:
        names = [one.name for one in self.gradients if one.vanishes]
        if not names:
            return []
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        return [f"Gradients that are zero up to rounding errors are not listed: {', '.join(names[:3])}{more}."]

    def _metric_rows(self) -> list[tuple[str, str, str, float]]:
        def spell(value: float | None) -> str:
            return "" if value is None else f"{value:.7g}"

        return [(one.name, spell(one.reference), spell(one.candidate), one.error) for one in self.metrics]

    def _module_tree(self) -> Tree:
        """The tree of modules, in the model's order, with the errors and impacts of the sites in them."""
        inside: dict[str, list[Site]] = {}
        for site in self.sites:
            parts = site.module.split(".")
            for end in range(1, len(parts) + 1):
                inside.setdefault(".".join(parts[:end]), []).append(site)
        place = {path: number for number, path in enumerate(self.modules)}
        paths = sorted(inside, key=lambda path: (not path, place.get(path, len(place)), path))
        values = {measure: [_measure(inside[path], measure) for path in paths] for measure in _MEASURES}
        shares = {
            measure: heat_shares([math.nan if value is None else value for value in values[measure]], scale)
            for measure, scale in zip(_MEASURES, self._scales(), strict=True)
            if any(value is not None for value in values[measure])
        }
        branches = [
            Branch(
                path,
                (*(values[measure][number] for measure in _MEASURES), len(inside[path])),
                [{"heat": round(column[number], 3)} for column in shares.values()],
            )
            for number, path in enumerate(paths)
        ]
        spelled = {"impact": f"impact on {self.loss_or_outputs}"}
        columns = [
            *(Column(spelled.get(measure, measure), "number") for measure in _MEASURES),
            Column("sites", "count"),
        ]
        return Tree("Modules", columns, branches, list(shares))


#: How the note begins of a comparison of equal runs.
NOTHING = "No call ran in another dtype than in the reference."
#: How the notes begin of ops that have chosen other elements.
CHOSE = "Chosen otherwise than in the reference: "
#: How the note begins about what the program's own conversions change in the reference's results.
ROUNDS = "The reference rounds as well: "
#: How the note begins of results whose errors say nothing.
BROKEN = "NaN or inf in the reference: "
#: The end of the notes about what runs in a lower dtype in both runs.
TRACED = "`torch-promote trace --values` tells which of the updates and sums are rounded away."
#: How many roundings explain a local error: those of the inputs, and that of the result.
_AS_EXPECTED = 2.0
_ABOUT_SITES = (
    "A site is the calls of one op in one module. Its local error is that of the op alone, on the inputs of the "
    "reference. Its accumulated error includes the errors of its inputs. Errors are relative L2 norms. Its impact is "
    "the first-order effect of its local error on the loss, in the loss's unit."
)
_ABOUT_COTANGENTS = (
    " Here it is on the outputs, in their unit, from random cotangents, because the step returned no loss."
)
_SITE_CELLS = ("calls", "dtypes", "local", "accumulated", "impact")
_MEASURES = ("local", "accumulated", "impact")


def _measure(sites: Iterable[Site], measure: str) -> float | None:
    """The largest error of sites, or the root of the sum of squares of their impacts; None if none is known."""
    values = [value for site in sites if (value := getattr(site, measure)) is not None]
    if not values:
        return None
    return math.hypot(*values) if measure == "impact" else float(max(values))


def _heat_chart(sites: Sequence[Site], loss_or_outputs: str, scales: Sequence[_Scale]) -> Chart:
    """The errors and impacts of the ops that each module calls itself, largest impact first."""
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        by_module.setdefault(site.module, []).append(site)
    values = {module: [_measure(own, measure) for measure in _MEASURES] for module, own in by_module.items()}
    order = sorted(values, key=lambda module: (-(values[module][2] or 0.0), -(values[module][0] or 0.0)))
    series = [
        Series(
            name,
            [math.nan if (value := values[module][number]) is None else value for module in order],
            scale=scales[number],
        )
        for number, name in enumerate(("local error", "accumulated error", f"impact on {loss_or_outputs}"))
    ]
    return Chart("Errors and impact by module", "heat", series, [module_name(module) for module in order])


def _name_of(policy: Policy) -> str:
    name = None if policy.modules else policy._name
    return "fp32" if name == "off" else name or "a changed policy"
