"""`compare`: finds the ops that lose accuracy under a policy, and estimates the effect on the loss."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from torch_promote.errors import StepError, check_flag, explains_arguments
from torch_promote.numerics import step_runs
from torch_promote.numerics.call_observers import (
    AddErrors,
    CallKey,
    CompareCandidate,
    CompareLocally,
    ForwardCalls,
    KeepReference,
    KeptCall,
    LeaveUnrounded,
    converts_one,
)
from torch_promote.numerics.comparison import (
    BROKEN,
    CHOSE,
    NOTHING,
    ROUNDS,
    TRACED,
    Comparison,
    GradientError,
    Metric,
    Site,
)
from torch_promote.numerics.impacts import (
    Backwards,
    ErrorSums,
    Impact,
    Impacts,
    SiteKey,
    errors_of,
    loss_of,
    watch_gradients,
)
from torch_promote.numerics.step_runs import Ranks, Results, StepRuns, current_policy, distances, norm_of, show_progress
from torch_promote.observe.call import Call, Unseen
from torch_promote.observe.observer import observe_dispatch
from torch_promote.observe.ops import facts_of, unnoticed
from torch_promote.observe.places import RunningModules, shorten
from torch_promote.observe.surroundings import watch_unseen
from torch_promote.policy.policy import Policy, PolicyLike
from torch_promote.reading.dtype_errors import is_about_dtypes
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.report.base import module_name, some_of, spell_number

#: The policy of the reference "fp32": the step without casts.
REFERENCE: Final = "off"
#: The start of the note about differing runs.
DIFFER = "Two runs of the reference differ"

#: The number of random directions with which the effect of errors on outputs is estimated, for a step without a loss.
_BACKWARDS = 7
#: The most runs that measure the impacts of sites that no gradient reaches, and how many of these sites are measured
#: one by one from the start.
_MOST_MEASURED, _FEW = 16, 6
#: Groups of sites whose effect is below this share of the largest impact are not taken apart.
_SMALL = 0.1


@explains_arguments
def compare(
    step: Callable[..., Any],
    *,
    model: nn.Module,
    reference: PolicyLike = "fp32",
    candidate: PolicyLike | None = None,
    gradients: bool = False,
    batches: int = 1,
    restore: Iterable[Any] = (),
    progress: bool = True,
) -> Comparison:
    """Runs a step under two policies, and reports the errors of the candidate for each op in each module.

    It runs the reference twice and the candidate once. It keeps the results of the reference's calls for that. If
    memory has no room for all of them, a note says so. If no gradient reaches the results of ops with errors, such as
    those of position embeddings, up to 16 more runs of the reference measure their impacts.

    Args:
        step: A training or evaluation step: `step()`, or `step(i)` with the number of the batch. It opens its own
            regions, of `my_autocast` or `torch.autocast`, and returns a loss, outputs, or a dict of metrics. If it does
            not run a backward, `compare` runs one on the loss.
        model: The model. Sites are named after its modules.
        reference: A policy, its name or its file; "fp32" is the step without casts.
        candidate: The policy to judge, given like `reference`; Policy.stock().override({"linear": "float8"}), say.
            None: the current policy, set by `install` or `set_default_policy`, or PyTorch's.
        gradients: Whether to compare the gradients of the parameters, too.
        batches: How many times a run calls the step.
        restore: What else the step changes: modules, optimizers, tensors, generators, lists, dicts, and objects with
            `state_dict` and `load_state_dict`, or with `get_state` and `set_state`. Parameters, buffers, gradients,
            random numbers, and optimizers, schedulers and scalers that the step refers to are restored anyway.
        progress: Whether to show a bar, if stderr is a terminal.

    Returns:
        The comparison. All state is restored.

    Raises:
        StepError: Two runs of the reference differ, the step returns nothing to compare, or its changes cannot be
            undone. The message names the cause.
        OptionError: An argument is invalid.
        PolicyError: A policy does not exist.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> def step():
        ...     with torch.autocast("cpu", torch.float16):
        ...         return model(torch.ones(2, 8)).square().mean()
        >>> comparison = compare(step, model=model)
        >>> sorted({site.op for site in comparison.sites})
        ['aten::linear', 'aten::mean', 'aten::square', 'aten::tanh']
    """
    check_flag("gradients", gradients)
    of_reference = _policy_of(reference)
    of_candidate = current_policy() if candidate is None else _policy_of(candidate)
    with (
        StepRuns(step, model, batches=batches, restore=restore) as runs,
        show_progress("compare", 3 * batches, wanted=check_flag("progress", progress)) as show,
    ):
        runs.on_step = lambda number: show(number, "")
        return ComparedRuns(runs, of_reference, of_candidate, gradients=gradients).compare()


def _policy_of(policy: PolicyLike) -> Policy:
    return Policy.of(REFERENCE if isinstance(policy, str) and policy == "fp32" else policy)


_WITHOUT_CASTS = (
    "It raised in the reference, in which no region casts. The program itself gives an op tensors of two dtypes: give "
    "it float32 data, and let the region cast."
)


class ComparedRuns:
    """Compares two policies like `compare`, with the runs of an open `StepRuns`."""

    def __init__(
        self,
        runs: StepRuns,
        reference: Policy,
        candidate: Policy,
        *,
        gradients: bool = False,
        most_runs: float = math.inf,  # 3 or more
        # Whether to raise if two runs of the reference differ. Otherwise `Comparison.noise` has the difference.
        strict: bool = True,
    ) -> None:
        self._runs, self._reference, self._candidate = runs, reference, candidate
        self._gradients, self._last, self._strict = gradients, runs.count + most_runs, strict
        self._model = runs.model
        self._first_run = runs.count
        self._backwards = Backwards()
        self._kept = KeepReference(RunningModules(self._model))
        self._theirs = CompareCandidate(RunningModules(self._model), self._kept.calls)
        self._local: CompareLocally
        self._impacts: Impacts
        # Of sites with unknown impacts: the effect of a group that they are in, or infinity.
        self._bounds: dict[SiteKey, float] = {}
        self._why_unknown = ""
        self._returned: set[str] = set()  # the results that are gradients of parameters
        self._notes: list[str] = []

    def compare(self) -> Comparison:
        """Performs the runs. Raises StepError as `compare`."""
        not_seen: list[Unseen] = []
        with watch_unseen(not_seen):
            try:
                first = self._run(self._reference, self._kept, self._find_returned)
            except RuntimeError as error:
                if self._reference == Policy.named(REFERENCE) and is_about_dtypes(str(error)):
                    error.add_note(_WITHOUT_CASTS)
                raise
        theirs, gradients = self._run_candidate()
        for one in self._kept.calls.values():
            one.results = []  # the candidate may have raised before it got there
        second = self._estimate_impacts()
        noise = self._check(first, second)
        unrounded = self._without_conversions(first, noise)
        self._measure_impacts(first, noise)
        zeros = self._returned_zeros(first, theirs)
        calls, there, only_there = self._kept.calls, self._theirs.calls, self._theirs.only_here
        unread = [f"The outputs of {', '.join(n)} were not compared: {why}." for why, n in self._theirs.unread.items()]
        left_out = self._kept.room.left_out + self._local.room.left_out
        if left_out:
            self._notes.append(
                f"There was no room in memory for {left_out / 2**30:.1f} GiB of results. Their accumulated errors are "
                f"unknown."
            )
        return Comparison(
            reference=self._reference,
            candidate=self._candidate,
            sites=self._sites(calls, there),
            metrics=[one for one in _metrics(first, theirs) if one.name not in zeros],
            gradients=errors_of(gradients, self._backwards.gradients) if self._gradients else [*zeros.values()],
            modules=[name for name, _ in self._model.named_modules()],
            runs=self._runs.count - self._first_run,
            backwards=self._backwards.count,
            random_cotangents=self._impacts.random,
            noise=noise,
            flops=sum(_flops_of(kept.call) for kept in calls.values()),
            not_aligned=_not_aligned(calls, there, only_there),
            not_seen=list(dict.fromkeys([*not_seen, *unread])),
            notes=self._all_notes(calls, there, bool(only_there), first, theirs, unrounded),
            torch_version=str(torch.__version__),
        )

    # --- runs

    def _run_candidate(self) -> tuple[Results, dict[str, torch.Tensor]]:
        """The candidate's run, and its gradients. If the step raises, as at a non-finite loss, its calls count."""
        candidate, backwards, before = self._theirs, Backwards(), self._runs.count

        def after(number: int, result: Any) -> None:
            backwards.after_step(result, candidate.saw_backward)
            candidate.saw_backward = False  # for the next batch

        try:
            if not self._gradients:
                return self._run(self._candidate, candidate), {}
            with watch_gradients(self._model, backwards):
                results = self._run(self._candidate, candidate, after)
            self._backwards.count += backwards.count
            return results, backwards.gradients
        except Exception as error:
            if self._strict or self._runs.count == before:
                raise
            self._notes.append(f"The step raised under the candidate: {type(error).__name__}: {error}")
            return [], backwards.gradients

    def _estimate_impacts(self) -> Results:
        """The second run of the reference, and a third one if it fails when its calls are recorded for a backward."""
        has_spare = self._runs.count + 1 < self._last
        with_grad = not self._kept.saw_backward and not self._kept.requires_grad and has_spare
        loss_scale = self._runs.state.loss_scale()
        self._impacts = Impacts(loss_scale, 1 if self._gradients else _BACKWARDS)
        try:
            second, self._local = self._run_locally(self._impacts, with_grad)
        except RuntimeError as error:
            if not with_grad:
                raise
            self._notes.append(
                f"No gradient shows the impacts: the step fails when its calls are recorded for a backward: {error}"
            )
            self._impacts, with_grad = Impacts(loss_scale), False
            second, self._local = self._run_locally(self._impacts, with_grad)
        has_errors = any(sums.total().relative for sums in self._local.errors.values())
        is_flat = has_errors and self._impacts.are_zero() and not self._kept.saw_backward
        outputs = sum(one.is_floating_point() for one in second[0].values())
        # Other ranks may have a gradient, and would not run once more.
        if is_flat and outputs > 1 and self._runs.count < self._last and Ranks().count == 1:
            self._impacts = Impacts(loss_scale, _BACKWARDS, is_random=True)
            second, self._local = self._run_locally(self._impacts, with_grad)
        return second

    def _run_locally(self, impacts: Impacts, with_grad: bool) -> tuple[Results, CompareLocally]:
        local = CompareLocally(*self._runs_to_compare(), impacts, with_grad)

        def after(number: int, result: Any) -> None:
            self._backwards.after_step(result, local.saw_backward, impacts)
            local.saw_backward = False  # for the next batch

        with contextlib.ExitStack() as stack:
            stack.callback(impacts.drop)
            if self._gradients:
                stack.enter_context(watch_gradients(self._model, self._backwards))
            results = self._run(self._reference, local, after)
        local.finish()
        return results, local

    def _runs_to_compare(self) -> tuple[RunningModules, KeepReference, CompareCandidate, tuple[Policy, Policy]]:
        return RunningModules(self._model), self._kept, self._theirs, (self._reference, self._candidate)

    def _measure_impacts(self, first: Results, noise: dict[str, float]) -> None:
        """Measures impacts where no gradient of the loss has reached a site's results, by runs of the reference."""
        # A run adds the local errors of a group of sites to their results. The group with the largest effect is halved
        # until its sites are known, or until its effect is small.
        errors = {site: sums.total().relative for site, sums in self._local.errors.items()}
        known, unreached = self._impacts.totals, self._local.unreached
        sites = [site for site, error in errors.items() if error and (site in unreached or site not in known)]
        if not sites:
            return
        is_finite = all(math.isfinite(_change_of(one, one, self._impacts.random)) for one in first)
        # Ranks may have other sites, and would wait for each other.
        if any(noise.values()) or Ranks().count > 1 or not is_finite:
            why = "it is not repeatable" if is_finite else "its results are not finite"
            why = "it runs on several ranks" if Ranks().count > 1 else why
            self._why_unknown = f"The step was not run once more to measure them, because {why}."
            self._bounds.update(dict.fromkeys(sites, math.inf))
            return
        calls = AddErrors(*self._runs_to_compare())
        sites.sort(key=lambda site: -errors[site])
        # Groups with what bounds their effect: that of the group that they are halves of.
        todo = [(math.inf, group) for group in ([[one] for one in sites] if len(sites) <= _FEW else [sites])]
        measured: list[tuple[float, list[SiteKey]]] = []
        left = min(_MOST_MEASURED, self._last - self._runs.count)
        while left > 0 and (todo or measured):
            if not todo:
                effect, group = measured.pop(max(range(len(measured)), key=lambda place: measured[place][0]))
                if effect <= _SMALL * max((one.size for one in known.values() if one.size < math.inf), default=0.0):
                    measured.append((effect, group))
                    break
                half = (len(group) + 1) // 2
                todo = [(effect, group[:half]), (effect, group[half:])]
            _, group = todo.pop(0)
            left -= 1
            impact = self._effect_of(calls, group, first)
            if impact is None:
                todo.append((math.inf, group))
                break
            if len(group) == 1 or not impact.size:
                known.update(dict.fromkeys(group, impact))
            else:
                measured.append((impact.size, group))
        self._why_unknown = f"{_MOST_MEASURED} runs measure such sites."
        if measured:
            spelled = " and ".join(spell_number(effect) for effect, _ in measured)
            what = "outputs" if self._impacts.random else "loss"
            self._why_unknown = f"Measured in groups, they change the {what} by {spelled}."
        for bound, group in (*todo, *measured):
            self._bounds.update(dict.fromkeys(group, bound))
            for site in group:
                known.pop(site, None)  # from a part of its calls

    def _without_conversions(self, first: Results, noise: dict[str, float]) -> dict[str, float]:
        """How far the reference's results are from those of a run without the program's own conversions, by name."""
        lossy = any(sums.total().relative for sums in self._kept.rounded.values())
        is_repeatable = not any(noise.values()) and Ranks().count == 1
        if not (lossy and self._differ(self._theirs.calls) and is_repeatable and self._runs.count < self._last):
            return {}
        try:
            results = self._run(self._reference, LeaveUnrounded(RunningModules(self._model)))
            found = [distances(ours, theirs) for ours, theirs in zip(first, results, strict=True)]
        except Exception:  # other conversions, or the program's weights, may need the dtype
            return {}
        return {name: max(one[name] for one in found) for name in found[0]}

    def _effect_of(self, calls: AddErrors, sites: list[SiteKey], first: Results) -> Impact | None:
        """The impact of sites together, measured. None if the step does not return the loss of its backward."""
        has_loss = all(loss_of(batch) is not None for batch in first)
        if not has_loss and not self._impacts.random and self._impacts.totals:
            return None
        self._impacts.random |= not has_loss
        calls.start(sites)
        try:
            results = self._run(self._reference, calls)
        except Exception:  # the step may raise for a loss that is not finite
            return Impact(math.inf, math.inf, math.inf)
        finally:
            calls.finish()
        changes = [_change_of(ours, theirs, self._impacts.random) for ours, theirs in zip(results, first, strict=True)]
        size = math.hypot(*changes)
        size = size if math.isfinite(size) else math.inf
        return Impact(size, sum(changes), size)

    def _run(self, policy: Policy, calls: ForwardCalls, on_result: Any = None) -> Results:
        return self._runs.run(policy, around=observe_dispatch(calls.observer), on_result=on_result)

    def _find_returned(self, _: int, result: Any) -> None:
        own = [one.grad for one in self._model.parameters() if one.grad is not None]
        returned = step_runs.named_tensors(result)
        with unnoticed():
            self._returned |= {name for name, one in returned.items() if any(_is_copy(one, of) for of in own)}

    def _returned_zeros(self, first: Results, theirs: Results) -> dict[str, GradientError]:
        """The gradients among the results that are zero but for rounding errors in each batch."""
        pairs = zip(theirs, first, strict=False)  # the candidate's step may have raised
        found = [errors_of(*({key: one[key] for key in self._returned & one.keys()} for one in two)) for two in pairs]
        always = set.intersection(set(self._returned), *({one.name for one in some if one.vanishes} for some in found))
        return {one.name: one for one in found[0] if one.name in always} if found else {}

    def _check(self, first: Results, second: Results) -> dict[str, float]:
        noise: dict[str, float] = {}
        for one, other in zip(second, first, strict=True):
            for name, error in distances(one, other).items():
                noise[name] = max(error, noise.get(name, 0.0))
        differing = [f"{name} by {error:.3g}" for name, error in noise.items() if error]
        different = self._local.different
        where = f" What differed first: {different}." if differing and different else ""
        if differing and not self._strict:
            self._notes.append(f"{DIFFER}.{where}")
        elif differing:
            raise StepError(
                f"the step is not repeatable: two runs of the reference from the same state differ "
                f"in {', '.join(differing)}.{where} Pass the state that it changes or draws from in "
                f"restore=(...), or take the number of the batch as its argument: step(i)."
            )
        return noise

    # --- results

    def _sites(self, calls: dict[CallKey, KeptCall], candidate: dict[CallKey, Call]) -> list[Site]:
        of_site: dict[SiteKey, list[tuple[KeptCall, Call]]] = {}
        for key, kept in calls.items():
            theirs = candidate.get(key)
            if theirs is not None and _is_of_autocast(kept.call, theirs):
                of_site.setdefault(key.site, []).append((kept, theirs))
        errors = self._local.errors  # a conversion without one is of no interest
        lossless = [
            site
            for site, pairs in of_site.items()
            if _only_converts(pairs[0][1]) and not (site in errors and errors[site].total().relative)
        ]
        for site in lossless:
            del of_site[site]
        sites = [(place, self._site(place, pairs)) for place, pairs in of_site.items()]

        def rank(of: tuple[SiteKey, Site]) -> tuple[float, float]:
            place, site = of
            if site.impact is not None:
                return -site.impact, 0.0 if site.impact == math.inf else -site.local
            error = max(site.local, site.accumulated or 0.0)
            bound = self._bounds.get(place, 0.0)
            # Without a bound, an error that rounding does not explain comes first.
            return -bound if bound < math.inf or error > 10 * site.rounding else 0.0, -error

        return [site for _, site in sorted(sites, key=rank)]  # ties in the order of running

    def _site(self, key: SiteKey, pairs: list[tuple[KeptCall, Call]]) -> Site:
        local = self._local.errors.get(key, ErrorSums()).total()
        accumulated = self._theirs.errors[key].total() if key in self._theirs.errors else None
        is_known = self._impacts.totals and not local.relative and key[1] not in self._local.refused
        impact = self._impacts.totals.get(key, Impact(0.0, 0.0, 0.0) if is_known else None)
        call = pairs[0][1]
        return Site(
            op=call.op,
            overload=call.overload,
            module=key[0],
            calls=len(pairs),
            line=call.line,
            dtypes=", ".join(dict.fromkeys(name for _, theirs in pairs for name in _dtypes(theirs))),
            policy=call.policy_name,
            local=local.relative,
            local_ulp=local.ulp,
            local_sqnr=local.sqnr,
            accumulated=None if accumulated is None else accumulated.relative,
            accumulated_ulp=None if accumulated is None else accumulated.ulp,
            accumulated_sqnr=None if accumulated is None else accumulated.sqnr,
            impact=None if impact is None else impact.size,
            signed_impact=None if impact is None or self._impacts.random else impact.signed,
            impact_spread=None if impact is None else impact.spread,
            nonfinite=local.nonfinite,
            bytes=sum(kept.bytes for kept, _ in pairs),
            flops=sum(_flops_of(kept.call) for kept, _ in pairs),
            misfit=next((why for _, theirs in pairs if (why := theirs.fallback)), ""),
            in_region=any(bool(theirs.autocast) for _, theirs in pairs),
        )

    def _all_notes(
        self,
        calls: dict[CallKey, KeptCall],
        candidate: dict[CallKey, Call],
        others: bool,
        first: Results,
        theirs: Results,
        unrounded: dict[str, float],
    ) -> list[str]:
        notes = [
            f"{CHOSE}{name} in {module_name(module)}, {differing:,} of {of:,} indices. Impacts are of first order, and "
            "do not count what follows from that."
            for (module, name, _), (differing, of) in self._theirs.choices.items()
            if differing
        ]
        if broken := step_runs.not_finite(first):
            notes.append(f"{BROKEN}{some_of(broken)}. Errors relative to it say nothing.")
        notes += self._notes
        differ = others or self._differ(candidate)
        has_errors = any(sums.total().relative for sums in self._local.errors.values())
        if not differ:
            own = {info.dtype for kept in calls.values() for info in kept.call.inputs} & set(LOWER_DTYPES)
            cause = (
                f"The program's own tensors are {' and '.join(sorted(map(dtype_name, own)))}, in the reference, too. "
                f"To compare what that loses, keep parameters and data in float32, and let a region cast. {TRACED}"
                if own
                else "Regions with a policy= keep it: remove policy= and overrides= from the step, and check that it "
                "opens a region."
            )
            notes.append(f"{NOTHING} {cause}")
        elif self._backwards.failed:
            notes.append(f"The backward that compare() ran on the step's result failed: {self._backwards.failed}")
        elif self._impacts.nonfinite:
            notes.append(self._about_gradients())
        elif not self._impacts.totals and not self._notes:
            notes.append(
                "The impacts are unknown: no gradient of a loss reached the calls. Return a loss that requires grad."
            )
        elif self._impacts.totals and has_errors and not self._impacts.explain(_change(first, theirs)):
            notes.append(_ZERO_OUTPUTS if self._impacts.random else _ZERO)
        if self._impacts.totals and self._bounds:
            finite = "finite " * bool(self._impacts.nonfinite)
            notes.append(
                f"No {finite}gradient reaches {len(self._bounds)} sites, whose impacts are unknown. {self._why_unknown}"
            )
        if differ and (rounding := self._own_roundings(candidate)):
            worst = max(unrounded, key=lambda name: unrounded[name], default="")
            if worst and unrounded[worst]:
                notes.append(
                    f"{ROUNDS}compared with a run without the program's own conversions to a lower dtype, its relative "
                    f"error is {spell_number(unrounded[worst])}, that of {worst}."
                )
            notes.append(
                "The program itself converts to a lower dtype, in the reference, too. What these calls lose is in no "
                f"error or impact here: {some_of(list(rounding), _FEW, '; ')}.{f' {TRACED}' * any(rounding.values())}"
            )
        notes += [
            f"{name} was not run alone: {why}. Its local error is unknown." for name, why in self._local.refused.items()
        ]
        return notes

    def _differ(self, candidate: dict[CallKey, Call]) -> bool:
        """Whether a call of both runs has other dtypes in the candidate."""
        calls = self._kept.calls
        return any(_dtypes(kept.call) != _dtypes(candidate[key]) for key, kept in calls.items() if key in candidate)

    def _own_roundings(self, candidate: dict[CallKey, Call]) -> dict[str, bool]:
        """The calls that run in a lower dtype in both runs, and whether they are more than conversions, which lead."""
        found: dict[str, float] = {}  # with what conversions lose
        for key, kept in self._kept.calls.items():
            call, is_same = kept.call, _dtypes(kept.call) == _dtypes(candidate.get(key, kept.call))
            if (
                not is_same
                or facts_of(call.name).is_view
                or not {one.dtype for one in call.outputs} & set(LOWER_DTYPES)
            ):
                continue
            at = f"{call.name} in {module_name(call.module)}, {shorten(call.line) or 'line unknown'}"
            if not key.line:
                found[at] = 0.0
            elif key.site in self._kept.rounded and (lost := self._kept.rounded[key.site].total()).relative:
                text = "makes numbers infinite" if lost.nonfinite else f"local error {spell_number(lost.relative)}"
                found[f"{at} ({text})"] = lost.relative
        return {text: not found[text] for text in sorted(found, key=lambda text: -found[text])}

    def _about_gradients(self) -> str:
        found = self._impacts.nonfinite
        (module, name, _), (line, bad, of) = next(iter(found.items()))
        sites = {site for site in found if self._local.errors[site].total().relative}
        return (
            f"The gradient of the reference is infinite or NaN, first that of the result of {name} in "
            f"{module_name(module)}, {shorten(line) or 'line unknown'}: {bad:,} of {of:,} elements. It tells no impact "
            f"of {len(sites)} sites with errors. Runs of the reference have measured "
            f"{len(sites & self._impacts.totals.keys())} of these."
        )


