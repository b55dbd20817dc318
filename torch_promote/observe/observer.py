"""The observer of a trace: makes a `Call` record for each observed call.

NOTE [ What one call is ]
If autocast has a policy for an op, the dispatcher makes three kinds of calls: the op on the caller's arguments, the
casts, and the op on the cast arguments. They are one `Call` here. Its casts are the arguments whose dtype differs
between the two calls of the op; a cast was reused if none of the casts in between made it. The conversion itself
(aten::_to_copy) is a separate call, because it runs a kernel.

A composite op is a call, and so are the ops that it calls. Calls made by a kernel are not recorded: the program did not
ask for them. Counts equal those of a TorchDispatchMode, which sees calls that pass the dispatch key Python:

- For a call on tensors that a torch.func transform wraps, the calls on the tensors inside count. If autocast casts the
  wrapped tensors, the outer call is a separate composite call.
- Creating a tensor from Python numbers (torch.tensor), for which PyTorch excludes that key, is not recorded. Neither
  are detach_, which computes nothing, printing a tensor, and turning a tensor into a Parameter.
- An in-place op's autograd kernel may copy the tensor before its own kernel runs, and calls the hooks for saved tensors
  (save_on_cpu). The ops that these call are recorded.
- While a mode is active, PyTorch sends the detach of each result that it saves for a backward only to that mode.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torch_promote import _C
from torch_promote.observe.autocast_state import my_autocast_is_in_force, state_in_force
from torch_promote.observe.events import Call, Cast, Phase, TensorInfo, facts_of
from torch_promote.observe.ops import (
    PoliciesOfStates,
    autograd_may_call,
    bytes_of,
    cast_key,
    device_type_of,
    dtype_arguments_of,
    is_composite,
    is_excluded,
    is_of_a_transform,
    is_traced,
    kind_of,
    leaves,
    overload_name,
    promotes,
    tensor_arguments,
)
from torch_promote.observe.places import NodeOrigins, Origin, RunningModules, is_parameter_made, place
from torch_promote.observe.policy_sources import PolicySources
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastState, autocast_plan

__all__ = ["THROUGH", "TensorNumbers", "Tracer"]


# ---Numbers tensors, to recognize repeated casts of a tensor without keeping it alive.


@dataclass(slots=True)
class _Known:
    reference: weakref.ref[torch.Tensor]
    number: int
    version: int
    uses: Counter[Any] = field(default_factory=Counter)  # for this version only


class TensorNumbers:
    """Assigns each tensor a number, shared by its views, and counts the uses of its content."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._last = 0
        self._lock = threading.Lock()

    def count(self, tensor: torch.Tensor, what: torch.dtype) -> tuple[int, int]:
        """Returns the tensor's number, and the number of earlier calls with the same content and `what`."""
        owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        known = self._known.get(id(owner))
        if known is None or known.reference() is not owner:
            known = self._add(owner)
        version = _version(tensor)
        if known.version != version:
            known.version, known.uses = version, Counter()
        content = (what, _place(tensor))
        before = known.uses[content]
        known.uses[content] = before + 1
        return known.number, before

    def _add(self, tensor: torch.Tensor) -> _Known:
        address = id(tensor)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            known = self._known.get(address)
            if known is not None and known.reference is reference:
                del self._known[address]

        with self._lock:
            self._last += 1
            known = self._known[address] = _Known(weakref.ref(tensor, forget), self._last, _version(tensor))
        return known


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.storage_offset(), tensor.shape, tensor.stride()


_IGNORED_NAMESPACES = frozenset({"prim", "profiler"})
_CONVERSIONS = frozenset({"aten::to.dtype", "aten::to.dtype_layout", "aten::to.device", "aten::to.other"})
_PYTHON = torch._C.DispatchKey.Python
#: Excluded inside an op's kernel, and included in the autograd kernel that calls it.
_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView
_MOST_EQUAL = 10_000
_A_LIBRARYS = "a kernel on PyTorch's autocast key"


@dataclass(slots=True, eq=False)
class _Open:
    """A call that has begun: the token of the dispatch observer."""

    op: torch._ops.OpOverload
    args: list[Any]
    see_through: bool
    composite: bool
    origin: Origin
    phase: Phase
    first_node: int
    start: int
    inputs: tuple[TensorInfo, ...] = ()
    policy: CastPolicy | torch.dtype | None = None
    said_by: str = ""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    runs: str | None = None  # the overload that autocast calls with the cast arguments, until it has called it
    ran_with: tuple[TensorInfo, ...] | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # the inputs, until the call has ended
    made: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    bytes: dict[str, int] = field(default_factory=dict)
    cast_time: int = 0
    to_autograd: bool = False  # whether only the calls of its autograd kernel are observed
    wrapped: bool = False
    decided: bool = False  # whether the policy is known for it, or for a call that it is part of
    stock_too: bool = False
    real_results: bool = False
    kept: Any = None  # a subclass's data for the call


