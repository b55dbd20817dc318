"""The observers of a comparison's runs.

NOTE [ The runs of a comparison ]
1. The reference: `KeepReference` stores the results of its calls, a fingerprint of each, and the state of the random
   number generators before each call that draws.
2. The candidate: `CompareCandidate` gives each call the reference's random numbers, compares its results with the
   stored ones, and records the dtypes of each call.
3. The reference again: `CompareLocally` checks the fingerprints, runs each call alone in the candidate's dtypes, and
   passes the errors to `Impacts`, which multiplies them with the gradients of the backward.

Results are stored for as many calls as fit in memory; further rounds of the same runs handle the others.

NOTE [ Which calls are compared ]
The calls that the program makes in a forward. Of a composite op, only the op itself is compared, not the ops that it
calls, because an override of the op applies to all of them. Not compared: views and ops that move data, which compute
nothing; collectives, which depend on other ranks; and recomputations of checkpoints, which repeat calls of the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.numerics.impacts import ErrorSums, Impacts
from torch_promote.numerics.nonfinite_finder import BETWEEN_PROCESSES
from torch_promote.observe.events import Call
from torch_promote.observe.observer import THROUGH, CallObserver
from torch_promote.observe.ops import argument_names, can_be_read, leaves, overload_name, unnoticed
from torch_promote.observe.places import RunningModules
from torch_promote.policy.legality import moves_data
from torch_promote.policy.named_policies import Value
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import CastPolicy
from torch_promote.policy.policy import Policy
from torch_promote.reference.autocast import replace_tensors, tensors_in
from torch_promote.regions.autocast import my_autocast

__all__ = ["CallKey", "CompareCandidate", "CompareLocally", "ForwardCalls", "KeepReference", "KeptCall", "LocalRuns"]


class CallKey(NamedTuple):
    """Identifies a call across runs of a program.

    Attributes:
        module: The path of the module that made it.
        name: The overload's full name.
        number: The number of earlier calls of the overload by the module.
    """

    module: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'the model'}, call {self.number + 1}"


class ForwardCalls(CallObserver):
    """An observer of the calls of a forward. Subclasses process the calls.

    Args:
        modules: Tracks which module runs.
    """

    #: Whether `seen` gets the program's own results, on which it can register hooks.
    wants_real_results = False

    def __init__(self, modules: RunningModules) -> None:
        super().__init__(modules, self._remember)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._ended: tuple[Call, list[torch.Tensor]] | None = None
        self.saw_backward = False
        self.communicates = False

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call. Its result is passed to `seen`."""

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call.

        Args:
            key: Its key.
            call: The tracer's record of it.
            args: Its arguments.
            results: The tensors among its results.
            begun: The result of `about_to`.
        """

    def abandoned(self, begun: Any) -> None:
        """Called when a call raises."""

    def _remember(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._ended = call, tensors

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call."""
        self.communicates |= op.namespace in BETWEEN_PROCESSES
        stack = self.open_calls
        if stack and getattr(stack[-1], "runs", None) is None:
            return None  # part of another call
        inner = bool(stack)
        token: Any = super().begin(op, args)
        if inner or token is None or token is THROUGH:
            return token
        if token.phase == "backward":
            # A backward that autograd records, such as that of a gradient penalty, is part of the loss.
            self.saw_backward |= not torch.is_grad_enabled()
        elif token.phase == "forward" and _computes(op):
            place = token.origin.module, overload_name(op)
            key = CallKey(*place, self._counts[place])
            self._counts[place] += 1
            try:
                token.kept = key, self.about_to(key, op, args)
                token.real_results = self.wants_real_results
            except BaseException:
                self.failed(token)
                raise
        return token

    def end(self, token: Any, results: list[Any]) -> None:
        """Called after a call."""
        super().end(token, results)
        kept = getattr(token, "kept", None)
        if kept is None or self._ended is None:
            return
        (call, tensors), self._ended = self._ended, None
        self.seen(kept[0], call, token.args, tensors, kept[1])

    def failed(self, token: Any) -> None:
        """Called when a call raises."""
        super().failed(token)
        self._ended = None
        kept = getattr(token, "kept", None)
        if kept is not None:
            self.abandoned(kept[1])


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def _computes(op: torch._ops.OpOverload) -> bool:
    if op.namespace in (*BETWEEN_PROCESSES, "fsdp"):  # FSDP's ops move data
        return False
    return not moves_data(overload_name(op)) and bool(op._schema.returns)


