"""The listener of `find_nonfinite`: checks the outputs of calls, and diagnoses the first that is not finite.

NOTE [ Which call is the origin ]
A call is checked when it ends: its results, and the arguments that it wrote to. Its other arguments are inspected only
if an output is not finite. Arguments that the op writes to are inspected before it runs, and copied if the verdict may
need their old values: to repeat a call with float16 or bfloat16 tensors in float32, and to see which elements an op has
written that may write to a part of a buffer, such as a cache made by `torch.empty`.

The ops inside of a composite op are checked first. Their verdict counts only if the result of the op that the program
called is not finite either, because a composite op may use infinite values internally.

NOTE [ Which non-finite results are benign ]
A call that makes an infinite value is not at fault if the program passed an infinite number (`masked_fill(mask, -inf)`,
`full((), -inf)`), or if an argument contains an infinite value, which the call passes on. A cast is not at fault if it
makes the lowest number of a dtype infinite, because that number stands for -inf in masks. A call that turns infinite
values into a NaN is at fault, and so is one that makes more values infinite in float16 or bfloat16 than in float32.

If GradScaler has scaled the loss and a call of the backward overflows, the call is repeated in a wider dtype. If its
result fits after division by the scale, only the scaled gradients overflow. Until GradScaler updates its scale, NaNs
that result from those infinite gradients are benign as well, and so is later what comes from them alone: a backward may
add to gradients of a skipped step that the program then clears. If they get into a parameter, an optimizer has stepped
with them although GradScaler has skipped the step, or would have. If they get into a loss, as those of a gradient
penalty do, the program has to divide them by the scale first; if it did, GradScaler skips the step. If GradScaler reads
them again after a backward has added to them, nothing has cleared them, and it skips that step whatever the scale.

A call that is not finite in float32 either may lack a number that another call lost: see NOTE [ Which call lost a
number ] in recent_calls.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad

from torch_promote.numerics.mathematics import explain
from torch_promote.numerics.nonfinite import (
    WHY,
    BenignKind,
    NonfiniteKind,
    NonfiniteOrigin,
    OptimizerSteps,
    ScalerSteps,
    Vanished,
    tell_line,
    tell_where,
)
from torch_promote.numerics.recent_calls import CLAMP_MASKS, SUMS, WITHOUT_REGION, RecentCalls, tell_constants
from torch_promote.numerics.step_state import repeat
from torch_promote.observe.call import Call
from torch_promote.observe.observer import CallObserver, CastingCall, OpenCall
from torch_promote.observe.ops import (
    OpFacts,
    asks_for_infinity,
    can_be_read,
    tensor_arguments,
    unnoticed,
    written,
)
from torch_promote.observe.places import RunningModules
from torch_promote.recording.program_state import ScaledGradients, is_called_by, loss_of, scales_loss, storage_of
from torch_promote.recording.values import FINITE, Extremes, TensorRange, extremes, is_finite
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name


class Propagation:
    """Follows the values of an origin through the tensors that contain them."""

    # T5 casts log(0) to an integer that is not used; the backward of a norm, and programs, replace 1 / 0 by 0. So
    # values are benign if each tensor that contains some was passed on, cast to integers or replaced, and the last
    # ones were cast or replaced. A NaN that the program writes may be a marker: a selection or nanmean leaves it out.

    def __init__(self, origin: Iterable[torch.Tensor], in_backward: bool, is_marker: bool) -> None:
        self.in_backward: bool = in_backward
        self.is_marker: bool = is_marker
        self.is_replaced: bool = False
        self.reader: Call | None = None  # the first call whose results have such values, too
        self._known: dict[int, StorageWeakRef] = {}  # keeps the addresses from being used again
        self._unread: set[int] = set()
        self._add(origin)

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for reference in map(storage_of, tensors):
            self._unread.add(_LOST if reference is None else reference.cdata)
            if reference is not None:
                self._known[reference.cdata] = reference

    def read(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor] = ()) -> bool:
        """Called when a call passes on, casts or replaces what it reads. Returns whether an input has such values."""
        references = [reference for reference in map(storage_of, inputs) if reference is not None]
        read = {reference.cdata for reference in references} & self._known.keys()
        self._unread -= read
        if read:
            self._add(outputs)
        return bool(read)

    def overwrite(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called when a call has written to tensors: their memory may have no such values any more."""
        for tensor in tensors:
            reference = storage_of(tensor)
            if reference is not None and reference.cdata in self._unread & self._known.keys():
                with unnoticed(), contextlib.suppress(RuntimeError):  # as in `extremes`
                    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                    if is_finite(extremes([whole])[0]):
                        self._unread.discard(reference.cdata)
                        self.is_replaced = True

    def knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these tensors contains such values."""
        return any(one is not None and one.cdata in self._known for one in map(storage_of, tensors))

    @property
    def is_marking(self) -> bool:
        """Whether a tensor that is alive may contain NaNs that the program wrote."""
        return self.is_marker and not all(one.expired() for one in self._known.values())

    @property
    def ended_well(self) -> bool:
        """Whether the values were only converted to integers, or replaced."""
        return not self._unread


class Sources:
    """The benign calls that the non-finite values of tensors come from."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, NonfiniteOrigin, Call | None]] = {}
        self._most = 1000

    def add(self, tensors: Iterable[torch.Tensor], source: NonfiniteOrigin, reader: Call | None = None) -> None:
        """Adds tensors with such values, and the call that passed them on."""
        self._known |= {one.cdata: (one, source, reader) for one in map(storage_of, tensors) if one is not None}
        if len(self._known) > self._most:
            self._known = {key: one for key, one in list(self._known.items()) if not one[0].expired()}
            self._most = 1000 + 2 * len(self._known)

    def of(self, tensors: Iterable[torch.Tensor]) -> NonfiniteOrigin | None:
        """Returns the call that the values of the first tensor come from of which it is known."""
        known = (self._known.get(one.cdata) for one in map(storage_of, tensors) if one is not None)
        return next((one[1] for one in known if one is not None), None)

    def reader_of(self, tensor: torch.Tensor) -> Call | None:
        """Returns the call that passed such values on to a tensor."""
        found = None if (storage := storage_of(tensor)) is None else self._known.get(storage.cdata)
        return None if found is None else found[2]