#: The note about impacts that do not explain the change of the loss.
_ZERO = (
    "The impacts on the loss are zero, or too small to explain its change: they do not rank the ops. A loss that "
    "compares the outputs with the reference's own has a gradient of zero at the reference. Return the outputs instead "
    "of the loss to get the impacts on them."
)
_ZERO_OUTPUTS = "The impacts on the outputs are zero: they do not rank the ops."


def _is_of_autocast(ours: Call, theirs: Call) -> bool:
    """Whether a call is in a region, or runs in other dtypes because of one."""
    takes_numbers = any(info.dtype.is_floating_point or info.dtype.is_complex for info in theirs.ran_with)
    return (takes_numbers and bool(theirs.autocast)) or _dtypes(ours) != _dtypes(theirs)


def _only_converts(call: Call) -> bool:
    """Whether a call changes a dtype alone, or makes a tensor from numbers."""
    return not call.inputs or converts_one(facts_of(call.name))


def _dtypes(call: Call) -> Iterator[str] | tuple[str, ...]:
    """The floating point dtypes that a call ran in, and those of its results if they are lower."""
    of_arguments = [info.dtype for info in call.ran_with if info.dtype.is_floating_point or info.dtype.is_complex]
    lower = [info.dtype for info in call.outputs if info.dtype in LOWER_DTYPES]
    return tuple(dict.fromkeys(map(dtype_name, [*of_arguments, *lower])))


