"""What results depend on beside the calls: the states of optimizers and generators, versions, devices and settings.

Also what the program did with some tensors: GradScaler's scale in gradients, conversions, and who read parameters.
Whatever is asked here may raise in some program, whose other part goes on: it is then unknown.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import os
import platform
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.amp import GradScaler, grad_scaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler

from torch_promote import _C
from torch_promote.observe.call import Argument, Call, TensorInfo
from torch_promote.observe.observer import CastingCall, OpenCall
from torch_promote.observe.ops import (
    OpFacts,
    argument_of,
    can_be_read,
    facts_of,
    has_storage,
    tensors_in,
    unnoticed,
)
from torch_promote.observe.places import RunningModules, frames, innermost_line, is_ours, shorten
from torch_promote.recording.recording import OptimizerState
from torch_promote.recording.values import FINITE, Extremes, Values, extremes, is_finite
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import short_line

UNKNOWN = "unknown"
_GRADIENT_OF_LOSS = torch.autograd._make_grads.__code__
#: How the names of a group's parameters are recorded: "parameters of group 0".
PARAMETERS = "parameters of "
_T = TypeVar("_T")


def _ask(question: Callable[[], _T], otherwise: _T) -> _T:
    """The answer of PyTorch; `otherwise` if it raises."""
    try:
        return question()
    except Exception:
        return otherwise


# --- generators


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def generator_states() -> dict[str, str]:
    """Returns digests of the states of the global random number generators, by device, "python" and "numpy"."""
    found = {"cpu": _of_generator(torch.default_generator)}
    if torch.cuda.is_initialized() and not _is_capturing():
        found |= {f"cuda:{i}": _of_generator(one) for i, one in enumerate(torch.cuda.default_generators)}
    version, numbers, gauss = random.getstate()
    # The hash of numbers is the same in each process; that of None is its address before Python 3.12.
    found["python"] = f"{hash((version, numbers, () if gauss is None else gauss)) & (1 << 64) - 1:016x}"
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        parts: dict[str, Any] = _ask(lambda: numpy.get_state(legacy=False)["state"], {})
        state = b"".join(one.tobytes() if hasattr(one, "tobytes") else b"%d" % one for one in parts.values())
        found["numpy"] = hashlib.blake2b(state, digest_size=8).hexdigest()
    return found


def _of_generator(generator: torch.Generator) -> str:
    with unnoticed():
        return _ask(lambda: _C.digest(generator.get_state()), UNKNOWN)


def state_drawn_from(args: Iterable[Any], inputs: Sequence[TensorInfo]) -> str:
    """Returns the generator from which a call is about to draw, with a digest of its state: "cpu 0123456789abcdef"."""
    given = next((one for one in args if isinstance(one, torch.Generator)), None)
    device = next((one for one in args if isinstance(one, torch.device)), None)
    name = str(device) if device is not None else inputs[0].device if inputs else "cpu"
    if given is not None:
        return f"its own {_of_generator(given)}"
    if name == "cpu":
        return f"cpu {_of_generator(torch.default_generator)}"
    if not name.startswith("cuda") or not torch.cuda.is_initialized() or _is_capturing():
        return ""
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    return f"cuda:{index} {_of_generator(torch.cuda.default_generators[index])}"


# --- optimizers


_OF_OPTIMIZER = " of optimizer "
Searched: TypeAlias = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Any]]]
"""The schedulers and GradScalers of optimizers, as they were found at the first step of each in one of several blocks.
"""


class OptimizerStates:
    """Reads the states of optimizers, and of the schedulers and GradScalers that exist when one steps first."""

    def __init__(
        self,
        name_of: Callable[[torch.Tensor], str],
        values_of: Callable[[torch.Tensor], Values],
        searched: Searched | None = None,
    ) -> None:
        self._searched: Searched = weakref.WeakKeyDictionary() if searched is None else searched
        self._name_of = name_of
        self._values_of = values_of
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # numbers
        self._count = 0  # of those that there have been
        self._others: list[weakref.ref[Any]] = []  # schedulers and scalers
        self._numbers: dict[str, Argument] = {}

    def at_step(self, optimizer: torch.optim.Optimizer, step: int) -> OptimizerState | None:
        """The state at the start of a step: all of an optimizer's at its first, then numbers that have changed."""
        first = optimizer not in self._known
        if first:
            self._known[optimizer] = self._count
            self._count += 1
            self._forget_dead()
            known = {id(one()) for one in self._others}
            found = self._searched.get(optimizer)
            if found is None:  # a search of all objects in the process
                found = self._searched[optimizer] = list(map(weakref.ref, _schedulers_and_scalers(optimizer)))
            self._others += [one for one in found if id(one()) not in known]
        numbers = self._all_numbers(optimizer)
        if first:
            numbers |= self._unknown(optimizer) | self._members(optimizer)
        changed = {name: value for name, value in numbers.items() if self._numbers.get(name, self) != value}
        self._numbers |= changed
        tensors = self._values([optimizer]) if first else {}
        return OptimizerState(step, tensors, changed) if tensors or changed else None

    def _forget_dead(self) -> None:
        """A program may make ever new optimizers."""
        self._others = [one for one in self._others if one() is not None]
        alive = {"", *map(self._suffix, self._known)}
        of_each = ((name, name.partition(_OF_OPTIMIZER)) for name in self._numbers)
        self._numbers = {name: self._numbers[name] for name, (_, of, number) in of_each if of + number in alive}

    def at_end(self, step: int) -> OptimizerState | None:
        """The states of all optimizers that have made a step; None if there are none."""
        found = self._values(self._known)
        unknown = {name: value for optimizer in self._known for name, value in self._unknown(optimizer).items()}
        return OptimizerState(step, found, unknown) if found or unknown else None

    def _values(self, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Values]:
        return {name: self._values_of(tensor) for name, tensor in self.tensors(optimizers)}

    def tensors(self, optimizers: Iterable[torch.optim.Optimizer] | None = None) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the states that can be read, of all known optimizers or of some, and those of GradScalers."""
        found: list[tuple[str, torch.Tensor]] = []
        for optimizer in self._known if optimizers is None else optimizers:
            found += _ask(functools.partial(self._tensors_of, optimizer), [])
        return found + self._scales()

    def _tensors_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        number = 0
        for place, group in enumerate(optimizer.param_groups):
            found += [
                (f"{key} of group {place}{self._suffix(optimizer)}", value)
                for key, value in group.items()
                if isinstance(value, torch.Tensor)
            ]
            for parameter in group["params"]:
                name = self._name_of(parameter) or f"parameter {number}{self._suffix(optimizer)}"
                number += 1
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        found.append((f"{key} of {name}", value))
        return found

    def _unknown(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        """Says of an optimizer whose state raises that it is unknown."""
        if _ask(lambda: self._tensors_of(optimizer), None) is not None:
            return {}
        return {f"state of {type(optimizer).__name__}{self._suffix(optimizer)}": UNKNOWN}

    def _members(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        """The names of the parameters of each group, if all have one."""
        groups = enumerate(optimizer.param_groups)
        found = {
            f"{PARAMETERS}group {i}{self._suffix(optimizer)}": (*map(self._name_of, one["params"]),)
            for i, one in groups
        }
        return found if all(map(all, found.values())) else {}

    def _suffix(self, optimizer: torch.optim.Optimizer) -> str:
        """Tells the second and later optimizers from the first."""
        number = self._known[optimizer]
        return f"{_OF_OPTIMIZER}{number}" if number else ""

    def _scales(self) -> list[tuple[str, torch.Tensor]]:
        scalers = [one for reference in self._others if isinstance(one := reference(), GradScaler)]
        return [
            (f"{name.removeprefix('_')} of GradScaler", tensor)
            for one in scalers
            for name in ("_scale", "_growth_tracker")
            if isinstance(tensor := getattr(one, name, None), torch.Tensor)
        ]

    def _all_numbers(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        suffix = self._suffix(optimizer)
        found = {
            f"{key} of group {place}{suffix}": value
            for place, group in enumerate(optimizer.param_groups)
            for key, value in _numbers_in({key: value for key, value in group.items() if key != "params"}).items()
        }
        for reference in self._others:
            one = reference()
            if one is None or (isinstance(one, LRScheduler) and getattr(one, "optimizer", None) is not optimizer):
                continue
            values = dict(vars(one))
            if isinstance(one, LRScheduler):
                values = {key: value for key, value in values.items() if key != "_step_count"}  # an extra step at start
            elif values.get("_scale") is not None:  # of which nothing is left of the initial ones
                values = {key: value for key, value in values.items() if not key.startswith("_init")}
            of = f"{type(one).__name__}{suffix if isinstance(one, LRScheduler) else ''}"
            found |= {f"{key} of {of}": value for key, value in _numbers_in(values).items()}
        return found


def _numbers_in(values: Mapping[str, Any]) -> dict[str, Argument]:
    """The numbers, bools, texts and lists of numbers among values."""
    found = {}
    for key, value in values.items():
        numbers = value if isinstance(value, list | tuple) else ()
        is_plain = value is None or isinstance(value, bool | int | float | str)
        if is_plain or (numbers and all(isinstance(one, int | float) for one in numbers)):
            found[key] = argument_of(value)
    return found


_OF_SCALER = GradScaler.step.__code__, GradScaler.update.__code__


def _schedulers_and_scalers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The schedulers of an optimizer, of which PyTorch has no list, and the GradScaler that calls its step."""
    found = gc.get_referrers(optimizer)
    attributes = [one for one in found if type(one) is dict and one.get("optimizer") is optimizer]
    found += gc.get_referrers(*attributes) if attributes else []
    schedulers = [one for one in found if issubclass(type(one), LRScheduler)]
    frame = next((one for one in frames() if one.f_code in _OF_SCALER), None)
    return schedulers if frame is None else [*schedulers, frame.f_locals["self"]]