#: Stands for the storage of a tensor that cannot be followed, such as a sparse one.
_LOST = 0


@dataclass
class FinderState:
    """What a finder knows so far."""

    benign: dict[tuple[str, ...], NonfiniteOrigin] = field(default_factory=dict)  # by place
    checked: int = 0  # the number of checked calls
    steps: int = 0  # the number of optimizer steps so far, also those that GradScaler skipped
    # The ops that the forward called in a region, by module and line: a call by name, and the call that made its input.
    forward_ops: dict[tuple[str, str], dict[str, tuple[Call, Call | None]]] = field(default_factory=dict)
    # Gradients that a lower dtype made 0, by place; and the step with the most parameters whose gradient is 0: its
    # number, these parameters, and all with a gradient.
    vanished: dict[tuple[str, ...], Vanished] = field(default_factory=dict)
    zero_gradients: tuple[int, int, int] | None = None
    # The last step in which the gradient of a parameter was not 0, or -1; the last one in which it had one; and the
    # number of parameters of which both are so.
    last_gradients: list[tuple[int, int, int]] = field(default_factory=list)
    scaler: ScalerSteps = field(default_factory=ScalerSteps)
    # In the last step that GradScaler skipped, the first call whose result is not finite because of the scale.
    scaled: NonfiniteOrigin | None = None
    clipped: Call | None = None  # the first call that clips gradients, or takes their norm to, while they are scaled
    undivided: Call | None = None  # the first call of a forward that computes with gradients while they are scaled
    # The first call that divides gradients by the scale which no scale has multiplied; their number, that of all, and
    # the scale.
    unmultiplied: tuple[Call, int, int, float] | None = None
    # Of the first gradients of a skipped step which a backward has added to, and GradScaler then read again: the step,
    # and the line of the backward.
    uncleared: tuple[int, str] | None = None
    # The first step of an optimizer with gradients that are scaled: its class, the line and the scale.
    stepped_scaled: tuple[str, str, float] | None = None
    rescaled: str = ""  # the first step that GradScaler made with gradients of a scaled loss, as a sentence
    nan_buffers: list[str] = field(default_factory=list)  # buffers with a NaN at the end, such as running statistics


# --- verdicts on calls

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_EXPONENTIALS = ("aten::exp", "aten::exp2", "aten::expm1", "aten::exp_", "aten::exp2_", "aten::expm1_")
#: Ops that put other numbers in place of some.
_REPLACING = {
    f"aten::{name}{end}"
    for name in (
        *("masked_fill", "where", "nan_to_num", "index_put", "masked_scatter", "threshold_backward"),
        *("clamp", "clamp_min", "clamp_max", "minimum", "maximum"),
    )
    for end in ("", "_")
}
#: What clip_grad_norm_ and clip_grad_value_ call first.
_CLIPPING = ("aten::_foreach_norm", "aten::linalg_vector_norm", "aten::_foreach_clamp_min_", "aten::clamp_")
_MOST_BENIGN = 1000
#: So many calls of a place of a backward are repeated in float32 to see whether their zeros are zeros there, too; the
#: share of such zeros from which they are named.
_MOST_LOOKS, _SHARE_OF_ZEROS = 3, 0.05


