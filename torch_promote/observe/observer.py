"""The observer of calls: makes a `Call` record of each call of an op, and passes it to a listener.

`observe_dispatch` shows any `Observer` each call of an op before autocast sees it, and the results of the call: the
calls of its thread, and of the threads in which autograd runs the thread's backward. It sees a composite op, then the
ops that the composite calls; an op that autocast casts, then the casts and the op on the cast arguments. Without an
observer, ops cost nothing more. `CallObserver` is the observer of all tools but `crosscheck`.

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

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch

from torch_promote import _C
from torch_promote.errors import DispatchObserverError
from torch_promote.integrations.compile import skip_frames
from torch_promote.integrations.higher_order_ops import let_operators_fall_through
from torch_promote.observe.call import COMPILED, Call, Cast, Kind, Phase, TensorInfo, Unseen, infos_of, records_of
from torch_promote.observe.ops import (
    NamedTensors,
    OpFacts,
    autograd_may_call,
    base_of,
    bytes_of,
    cast_key,
    device_of,
    facts_of,
    hints,
    is_excluded,
    is_traced,
    is_weight,
    is_wrapped,
    produced,
    read_arguments,
    tensors_in,
)
from torch_promote.observe.places import NodeOrigins, Origin, RunningModules, is_parameter_made, place, shown_line
from torch_promote.observe.policy_sources import PolicySources, my_autocast_is_in_force, state_in_force
from torch_promote.observe.surroundings import CompiledListener, recomputation_stops, report_compiled_call, watch_unseen
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan, has_policy
from torch_promote.regions.autocast import watch_regions
from torch_promote.regions.float8 import why_not


@dataclass(slots=True, eq=False)
class _Tokens:
    """The token of a call that several observers see."""

    open: list[tuple[Any, Any]]  # the observers that have begun the call and not ended it, with their tokens
    blinded: list[int]  # the ids of the observers that do not see what the call calls in turn
    stock_too: bool = False
    see_through: bool = False
    real_results: bool = False


class ListOfThread(threading.local):
    """A list for each thread."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class SeveralObservers:
    """Passes each call on to several observers, to the outermost first, and its end in the other order."""

    # At most one of them may ask for runs under stock autocast.

    def __init__(self, observers: Sequence[Any]) -> None:
        self.observers: tuple[Any, ...] = tuple(observers)
        self._blind = ListOfThread()  # the ids of the observers that do not see the calls that a thread makes now

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> _Tokens | None:
        """The call begins."""
        blind = self._blind.items
        tokens = _Tokens([], [])
        for observer in self.observers:
            if id(observer) in blind:
                continue
            try:
                token = observer.begin(op, args)
            except BaseException:
                tokens.blinded.clear()
                self.failed(tokens)
                raise
            if token is not None:
                tokens.open.append((observer, token))
                tokens.stock_too |= token.stock_too
                tokens.real_results |= getattr(token, "real_results", False)
            if token is not None and token.see_through:
                tokens.see_through = True
            else:
                tokens.blinded.append(id(observer))
        if not tokens.open:
            return None
        blind.extend(tokens.blinded)
        return tokens

    def before_stock(self, tokens: _Tokens) -> list[Any]:
        """The run under stock autocast begins."""
        observer, token = next(one for one in tokens.open if one[1].stock_too)
        return observer.before_stock(token)  # type: ignore[no-any-return]

    def after_stock(self, tokens: _Tokens, results: list[Any], error: str | None) -> None:
        """The run under stock autocast has ended."""
        observer, token = next(one for one in tokens.open if one[1].stock_too)
        observer.after_stock(token, results, error)

    def end(self, tokens: _Tokens, results: list[Any]) -> None:
        """The call has ended."""
        self._see_again(tokens)
        while tokens.open:
            observer, token = tokens.open[-1]
            observer.end(token, results)
            tokens.open.pop()  # of one that raises, `failed` is called, too

    def failed(self, tokens: _Tokens) -> None:
        """The call, or an observer, has raised."""
        self._see_again(tokens)
        while tokens.open:
            observer, token = tokens.open.pop()
            observer.failed(token)

    def _see_again(self, tokens: _Tokens) -> None:
        blind = self._blind.items
        while tokens.blinded:
            blind.remove(tokens.blinded.pop())