# --- GradScaler's scale in gradients


def loss_of(call: Call, args: Sequence[Any]) -> torch.Tensor | None:
    """Returns the loss if a call that has just ended makes the gradient of one."""
    if call.op != "aten::ones_like":
        return None
    frame = next(itertools.filterfalse(is_ours, frames()), None)
    is_loss = frame is not None and frame.f_code is _GRADIENT_OF_LOSS and isinstance(args[0], torch.Tensor)
    return args[0] if is_loss else None


def is_called_by(module: ModuleType) -> bool:
    """Whether code of a module makes the call that is observed."""
    frame = next(itertools.filterfalse(is_ours, frames()), None)  # one observer may call another
    return frame is not None and frame.f_code.co_filename == module.__file__


#: The op with which GradScaler multiplies a loss.
_BY_SCALE = "aten::mul.Tensor"


def scales_loss(call: OpenCall) -> bool:
    """Whether GradScaler makes a call, to multiply a loss by its scale."""
    # A number as the other factor is the scale that it hands to a fused optimizer.
    is_product = call.facts.name == _BY_SCALE and isinstance(call.args[1], torch.Tensor)
    return is_product and call.around is None and is_called_by(grad_scaler)


def storage_of(tensor: torch.Tensor) -> Any:
    """Returns a StorageWeakRef to a tensor's storage, which reserves its address; None if it has none to read."""
    return StorageWeakRef(tensor.untyped_storage()) if has_storage(tensor) else None


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of storages; in a backward, a reference to one would keep autograd from adding in place."""
    return {torch._C._storage_address(one) for one in tensors if has_storage(one)}  # type: ignore[attr-defined]


def _floats_among(args: Sequence[Any]) -> list[float]:
    """The numbers among arguments, also as tensors without dimensions, as which PyTorch passes them on."""
    with unnoticed():
        tensors = (one for one in tensors_in(args) if can_be_read(one) and one.dim() == 0)
        given = [*args, *(one.item() for one in tensors)]
        return [one for one in given if isinstance(one, float)]


def _may_be_scale(number: float) -> bool:
    """Whether a number is a power of 2, as the scales of GradScaler are, and larger than the weights of losses are."""
    return number >= 16 and math.frexp(number)[0] == 0.5


class ScaledStep(NamedTuple):
    """A step of an optimizer with gradients that are scaled."""

    name: str  # the optimizer's class
    line: str
    scale: float
    is_again: bool = False  # whether it is GradScaler's, after a backward that followed `unscale_`

    def __str__(self) -> str:
        how = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
        if self.is_again:
            how = "a backward made them after scaler.unscale_(optimizer). Call scaler.update() before a backward that "
            how += "makes new gradients, and scaler.unscale_(optimizer) after the last one that adds to them"
        said = f"{self.name} stepped with gradients that GradScaler had multiplied by {self.scale:,.10g}"
        return f"{said}, {shorten(self.line)}: {how}."


_OfScale: TypeAlias = Literal["scale", "scaled loss", "scaled gradient", "computed from these", "unscaled gradient"]
_Held: TypeAlias = _OfScale | Literal["partly scaled gradient", "gradient without scale"]
"""What memory holds, of GradScaler's scale. "partly scaled": a scaled backward has added to an unscaled gradient.
"without scale": of the backward of a loss that no scale has multiplied."""


@dataclass(eq=False)
class ScaledGradients:
    """GradScaler's scale, and which gradients have it in them."""

    scale: float | None = None  # from the first scaled loss of a step to the update of the scale
    are_unscaled: bool = True  # whether the gradients are, since the loss was scaled
    has_overflowed: bool = False  # whether only scaled gradients have overflowed since the last update
    # Gradients that GradScaler has found not finite, by storage: it, the step, and where a backward has added to them.
    _refused: dict[int, tuple[StorageWeakRef, int, str | None]] = field(default_factory=dict)
    _line: str = ""  # of the backward of a loss that runs, or ran last
    _held: dict[int, _Held] = field(default_factory=dict)  # by the address of a storage
    is_backward_of_one: bool = False  # whether the backward that runs, or ran last, is of a scaled loss

    def watch(self, of: OpenCall, call: Call, results: list[torch.Tensor]) -> None:
        """Called after each call, by who does not call the methods below."""
        if scales := scales_loss(of):
            self.begin(extremes([of.args[1]])[0][1], False)
        if self.scale is None:
            return
        self.follow(of, call, results, scales)
        if call.op == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self.unscale(of.args[0], False, 0)
        elif call.op == "aten::_amp_update_scale_":
            self.update()

    def begin(self, scale: float, is_overflow: bool) -> None:
        """A loss is multiplied by the scale. `is_overflow`: its values come from an overflow that was divided."""
        self.has_overflowed &= is_overflow
        self.scale, self.are_unscaled = scale, scale == 1

    def unscale(self, gradients: Sequence[torch.Tensor], found_inf: bool, step: int) -> tuple[int, str] | None:
        """Gradients were divided by the scale. Returns the step that one was left from, and who has added to it."""
        self._hold(_addresses(gradients), "unscaled gradient")
        self.are_unscaled = True
        found = [not is_finite(one) for one in extremes(gradients)] if found_inf else [False] * len(gradients)
        left, self._refused = self._refused, {key: one for key, one in self._refused.items() if not one[0].expired()}
        uncleared: list[tuple[int, str]] = []
        for reference, is_refused in zip(map(storage_of, gradients), found, strict=True):
            _, since, line = left.get(0 if reference is None else reference.cdata, (None, step, None))
            if reference is not None and is_refused:
                self._refused[reference.cdata] = reference, step if line is None else since, line
                uncleared += [] if line is None else [(since, line)]
            elif reference is not None:
                self._refused.pop(reference.cdata, None)
        return min(uncleared, default=None)

    def add_to_refused(self, results: Iterable[torch.Tensor], before: Mapping[int, Extremes]) -> None:
        """A call of a backward has written to tensors. `before`: their extremes, by id."""
        for tensor in results if self._refused else ():
            known = self._refused.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
            if known is not None:
                is_left = not is_finite(before.get(id(tensor), FINITE))
                line = innermost_line() or self._line  # a thread of autograd runs no Python
                self._refused[known[0].cdata] = known[0], known[1], line if is_left else None

    def update(self) -> None:
        """GradScaler updates its scale."""
        self.scale, self.has_overflowed = None, False
        self._forget("scaled gradient", "computed from these", "unscaled gradient", "partly scaled gradient")

    def have_scale(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these tensors has the scale in it."""
        return not self.are_unscaled and "scaled gradient" in self._held_by(tensors)

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> set[_Held]:
        """What is known of an optimizer's gradients since the last update of the scale."""
        every = (one.grad for group in optimizer.param_groups for one in group["params"])
        return self._held_by(one for one in every if one is not None)

    def stepped(self, optimizer: torch.optim.Optimizer) -> ScaledStep | None:
        """Called before a step of an optimizer. Returns it if its gradients are scaled, and it does not divide them."""
        wrong: set[_Held] = {"scaled gradient", "partly scaled gradient"}
        if not self.scale or self.are_unscaled or wrong.isdisjoint(self.of_optimizer(optimizer)):
            return None
        frame = next((one for one in frames() if one.f_code is GradScaler.step.__code__), None)
        if frame is not None:
            stepped = frame.f_locals["optimizer"]
            has_scale = getattr(stepped, "grad_scale", None) is not None or "grad_scaler" in frame.f_locals["kwargs"]
            if getattr(stepped, "_step_supports_amp_scaling", False) and has_scale:
                return None
        return ScaledStep(type(optimizer).__name__, innermost_line(), self.scale, frame is not None)

    def divides(self, call: Call, args: Sequence[Any]) -> bool:
        """Whether a call of the forward divides by the scale."""
        op = call.op.removesuffix("_").replace("::_foreach_", "::")
        factor = {"aten::div": self.scale, "aten::mul": 1 / (self.scale or 1)}.get(op)
        return call.phase == "forward" and factor is not None and factor in _floats_among(args)

    def without_scale(self, gradients: Iterable[torch.Tensor]) -> int:
        """The number of gradients that a loss has which no scale has multiplied."""
        return sum("gradient without scale" in self._held_by([one]) for one in gradients)

    def are_sized(self, facts: OpFacts, args: Sequence[Any], results: list[torch.Tensor]) -> bool:
        """Whether a call multiplies scaled gradients in place by a tensor that is computed from them."""
        in_place = facts.op_name.endswith(("mul_", "div_")) and self.have_scale(results)
        return in_place and "computed from these" in self._held_by(tensors_in(args[1:]))

    def follow(self, of: OpenCall, call: Call, results: list[torch.Tensor], scales: bool) -> None:
        """Called after each call. `scales`: whether GradScaler makes it, to multiply a loss by the scale."""
        made, read, facts = _addresses(results), self._held_by(of.read), of.facts
        if scales:
            self._forget("scaled loss")
            self._hold(made, "scaled loss")
            self._hold(_addresses(of.args[1:2]), "scale")
        elif call.phase == "backward":
            self._follow_backward(of, call, made, read)
            return
        else:
            depends = call.phase == "forward" and bool(read & {"scaled gradient", "computed from these"})
            is_divided = depends and self.divides(call, of.args)
            has_scale = depends and not is_divided and any(one.is_floating_point() for one in results)
            is_new = is_divided or not (facts.writes or facts.shares)  # it may reuse memory
            for one in made:
                held = self._held.get(one)
                is_cleared = facts.overwrites and held == "unscaled gradient"
                if is_new or is_cleared or (held != "scaled gradient" and (has_scale or held == "computed from these")):
                    self._hold([one], "computed from these" if has_scale else None)
        if (loss := loss_of(call, of.args)) is not None:
            self.is_backward_of_one, self._line = "scaled loss" in self._held_by([loss]), call.line
            self._forget("gradient without scale")
            self._hold(made if not self.is_backward_of_one else (), "gradient without scale")

    def _follow_backward(self, of: OpenCall, call: Call, made: set[int], read: set[_Held]) -> None:
        if self.is_backward_of_one:
            adds = call.op in ("aten::add", "aten::add_") and read & {"unscaled gradient", "partly scaled gradient"}
            self._hold(made, "partly scaled gradient" if adds else "scaled gradient")
            return
        is_plain = "gradient without scale" in read and not read & {"scaled gradient", "scale"}
        self._hold(made, "gradient without scale" if is_plain else None)
        numbers = _floats_among(of.args) if is_plain and call.op in ("aten::mul", "aten::mul_") else ()
        if "scale" in read or any(map(_may_be_scale, numbers)):  # a scale that the program multiplies with itself
            self._forget("gradient without scale")

    def _held_by(self, tensors: Iterable[torch.Tensor]) -> set[_Held]:
        return {self._held[one] for one in _addresses(tensors) if one in self._held}

    def _hold(self, addresses: Iterable[int], held: _Held | None) -> None:
        for one in addresses:
            if held is None:
                self._held.pop(one, None)
            else:
                self._held[one] = held

    def _forget(self, *kinds: _Held) -> None:
        self._held = {one: held for one, held in self._held.items() if held not in kinds}


# --- the program's conversions and parameters


def conversion_of(call: Call) -> str:
    """Returns the line and the dtypes of a call with which the program converts a tensor to a floating dtype; or ""."""
    if not (call.own and call.inputs and call.outputs and call.phase in ("forward", "recompute")):
        return ""
    before, after, facts = call.inputs[0].dtype, call.outputs[0].dtype, facts_of(call.name)
    if before is after or not after.is_floating_point or facts.is_view or not facts.keeps_elements:
        return ""
    return f"{short_line(call.line)} {dtype_name(before)} -> {dtype_name(after)}"


class TensorUses:
    """What a trace remembers of tensors: which parameters autograd's calls read, and what made them. It holds none."""

    def __init__(self, modules: RunningModules) -> None:
        self.modules: RunningModules = modules
        self.scaled: ScaledGradients = ScaledGradients()
        self.undone: Counter[str] = Counter()  # the casts of autocast that undo conversions, by `conversion_of`
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype]] = {}  # with the dtype at that time, by id
        self._converted: dict[int, tuple[StorageWeakRef, Call]] = {}  # by storage
        self._most = 1000

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after each call."""
        if of.phase != "backward" and torch.is_grad_enabled():
            for one in of.read:
                if one.requires_grad and one.is_leaf and id(one) not in self._read:
                    end = functools.partial(self._end, id(one))
                    self._read[id(one)] = weakref.ref(one, end), one.dtype
        if call is None or call.error:
            return
        if self.scaled.scale is not None or of.facts.name == _BY_SCALE:
            self.scaled.watch(of, call, results)
        tensors = of.tensors if isinstance(of, CastingCall) and self._converted else {}
        for cast in call.casts if tensors else ():
            made = self.conversion(tensors[cast.argument])
            dtypes = made and (made.inputs[0].dtype, made.outputs[0].dtype)
            if made and dtypes == (cast.to_dtype, cast.from_dtype) and not cast.reused:
                self.undone[conversion_of(made)] += 1
        is_copy = of.facts.keeps_elements and call.inputs and call.outputs
        is_other = is_copy and call.inputs[0].dtype is not call.outputs[0].dtype
        if is_other and conversion_of(call) and (storage := storage_of(results[0])) is not None:
            self._converted[storage.cdata] = storage, call
            if len(self._converted) > self._most:
                self._converted = {key: one for key, one in self._converted.items() if not one[0].expired()}
                self._most = 1000 + 2 * len(self._converted)

    def _end(self, key: int, reference: object) -> None:
        self._read.pop(key, None)

    @property
    def has_read(self) -> bool:
        """Whether a call that autograd recorded has read a leaf since the trace began."""
        return bool(self._read)

    def first_dtype(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype that a leaf had when a call that autograd recorded read it first; None if none has."""
        reference, dtype = self._read.get(id(tensor), (None, None))
        return dtype if reference is not None and reference() is tensor else None

    def conversion(self, tensor: torch.Tensor) -> Call | None:
        """The call with which the program has converted another tensor to what a tensor's memory is, if it is known."""
        return next((self._converted[one][1] for one in _addresses([tensor]) if one in self._converted), None)