def _metrics(reference: Results, candidate: Results) -> list[Metric]:
    worst: dict[str, Metric] = {}
    if not candidate:  # the step raised
        return [Metric(name, _number(value), None, float("inf")) for name, value in reference[0].items()]
    for ours, theirs in zip(reference, candidate, strict=True):
        for name, error in distances(theirs, ours).items():
            if name not in worst or error > worst[name].error:
                worst[name] = Metric(name, _number(ours[name]), _number(theirs[name]), error)
    return list(worst.values())


def _is_copy(one: torch.Tensor, of: torch.Tensor) -> bool:
    if one is of or type(one) is not type(of) or type(one) is not torch.Tensor:  # DTensors would communicate
        return one is of
    alike = (one.shape, one.dtype, one.device, one.layout) == (of.shape, of.dtype, of.device, torch.strided)
    return alike and torch.equal(one, of)


def _change(reference: Results, candidate: Results) -> float:
    """The largest change of the loss by the candidate over all batches; 0 if the step does not return a loss."""
    changes = [0.0]
    for ours, theirs in zip(reference, candidate, strict=False):  # the candidate's step may have raised
        loss, other = ours.get("loss"), theirs.get("loss")
        if loss is not None and other is not None and loss.numel() == 1 == other.numel():
            changes.append(abs(float(other.real) - float(loss.real)))
    return max((one for one in changes if math.isfinite(one)), default=0.0)