_KEY = torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY)


class Token(Protocol):
    """An observer's handle for a call."""

    # With a true attribute `real_results`, `end` gets the results that the caller gets, on which hooks can be put.
    # Otherwise those that are new to Python are copies that share the data.

    stock_too: bool  # whether the call runs under PyTorch's own autocast first, and then as it is
    see_through: bool  # whether the observer sees the ops that the call makes in turn


class Observer(Protocol):
    """The methods are called in the thread of the op. An error that they raise reaches the op's caller."""

    # If tokens ask for a run under stock autocast: `before_stock(token)` returns for each argument None, or the value
    # for that run in its place; `after_stock(token, results, error)` gets the results, or the text of its error.
    # In nested blocks each observer sees the calls; of one class with `innermost_only`, only the innermost.

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Token | None:
        """The call begins. None ignores it and the ops that it calls. A wrapped number is a Python number."""

    def end(self, token: Any, results: list[Any]) -> None:
        """The call has ended, with these results, in the schema's order."""

    def failed(self, token: Any) -> None:
        """The call, or another method of the observer, has raised."""


@contextlib.contextmanager
def observe_dispatch(observer: Observer) -> Iterator[None]:
    """Shows an observer the calls of this thread. The observers of blocks around this one see them, too."""
    _prepare(type(observer))
    # In one generator, since torch.compile does not trace generators: a compiled function may open a block.
    thread, begun = _thread, False
    try:
        if not thread.observers:
            thread.outside = _C.swap_observer(None), torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        thread.observers.append(observer)
        _C.swap_observer(_all_of(thread.outside[0], thread.observers))
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        begun = True
        yield
    finally:
        _end(observer, begun)


def _end(observer: Observer, begun: bool) -> None:
    thread = _thread
    left = [one for one in thread.observers if one is not observer]
    if begun and len(left) == len(thread.observers):
        raise DispatchObserverError(
            "a block of crosscheck, trace or find_nonfinite ended in another thread than the one that entered it, "
            "where it is still open. End it in the thread that entered it. Each thread needs a block of its own."
        )
    _C.swap_observer(_all_of(thread.outside[0], left))
    if not left:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, thread.outside[1])
        thread.outside = (None, False)
    thread.observers = left


@functools.cache
def _prepare(kind: type) -> None:
    """Registers the key, and keeps torch.compile from compiling an observer's methods when an op calls them."""
    try:
        _C.register_dispatch_observer()
    except RuntimeError as error:
        raise DispatchObserverError(
            f"the dispatch key {_C.DISPATCH_OBSERVER_KEY}, which crosscheck and trace need, is taken in this "
            f"process: another library has registered a fallback on it. Run them in a process without that "
            f"library. PyTorch says: {error}"
        ) from error
    let_operators_fall_through(_C.DISPATCH_OBSERVER_KEY)
    names = ("begin", "before_stock", "after_stock", "end", "failed")
    methods = (getattr(one, name, None) for one in (kind, SeveralObservers) for name in names)
    skip_frames(_end, *(method for method in methods if hasattr(method, "__code__")))


def _all_of(outside: Any, observers: list[Any]) -> Any:
    """The observer that shows the calls to those outside of the thread's blocks and to those of the blocks."""
    around = outside.observers if isinstance(outside, SeveralObservers) else [] if outside is None else [outside]
    found: list[Any] = []
    for one in reversed([*around, *observers]):
        if not (getattr(one, "innermost_only", False) and any(type(other) is type(one) for other in found)):
            found.insert(0, one)
    return found[0] if len(found) == 1 else SeveralObservers(found) if found else None


@dataclass
class _Observers(threading.local):
    """The observers of a thread. Blocks of asyncio tasks may end in any order."""

    observers: list[Observer] = field(default_factory=list)
    outside: tuple[Any, bool] = (None, False)  # the observer and the key's state outside of all blocks


_thread = _Observers()