@dataclass(eq=False)
class WatchedCall:
    """A running call, with the facts that a verdict may need. Those from `call` on are known when it has ended."""

    facts: OpFacts
    args: list[Any]  # in the schema's order
    kept: list[Any] | None = None  # the same as `RecentCalls.keep` returned them, for a call that the program made
    before: dict[int, Extremes] = field(default_factory=dict)  # the extremes of arguments that the op writes to, by id
    # Of those whose old values the verdict may need, by id.
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    ignores_old: bool = False  # whether the outputs are known to be not finite whatever was in these arguments
    cast_args: list[Any] | None = None  # the arguments after autocast's casts; None without casts
    scales: bool = False  # whether it is GradScaler's multiplication
    has_inner: bool = False  # whether the op has called others
    inner_nonfinite: bool = False  # whether one of those has returned a value that is not finite
    verdict: Verdict | None = None  # on these
    call: Call = None  # type: ignore[assignment]
    results: list[torch.Tensor] = field(default_factory=list)  # the tensors of its outputs
    # Their extremes; finite ones if the call has left the non-finite values in memory as they were.
    outputs: list[Extremes] = field(default_factory=list)

    @functools.cached_property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors among the arguments, by name."""
        return list(tensor_arguments(self.facts.op, self.args))

    @property
    def nonfinite(self) -> list[torch.Tensor]:
        """The outputs that are not finite."""
        return [tensor for tensor, found in zip(self.results, self.outputs, strict=True) if not is_finite(found)]

    @property
    def nonfinite_inputs(self) -> list[torch.Tensor]:
        """The arguments that were not finite before the call."""
        return [tensor for (_, tensor), found in zip(self.tensors, self.inputs, strict=True) if not is_finite(found)]

    @functools.cached_property
    def inputs(self) -> list[Extremes]:
        """The extremes of `tensors` before the call; finite ones for memory that the op overwrites."""
        outs = set(map(id, self.outs.values()))
        fresh = [tensor for _, tensor in self.tensors if id(tensor) not in self.before and id(tensor) not in outs]
        before = {} if self.facts.overwrites else self.before
        found = dict(zip(map(id, fresh), extremes(fresh), strict=True)) | before
        return [found.get(id(tensor), FINITE) for _, tensor in self.tensors]

    @property
    def outs(self) -> dict[str, torch.Tensor]:
        """The arguments for `out=`, by name."""
        return dict(written([one for one in self.facts.writes if one.is_out], self.args))

    @property
    def is_partial(self) -> bool:
        """Whether the op may write to a part of an argument that contained values that are not finite."""
        return self.facts.writes_part and not all(map(is_finite, self.before.values()))

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether all non-finite values of an output were there before the call, outside of the part that it wrote."""
        before = self.copies.get(id(tensor))
        if before is None or not self.is_partial or before.shape != tensor.shape:
            return False
        with unnoticed(), contextlib.suppress(RuntimeError):  # as in `extremes`
            same, finite = (tensor == before) | (tensor.isnan() & before.isnan()), tensor.isfinite()
            return bool(finite.any() and (same | finite).all())
        return False

    def is_cured_by(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether results of a repetition are finite; if inputs are infinite, whether they have no NaN."""
        found = extremes(results)
        if all(map(is_finite, found)):
            return True
        makes_nan = any(math.isnan(low) for low, _ in self.outputs)
        return makes_nan and not all(map(is_finite, self.inputs)) and not any(math.isnan(low) for low, _ in found)

    def depends_on_old(self) -> bool:
        """Whether the outputs are finite if arguments that the op writes to contain zeros before, not inf or NaN."""
        self.ignores_old = True
        alone = self.again(None)
        if alone is not None and not all(map(is_finite, extremes(alone))):
            pairs = zip(self.tensors, self.inputs, strict=True)
            self.inputs = [FINITE if id(tensor) in self.before else found for (_, tensor), found in pairs]
            return False
        self.ignores_old = False
        return alone is not None

    def again(self, dtype: torch.dtype | None) -> list[torch.Tensor] | None:
        """Repeats the call on copies in a dtype, without autocast; None if it fails, or communicates."""
        if self.facts.communicates:
            return None
        try:
            with unnoticed():
                return repeat(self.facts.op, self.args, lambda _, value: self._convert(value, dtype))
        except Exception:  # an op may refuse the dtype, or the changed arguments
            return None

    # Not a function inside of `again`: one that calls itself is in a cycle, which would keep the arguments alive, and
    # autograd adds to a gradient in place only if nobody else refers to it.
    def _convert(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = self.copies.get(id(value), value)
            if self.ignores_old and not is_finite(self.before.get(id(value), FINITE)):
                tensor = torch.zeros_like(tensor)
            if dtype is None:
                return tensor.clone()
            if tensor.is_floating_point():
                return tensor.to(dtype, copy=True)
            return tensor.to(_COMPLEX[dtype], copy=True) if tensor.is_complex() else tensor.clone()
        if isinstance(value, torch.dtype):
            return dtype if dtype is not None and value in (*LOWER_DTYPES, torch.float32) else value
        return [self._convert(one, dtype) for one in value] if isinstance(value, list | tuple) else value


@dataclass(slots=True)
class Verdict:
    """The kind of fault, the op at fault, and for a cast the argument."""

    kind: NonfiniteKind
    inner: str
    argument: str = ""
    text: tuple[str, ...] = ()


def _is_lowest(value: float, dtype: torch.dtype) -> bool:
    """Whether a value is the lowest of its dtype, or close to it for a dtype with a wide range."""
    if not dtype.is_floating_point:
        return False
    lowest = torch.finfo(dtype).min
    return value <= (lowest if dtype is torch.float16 else lowest / 2)


def _count_infinite(tensors: Sequence[torch.Tensor]) -> int:
    with unnoticed():
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        wide = (tensor if tensor.dtype.itemsize > 1 else tensor.float() for tensor in floating)  # float8 lacks isinf
        return sum(int(torch.isinf(tensor).sum()) for tensor in wide)


# --- the observer

#: So many origins are kept whose values may have been replaced, and so many whose values are still there.
_MOST_PROVISIONAL, _MOST_LEFT = 400, 20
_IN_FUNCTION = (
    "It is in the backward of the autograd.Function {name}, where no region is open and no override acts: with "
    'torch.amp.custom_fwd(device_type="...", cast_inputs=torch.float32) on its forward and torch.amp.custom_bwd on its '
    "backward, both get float32."
)
_BACKWARD_WITHOUT_REGION = (
    "No region was open, so the backward computes in the dtype of the forward: to compute it in float32, convert the "
    "arguments of the op there with .float()."
)
_TOO_LARGE = "What its result goes to has to be float32, too: it is too large for {dtype}."
_PASSES_NAN = "The program itself passes NaN."
_MORE_INFINITE = (
    "Arguments have infinite values. {count:,} more values of the result are infinite in {dtype}, and not if the call "
    "is repeated in float32."
)
_OFTEN = f"Such a call has made inf or NaN {_MOST_LOOKS} times before: the calls before it were not repeated again."


class NonfiniteFinder:
    """Looks for the first call with finite inputs and a non-finite output."""

    # `found` is called with the origin in the thread of the call, and whether a backward can no longer replace the
    # values; later with None, if it proves benign. An error that it raises reaches the caller of the call.

    def __init__(
        self,
        modules: RunningModules,
        found: Callable[[NonfiniteOrigin | None, bool], None],
        is_allowed: Callable[[Call], bool],
    ) -> None:
        self.observer: CallObserver = CallObserver(modules, self.ended, self.begun)
        self._modules = modules
        self._found = found
        self._is_allowed = is_allowed
        self._lock = threading.RLock()
        self.seen: FinderState = FinderState()
        self._scaled = ScaledGradients()
        self._nan_is_known = False
        self._recent = RecentCalls()
        self._sources = Sources()
        self._looks: Counter[tuple[str, ...]] = Counter()  # how often calls were repeated, by place
        self._gradients: dict[int, tuple[int, int]] = {}  # see `FinderState.last_gradients`, by the id of the parameter
        self._steps_before = 0  # at GradScaler's last update
        self._scaled_in = -1  # the update of the scale before which `seen.scaled` was found
        # The optimizers whose gradients GradScaler has divided, by reference; and those since its last update, with
        # whether one was not finite.
        self._optimizers: dict[weakref.ref[torch.optim.Optimizer], OptimizerSteps] = {}
        self._unscaled: dict[weakref.ref[torch.optim.Optimizer], bool] = {}
        # Origins of values that the program may still convert to integers, or replace; the benign ones are among them.
        self._provisional: list[tuple[NonfiniteOrigin, Propagation]] = []
        self._first: NonfiniteOrigin | None = None  # of those whose values are still there, the first

    def begun(self, of: OpenCall) -> WatchedCall | None:
        """Called before a call."""
        if of.wrapped:  # cannot be read; the calls on the tensors inside follow
            return None
        watched, args, name = WatchedCall(of.facts, of.args), of.args, of.facts.name
        if of.facts.writes:
            self._look_before(watched, of)
        tensors = [tensor for _, tensor in watched.tensors]
        around = self._parent(of)
        is_cast = of.facts.is_copy and isinstance(around, CastingCall)  # autograd may save what it returns
        if (around is None or is_cast) and (of.autocast or self._recent.concerns(tensors, args)):
            watched.kept = self._recent.keep(args, watched.copies, of.phase)
        if scales_loss(of):
            watched.scales = True
            source = self._sources.of(args[:1])
            is_overflow = source is not None and source.kind == "GradScaler" and source.scale is None
            self._scaled.begin(extremes([args[1]])[0][1], is_overflow)
        elif name == "aten::_amp_update_scale_":
            (_, scale), (_, found_inf) = extremes([args[0], args[2]])
            if found_inf and self._scaled_in != self.seen.scaler.count:
                self.seen.scaled = None
            self.seen.scaler.add(scale, found_inf > 0, *args[4:])
            for reference, is_skipped in self._unscaled.items():
                self._optimizers[reference].count += 1
                self._optimizers[reference].skipped += is_skipped
            self._unscaled.clear()
            if found_inf and self.seen.steps == self._steps_before:  # the scaler has skipped the optimizer's
                self.seen.steps += 1
            self._steps_before = self.seen.steps
            self._scaled.update()
        return watched

    def _look_before(self, watched: WatchedCall, of: OpenCall) -> None:
        tensors = [tensor for _, tensor in written([one for one in of.facts.writes if not one.is_out], of.args)]
        watched.before = dict(zip(map(id, tensors), extremes(tensors), strict=True))
        repeats = isinstance(of, CastingCall) or any(tensor.dtype in LOWER_DTYPES for _, tensor in watched.tensors)
        repeats |= watched.is_partial or (self._scaled.scale is not None and of.phase == "backward")
        with unnoticed():
            # Copying a tensor without data fails or (for fake tensors) crashes, and no verdict needs it.
            watched.copies = {
                id(tensor): tensor.clone()
                for tensor in tensors
                if (repeats or not is_finite(watched.before[id(tensor)])) and can_be_read(tensor)
            }

    @staticmethod
    def _parent(of: OpenCall) -> OpenCall | None:
        """The watched call that a call is made in."""
        around = of.around
        while around is not None and around.mine is None:
            around = around.around
        return around

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call."""
        watched, around = of.mine, self._parent(of)
        if self.observer.is_done or watched is None or call is None or call.error:
            return
        if call.phase == "recompute" and not call.outputs:  # a checkpoint stopped it, so it has no results
            return
        parent: WatchedCall | None = None if around is None else around.mine
        if parent is not None and isinstance(around, CastingCall) and around.runs == around.facts.name:
            parent.cast_args = around.cast_args
        if isinstance(of, CastingCall):
            watched.has_inner |= of.cast_args is not None
            watched.cast_args = of.cast_args if of.runs == of.facts.name else None
        watched.call, watched.results = call, results
        if self._first is not None and self._is_final(watched, call):
            self.observer.is_done = True
            self._recent.clear()
            self._found(self._first, True)
            return
        if parent is not None:
            parent.has_inner = True
        elif call.autocast and call.phase != "backward":
            known = self.seen.forward_ops.setdefault((call.module, call.line), {})
            if call.name not in known:
                known[call.name] = call, self._recent.maker_of(watched.kept or ())
        self._check(watched, parent)
        if self._first is None and not self.observer.is_done and parent is None:
            self._check_loss(loss_of(call, of.args))
        if self.observer.is_done:
            self._recent.clear()
        elif watched.kept is not None and watched.facts.has_results:
            self._recent.add(watched.facts, watched.kept, call, results)
        scaled = self._scaled
        scaled.follow(of, call, results, watched.scales)
        if call.phase == "backward" and watched.facts.writes:
            scaled.add_to_refused(results, watched.before)
        if watched.facts.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            (_, found_inf), (_, inverse) = extremes(watched.args[1:3])
            count = scaled.without_scale(watched.args[0])
            if count and inverse not in (0, 1) and self.seen.unmultiplied is None:
                self.seen.unmultiplied = call, count, len(watched.args[0]), 1 / inverse
            self._note_optimizer(call, found_inf > 0)
            uncleared = scaled.unscale(watched.args[0], found_inf > 0, self.seen.scaler.count)
            self.seen.uncleared = self.seen.uncleared or uncleared
        elif scaled.are_sized(watched.facts, watched.args, results) or (
            watched.facts.op_name in _CLIPPING
            and scaled.have_scale(tensor for _, tensor in watched.tensors)
            and is_called_by(clip_grad)
        ):
            self.seen.clipped = self.seen.clipped or call
        elif self.seen.undivided is None and not scaled.are_unscaled and self._computes_with_scaled(watched, call):
            self.seen.undivided = call

    def _note_optimizer(self, call: Call, found_inf: bool) -> None:
        """GradScaler divides gradients of an optimizer."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not torch.amp.GradScaler._unscale_grads_.__code__:
            frame = frame.f_back
        if frame is None:  # the program's own scaler
            return
        optimizer = frame.f_locals["optimizer"]
        reference = weakref.ref(optimizer)
        if reference not in self._optimizers:
            self._optimizers[reference] = OptimizerSteps(type(optimizer).__name__, call.line)
            self.seen.scaler.optimizers.append(self._optimizers[reference])
        self._unscaled[reference] = self._unscaled.get(reference, False) or found_inf

    def _check_loss(self, loss: torch.Tensor | None) -> None:
        """Reports the infinite numbers of a mask that a loss contains: nothing has replaced or left them out."""
        source = None if loss is None else self._sources.of([loss])
        if loss is None or source is None or source.kind != "mask" or is_finite(extremes([loss])[0]):
            return
        reader = self._sources.reader_of(loss) or source.call
        if self._is_allowed(source.call) or self._is_allowed(reader):
            return
        text = (
            f"It passes an infinite number on that the program asked for, {tell_where(source.call)}; the loss is not "
            "finite for it. Leave out of the loss what the mask leaves out, or mask with a finite number.",
        )
        outputs = (TensorRange.of("0", loss),)
        origin = NonfiniteOrigin(reader, "mathematics", reader.name, (), outputs, text=text, step=self.seen.steps)
        self.observer.is_done = True
        self._found(origin, True)

    def _computes_with_scaled(self, watched: WatchedCall, call: Call) -> bool:
        """Whether a call of the forward reads gradients of a loss that GradScaler has scaled, and does not divide."""
        facts = watched.facts
        passes = facts.keeps_elements or facts.is_copy or not facts.has_results or watched.scales
        return (
            call.phase == "forward"
            and watched.kept is not None
            and not passes
            and self._recent.reads_scaled_gradient(watched.kept, self._scaled.scale or 0.0)
            and not self._scaled.divides(watched.call, watched.args)
        )

    def _check(self, watched: WatchedCall, parent: WatchedCall | None) -> None:
        call, results = watched.call, watched.results
        if call.composite and watched.has_inner and not watched.inner_nonfinite:
            return
        if not watched.has_inner and watched.facts.shares:
            return
        unwritten = watched.facts.unwritten
        self.seen.checked += 1
        watched.outputs = extremes(results)
        for i, tensor in enumerate(results):
            if not is_finite(watched.outputs[i]) and (i in unwritten or watched.keeps(tensor)):
                watched.outputs[i] = FINITE
        if all(map(is_finite, watched.outputs)):
            if call.phase == "backward" and not call.composite:
                self._look_for_zeros(watched)
            # The backward of nan_to_num compares its input; a program that does so may look for the values.
            casts = call.op == "aten::_to_copy" or call.phase == "backward"
            has_numbers = bool(results) and (results[0].is_floating_point() or results[0].is_complex())
            casts = casts and bool(results) and not has_numbers
            drops = has_numbers and not call.op.endswith("_like")  # of which only the shape counts
            for _, spread in self._provisional:
                if casts or call.op in _REPLACING:
                    spread.is_replaced |= spread.read(tensor for _, tensor in watched.tensors) and not casts
                elif spread.is_marker and drops and spread.knows(tensor for _, tensor in watched.tensors):
                    spread.read(watched.nonfinite_inputs)
                if watched.facts.writes:
                    spread.overwrite(watched.results)
            if self._provisional:
                self._settle()
            return
        if parent is not None:
            parent.inner_nonfinite = True
        verdict = watched.verdict
        if verdict is None and watched.inner_nonfinite and call.composite:
            verdict = self._earlier_cast(watched)  # the ops inside have been judged
        elif verdict is None:
            verdict = self._judge(watched)
        if verdict is None:
            for _, spread in self._provisional if not call.composite else ():
                if spread.read([tensor for _, tensor in watched.tensors], watched.nonfinite):
                    spread.reader = spread.reader or call
            if not call.composite and (source := self._source(watched)) is not None:
                is_divided = source.kind == "GradScaler" and self._scaled.divides(watched.call, watched.args)
                self._sources.add(watched.nonfinite, replace(source, scale=None) if is_divided else source, call)
            self._settle()
        elif self._is_allowed(call):
            self._nan_is_known = True
            self._add_benign("allowed", call, watched.nonfinite)
        elif parent is not None:
            parent.verdict = parent.verdict or _in_terms_of(parent, watched, verdict)
        else:
            self._report(watched, verdict)

    def _source(self, watched: WatchedCall) -> NonfiniteOrigin | None:
        """The benign call that the non-finite values of the arguments come from, if it is known."""
        return self._sources.of(watched.nonfinite_inputs)

    def _origin(self, watched: WatchedCall, verdict: Verdict) -> NonfiniteOrigin:
        call, text, step = watched.call, verdict.text, self.seen.steps
        if verdict.kind == "scaled gradient" and (source := self._source(watched)) is not None:
            text = (
                f"Only GradScaler's scale makes it infinite: {source.scaled:.4g} with the scale {source.scale:g}, "
                f"{source.unscaled:.4g} without.",
                f"Its values went into the loss that GradScaler scaled next, {tell_line(call)}.",
                WHY[verdict.kind],
            )
            return NonfiniteOrigin(source.call, verdict.kind, source.op, text=text, step=step)
        node = torch._C._current_autograd_node() if call.phase == "backward" else None
        name = "" if node is None else node.name()
        if text and verdict.kind != "mathematics" and not call.autocast:
            function = getattr(node, "_forward_cls", None)
            if function is not None:
                text = (*text, _IN_FUNCTION.format(name=function.__name__))
            elif call.phase == "forward":
                text = (*text, WITHOUT_REGION)
            elif call.phase == "backward" and not self.seen.forward_ops:
                text = (*text, _BACKWARD_WITHOUT_REGION)
            if verdict.kind == "overflow in the op" and text[-1] in (WITHOUT_REGION, _BACKWARD_WITHOUT_REGION):
                text = (*text, _TOO_LARGE.format(dtype=dtype_name(_lower_dtype(watched))))
        if verdict.kind == "overflow in a cast" and not text:
            text = self._tell_cast(watched, verdict, name)
        if verdict.kind == "mathematics" and not text:
            here = "origin", call.name, call.module, call.line
            self._looks[here] += 1
            found = self._find_loss(watched) if self._looks[here] <= _MOST_LOOKS else (_OFTEN,)
            if isinstance(found, NonfiniteOrigin):
                return replace(found, nonfinite=None if found.call is call else call, step=step)
            values = [watched.copies.get(id(one), one) for one in watched.args]
            arguments = dict(zip(watched.facts.arguments, values, strict=False))
            text = (*explain(call.op, arguments, watched.results, name), *found)
            if (source := self._source(watched)) is not None:
                told = f"made by {tell_where(source.call)}."  # of its argument, too
                text = (*(one for one in text if not one.endswith(told)), f"Its infinite values were {told}")
        inputs = tuple(
            TensorRange.of(path, watched.copies[id(tensor)])
            if id(tensor) in watched.copies
            else TensorRange.of(path, tensor, watched.before.get(id(tensor)))
            for path, tensor in watched.tensors
            if path not in watched.outs
        )
        outputs = tuple(TensorRange.of(one.name, to) for one, to in zip(call.outputs, watched.results, strict=True))
        found_in = verdict.inner, inputs, outputs, verdict.argument, name
        return NonfiniteOrigin(call, verdict.kind, *found_in, text=text, step=step)

    def _tell_cast(self, watched: WatchedCall, verdict: Verdict, node: str) -> tuple[str, ...]:
        """Says what is too large for a dtype, and for a gradient with which factor of the loss it is not."""
        source, lower = dict(watched.tensors).get(verdict.argument), _lower_dtype(watched)
        (low, high), largest = extremes([source])[0] if source is not None else FINITE, torch.finfo(lower).max
        size = max(abs(low), abs(high))
        if not largest < size < math.inf:
            return ()
        what = WHY[verdict.kind].format(argument=verdict.argument)
        told = f"{what[:-1]}: {size:.3g} is too large for {dtype_name(lower)}, whose largest number is {largest:,.6g}."
        unscaled = size / (self._scaled.scale if self._scaled.scale and self._scaled.is_backward_of_one else 1)
        if not node.startswith("ToCopyBackward") or unscaled <= largest:
            return (told,)
        fits = 2.0 ** math.floor(math.log2(largest / unscaled))
        return (
            told,
            f"This gradient is {unscaled:.3g} without a scale, and fits if the loss is multiplied by {fits:g} or less. "
            "It is not known what fits of the results that are computed from it. "
            "An op in float32 moves the cast to the call before it, where it fits only if the op's backward makes it "
            "smaller.",
        )

    def _look_for_zeros(self, watched: WatchedCall) -> None:
        """Repeats the first calls of a backward from each place in float32, and those with nothing but zeros."""
        call, facts = watched.call, watched.facts
        if not any(tensor.dtype in LOWER_DTYPES for tensor in watched.results):
            return
        if facts.is_random or facts.shares or facts.is_uninitialized:
            return
        place = call.name, call.module, call.line
        only_zeros = any(
            tensor.dtype in LOWER_DTYPES and tensor.numel() and found == (0, 0)
            for tensor, found in zip(watched.results, watched.outputs, strict=True)
        )
        if self._looks[place] >= (_MOST_LOOKS if only_zeros else 1):
            return
        self._looks[place] += 1
        wide = watched.again(torch.float32)
        for low, exact in zip(watched.results, wide or (), strict=False):
            if low.dtype not in LOWER_DTYPES or not can_be_read(low) or low.shape != exact.shape:
                continue
            with unnoticed(), contextlib.suppress(RuntimeError):  # as in `extremes`
                lost = exact[(low == 0) & (exact != 0)]
                if lost.numel() > _SHARE_OF_ZEROS * low.numel():
                    found = Vanished(call, lost.numel(), low.numel(), float(lost.abs().max()))
                    calls = self.seen.vanished[place].calls + 1 if place in self.seen.vanished else 1
                    self.seen.vanished[place] = replace(self.seen.vanished.get(place, found), calls=calls)
                    return

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of an optimizer: counts the gradients that are 0."""
        if self.observer.is_done:
            return
        stepped = None if self.seen.stepped_scaled or self.seen.rescaled else self._scaled.stepped(optimizer)
        if stepped is not None and stepped.is_again:
            self.seen.rescaled = str(stepped)
        elif stepped is not None:
            self.seen.stepped_scaled = stepped.name, stepped.line, stepped.scale
        given = {id(one): one.grad for group in optimizer.param_groups for one in group["params"]}
        given = {key: one for key, one in given.items() if one is not None and can_be_read(one) and one.numel()}
        found = extremes([*given.values()])
        zeros, step = found.count((0, 0)), self.seen.steps
        for key, one in zip(given, found, strict=True):
            self._gradients[key] = self._gradients.get(key, (-1, 0))[0] if one == (0, 0) else step, step
        self.seen.last_gradients = [(*key, count) for key, count in Counter(self._gradients.values()).items()]
        if self.seen.vanished and zeros > (self.seen.zero_gradients or (0, 0, 0))[1]:
            self.seen.zero_gradients = step, zeros, len(given)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of an optimizer, whose closure was a part of it."""
        self.seen.steps += 1
        with self._lock:
            self._drop_ended()

    def _find_loss(self, watched: WatchedCall) -> NonfiniteOrigin | tuple[str, ...]:
        try:
            kept = watched.kept or self._recent.keep(watched.args, watched.copies, watched.call.phase)
            args = self._recent.with_arguments(kept, watched.args)
            source = None if (known := self._source(watched)) is None else known.call
            return self._recent.find_loss(watched.facts, args, watched.call, watched.is_cured_by, source)
        except Exception as error:  # the program goes on
            why = str(error).partition("\n")[0] or type(error).__name__
            return (
                "The same call in float32 is not finite either.",
                f"The calls before it could not be repeated: {why}.",
            )

    def _report(self, watched: WatchedCall, verdict: Verdict) -> None:
        origin = self._origin(watched, verdict)
        with self._lock:
            if self.observer.is_done:
                return
            if verdict.kind == "mathematics":
                spread = Propagation(watched.nonfinite, watched.call.phase == "backward", bool(verdict.text))
                self._provisional.append((origin, spread))
                self._settle()
            else:
                self.observer.is_done = True
                self._found(self._first or origin, True)

    def _is_final(self, watched: WatchedCall, call: Call) -> bool:
        """Whether the values of an origin can no longer be replaced: the backward is over, or they are used."""
        if call.phase == "optimizer" or call.op == "aten::_local_scalar_dense":
            used = watched.nonfinite_inputs
            return any(spread.knows(used) for _, spread in self._provisional if not spread.ended_well)
        return call.phase == "forward" and any(one.in_backward and not one.ended_well for _, one in self._provisional)

    def _settle(self) -> None:
        """Finds the first origin whose values are still there."""
        before = self._first
        self._first = next((one for one, spread in self._provisional if not spread.ended_well), None)
        if len(self._provisional) > _MOST_PROVISIONAL:
            self._drop_ended(_MOST_PROVISIONAL // 2)
        left = sum(not (spread.ended_well or spread.is_marker) for _, spread in self._provisional)
        self.observer.is_done |= left > _MOST_LEFT
        if self._first is not before or self.observer.is_done:
            self._found(self._first, self._first is not None and self._first.phase != "backward")

    def _drop_ended(self, most: int | None = None) -> None:
        """Counts benign origins, of all or of the first ones, whose values no call will use any more."""
        first, last = self._provisional[:most], [] if most is None else self._provisional[most:]
        for origin, spread in first:
            if spread.ended_well and not spread.is_marker:
                self._add_benign("replaced" if spread.is_replaced else "integers", origin.call)
        self._provisional = [pair for pair in first if pair[1].is_marking or not pair[1].ended_well] + last

    def finish(self) -> None:
        """Called after the block."""
        with self._lock:
            reader = next((spread.reader for origin, spread in self._provisional if origin is self._first), None)
            if self._first is not None and reader is not None and _PASSES_NAN in self._first.text:
                text = *self._first.text, f"They are read by {tell_where(reader)}."
                self._found(replace(self._first, text=text), False)
            self._drop_ended()
        self._recent.clear()
        has_origin = self._first is not None or self.observer.is_done
        buffers = [
            (f"{path}.{name}".lstrip("."), buffer)
            for module, path in (self._modules.named() if has_origin else ())
            for name, buffer in module._buffers.items()  # a module's own named_buffers may do anything
            if buffer is not None and not is_lazy(buffer)
        ]
        found = extremes([buffer for _, buffer in buffers])
        self.seen.nan_buffers += [name for (name, _), (low, _) in zip(buffers, found, strict=True) if math.isnan(low)]

    # --- verdicts

    def _judge(self, watched: WatchedCall) -> Verdict | None:
        """Returns the verdict on a call with a non-finite result; None if the call is not at fault."""
        if watched.is_partial and watched.depends_on_old():
            return None
        call, inputs = watched.call, watched.inputs
        source = self._source(watched) if watched.scales else None
        if source is not None and source.kind == "GradScaler" and source.scale is not None:
            return Verdict("scaled gradient", call.name)
        sources = [self._sources.of([one]) for one in watched.nonfinite_inputs]
        is_of_scaler = bool(sources) and all(one is not None and one.kind == "GradScaler" for one in sources)
        unfit = is_of_scaler or self._scaled.has_overflowed
        if call.phase == "optimizer" and unfit and not all(map(is_finite, inputs)):
            steps = any(isinstance(one, torch.nn.Parameter) for one in watched.nonfinite)
            return Verdict("optimizer step", call.name) if steps and watched.facts.writes else None
        makes_nan = any(math.isnan(low) for low, _ in watched.outputs)
        has_nan = any(math.isnan(low) for low, _ in inputs)
        has_inf = not has_nan and not all(map(is_finite, inputs))
        if has_nan or has_inf:
            tensors = [tensor for _, tensor in watched.tensors]
            if any(spread.knows(tensors) for _, spread in self._provisional):
                return None
        numbers = _written_numbers(watched)
        is_known = self._nan_is_known or unfit
        passes_nan = any(math.isnan(one) for one in (*watched.args, *numbers) if isinstance(one, float))
        if makes_nan and passes_nan and not is_known:
            self._add_benign("mask", call, watched.nonfinite)
            return Verdict("mathematics", call.name, text=(_PASSES_NAN,))
        if makes_nan and has_nan:
            return None if is_known else Verdict("data", call.name)
        if (has_nan or has_inf) and unfit:
            return None
        if not makes_nan:
            if has_nan:
                return None
            if has_inf:
                if any(map(math.isinf, numbers)) and self._source(watched) is None:
                    self._add_benign("mask", call, watched.nonfinite)
                if call.op in _EXPONENTIALS and inputs[0][1] != math.inf:  # exp turns a mask's -inf into 0
                    return self._kind(watched, finite=True)
                more = self._beyond_float32(watched)
                if more > 0 and self._is_mask(watched):  # what makes a NaN of it is at fault
                    self._add_benign("mask", call, watched.nonfinite)
                    more = 0
                if more <= 0:
                    return None
                text = _MORE_INFINITE.format(count=more, dtype=dtype_name(_lower_dtype(watched)))
                texts = (text, CLAMP_MASKS) if call.op.removesuffix("_") in SUMS else (text,)
                return Verdict("overflow in the op", call.name, text=texts)
            if self._is_mask(watched):
                self._add_benign("mask", call, watched.nonfinite)
                return None
        return None if self._only_scaled(watched) else self._kind(watched, all(map(is_finite, inputs)))

    @staticmethod
    def _is_mask(watched: WatchedCall) -> bool:
        numbers = [tensor for _, tensor in watched.tensors if tensor.dtype is not torch.bool]
        lowest = all(high != math.inf for _, high in watched.outputs) and any(
            _is_lowest(low, tensor.dtype) for (_, tensor), (low, _) in zip(watched.tensors, watched.inputs, strict=True)
        )
        return asks_for_infinity(watched.args) or not numbers or lowest

    @staticmethod
    def _beyond_float32(watched: WatchedCall) -> int:
        """How many more values a call in a lower dtype makes infinite than in float32; 0 if that is not known."""
        if not any(tensor.dtype in LOWER_DTYPES for tensor in watched.results):
            return 0
        wider = watched.again(torch.float32)
        return 0 if wider is None else _count_infinite(watched.results) - _count_infinite(wider)

    def _only_scaled(self, watched: WatchedCall) -> bool:
        """Whether the result would be finite without GradScaler's scale."""
        if not self._scaled.scale or not (watched.scales or watched.call.phase == "backward"):
            return False
        if not all(map(is_finite, watched.inputs)):
            return False
        if watched.kept and self._recent.are_of_forward(watched.kept):
            return False  # the scale is not in its arguments, such as those of exp in the backward of a Function
        for dtype in (torch.float32, torch.float64):
            wider = watched.again(dtype)
            if wider is None or len(wider) != len(watched.results):
                return False
            found = extremes(wider)
            if all(map(is_finite, found)):
                break
        else:
            return False
        sizes = [
            (max(abs(low), abs(high)), torch.finfo(tensor.dtype).max)
            for tensor, (low, high) in zip(watched.results, found, strict=True)
            if tensor.is_floating_point()
        ]
        if any(size / self._scaled.scale > largest for size, largest in sizes):
            return False
        if self._scaled_in != self.seen.scaler.count:
            self._scaled_in = self.seen.scaler.count
            self.seen.scaled = self._origin(watched, Verdict("overflow in the op", watched.call.name))
        self._scaled.has_overflowed = True
        largest = max(size for size, _ in sizes)
        self._add_benign("GradScaler", watched.call, watched.nonfinite, self._scaled.scale, largest)
        return True

    def _kind(self, watched: WatchedCall, finite: bool) -> Verdict:
        """The verdict on a call at fault, of which all inputs are finite or not."""
        call, tensors = watched.call, watched.tensors
        if finite and watched.facts.is_copy:
            sources = [name for name, tensor in tensors if id(tensor) not in watched.before] or [tensors[0][0]]
            first = next(i for i, found in enumerate(watched.outputs) if not is_finite(found))
            return Verdict("overflow in a cast", call.name, sources[min(first, len(sources) - 1)])
        earlier = self._earlier_cast(watched) if finite else None
        if earlier is not None:
            return earlier
        dtypes = {tensor.dtype for _, tensor in tensors} | {tensor.dtype for tensor in watched.results}
        dtypes |= {info.dtype for info in call.ran_with}
        if dtypes.isdisjoint(LOWER_DTYPES):
            return Verdict("mathematics", call.name)
        wider = watched.again(torch.float32)
        found = [] if wider is None else extremes(wider)
        if not all(map(is_finite, found)):
            return Verdict("mathematics", call.name)
        text = WHY["overflow in the op"]
        low, high = min((one for one, _ in found), default=0.0), max((one for _, one in found), default=0.0)
        text = f"{text[:-1]}: from {low:.5g} to {high:.5g}." if found else "The inputs are finite, its result is not."
        dtype = _lower_dtype(watched)
        constants = tell_constants(watched.facts, watched.kept or (), dtype)
        return Verdict("overflow in the op", call.name, text=(text, *constants))

    @staticmethod
    def _earlier_cast(watched: WatchedCall) -> Verdict | None:
        """Looks for an infinite value that is in the cast arguments but not in the program's arguments."""
        if watched.cast_args is None or len(watched.cast_args) != len(watched.args):
            return None
        before = dict(watched.tensors)
        for name, tensor in tensor_arguments(watched.facts.op, watched.cast_args):
            if tensor.dtype not in LOWER_DTYPES or name not in before:
                continue
            passed, cast = extremes([before[name], tensor])
            if is_finite(passed) and not is_finite(cast) and not _is_lowest(passed[0], before[name].dtype):
                return Verdict("overflow in a cast", watched.call.name, name)
        return None

    def _add_benign(
        self,
        kind: BenignKind,
        call: Call,
        made: Iterable[torch.Tensor] = (),
        scale: float | None = None,
        scaled: float | None = None,
    ) -> None:
        key = (kind, call.name, call.module, call.line)
        unscaled = None if scale is None or scaled is None else scaled / scale
        new = NonfiniteOrigin(call, kind, scale=scale, scaled=scaled, unscaled=unscaled)
        self._sources.add(made, new)
        with self._lock:
            known = self.seen.benign.get(key, new)
            if known is not new or len(self.seen.benign) < _MOST_BENIGN:
                count = known.count + (known is not new)
                self.seen.benign[key] = replace(new, call=known.call, count=count)


def _lower_dtype(watched: WatchedCall) -> torch.dtype:
    return next((tensor.dtype for tensor in watched.nonfinite if tensor.dtype in LOWER_DTYPES), torch.float32)


def _written_numbers(watched: WatchedCall) -> list[float]:
    """The numbers that the program writes to a tensor and PyTorch has made tensors: `x[mask] = nan`."""
    if watched.call.op not in _REPLACING | {"aten::fill_"}:
        return []
    tensors = zip(watched.tensors, watched.inputs, strict=True)
    return [low for (_, one), (low, _) in tensors if one.dim() == 0 and not one.requires_grad]


def _in_terms_of(parent: WatchedCall, watched: WatchedCall, verdict: Verdict) -> Verdict:
    """The verdict on a call that another one made, with the argument that the other one passed on; "" if it did not."""
    if watched.facts is parent.facts:
        return verdict
    passed = dict(watched.tensors).get(verdict.argument)
    arguments = [*parent.tensors, *tensor_arguments(parent.facts.op, parent.cast_args or ())]
    name = next((name for name, tensor in arguments if tensor is passed), "")
    if not name and parent.facts.is_cast:  # in a backward, objects differ
        name = parent.tensors[0][0]
    return Verdict(verdict.kind, verdict.inner, name, verdict.text)
