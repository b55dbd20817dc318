"""The listeners of a comparison's runs.

NOTE [ The runs of a comparison ]
1. The reference: `KeepReference` keeps the results of its calls, a fingerprint of each, and the state of the random
   number generators before each call that draws.
2. The candidate: `CompareCandidate` gives each call the reference's random numbers, compares its results with those
   that were kept, and records the dtypes of each call.
3. The reference again: `CompareLocally` checks the fingerprints, runs each call alone in the candidate's dtypes, and
   passes the errors to `Impacts`, which multiplies them with the gradients of the backward.
4. The reference once more for groups of sites that no gradient reaches, such as those of a rotary table, or of
   positions that become indices: `AddErrors` adds the local errors to their results, and the loss shows the impact.

NOTE [ Whose error it is ]
A call whose policy casts to a lower dtype rounds its arguments itself, also if they were rounded before: that is its
error if it alone runs in lower precision. A call without such a policy runs in lower precision because another call
has rounded its arguments. Its local error is the difference of two calls on the reference's arguments rounded like
that: one in the candidate's dtypes, and one in the reference's. Otherwise the cosine of a rounded angle would be
blamed, not the product that has rounded the angle.

NOTE [ Which calls are compared ]
The calls that the program makes in a forward, and those of optimizers and backwards inside of a region, where policies
act, with their results and the arguments that they write to. Of a composite op, only the op itself is compared, not the
ops that it calls, because an override of the op applies to all of them. A conversion by the program is compared,
because it rounds if its dtype is lower in the candidate. Not compared: conversions of a backward, which the reference
does not make; views and other ops that move data, which compute nothing; collectives, which depend on other ranks; and
recomputations of checkpoints, which repeat calls of the forward.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.checking.comparison import compare
from torch_promote.numerics.impacts import ErrorSums, Impacts, SiteKey, as_reals
from torch_promote.numerics.step_state import (
    RandomState,
    random_state,
    repeat,
    set_random_state,
)
from torch_promote.observe.call import Call
from torch_promote.observe.observer import CallObserver, OpenCall
from torch_promote.observe.ops import OpFacts, can_be_read, facts_of, has_storage, leaves, unnoticed
from torch_promote.observe.places import RunningModules, shorten
from torch_promote.policy.named_policies import Value
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.policy.policy import Policy
from torch_promote.reference.autocast import replace_tensors, tensors_in
from torch_promote.reference.dtypes import LOWER_DTYPES
from torch_promote.regions.autocast import my_autocast
from torch_promote.report.base import module_name


class CallKey(NamedTuple):
    """Identifies a call across runs of a program."""

    module: str
    name: str  # with the overload
    line: str  # of a conversion, whose cure is a change of that line; "" for other calls
    number: int  # the number of earlier calls of the site

    @property
    def site(self) -> SiteKey:
        """The site of the call."""
        return self[:3]

    def __str__(self) -> str:
        at = f", {shorten(self.line)}" if self.line else ""
        return f"{self.name} in {module_name(self.module)}{at}, call {self.number + 1}"


class Room:
    """Keeps tensors: in a quarter of the free memory of their device, then in half of the host's."""

    def __init__(self) -> None:
        self.left_out: int = 0  # the bytes of tensors for which there was no room
        self._left: dict[str, int] = {}

    def keep(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor | None:
        """Returns the tensor, if there is room for it; its device may be the CPU then."""
        size = tensor.numel() * tensor.element_size()
        for device in dict.fromkeys((tensor.device.type, "cpu")):
            left = self._left.get(device)
            if left is None:
                left = _free_bytes(device)
            self._left[device] = left - size if size <= left else left
            if size <= left:
                return tensor.to(tensor.device if device == tensor.device.type else device, copy=copy)
        self.left_out += size
        return None


_LEAST = 256 << 20


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return max(int(torch.cuda.mem_get_info()[0]) // 4, _LEAST)
    try:
        return max(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _LEAST)
    except (ValueError, OSError, AttributeError):  # not available on this system
        return 4 * _LEAST


def converts_one(facts: OpFacts) -> bool:
    """Whether an op changes the dtype of a tensor and nothing else."""
    return facts.is_cast or facts.op_name == "aten::type_as"


class ForwardCalls:
    """A listener for the calls of a forward. Subclasses process the calls."""

    #: Whether `seen` gets the program's own results, on which it can register hooks.
    wants_real_results = False

    def __init__(self, modules: RunningModules) -> None:
        self.observer: CallObserver = CallObserver(modules, self.ended, self.begun, outermost_only=True)
        self._counts: Counter[SiteKey] = Counter()
        self.saw_backward: bool = False

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call. Its result is passed to `seen`."""

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call with its record, its arguments, and the tensors of its outputs."""

    def begun(self, of: OpenCall) -> tuple[CallKey, Any] | None:
        """Called before a call. Returns its key, and what `about_to` returns; None if it is not processed."""
        if of.around is not None:
            return None
        facts = of.facts  # see NOTE [ Which calls are compared ]
        is_conversion = converts_one(facts)
        rounds = (facts.computes and not facts.is_uninitialized) or is_conversion
        if of.phase == "backward":
            # A backward that autograd records, such as that of a gradient penalty, is part of the loss.
            self.saw_backward |= not torch.is_grad_enabled()
            rounds &= not is_conversion
        if (of.phase == "forward" or (of.phase in ("optimizer", "backward") and of.autocast)) and rounds:
            place = of.origin.module, facts.name, of.origin.line if is_conversion else ""
            key = CallKey(*place, self._counts[place])
            self._counts[place] += 1
            of.real_results = self.wants_real_results
            return key, self.about_to(key, facts.op, of.args)
        return None

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call."""
        if of.mine is not None and call is not None and not call.error:
            key, begun = of.mine
            self.seen(key, call, of.args, results, begun)


def _comparable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that can be compared: readable tensors of floating point or complex numbers, or of bools."""
    return [one for one in tensors if (_is_of_numbers(one) or one.dtype is torch.bool) and has_storage(one)]


_CHOOSING = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode", "median")


def _chosen(call: Call, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The indices that a call has chosen by comparing numbers."""
    is_one = call.op.partition("::")[2] in _CHOOSING and any(info.dtype.is_floating_point for info in call.inputs)
    return [one for one in results if is_one and one.dtype is torch.int64 and has_storage(one)]


def _is_of_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _why_unread(tensor: torch.Tensor) -> str:
    if not can_be_read(tensor):
        return f"{type(tensor).__name__} has no data of its own"
    return f"a tensor is {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}"


@dataclass(slots=True, eq=False)
class KeptCall:
    """A call of the reference."""

    call: Call
    bytes: int  # the size of its floating point results
    shapes: list[torch.Size]
    fingerprint: list[torch.Tensor]  # a hash of the bits of each
    random: RandomState | None  # the state of the generators before the call; None if it draws no random numbers
    results: list[torch.Tensor | None]  # copies, until the candidate has been compared; None for those without room
    chosen: list[torch.Tensor | None]  # the same of the indices that it has chosen


class KeepReference(ForwardCalls):
    """The listener of the reference."""

    def __init__(self, modules: RunningModules) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, KeptCall] = {}
        self.requires_grad: bool = False
        self.room: Room = Room()
        # What the program's own conversions to a lower dtype lose of their arguments, by site.
        self.rounded: dict[SiteKey, ErrorSums] = {}

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> RandomState:
        """Called before a call."""
        return random_state(args)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: RandomState) -> None:
        """Called after a call."""
        found = _comparable(results)
        self.requires_grad |= any(one.requires_grad for one in found)
        with unnoticed():
            if (of := _lowered(key, args, found)) is not None:
                self.rounded.setdefault(key.site, ErrorSums()).add(found[0].detach(), of.detach())
            self.calls[key] = KeptCall(
                call,
                sum(one.numel() * one.element_size() for one in found if _is_of_numbers(one)),
                [one.shape for one in found],
                [_fingerprint(one) for one in found],
                begun if compare(begun, random_state(args)) else None,
                [self.room.keep(one.detach(), copy=True) for one in found],
                [self.room.keep(one, copy=True) for one in _chosen(call, results)],
            )


def _lowered(key: CallKey, args: list[Any], results: list[torch.Tensor]) -> torch.Tensor | None:
    """The argument that a call has converted to a lower dtype; None for other calls."""
    if not key.line or not results or results[0].dtype not in LOWER_DTYPES:
        return None
    of: torch.Tensor = args[0]
    return of if of.dtype != results[0].dtype and has_storage(of) and not of.is_complex() else None


class LeaveUnrounded(ForwardCalls):
    """A listener of the reference that undoes the program's own conversions to a lower dtype."""

    wants_real_results = True

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: None) -> None:
        """Called after a call."""
        with unnoticed():
            if (of := _lowered(key, args, _comparable(results))) is not None:
                results[0].data = of.detach().to(torch.float32, copy=True)


class CompareCandidate(ForwardCalls):
    """The listener of the candidate. It drops the results of the reference's calls after use."""

    def __init__(self, modules: RunningModules, reference: dict[CallKey, KeptCall]) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, Call] = {}
        self.settings: dict[CallKey, dict[str, Any]] = {}  # arguments that follow from dtypes: see `_settings`
        self.errors: dict[SiteKey, ErrorSums] = {}  # accumulated, by module and overload
        # Calls that the reference did not make, by module and overload.
        self.only_here: Counter[SiteKey] = Counter()
        # The numbers of indices that were chosen otherwise than in the reference, and of all, by module and overload.
        self.choices: dict[SiteKey, tuple[int, int]] = {}
        # The overloads in regions with outputs that cannot be compared, by the reason.
        self.unread: dict[str, dict[str, None]] = {}
        self._reference = reference

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> None:
        """Called before a call."""
        kept = self._reference.get(key)
        if kept is not None and kept.random is not None:
            set_random_state(kept.random, args)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: None) -> None:
        """Called after a call."""
        self.calls[key] = call
        if settings := dict(_settings(call, args)):
            self.settings[key] = settings
        kept, ours = self._reference.get(key), _comparable(results)
        for one in results if call.autocast and len(ours) < len(results) else ():
            if one.is_floating_point() and not _comparable([one]):
                self.unread.setdefault(_why_unread(one), {})[key.name] = None
        with unnoticed():
            for mine, other in zip(_chosen(call, results), [] if kept is None else kept.chosen, strict=False):
                differing, of = self.choices.get(key.site, (0, 0))
                if other is not None and mine.shape == other.shape:
                    self.choices[key.site] = differing + int((mine != other.to(mine.device)).sum()), of + mine.numel()
        if kept is None or [one.shape for one in ours] != kept.shapes:
            self.only_here[key.site] += 1
            return
        theirs, kept.results = [one for one in kept.results if one is not None], []
        if len(theirs) < len(ours):
            return  # there was no room
        sums = self.errors.setdefault(key.site, ErrorSums())
        with unnoticed():
            for one, other in zip(ours, theirs, strict=True):
                sums.add(one.detach(), other)


