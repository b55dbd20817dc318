"""The listeners of a comparison's runs.

NOTE [ The runs of a comparison ]
1. The reference: `KeepReference` keeps the results of its calls, a fingerprint of each, and the state of the random
   number generators before each call that draws.
2. The candidate: `CompareCandidate` gives each call the reference's random numbers, compares its results with those
   that were kept, and records the dtypes of each call.
3. The reference again: `CompareLocally` checks the fingerprints, runs each call alone in the candidate's dtypes, and
   passes the errors to `Impacts`, which multiplies them with the gradients of the backward.

NOTE [ Which calls are compared ]
The calls that the program makes in a forward, and those of optimizers inside of a region, with their results and the
arguments that they write to. Of a composite op, only the op itself is compared, not the ops that it calls, because an
override of the op applies to all of them. Not compared: views and ops that move data, which compute nothing;
collectives, which depend on other ranks; and recomputations of checkpoints, which repeat calls of the forward.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.checking.comparison import compare
from torch_promote.numerics.impacts import ErrorSums, Impacts
from torch_promote.numerics.step_state import (
    RandomState,
    random_state,
    repeat,
    set_random_state,
)
from torch_promote.observe.call import Call
from torch_promote.observe.observer import CallObserver, OpenCall
from torch_promote.observe.ops import can_be_read, facts_of, has_storage, leaves, unnoticed
from torch_promote.observe.places import RunningModules
from torch_promote.policy.named_policies import Value
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.policy.policy import Policy
from torch_promote.reference.autocast import replace_tensors, tensors_in
from torch_promote.regions.autocast import my_autocast
from torch_promote.report.base import module_name

__all__ = [
    "CallKey",
    "CompareCandidate",
    "CompareLocally",
    "ForwardCalls",
    "KeepReference",
    "KeptCall",
    "Room",
    "hidden_from_observers",
]


class CallKey(NamedTuple):
    """Identifies a call across runs of a program."""

    module: str
    name: str  # with the overload
    number: int  # the number of earlier calls of the overload by the module

    def __str__(self) -> str:
        return f"{self.name} in {module_name(self.module)}, call {self.number + 1}"


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


class ForwardCalls:
    """A listener for the calls of a forward. Subclasses process the calls."""

    #: Whether `seen` gets the program's own results, on which it can register hooks.
    wants_real_results = False

    def __init__(self, modules: RunningModules) -> None:
        self.observer: CallObserver = CallObserver(modules, self.ended, self.begun, outermost_only=True)
        self._counts: Counter[tuple[str, str]] = Counter()
        self.saw_backward: bool = False

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call. Its result is passed to `seen`."""

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call with its record, its arguments, and the tensors of its outputs."""

    def begun(self, of: OpenCall) -> tuple[CallKey, Any] | None:
        """Called before a call. Returns its key, and what `about_to` returns; None if it is not processed."""
        if of.around is not None:
            return None
        if of.phase == "backward":
            # A backward that autograd records, such as that of a gradient penalty, is part of the loss.
            self.saw_backward |= not torch.is_grad_enabled()
        elif (of.phase == "forward" or (of.phase == "optimizer" and of.autocast)) and of.facts.computes:
            place = of.origin.module, of.facts.name
            key = CallKey(*place, self._counts[place])
            self._counts[place] += 1
            of.real_results = self.wants_real_results
            return key, self.about_to(key, of.facts.op, of.args)
        return None

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call."""
        if of.mine is not None and call is not None and not call.error:
            key, begun = of.mine
            self.seen(key, call, of.args, results, begun)


def _floating(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that can be compared: readable tensors of floating point or complex numbers."""
    return [tensor for tensor in tensors if (tensor.is_floating_point() or tensor.is_complex()) and has_storage(tensor)]


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


class KeepReference(ForwardCalls):
    """The listener of the reference."""

    def __init__(self, modules: RunningModules) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, KeptCall] = {}
        self.requires_grad: bool = False
        self.room: Room = Room()

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> RandomState:
        """Called before a call."""
        return random_state(args)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: RandomState) -> None:
        """Called after a call."""
        found = _floating(results)
        self.requires_grad |= any(one.requires_grad for one in found)
        with unnoticed():
            self.calls[key] = KeptCall(
                call,
                sum(one.numel() * one.element_size() for one in found),
                [one.shape for one in found],
                [_fingerprint(one) for one in found],
                begun if compare(begun, random_state(args)) else None,
                [self.room.keep(one.detach(), copy=True) for one in found],
            )


class CompareCandidate(ForwardCalls):
    """The listener of the candidate. It drops the results of the reference's calls after use."""

    def __init__(self, modules: RunningModules, reference: dict[CallKey, KeptCall]) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, Call] = {}
        self.errors: dict[tuple[str, str], ErrorSums] = {}  # accumulated, by module and overload
        # Calls that the reference did not make, by module and overload.
        self.only_here: Counter[tuple[str, str]] = Counter()
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
        kept, ours = self._reference.get(key), _floating(results)
        for one in results if call.autocast and len(ours) < len(results) else ():
            if one.is_floating_point() and not _floating([one]):
                self.unread.setdefault(_why_unread(one), {})[key.name] = None
        if kept is None or [one.shape for one in ours] != kept.shapes:
            self.only_here[key[:2]] += 1
            return
        theirs, kept.results = [one for one in kept.results if one is not None], []
        if len(theirs) < len(ours):
            return  # there was no room
        sums = self.errors.setdefault(key[:2], ErrorSums())
        with unnoticed():
            for one, other in zip(ours, theirs, strict=True):
                sums.add(one.detach(), other)