# --- versions, devices and settings

#: Those of scaled_dot_product_attention, which their flags name.
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
#: Environment variables that select kernels.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
#: Settings of compilers, which exist if a program has loaded them.
_OF_COMPILERS = {
    "torch._inductor.config": ("emulate_precision_casts", "fallback_random", "max_autotune", "deterministic"),
    "torch._functorch.config": ("backward_pass_autocast", "activation_memory_budget"),
}
#: The backends and kinds of ops that have an attribute `fp32_precision`.
_PRECISIONS = (
    *("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)


@functools.cache
def _cpu() -> str:
    """The model of the CPU, by which libraries select kernels; "" if it is unknown."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, str]:
    """Returns what the bits of results may depend on, besides the program; "unknown" if PyTorch does not tell."""
    # If a program sets `torch.backends.cuda.matmul.fp32_precision`, the functions for the older settings raise.
    backends: Any = torch.backends
    asked: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.__version__,
        "python": platform.python_version,
        "machine": platform.machine,
        "cpu": _cpu,
        "cpu capability": backends.cpu.get_cpu_capability,
        "threads": torch.get_num_threads,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "mkldnn": lambda: backends.mkldnn.is_available() and backends.mkldnn.enabled,
        "sdpa": lambda: ", ".join(name for name in _KERNELS if getattr(backends.cuda, f"{name}_sdp_enabled")()),
        "mha fastpath": backends.mha.get_fastpath_enabled,
        "cuda": lambda: torch.version.cuda or "none",
    }
    for name in _PRECISIONS:
        path = f"{name}.fp32_precision".removeprefix(".")
        asked[f"backends.{path}"] = functools.partial(functools.reduce, getattr, path.split("."), backends)
    if torch.cuda.is_initialized():
        matmul = backends.cuda.matmul
        asked |= {
            "gpus": lambda: ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
            "cudnn": backends.cudnn.version,
            "cudnn.deterministic": lambda: backends.cudnn.deterministic,
            "cudnn.benchmark": lambda: backends.cudnn.benchmark,
            "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
            "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
            "float16 reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "bfloat16 reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        }
    for module, names in _OF_COMPILERS.items():
        config = sys.modules.get(module)
        for name in names if config is not None else ():
            asked[f"{module.removeprefix('torch._').removesuffix('.config')}.{name}"] = functools.partial(
                getattr, config, name
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        asked["rank"] = dist.get_rank
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        asked["rank"] = lambda: os.environ["RANK"]
    found = {name: str(_ask(question, UNKNOWN)) for name, question in asked.items()}
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