def _change_of(candidate: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], of_outputs: bool) -> float:
    """The change of the loss of a batch, or the L2 norm of that of the outputs."""
    if of_outputs:
        pairs = [(one, reference[name]) for name, one in candidate.items() if one.is_floating_point()]
        return math.hypot(*(norm_of(one.double() - other.double()) for one, other in pairs))
    ours, theirs = loss_of(candidate), loss_of(reference)
    return 0.0 if ours is None or theirs is None else float(ours.double()) - float(theirs.double())


def _number(tensor: torch.Tensor) -> float | None:
    return float(tensor) if tensor.numel() == 1 and not tensor.is_complex() else None


def _not_aligned(
    calls: dict[CallKey, KeptCall], candidate: dict[CallKey, Call], only_there: dict[SiteKey, int]
) -> list[str]:
    missing = Counter(key.site for key in calls if key not in candidate)
    return [
        f"{name} in {module_name(module)}: calls that only the {who} made: {number}."
        for who, counts in (("reference", missing), ("candidate", only_there))
        for (module, name, _), number in counts.items()
    ]


#: The argument over whose last dimension a product sums.
_SUMS_OVER = {
    "linear": "input",
    "matmul": "self",
    "mm": "self",
    "bmm": "self",
    "mv": "self",
    "addmm": "mat1",
    "addmv": "mat",
    "baddbmm": "batch1",
}


def _flops_of(call: Call) -> int:
    """Returns the operations of a forward call of linear, matmul, a convolution or attention; 0 for others."""
    op = call.op.removeprefix("aten::")
    shapes = {info.name: info.shape for info in call.inputs if info.shape}
    result = math.prod(call.outputs[0].shape) if call.outputs else 0
    if op in _SUMS_OVER:
        return 2 * result * shapes.get(_SUMS_OVER[op], (0,))[-1]
    if op.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")) and "weight" in shapes:
        # Each element of the input of a transposed convolution, or of the result of others, is multiplied with these.
        of_one = math.prod(shapes["weight"][1:])
        return 2 * of_one * (math.prod(shapes.get("input", (0,))) if "transpose" in op else result)
    if op == "scaled_dot_product_attention" and len(shapes) >= 3:
        query, key, value = (shapes[name] for name in ("query", "key", "value"))
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0