class CompareLocally(ForwardCalls):
    """The listener of the reference's second run. `impacts` gets the local errors."""

    wants_real_results = True

    def __init__(
        self,
        modules: RunningModules,
        reference: dict[CallKey, KeptCall],
        candidate: dict[CallKey, Call],
        policy: Policy,
        impacts: Impacts,
        with_grad: bool = False,  # whether to record calls for a backward although the program disables gradients
    ) -> None:
        super().__init__(modules)
        self.errors: dict[tuple[str, str], ErrorSums] = {}  # local, by module and overload
        self.refused: dict[str, str] = {}  # why calls could not be run alone, by overload
        self.different: str = ""  # the first call that differs from the first run
        self.room: Room = Room()  # keeps the errors until the backward
        self._reference = reference
        self._candidate = candidate
        self._policy = policy.without_modules()
        self._regions: dict[Any, list[my_autocast]] = {}
        self._impacts = impacts
        self._with_grad = with_grad
        self._recorded: OpenCall | None = None
        self._missing = dict.fromkeys(reference)

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

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> list[torch.Tensor] | None:
        """Called before a call. Returns the results of the call in the candidate's dtypes."""
        return self._run_alone(op, args, self._candidate[key]) if self._differs(key) else None

    def seen(
        self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: list[torch.Tensor] | None
    ) -> None:
        """Called after a call."""
        found, differs = _floating(results), self._differs(key)
        self._check(key, found)
        arguments = set(map(id, leaves(args)))
        computed = [one for one in found if id(one) not in arguments or not one.is_leaf]  # not a buffer or a parameter
        for one in computed:
            if self._with_grad and differs and not one.requires_grad and one.is_leaf and not one.is_inference():
                one.requires_grad_(True)
            if one.requires_grad and one.numel() == 1:
                self._impacts.watch_scalar(one)
        if begun is not None:
            self._compare(key, found, _floating(begun))

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

    def _compare(self, key: CallKey, results: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
        if [one.shape for one in alone] != [one.shape for one in results]:
            self.refused.setdefault(key.name, "the shapes of its results differ in these dtypes")
            return
        sums = self.errors.setdefault(key[:2], ErrorSums())
        for ours, theirs in zip(alone, results, strict=True):
            with unnoticed():
                reference = theirs.detach()
                sums.add(ours, reference)
                wide = ours.to(torch.promote_types(ours.dtype, reference.dtype))
                difference = self.room.keep((wide - reference).to(reference.dtype))
            if difference is not None:
                self._impacts.add(key[:2], theirs, difference)

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

    # --- calls in the candidate's dtypes

    def _run_alone(self, op: torch._ops.OpOverload, args: list[Any], as_in: Call) -> list[torch.Tensor] | None:
        """The results of a call on the reference's arguments, in the candidate's dtypes and regions."""
        closed = {type(one).__name__ for one in leaves(args) if isinstance(one, torch.Tensor) and not can_be_read(one)}
        if closed:  # without their own dispatch, kernels would read out of bounds
            self.refused.setdefault(facts_of(op).name, f"{', '.join(sorted(closed))} has no data of its own")
            return None
        # A cast to float8 without a scale would saturate: the region that the call runs in scales.
        in_float8 = as_in.policy in FLOAT8_POLICIES
        dtypes = {} if in_float8 else {info.name: info.dtype for info in as_in.ran_with}
        writes = {one.name for one in facts_of(op).writes}

        def convert(name: str, value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return value.clone_state()
            chosen = {
                path: tensor.detach().to(dtypes.get(path, tensor.dtype), copy=name in writes)
                for path, tensor in tensors_in(name, value)
            }
            return replace_tensors(name, value, chosen) if chosen else value

        try:
            with hidden_from_observers(), torch.no_grad(), contextlib.ExitStack() as stack:
                for mode in (_keys.DisableTorchFunction(), _keys._DisableTorchDispatch()):
                    stack.enter_context(mode)
                for region in self._regions_of(facts_of(op).name, as_in):
                    stack.enter_context(region)
                return repeat(op, args, convert)
        except Exception as error:  # an op may refuse the dtypes, or a second call
            self.refused.setdefault(facts_of(op).name, f"{type(error).__name__}: {error}")
            return None

    def _regions_of(self, name: str, call: Call) -> list[my_autocast]:
        key = call.autocast, name, call.policy
        found = self._regions.get(key)
        if found is None:
            overrides: dict[str, Value] = {}
            if call.policy not in (None, CastPolicy.fallthrough) and any(
                self._policy.lookup(exact_key(name), device) != call.policy for device, _ in call.autocast
            ):
                overrides[exact_key(name)] = call.policy
            found = self._regions[key] = [
                my_autocast(device, dtype=dtype, policy=self._policy, overrides=overrides)
                for device, dtype in call.autocast
            ]
        return found


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_keys: Any = torch._C
_OBSERVER = _keys.DispatchKeySet(_keys._dispatch_key_parse(_C.dispatch_observer_key()))


def hidden_from_observers() -> contextlib.AbstractContextManager[Any]:
    """Hides the ops of a block from observers, but not from autocast."""
    guard: contextlib.AbstractContextManager[Any] = _keys._ExcludeDispatchKeyGuard(_OBSERVER)
    return guard


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits: their sum, weighted by position."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(-1).view(_INTEGERS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(1 << 20)):
        weights = torch.arange(1, piece.numel() + 1, device=piece.device) * 2654435761 + number
        total += (piece.to(torch.int64) * weights).sum()
    return total