_T = TypeVar("_T")
_PYTHON = torch._C.DispatchKey.Python
#: Excluded inside an op's kernel, and included in the autograd kernel that calls it.
_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView
#: The bound of each cache. A program has few ops and shapes, used repeatedly.
_MOST_CACHED = 10_000
_OF_A_LIBRARY, _PROMOTION = "a kernel on PyTorch's autocast key", "promotion rule "


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has begun; attributes without a comment are those of `Call`, or what these are made from."""

    facts: OpFacts
    args: list[Any]  # in the schema's order
    inputs: tuple[TensorInfo, ...]
    read: list[torch.Tensor]  # these
    arguments: tuple[tuple[str, Any], ...]
    origin: Origin
    phase: Phase
    composite: bool
    see_through: bool  # whether the ops that it calls are observed
    to_autograd: bool  # whether of these, only the calls of its autograd kernel are observed
    wrapped: bool  # whether a torch.func transform wraps its tensors
    first_node: int  # the sequence number of the first autograd node that it may record
    around: OpenCall | None  # the call that it is made in; None if the program makes it
    start: int
    policy: CastPolicy | torch.dtype | None = None
    policy_source: str = ""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    policy_is_known: bool = False  # whether it, or a call around it, has a policy or an answer why it has none
    fallback: str = ""
    mine: Any = None  # what the listener's `begun` has returned
    real_results: bool = False  # whether `end` has to get the caller's results; see `Token`
    stock_too: bool = False


@dataclass(slots=True, eq=False)
class CastingCall(OpenCall):
    """A call whose op autocast calls again, with cast arguments."""

    runs: str = ""  # the overload that autocast calls
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # the arguments by name, to identify the casts
    ran_with: tuple[TensorInfo, ...] | None = None  # the arguments of that call; None until autocast has made it
    cast_args: list[Any] | None = None  # the same as they are
    sizes: dict[str, int] = field(default_factory=dict)  # their bytes by name
    # The number of casts that autocast has asked for and that no argument explains yet, by `cast_key`.
    conversions: dict[tuple[Any, ...], int] = field(default_factory=dict)
    cast_time: int = 0  # so far, in nanoseconds
    # Under a float8 policy, the operands of the product that were seen.
    in_float8: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Part:
    """A call that autocast makes for `outer`: a cast that began at `start`, or the op on the cast arguments (0)."""

    outer: CastingCall
    start: int = 0
    see_through: bool = True
    to_autograd: bool = False
    stock_too: bool = False


#: The token of a call on tensors that a transform wraps.
THROUGH: Part = Part(None)  # type: ignore[arg-type]
CallToken = OpenCall | Part


class _Thread(threading.local):
    """The open calls of a thread, the outermost first; its last casts of activations, which cache="all" would keep."""

    # A cast has its tensor, the tensor's version, the target dtype, and how often the thread's casts had ended before.

    def __init__(self) -> None:
        self.tokens: list[CallToken] = []
        self.activations: deque[tuple[weakref.ref[torch.Tensor], int, torch.dtype, int]] = deque(maxlen=4)


@dataclass(slots=True)
class _StateFacts:
    """What an autocast state says: its devices, and whether it has a policy for an op, by name."""

    state: AutocastState
    devices: tuple[tuple[str, torch.dtype], ...]
    has_policy: dict[str, bool] = field(default_factory=dict)


class CallObserver:
    """Makes `Call` records of the calls that it observes; an `Observer` for `observe_dispatch`."""

    # `begun` and `ended` run in the thread of the call. What `begun` returns is `mine` of the open call. `ended`
    # follows each `begun` that has not raised, with the record and the tensors of its `outputs`; the record is
    # None if only the calls inside count.

    def __init__(
        self,
        modules: RunningModules,
        ended: Callable[[OpenCall, Call | None, list[torch.Tensor]], None],
        begun: Callable[[OpenCall], Any] | None = None,
        only_casting: bool = False,  # whether to skip calls without an autocast policy
        outermost_only: bool = False,  # whether to skip calls that are made in another one
    ) -> None:
        self.sources: PolicySources = PolicySources(modules)
        self.modules = modules
        self.is_done: bool = False  # whether to observe no more calls
        self._ended = ended
        self._begun = begun
        self._only_casting = only_casting
        self._outermost_only = outermost_only
        self._nodes = NodeOrigins(modules)
        self._numbers = TensorNumbers()
        self._thread = _Thread()
        # Caches. The keys are ids of objects that the values keep alive.
        self._facts: dict[int, OpFacts] = {}
        self._states: dict[int, _StateFacts] = {}
        self._plans: dict[tuple[int, int, int], tuple[Any, ...]] = {}
        self._origins: dict[Origin, Origin] = {}
        self._infos: dict[Any, tuple[TensorInfo, ...]] = {}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of an optimizer. A fused one may leave the versions of the weights as they were."""
        parameters = (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)
        self._numbers.forget_uses(parameters)

    #: Called for each call of a compiled function: see `watch_unseen`.
    compiled: CompiledListener | None = None
    #: Whether the calls of optimizers are left out.
    skips_optimizers: bool = False

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> CallToken | None:
        """Called before a call."""
        facts = self._facts.get(id(op))
        if facts is None:
            facts = _store(self._facts, id(op), facts_of(op))
        if self.is_done or facts.is_ignored or is_excluded(_PYTHON):
            return None
        if is_traced():
            if self.compiled is not None:
                report_compiled_call()
            return None
        tokens = self._thread.tokens
        outer = tokens[-1] if tokens else None
        if outer is not None and outer.to_autograd and is_excluded(_BELOW_AUTOGRAD):
            return None
        if outer is not None and self._outermost_only and not isinstance(outer, CastingCall):
            return None
        named, arguments = read_arguments(facts.arguments, args)
        tensors = [tensor for _, tensor in named]
        wrapped = is_wrapped(tensors)
        composite = wrapped or (facts.may_be_composite and facts.is_composite(device_of(tensors)))
        if isinstance(outer, CastingCall) and outer.ran_with is None and outer.wrapped == wrapped:
            part = self._begin_part(outer, facts, args, named, composite)
            if part is not None:
                return part
        state = state_in_force()
        asked = None if state is None else self._ask_state(state)
        has_one = asked is not None and self._has_policy(asked, facts.name)
        if wrapped and not has_one:
            return THROUGH
        if facts.is_detach and (facts.name == "aten::detach_" or is_parameter_made()):
            return None
        around = outer.outer if isinstance(outer, Part) else outer
        where = self._locate(around)
        if where is None:
            return None
        origin, phase, is_compiled = where
        first_node = torch._C._autograd._get_sequence_nr()
        if around is None:
            self._nodes.add_between(first_node, origin)
        inputs = self._share(named)
        plan = self._plan(facts, args, inputs, asked.state) if asked is not None and has_one else None
        to_autograd = not composite and autograd_may_call(facts)
        casting = plan is not None and plan.policy is not None and not plan.left_to_stock
        call: OpenCall = (CastingCall if casting else OpenCall)(
            facts,
            args,
            inputs,
            tensors,
            arguments,
            origin,
            phase,
            composite,
            casting or composite or to_autograd,
            to_autograd and not casting,
            wrapped,
            first_node,
            around,
            time.time_ns(),
        )
        if isinstance(call, CastingCall) and plan is not None:
            call.runs, call.tensors = plan.runs, dict(named)
        call.policy_is_known = around is not None and around.policy_is_known
        if asked is not None:
            call.autocast = asked.devices
        if is_compiled:
            call.policy_source, call.policy_is_known = COMPILED, True
        else:
            self._explain_policy(call, plan, asked)
        tokens.append(call)
        if self._begun is not None:
            try:
                call.mine = self._begun(call)
            except BaseException:  # the dispatcher does not make the call
                self._pop(call)
                raise
        return call

    def _begin_part(
        self, outer: CastingCall, facts: OpFacts, args: list[Any], named: NamedTensors, composite: bool
    ) -> Part | None:
        """Begins a call that autocast makes for another one; None if the call is not one of these."""
        if facts.name == outer.runs:
            ran_with = self._share(named)
            if outer.wrapped and ran_with is outer.inputs:  # the transform, which runs before autocast
                return THROUGH
            outer.sizes = {path: bytes_of(tensor) for path, tensor in named}
            to_autograd = not composite and autograd_may_call(facts)
            part = Part(outer, 0, composite or to_autograd, to_autograd)
            outer.cast_args = args
            outer.ran_with = ran_with  # last, because Ctrl-C may interrupt in between
        elif facts.op_name == "aten::to":
            if named and named[0][1] is args[0]:  # not a number
                if outer.policy in FLOAT8_POLICIES and args[0].dtype is torch.float8_e4m3fn and torch.float32 in args:
                    self._note_float8(outer, args[0])
                    return None
                key = cast_key(args[0], next((arg for arg in args if isinstance(arg, torch.dtype)), None))
                outer.conversions[key] = outer.conversions.get(key, 0) + 1
            part = Part(outer, time.time_ns())
        elif facts.name == "aten::_scaled_mm" and outer.policy in FLOAT8_POLICIES:
            self._note_float8(outer, args[0])
            self._note_float8(outer, args[1])
            return None
        else:
            return None
        self._thread.tokens.append(part)
        return part

    def _note_float8(self, call: CastingCall, operand: torch.Tensor) -> None:
        """Notes an operand of the product that stands for a call of linear: first the input, then the weight."""
        # Each is a cast of the argument. On a CPU, the product begins with their conversions to float32.
        call.in_float8.append(operand)
        if len(call.in_float8) < 2:
            return
        operands = list(zip(("input", "weight"), call.in_float8, strict=True))
        made = sum(number for key, number in call.conversions.items() if key[2] is operand.dtype)
        for name, tensor in operands[:made]:  # the weight, if only one was made, is kept from an earlier call
            call.conversions[cast_key(call.tensors[name], tensor.dtype)] = 1
        call.sizes = {name: bytes_of(tensor) for name, tensor in operands}
        call.ran_with = self._share(operands)

    def _locate(self, around: OpenCall | None) -> tuple[Origin, Phase, bool] | None:
        """The origin and the phase of a call, and whether it is compiled; None if it is left out."""
        if around is not None:
            return around.origin, around.phase, around.policy_source == COMPILED
        found = place()
        if found is None or (self.skips_optimizers and found.phase == "optimizer"):
            return None
        recorded = self._nodes.of_running_node(found.called_backward) if found.phase == "backward" else None
        if recorded is None:
            path = "" if found.module is None else self.modules.path_at(found.module)
            where = Origin(path, found.line)
        else:
            where = Origin(recorded.module, found.line or recorded.line)
        origin = self._origins.get(where)  # there are as many as the program has lines in modules
        if origin is None:
            origin = self._origins[where] = where._replace(line=shown_line(where.line))
        return origin, found.phase, found.is_compiled

    def _explain_policy(self, call: OpenCall, plan: AutocastPlan | None, asked: _StateFacts | None) -> None:
        """Fills in the policy of a call, and its source or why there is none."""
        name = call.facts.name
        if plan is not None and plan.left_to_stock:
            call.policy_source = _OF_A_LIBRARY
        elif plan is not None and plan.policy is not None:
            assert plan.device is not None
            call.policy, call.policy_source = plan.policy, self.sources.of(name, plan.device, call.origin.module)
            if isinstance(call, CastingCall) and plan.policy in FLOAT8_POLICIES:
                why = why_not(call.tensors["input"], call.tensors["weight"], call.tensors.get("bias"))
                call.fallback = why or ""
        elif plan is not None and asked is not None:  # an override that casts nothing
            override = asked.state.override
            device = next((device for device, _ in asked.devices if override(name, device) is not None), None)
            if device is not None and any(info.device.startswith(device) for info in call.inputs):
                call.policy, call.policy_source = (
                    CastPolicy.fallthrough,
                    self.sources.of(name, device, call.origin.module),
                )
        if not call.policy_is_known:
            if call.policy is None and not call.policy_source and _C.depth():
                call.policy_source = self.sources.switched_off(name, call.inputs, call.autocast)
            call.policy_is_known = call.policy is not None or bool(call.policy_source)
        if call.policy is None and not call.policy_source and call.autocast and call.phase == "forward":
            call.policy_source = self.sources.outside_of_regions()
        if call.policy is None and not call.policy_source and call.facts.promotes(info.dtype for info in call.inputs):
            rule = _C.promotion_rule()
            acts = bool(rule) and _C.promotion_in_force() is not None and _C.promotion_acts_on(tensors_in(call.args))
            call.policy_source = f"{_PROMOTION}{rule if acts else 'torch'}"

    def end(self, token: CallToken, results: list[Any]) -> None:
        """Called after a call."""
        self._pop(token)
        if isinstance(token, OpenCall):
            self._close(token, produced(token.facts, token.args, results), False)
        elif token.start:
            token.outer.cast_time += time.time_ns() - token.start

    def failed(self, token: CallToken) -> None:
        """Called when a call raises, or `end` does."""
        if self._pop(token) and isinstance(token, OpenCall):
            self._close(token, [], not recomputation_stops())

    def _pop(self, token: CallToken) -> bool:
        """Removes a token, and those of calls inside it that an error has ended."""
        tokens = self._thread.tokens
        if tokens and tokens[-1] is token:
            tokens.pop()
            return True
        if token not in tokens:
            return False
        del tokens[tokens.index(token) :]
        return True

    def _close(self, call: OpenCall, outputs: NamedTensors, error: bool) -> None:
        self._nodes.add(call.first_node, call.origin)
        casting = call if isinstance(call, CastingCall) and call.ran_with is not None else None
        if (self._only_casting and call.policy is None) or (call.wrapped and casting is None):
            self._ended(call, None, [])
            return
        is_named = error or call.policy_source.startswith(_PROMOTION)
        inputs = self._with_owners(call) if is_named else call.inputs
        self._ended(
            call,
            Call(
                op=call.facts.op_name,
                overload=call.facts.overload,
                module=call.origin.module,
                phase=call.phase,
                line=call.origin.line,
                inputs=inputs,
                ran_with=inputs if casting is None or casting.ran_with is None else casting.ran_with,
                outputs=self._share(outputs),
                casts=() if casting is None or casting.ran_with is call.inputs else tuple(self._casts(casting)),
                policy=call.policy,
                policy_source=call.policy_source,
                composite=call.composite,
                thread=threading.get_native_id(),
                error=error,
                autocast=call.autocast,
                arguments=call.arguments,
                start=call.start,
                duration=time.time_ns() - call.start,
                cast_time=call.cast_time if isinstance(call, CastingCall) else 0,
                own=call.around is None,
                fallback=call.fallback,
            ),
            [tensor for _, tensor in outputs],
        )

    def _casts(self, call: CastingCall) -> Iterator[Cast]:
        after = {info.name: info for info in call.ran_with or ()}
        for before in call.inputs:
            got = after.get(before.name)
            if got is None or got.dtype is before.dtype:
                continue
            tensor = call.tensors[before.name]
            key = cast_key(tensor, got.dtype)
            made = call.conversions.get(key, 0)
            if made:
                call.conversions[key] = made - 1
            number, earlier = self._numbers.count(tensor, got.dtype)
            kind: Kind = "weight" if is_weight(tensor) else "gradient" if call.phase == "backward" else "activation"
            mode = _C.cache_mode() if my_autocast_is_in_force() else "PyTorch's"
            avoidable = self._avoidable(tensor, got.dtype, kind, mode, earlier) if made else ""
            yield Cast(
                argument=before.name,
                from_dtype=before.dtype,
                to_dtype=got.dtype,
                bytes=call.sizes[before.name],
                kind=kind,
                reused=not made,
                tensor=number,
                earlier=earlier,
                cache="" if made else mode,
                avoidable=avoidable,
            )

    def _avoidable(
        self, tensor: torch.Tensor, to: torch.dtype, kind: Kind, mode: str, earlier: int
    ) -> Literal["", "persistent", "all"]:
        """The cache mode in which a cast would have been reused. None keeps casts of activations to a larger dtype."""
        if kind == "weight":
            return "persistent" if earlier and mode != "persistent" and _C.would_keep(tensor, True) else ""
        if kind == "gradient" or mode == "all" or tensor.is_inference() or to.itemsize > tensor.dtype.itemsize:
            return ""
        state = tensor._version, to, _C.casts_ended()
        if any(known() is tensor and tuple(then) == state for known, *then in self._thread.activations):
            return "all" if _C.would_keep(tensor, False) else ""
        self._thread.activations.append((weakref.ref(tensor), *state))
        return ""

    def _share(self, named: NamedTensors) -> tuple[TensorInfo, ...]:
        """The records of tensors. Equal ones are one object, because a program has few different ones."""
        key = infos_of(named)
        try:
            infos = self._infos.get(key)
        except TypeError:  # a symbolic size, which has no hash: it stands for that of the tensor that is traced
            key = tuple(
                (name, dtype, hints(sizes), at, strides and hints(strides)) for name, dtype, sizes, at, strides in key
            )
            infos = self._infos.get(key)
        if infos is None:
            infos = records_of(key)
            _store(self._infos, key, infos)
        return infos

    def _with_owners(self, call: OpenCall) -> tuple[TensorInfo, ...]:
        """The inputs, with the names of the parameters and buffers among them."""
        owners = tuple(map(self.modules.spell_owner, call.read))
        found = self._infos.get((call.inputs, owners)) if any(owners) else call.inputs
        if found is None:
            pairs = zip(call.inputs, owners, strict=True)
            found = _store(self._infos, (call.inputs, owners), tuple(replace(info, owner=one) for info, one in pairs))
        return found

    def _ask_state(self, state: AutocastState) -> _StateFacts:
        found = self._states.get(id(state))
        if found is None:
            devices = tuple((device, one.dtype) for device, one in state.devices.items() if one.enabled)
            found = _store(self._states, id(state), _StateFacts(state, devices))
        return found

    @staticmethod
    def _has_policy(asked: _StateFacts, name: str) -> bool:
        """Whether a device type has a policy for an op, or a library has an autocast kernel for it."""
        found = asked.has_policy.get(name)
        if found is None:
            found = asked.has_policy[name] = any(has_policy(name, device, asked.state) for device, _ in asked.devices)
        return found

    def _plan(
        self, facts: OpFacts, args: list[Any], inputs: tuple[TensorInfo, ...], state: AutocastState
    ) -> AutocastPlan:
        """The reference's plan, without its casts: the rest depends only on the op, the state, and `inputs`."""
        key = id(facts), id(inputs), id(state)
        found = self._plans.get(key)
        if found is None:
            found = _store(self._plans, key, (autocast_plan(facts.op, args, {}, state), facts, inputs, state))
        plan: AutocastPlan = found[0]
        return plan