class CallsAlone(ForwardCalls):
    """A listener that runs calls of the reference alone, once more in the candidate's dtypes. Subclasses use it."""

    wants_real_results = True

    def __init__(
        self,
        modules: RunningModules,
        reference: KeepReference,
        candidate: CompareCandidate,
        policies: tuple[Policy, Policy],  # of the reference and of the candidate
    ) -> None:
        super().__init__(modules)
        self.refused: dict[str, str] = {}  # why calls could not be run alone, by overload
        self._reference = reference.calls
        self._candidate = candidate.calls
        self._settings = candidate.settings
        self._policies = [policy.without_modules() for policy in policies]
        self._regions: dict[Any, list[my_autocast]] = {}

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Returns results in the candidate's dtypes, and what they are compared with: NOTE [ Whose error it is ]."""
        if not self._differs(key):
            return None
        ours, theirs = self._reference[key].call, self._candidate[key]
        before, rounded = {info.name: info.dtype for info in ours.inputs}, {}
        if not (theirs.policy in _ROUNDING or isinstance(theirs.policy, torch.dtype)):
            for info in theirs.inputs:
                if _is_lower(info.dtype, before.get(info.name, info.dtype)):
                    rounded[info.name] = info.dtype
        alone = self._run_alone(op, args, theirs, self._policies[1], rounded, self._settings.get(key, {}))
        if alone is None or not rounded:
            return None if alone is None else (alone, None)
        as_there = self._run_alone(op, args, ours, self._policies[0], rounded, {})
        return None if as_there is None else (alone, as_there)

    def _differs(self, key: CallKey) -> bool:
        """Whether the candidate ran a call in other dtypes."""
        kept, theirs = self._reference.get(key), self._candidate.get(key)
        if kept is None or theirs is None:
            return False
        ours = kept.call
        return (
            [info.dtype for info in ours.ran_with] != [info.dtype for info in theirs.ran_with]
            or [info.dtype for info in ours.outputs] != [info.dtype for info in theirs.outputs]
            or (ours.composite and bool(theirs.autocast))  # the ops that it calls may run in other dtypes
        )

    def _errors(
        self, key: CallKey, results: list[torch.Tensor], begun: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each result of a call: itself, that of the call alone, and what the latter is compared with."""
        if begun is None:
            return []
        alone = _comparable(begun[0])
        wanted = results if begun[1] is None else _comparable(begun[1])
        if not [one.shape for one in alone] == [one.shape for one in results] == [one.shape for one in wanted]:
            self.refused.setdefault(key.name, "the shapes of its results differ in these dtypes")
            return []
        return [(one, ours, theirs.detach()) for one, ours, theirs in zip(results, alone, wanted, strict=True)]

    # --- calls in other dtypes

    def _run_alone(
        self,
        op: torch._ops.OpOverload,
        args: list[Any],
        as_in: Call,
        policy: Policy,
        rounded: dict[str, torch.dtype],  # the dtypes to which arguments are rounded first
        settings: dict[str, Any],  # arguments that are not those of the reference
    ) -> list[torch.Tensor] | None:
        """The results of a call on the reference's arguments, in the dtypes and regions of a record."""
        closed = {type(one).__name__ for one in leaves(args) if isinstance(one, torch.Tensor) and not can_be_read(one)}
        if closed:  # without their own dispatch, kernels would read out of bounds
            self.refused.setdefault(facts_of(op).name, f"{', '.join(sorted(closed))} has no data of its own")
            return None
        # A cast to float8 without a scale would saturate: the region that the call runs in scales.
        in_float8 = as_in.policy in FLOAT8_POLICIES
        dtypes = {} if in_float8 else {info.name: info.dtype for info in as_in.ran_with}
        writes = {one.name for one in facts_of(op).writes}

        def convert(name: str, value: Any) -> Any:
            if name in settings:
                return settings[name]
            chosen = {}
            for path, tensor in tensors_in(name, value):
                given = tensor.detach().to(rounded.get(path, tensor.dtype))
                chosen[path] = given.to(dtypes.get(path, given.dtype), copy=name in writes)
            return replace_tensors(name, value, chosen) if chosen else value

        try:
            with hidden_from_observers(), torch.no_grad(), contextlib.ExitStack() as stack:
                for mode in (_keys.DisableTorchFunction(), _keys._DisableTorchDispatch()):
                    stack.enter_context(mode)
                for region in self._regions_of(facts_of(op).name, as_in, policy):
                    stack.enter_context(region)
                return repeat(op, args, convert)
        except Exception as error:  # an op may refuse the dtypes, or a second call
            self.refused.setdefault(facts_of(op).name, f"{type(error).__name__}: {error}")
            return None

    def _regions_of(self, name: str, call: Call, policy: Policy) -> list[my_autocast]:
        key = call.autocast, name, call.policy, policy is self._policies[0]
        found = self._regions.get(key)
        if found is None:
            overrides: dict[str, Value] = {}
            if call.policy not in (None, CastPolicy.fallthrough) and any(
                policy.lookup(exact_key(name), device) != call.policy for device, _ in call.autocast
            ):
                overrides[exact_key(name)] = call.policy
            found = self._regions[key] = [
                my_autocast(device, dtype=dtype, policy=policy, overrides=overrides) for device, dtype in call.autocast
            ]
        return found


class CompareLocally(CallsAlone):
    """The listener of the reference's second run. `impacts` gets the local errors."""

    def __init__(
        self,
        modules: RunningModules,
        reference: KeepReference,
        candidate: CompareCandidate,
        policies: tuple[Policy, Policy],
        impacts: Impacts,
        with_grad: bool = False,  # whether to record calls for a backward although the program disables gradients
    ) -> None:
        super().__init__(modules, reference, candidate, policies)
        self.errors: dict[SiteKey, ErrorSums] = {}  # local, by module and overload
        self.unreached: set[SiteKey] = set()  # the sites with results whose errors meet no gradient
        self.different: str = ""  # the first call that differs from the first run
        self.room: Room = Room()  # keeps the errors until the backward
        self._impacts = impacts
        self._with_grad = with_grad
        self._recorded: OpenCall | None = None
        self._missing = dict.fromkeys(self._reference)

    def begun(self, of: OpenCall) -> tuple[CallKey, Any] | None:
        """Called before a call. Ops that move data are recorded as well, because gradients flow through them."""
        mine = super().begun(of)
        is_forward = of.around is None and of.phase == "forward"
        if self._with_grad and is_forward and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._recorded = of
            torch._C._set_grad_enabled(True)
        return mine

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call."""
        if self._recorded is of:
            self._recorded = None
            torch._C._set_grad_enabled(False)
        super().ended(of, call, results)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call."""
        found, differs = _comparable(results), self._differs(key)
        self._check(key, found)
        arguments = set(map(id, leaves(args)))
        computed = [one for one in found if id(one) not in arguments or not one.is_leaf]  # not a buffer or a parameter
        for one in computed:
            if self._with_grad and differs and _may_require_grad(one):
                one.requires_grad_(True)
            if one.requires_grad and one.numel() == 1:
                self._impacts.watch_scalar(one)
        sums = self.errors.setdefault(key.site, ErrorSums()) if begun is not None else ErrorSums()
        for result, ours, theirs in self._errors(key, found, begun):
            with unnoticed():
                sums.add(ours, theirs)
                difference = self.room.keep(_difference(ours, theirs, result.dtype))
            if difference is None or not result.requires_grad:
                self.unreached.add(key.site)
            else:
                self._impacts.add(key.site, result, difference, call.line)

    def _check(self, key: CallKey, results: list[torch.Tensor]) -> None:
        if self.different:
            return
        kept = self._reference.get(key)
        self._missing.pop(key, None)
        if kept is None:
            self.different = f"{key}, was made only in the second run"
            return
        with unnoticed():
            now = [_fingerprint(one) for one in results]
        if len(now) != len(kept.fingerprint) or not all(map(torch.equal, now, kept.fingerprint)):
            self.different = f"the results of {key}, at {kept.call.line or 'an unknown line'}"

    def finish(self) -> None:
        """Called after the run."""
        if not self.different and self._missing:
            self.different = f"{next(iter(self._missing))}, was made only in the first run"


class AddErrors(CallsAlone):
    """A listener of the reference that adds the local errors of some sites to their results."""

    sites: frozenset[SiteKey] = frozenset()  # by module and overload

    def _differs(self, key: CallKey) -> bool:
        return key.site in self.sites and super()._differs(key)

    def start(self, sites: Iterable[SiteKey]) -> None:
        """Called before a run, with its sites."""
        self.sites = frozenset(sites)
        self._counts.clear()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call."""
        arguments = set(map(id, leaves(args)))
        for result, ours, theirs in self._errors(key, _comparable(results), begun):
            is_argument = id(result) in arguments
            with unnoticed():
                result, ours, theirs = map(_unexpanded, (result, ours, theirs), 3 * [result.stride()])
                if is_argument:  # a conversion that had nothing to do has returned the program's tensor
                    self._before.append((result, result.clone()))
                if result.dtype is torch.bool:
                    result.logical_xor_(ours != theirs)
                else:
                    result.add_(_difference(ours, theirs, result.dtype))

    def finish(self) -> None:
        """Called after the run. Restores what the program has passed, such as its data."""
        with unnoticed():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before = []


#: The policies under which a call rounds its arguments itself.
_ROUNDING = (CastPolicy.lower_precision_fp, *FLOAT8_POLICIES)


def _unexpanded(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """One of the elements that have one place in the memory of a tensor with these strides, as `expand` makes it."""
    return tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in strides)]


def _difference(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of a result; zero where the other one is not finite either."""
    if ours.dtype is torch.bool:
        return ours != theirs
    if min(ours.dtype.itemsize, theirs.dtype.itemsize) == 1 and theirs.dtype.is_floating_point:  # float8 has no sub
        ours, theirs = ours.float(), theirs.float()
    wide = ours.to(torch.promote_types(ours.dtype, theirs.dtype))
    return torch.where(theirs.isfinite(), wide - theirs, 0.0).to(dtype)


def _may_require_grad(tensor: torch.Tensor) -> bool:
    is_free = not tensor.requires_grad and tensor.is_leaf and not tensor.is_inference()
    return is_free and _is_of_numbers(tensor)


def _is_lower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating point dtype has fewer bits than another one."""
    return dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize


def _settings(call: Call, args: list[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that follow from the dtype that a program runs in: dtypes, and numbers that stand for infinity."""
    for argument, value in zip(facts_of(call.name).arguments, args, strict=False):
        if isinstance(value, torch.dtype) or (isinstance(value, float) and _LARGEST_HALF <= abs(value) < math.inf):
            yield argument, value


#: The largest number of float16.
_LARGEST_HALF = torch.finfo(torch.float16).max
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_keys: Any = torch._C
_OBSERVER = _keys.DispatchKeySet(_keys._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY))


def hidden_from_observers() -> contextlib.AbstractContextManager[Any]:
    """Hides the ops of a block from observers, but not from autocast."""
    guard: contextlib.AbstractContextManager[Any] = _keys._ExcludeDispatchKeyGuard(_OBSERVER)
    return guard


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits: their sum, weighted by position."""
    real = as_reals(tensor.detach()).contiguous()
    bits = real.view(_INTEGERS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(1 << 20)):
        weights = torch.arange(1, piece.numel() + 1, device=piece.device) * 2654435761 + number
        total += (piece.to(torch.int64) * weights).sum()
    return total