@dataclass(slots=True, eq=False)
class _Again:
    """Part of another call: the op with autocast's cast arguments, or a conversion for it."""

    see_through: bool
    outer: _Open
    converts_since: int = 0
    to_autograd: bool = False
    stock_too: bool = False


class _Through:
    """The token of a call on tensors that a torch.func transform wraps."""

    see_through = True
    stock_too = False


THROUGH = _Through()
_Token = TypeVar("_Token", _Open, _Again)


class Tracer:
    """Makes the records of calls and passes them on, in the order in which the calls end.

    Args:
        modules: Tracks which module runs.
        add: Called with each call and the tensors among its results, in the thread of the call.
        only_casting: Whether to skip calls without an autocast policy.
    """

    def __init__(
        self,
        modules: RunningModules,
        add: Callable[[Call, list[torch.Tensor]], None],
        only_casting: bool = False,
    ) -> None:
        self._modules = modules
        self._add = add
        self._only_casting = only_casting
        self._nodes = NodeOrigins(modules)
        self._numbers = TensorNumbers()
        self._policies = PoliciesOfStates()
        self._threads = threading.local()
        self._origins: dict[Origin, Origin] = {}  # as many as the program has lines in modules
        self._equal: dict[Any, tuple[TensorInfo, ...]] = {}
        self.sources = PolicySources(modules)

    def _stack(self) -> list[_Open | _Again]:
        stack: list[_Open | _Again] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> _Open | _Again | _Through | None:
        """Called before a call."""
        if op.namespace in _IGNORED_NAMESPACES or is_excluded(_PYTHON) or is_traced():
            return None
        stack = self._stack()
        outer = stack[-1] if stack else None
        if outer is not None and outer.to_autograd and is_excluded(_BELOW_AUTOGRAD):
            return None
        name = overload_name(op)
        wrapped = is_of_a_transform(args)
        composite = wrapped or is_composite(op, device_type_of(args))
        if isinstance(outer, _Open) and outer.runs is not None and outer.wrapped == wrapped:
            if name == outer.runs:
                ran_with = self._infos(tensor_arguments(op, args))
                if wrapped and ran_with is outer.inputs:  # the transform, which runs before autocast
                    return THROUGH
                outer.bytes = {path: bytes_of(tensor) for path, tensor in tensor_arguments(op, args)}
                outer.ran_with = ran_with  # last, because Ctrl-C may interrupt in between
                outer.runs = None
                to_autograd = not composite and autograd_may_call(op)
                return self._push(_Again(composite or to_autograd, outer, to_autograd=to_autograd))
            if name in _CONVERSIONS:
                tensor, dtype = args[0], next((arg for arg in args if isinstance(arg, torch.dtype)), None)
                if isinstance(tensor, torch.Tensor):  # not a number
                    outer.made[cast_key(tensor, dtype)] += 1
                return self._push(_Again(True, outer, time.time_ns()))
        if wrapped and self._without_autocast(name):
            return THROUGH
        if name == "aten::detach_" or (name == "aten::detach" and is_parameter_made()):
            return None
        call = self._open(op, name, args, composite, outer)
        if call is None:
            return None
        call.wrapped = wrapped
        return self._push(call)

    def _without_autocast(self, name: str) -> bool:
        state = state_in_force()
        return state is None or not self._policies.has_one(name, state)

    def _push(self, token: _Token) -> _Token:
        self._stack().append(token)
        return token

    def _open(
        self, op: torch._ops.OpOverload, name: str, args: list[Any], composite: bool, outer: _Open | _Again | None
    ) -> _Open | None:
        around = outer.outer if isinstance(outer, _Again) else outer
        if around is not None:
            origin, phase = around.origin, around.phase
        else:
            found = place()
            if found is None:
                return None
            phase = found.phase
            recorded = self._nodes.of_running_node(found.called_backward) if phase == "backward" else None
            if recorded is None:
                origin = Origin(self._modules.path_at(found.module), found.line)
            else:
                origin = Origin(recorded.module, recorded.line or found.line)
        origin = self._origins.setdefault(origin, origin)
        first_node = NodeOrigins.next_number()
        if around is None:
            self._nodes.add_between(first_node, origin)
        named = list(tensor_arguments(op, args))
        call = _Open(op, args, composite, composite, origin, phase, first_node, time.time_ns(), self._infos(named))
        if not composite and autograd_may_call(op):
            call.see_through = call.to_autograd = True
        state = state_in_force()
        if state is not None:
            call.autocast = self._policies.devices(state)
            if self._policies.has_one(name, state):
                self._plan(call, name, named, state)
        call.decided = around is not None and around.decided
        if not call.decided and call.policy is None and not call.said_by:
            on = {device for device, _ in call.autocast}
            call.said_by = self.sources.switched_off(name, {info.device for info in call.inputs}, on)
        call.decided = call.decided or call.policy is not None or bool(call.said_by)
        if call.policy is None and not call.said_by and promotes(name, call.inputs):
            call.said_by = f"promotion rule {_C.promotion_rule() or 'torch'}"
        return call

    def _plan(self, call: _Open, name: str, named: list[tuple[str, torch.Tensor]], state: AutocastState) -> None:
        plan = autocast_plan(call.op, call.args, {}, state)
        call.policy = plan.policy
        if plan.left_to_stock:
            call.said_by = _A_LIBRARYS
        elif plan.policy is not None:
            assert plan.device is not None
            call.said_by = self.sources.of(name, plan.device, call.origin.module)
            call.see_through, call.to_autograd = True, False
            call.runs = plan.runs
            call.tensors = dict(named)
        else:  # an override that casts nothing
            device = next((device for device, _ in call.autocast if state.override(name, device) is not None), None)
            if device is not None and any(info.device.startswith(device) for info in call.inputs):
                call.policy, call.said_by = CastPolicy.fallthrough, self.sources.of(name, device, call.origin.module)

    def end(self, token: _Open | _Again | _Through, results: list[Any]) -> None:
        """Called after a call."""
        if isinstance(token, _Through):
            return
        self._pop(token)
        if isinstance(token, _Open):
            tensors = [tensor for tensor in leaves(results) if tensor is not None]
            self._close(token, tensors, False)
        elif token.converts_since:
            token.outer.cast_time += time.time_ns() - token.converts_since

    def failed(self, token: _Open | _Again | _Through) -> None:
        """Called when a call raises, or `end` does."""
        if isinstance(token, _Through):
            return
        if self._pop(token) and isinstance(token, _Open):
            self._close(token, [], True)

    def _pop(self, token: _Open | _Again) -> bool:
        stack = self._stack()
        if token not in stack:
            return False
        del stack[stack.index(token) :]
        return True

    def _close(self, call: _Open, tensors: list[torch.Tensor], error: bool) -> None:
        self._nodes.add(call.first_node, call.origin)
        if (self._only_casting and call.policy is None) or (call.wrapped and call.ran_with is None):
            return
        schema = call.op._schema
        ran_with = call.inputs if call.ran_with is None else call.ran_with
        self._add(
            Call(
                op=schema.name,
                overload=schema.overload_name,
                module=call.origin.module,
                phase=call.phase,
                line=call.origin.line,
                inputs=call.inputs,
                ran_with=ran_with,
                outputs=self._infos((str(i), tensor) for i, tensor in enumerate(tensors)),
                casts=tuple(self._casts(call)),
                policy=call.policy,
                said_by=call.said_by,
                composite=call.composite,
                thread=threading.get_native_id(),
                error=error,
                autocast=call.autocast,
                dtype_arguments=dtype_arguments_of(call.op, call.args),
                start=call.start,
                duration=time.time_ns() - call.start,
                cast_time=call.cast_time,
            ),
            tensors,
        )

    def _infos(self, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorInfo, ...]:
        # Share equal objects: a program has few different ones, used repeatedly.
        facts = tuple((path, *facts_of(tensor)) for path, tensor in named)
        infos = self._equal.get(facts)
        if infos is None:
            if len(self._equal) > _MOST_EQUAL:
                self._equal.clear()
            infos = tuple(
                TensorInfo(path, dtype, shape, str(device), strides) for path, dtype, shape, device, strides in facts
            )
            self._equal[facts] = infos
        return infos

    def _casts(self, call: _Open) -> Iterator[Cast]:
        if call.ran_with is None or call.ran_with is call.inputs:
            return
        after = {info.name: info for info in call.ran_with}
        for before in call.inputs:
            got = after.get(before.name)
            if got is None or got.dtype is before.dtype:
                continue
            tensor = call.tensors[before.name]
            key = cast_key(tensor, got.dtype)
            reused = call.made[key] == 0
            call.made[key] -= not reused
            number, earlier = self._numbers.count(tensor, got.dtype)
            size = call.bytes[before.name]
            kind = kind_of(tensor, call.phase)
            cache = "" if not reused else _C.cache_mode() if my_autocast_is_in_force() else "PyTorch's"
            yield Cast(before.name, before.dtype, got.dtype, size, kind, reused, number, earlier, cache)