def _store(cache: dict[Any, Any], key: Any, value: _T) -> _T:
    """Adds to a cache of bounded size, and returns the value."""
    if len(cache) > _MOST_CACHED:
        cache.clear()
    cache[key] = value
    return value


@contextlib.contextmanager
def observe(observer: CallObserver, not_seen: list[Unseen]) -> Iterator[None]:
    """Lets an observer see the calls of a block: those of this thread, and of autograd's threads for its backward."""
    # `not_seen` gets a sentence for each kind of computation in the block that cannot be observed.
    with (
        watch_unseen(not_seen, observer.modules, observer.compiled, observer.sources.open_here),
        watch_regions(observer.sources.entered),
        observe_dispatch(observer),
    ):
        yield


@dataclass(slots=True)
class _Known:
    reference: weakref.ref[torch.Tensor]
    number: int
    version: int
    uses: Counter[Any] = field(default_factory=Counter)  # for this version only


class TensorNumbers:
    """Assigns each tensor a number, shared by its views, and counts the uses of its content. It keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._next = itertools.count(1)

    def count(self, tensor: torch.Tensor, what: torch.dtype) -> tuple[int, int]:
        """Returns the tensor's number, and the number of earlier calls with the same content and `what`."""
        owner = base_of(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        address = id(owner)
        known = self._known.get(address)
        if known is None or known.reference() is not owner:
            reference = weakref.ref(owner, lambda _: self._known.pop(address, None))
            known = self._known[address] = _Known(reference, next(self._next), version)
        if known.version != version:
            known.version, known.uses = version, Counter()
        part: Any = None
        if tensor.layout is torch.strided and not tensor.is_nested:
            part = tensor.storage_offset(), tensor.shape, tensor.stride()
        try:
            before = known.uses.get((what, part), 0)
        except TypeError:  # symbolic sizes have no hash
            part = tensor.dim(), *hints((tensor.storage_offset(), *tensor.shape, *tensor.stride()))
            before = known.uses.get((what, part), 0)
        known.uses[what, part] = before + 1
        return known.number, before

    def forget_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts the uses of tensors anew: their contents have changed, perhaps with no new version."""
        for tensor in tensors:
            known = self._known.get(id(tensor))
            if known is not None and known.reference() is tensor:
                known.uses = Counter()