def floating(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a call's results that can be compared: readable tensors of floating point or complex numbers."""
    return [
        tensor
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and can_be_read(tensor)
    ]


_keys: Any = torch._C
_HIDDEN = _keys.DispatchKeySet(_keys._dispatch_key_parse(_C.dispatch_observer_key()))

#: The state of the generators: the CPU's, the GPUs', and those among a call's arguments.
RandomState = tuple[torch.Tensor, list[torch.Tensor] | None, list[torch.Tensor]]
#: Arguments that batch and instance norm write to, although their schemas do not declare it.
_STATISTICS = frozenset({"running_mean", "running_var"})


class LocalRuns:
    """Runs calls of the reference in the way in which the candidate ran them.

    Args:
        candidate: The candidate's policy.
    """

    def __init__(self, candidate: Policy) -> None:
        self._policy = candidate.without_modules()
        self._regions: dict[Any, list[my_autocast]] = {}
        self.refused: dict[str, str] = {}

    def run(self, op: torch._ops.OpOverload, args: list[Any], as_in: Call) -> list[torch.Tensor] | None:
        """Runs a call.

        Args:
            op: The overload.
            args: The reference's arguments. They are not modified.
            as_in: The candidate's call: its dtypes, policy and regions.

        Returns:
            The tensors among the results; None if the call cannot be run alone (`refused` has the reason by overload).
        """
        closed = {type(one).__name__ for one in leaves(args) if isinstance(one, torch.Tensor) and not can_be_read(one)}
        if closed:  # without their own dispatch, kernels would read out of bounds
            self.refused.setdefault(overload_name(op), f"{', '.join(sorted(closed))} has no data of its own")
            return None
        dtypes = {info.name: info.dtype for info in as_in.ran_with}
        writes = {one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        writes |= _STATISTICS
        try:
            with _hidden(), torch.no_grad():
                given = {
                    name: _converted(name, value, dtypes, name in writes)
                    for name, value in zip(argument_names(op), args, strict=True)
                }
                keyword_only = {one.name for one in op._schema.arguments if one.kwarg_only}
                positional = [value for name, value in given.items() if name not in keyword_only]
                named = {name: value for name, value in given.items() if name in keyword_only}
                with contextlib.ExitStack() as stack:
                    for region in self._regions_of(overload_name(op), as_in):
                        stack.enter_context(region)
                    results = op(*positional, **named)
        except Exception as error:  # an op may refuse the dtypes, or a second call
            self.refused.setdefault(overload_name(op), f"{type(error).__name__}: {error}")
            return None
        return [one for one in leaves(results if isinstance(results, list | tuple) else [results]) if one is not None]

    def _regions_of(self, name: str, call: Call) -> list[my_autocast]:
        key = call.autocast, name, call.policy
        found = self._regions.get(key)
        if found is None:
            overrides: dict[str, Value] = {}
            if call.policy is not None and self._says_otherwise(name, call):
                overrides[exact_key(name)] = call.policy
            found = self._regions[key] = [
                my_autocast(device, dtype=dtype, policy=self._policy, overrides=overrides)
                for device, dtype in call.autocast
            ]
        return found

    def _says_otherwise(self, name: str, call: Call) -> bool:
        if call.policy is CastPolicy.fallthrough:
            return False
        return any(self._policy.lookup(exact_key(name), device) != call.policy for device, _ in call.autocast)


def _converted(name: str, value: Any, dtypes: Mapping[str, torch.dtype], copy: bool) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    chosen = {
        path: tensor.detach().to(dtypes.get(path, tensor.dtype), copy=copy) for path, tensor in tensors_in(name, value)
    }
    return replace_tensors(name, value, chosen) if chosen else value


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Hides ops from observers and modes, but not from autocast."""
    random = random_state()
    try:
        with (
            _keys.DisableTorchFunction(),
            _keys._DisableTorchDispatch(),
            _keys._ExcludeDispatchKeyGuard(_HIDDEN),
        ):
            yield
    finally:
        set_random_state(random)


def random_state(args: Iterable[Any] = ()) -> RandomState:
    """Returns the state of PyTorch's generators, and of those among a call's arguments."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, [one.get_state() for one in _generators(args)]


def set_random_state(state: RandomState, args: Iterable[Any] = ()) -> None:
    """Sets the state of PyTorch's generators, and of those among a call's arguments."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    for one, own in zip(_generators(args), state[2], strict=False):  # only one of the runs may pass a generator
        one.set_state(own)


def _generators(args: Iterable[Any]) -> list[torch.Generator]:
    return [one for one in args if isinstance(one, torch.Generator)]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class KeptCall:
    """A call of the reference.

    Attributes:
        call: The tracer's record of it.
        bytes: The size of its floating point results.
        fingerprint: A hash of the bits of each.
        random: The state of the generators before the call; None if it does not draw random numbers.
        results: Copies of the results, until the candidate has been compared.
    """

    call: Call
    bytes: int
    fingerprint: list[torch.Tensor]
    random: RandomState | None
    results: list[torch.Tensor] | None = None


class KeepReference(ForwardCalls):
    """The observer of the reference.

    Args:
        modules: Tracks which module runs.
        skip: The bytes of results to skip before the first one to keep.
        most: The number of bytes of results to keep.
    """

    def __init__(self, modules: RunningModules, skip: int, most: int) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, KeptCall] = {}
        self.requires_grad = False
        self.bytes = 0
        self._skip = skip
        self._most = most

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> RandomState:
        """Called before a call."""
        return random_state(args)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call."""
        found = floating(results)
        size = sum(one.numel() * one.element_size() for one in found)
        keeps = self._skip <= self.bytes < self._skip + self._most
        self.bytes += size
        self.requires_grad |= any(one.requires_grad for one in found)
        random = None if _is_same(begun, random_state(args)) else begun
        with unnoticed():
            kept = [one.detach().clone() for one in found] if keeps else None
            self.calls[key] = KeptCall(call, size, [_fingerprint(one) for one in found], random, kept)


class CompareCandidate(ForwardCalls):
    """The observer of the candidate.

    Args:
        modules: Tracks which module runs.
        reference: The reference's calls. Their results are dropped after use.

    Attributes:
        calls: The candidate's calls.
        errors: The accumulated errors, by module and overload.
        only_here: The number of calls that the reference did not make, by module and overload.
    """

    def __init__(self, modules: RunningModules, reference: dict[CallKey, KeptCall]) -> None:
        super().__init__(modules)
        self.calls: dict[CallKey, Call] = {}
        self.errors: dict[tuple[str, str], ErrorSums] = {}
        self.only_here: Counter[tuple[str, str]] = Counter()
        self._reference = reference

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> None:
        """Called before a call."""
        kept = self._reference.get(key)
        if kept is not None and kept.random is not None:
            set_random_state(kept.random, args)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call."""
        self.calls[key] = call
        kept = self._reference.get(key)
        if kept is None:
            self.only_here[key[:2]] += 1
            return
        theirs, kept.results = kept.results, None
        if theirs is None:
            return
        ours = floating(results)
        if [one.shape for one in ours] != [one.shape for one in theirs]:
            self.only_here[key[:2]] += 1
            return
        sums = self.errors.setdefault(key[:2], ErrorSums())
        with unnoticed():
            for one, other in zip(ours, theirs, strict=True):
                sums.add(one.detach(), other)


@dataclass(slots=True, eq=False)
class _Begun:
    """The facts about a call that are known before it runs."""

    random: RandomState
    with_grad: bool
    results: list[torch.Tensor] | None = None
    has_run: bool = False
    op: Any = None


class CompareLocally(ForwardCalls):
    """The observer of the reference's second run.

    Args:
        modules: Tracks which module runs.
        reference: The reference's calls in its first run.
        candidate: The candidate's calls.
        local: Runs calls alone.
        impacts: Receives the local errors.
        skip: The bytes of results to skip before the first errors are computed.
        most: The bytes of results for which errors are computed.
        with_grad: Whether to record calls for a backward although the program disables gradients.

    Attributes:
        errors: The local errors, by module and overload.
        different: The first call that differs from the first run, as text; "".
        is_more: Whether later calls ran in other dtypes in the candidate.
    """

    wants_real_results = True

    def __init__(
        self,
        modules: RunningModules,
        reference: dict[CallKey, KeptCall],
        candidate: dict[CallKey, Call],
        local: LocalRuns,
        impacts: Impacts,
        skip: int,
        most: int,
        with_grad: bool = False,
    ) -> None:
        super().__init__(modules)
        self.errors: dict[tuple[str, str], ErrorSums] = {}
        self.different = ""
        self.is_more = False
        self._reference = reference
        self._candidate = candidate
        self._local = local
        self._impacts = impacts
        self._bytes = 0
        self._skip = skip
        self._most = most
        self._with_grad = with_grad
        self._recorded: list[Any] = []
        self._missing = set(reference)

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call. Ops that move data are recorded as well, because gradients flow through them."""
        token = super().begin(op, args)
        moves = getattr(token, "phase", "") == "forward" and token.kept is None
        if self._with_grad and moves and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._recorded.append(token)
            torch._C._set_grad_enabled(True)
        return token

    def end(self, token: Any, results: list[Any]) -> None:
        """Called after a call."""
        self._has_ended(token)
        super().end(token, results)

    def failed(self, token: Any) -> None:
        """Called when a call raises."""
        self._has_ended(token)
        super().failed(token)

    def _has_ended(self, token: Any) -> None:
        if self._recorded and self._recorded[-1] is token:
            self._recorded.pop()
            torch._C._set_grad_enabled(False)

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> _Begun:
        """Called before a call."""
        begun = _Begun(random_state(args), torch.is_grad_enabled(), op=op)
        if op._schema.is_mutable and self._is_wanted(key):  # the call will change its arguments
            begun.has_run = True
            begun.results = self._local.run(op, args, self._candidate[key])
        if self._with_grad and not torch.is_inference_mode_enabled():
            torch._C._set_grad_enabled(True)
        return begun

    def abandoned(self, begun: _Begun) -> None:
        """Called when a call raises."""
        torch._C._set_grad_enabled(begun.with_grad)

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: _Begun) -> None:
        """Called after a call."""
        torch._C._set_grad_enabled(begun.with_grad)
        found = floating(results)
        self._check(key, found)
        if self._with_grad and self._is_wanted(key):
            for one in found:
                if not one.requires_grad and one.is_leaf and not one.is_inference():
                    one.requires_grad_(True)
        for one in found:
            if one.requires_grad and one.numel() == 1:
                self._impacts.watch_scalar(one)
        if self._is_wanted(key):
            if not begun.has_run:
                after = random_state(args)
                set_random_state(begun.random, args)
                begun.results = self._local.run(begun.op, args, self._candidate[key])
                set_random_state(after, args)
            self._compare(key, found, begun.results)
        elif not key.module:  # the loss: its gradients are the scale for deciding whether the model's are zero
            for one in found:
                self._impacts.add(key[:2], one, torch.zeros((), device=one.device))
        kept = self._reference.get(key)
        self.is_more |= self._bytes >= self._skip + self._most and self._differs(key)
        self._bytes += 0 if kept is None else kept.bytes

    def _is_wanted(self, key: CallKey) -> bool:
        """Whether the candidate ran a call in other dtypes, and this round handles it."""
        return self._skip <= self._bytes < self._skip + self._most and self._differs(key)

    def _differs(self, key: CallKey) -> bool:
        kept, theirs = self._reference.get(key), self._candidate.get(key)
        if kept is None or theirs is None:
            return False
        ours = kept.call
        return (
            [info.dtype for info in ours.ran_with] != [info.dtype for info in theirs.ran_with]
            or [info.dtype for info in ours.outputs] != [info.dtype for info in theirs.outputs]
            or (ours.composite and bool(theirs.autocast))  # the ops that it calls may run in other dtypes
        )

    def _compare(self, key: CallKey, results: list[torch.Tensor], alone: list[torch.Tensor] | None) -> None:
        if alone is None:
            return
        alone = floating(alone)
        if [one.shape for one in alone] != [one.shape for one in results]:
            self._local.refused.setdefault(key.name, "the shapes of its results differ in these dtypes")
            return
        sums = self.errors.setdefault(key[:2], ErrorSums())
        for ours, theirs in zip(alone, results, strict=True):
            with unnoticed():
                reference = theirs.detach()
                sums.add(ours, reference)
                wide = ours.to(torch.promote_types(ours.dtype, reference.dtype))
                difference = (wide - reference).to(reference.dtype)
            self._impacts.add(key[:2], theirs, difference)

    def _check(self, key: CallKey, results: list[torch.Tensor]) -> None:
        if self.different:
            return
        kept = self._reference.get(key)
        self._missing.discard(key)
        if kept is None:
            self.different = f"{key}, was made only in the second run"
            return
        with unnoticed():
            now = [_fingerprint(one) for one in results]
        same = len(now) == len(kept.fingerprint) and all(
            torch.equal(one, other) for one, other in zip(now, kept.fingerprint, strict=True)
        )
        if not same:
            self.different = f"the results of {key}, at {kept.call.line or 'an unknown line'}"

    def finish(self) -> None:
        """Called after the run."""
        if not self.different and self._missing:
            key = next(key for key in self._reference if key in self._missing)
            self.different = f"{key}, was made only in the first run"


def _is_same(one: RandomState, other: RandomState) -> bool:
    with unnoticed():
        if not torch.equal(one[0], other[0]) or not all(map(torch.equal, one[2], other[2])):
            return False
        return one[1] is None or other[1] is None or all(map(torch.equal, one[1], other[1]))


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits: their sum, weighted by position."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(-1).view(_INTEGERS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(1 << 20)):
        weights = torch.arange(1, piece.numel() + 1, device=piece.device) * 2654435761 + number
        total += (piece.to(torch.int64) * weights).sum()
    return total
