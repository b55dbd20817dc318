"""Diagnoses a call whose result is not finite: the kind of fault, or benign.

NOTE [ Which non-finite results are benign ]
A call that makes an infinite value is not at fault if the program passed an infinite number (`masked_fill(mask, -inf)`,
`full((), -inf)`), or if an argument contains an infinite value, which the call passes on. A cast is not at fault if it
makes the lowest number of a dtype infinite, because that number stands for -inf in masks. A call that turns infinite
values into a NaN is at fault, and so is one that makes more values infinite in float16 or bfloat16 than in float32.

If GradScaler has scaled the loss and a call of the backward overflows, the call is repeated in a wider dtype. If its
result fits after division by the scale, only the scaled gradients overflow. Until GradScaler updates its scale, NaNs
that result from those infinite gradients are benign as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_promote.checking.overloads import tensor_arguments, tensors_in
from torch_promote.numerics.nonfinite.call_again import call_again
from torch_promote.numerics.nonfinite.records import BenignKind, BenignNonfinite, NonfiniteKind
from torch_promote.numerics.ranges.tensor_ranges import FINITE, Extremes, extremes, is_finite
from torch_promote.numerics.ranges.unnoticed import unnoticed
from torch_promote.numerics.records.calls import Call

__all__ = ["NonfiniteJudge", "Verdict", "Watched"]

_LOWER = (torch.float16, torch.bfloat16)
_CONVERSIONS = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
_EXPONENTIALS = ("aten::exp", "aten::exp2", "aten::expm1", "aten::exp_", "aten::exp2_", "aten::expm1_")
#: Ops that ignore the old content of the tensor that they write to.
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "log_normal", "exponential", "cauchy", "geometric")
)
#: Ops that write to a part of a tensor. The rest may be uninitialized.
_PARTIAL = ("index_copy_", "index_put_", "_index_put_impl_", "index_fill_", "scatter_", "masked_fill_", "put_")
_MOST_BENIGN = 1000


@dataclass(slots=True, eq=False)
class Watched:
    """A running call, with the facts that a verdict may need."""

    token: Any
    op: torch._ops.OpOverload
    args: list[Any]
    before: dict[int, Extremes] = field(default_factory=dict)  # of arguments that the op writes to, by id
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    cast_args: list[Any] | None = None  # the arguments after autocast's casts
    scales: bool = False  # GradScaler's multiplication
    has_inner: bool = False
    inner_nonfinite: bool = False
    verdict: Verdict | None = None


@dataclass(slots=True)
class Verdict:
    """The kind of fault, the op at fault, and for a cast the argument."""

    kind: NonfiniteKind
    inner: str
    argument: str = ""


class NonfiniteJudge:
    """Diagnoses calls, and keeps state for later ones: GradScaler's scale, and known NaNs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scale: float | None = None
        self._scaled_overflow = False
        self._nan_is_known = False
        self._benign: dict[tuple[str, ...], BenignNonfinite] = {}

    @property
    def benign(self) -> list[BenignNonfinite]:
        """The benign non-finite values, by place."""
        return list(self._benign.values())

    def set_scale(self, scale: float | None) -> None:
        """Called when GradScaler scales a loss, and with None when it has updated its scale after the step."""
        self._scale, self._scaled_overflow = scale, False

    def allow(self, call: Call) -> None:
        """Records a call that may make non-finite values."""
        self._nan_is_known = True
        self._add_benign("allowed", call)

    def judge(
        self, watched: Watched, call: Call, tensors: list[torch.Tensor], outputs: Sequence[Extremes]
    ) -> Verdict | None:
        """Returns the verdict on a call with a non-finite result; None if the call is not at fault.

        Args:
            watched: The call.
            call: Its record.
            tensors: The tensors among its results.
            outputs: Their extremes.
        """
        named = list(tensor_arguments(watched.op, watched.args))
        inputs = self._input_extremes(watched, named)
        makes_nan = any(math.isnan(low) for low, _ in outputs)
        has_nan = any(math.isnan(low) for low, _ in inputs)
        has_inf = any(not is_finite(one) for one in inputs) and not has_nan
        if makes_nan and has_nan and self._writes_a_part(watched, call, named, inputs):
            return None
        if makes_nan and has_nan:
            return None if self._nan_is_known or self._scaled_overflow else Verdict("data", call.name)
        if (has_nan or has_inf) and self._scaled_overflow:
            return None
        if not makes_nan:
            if has_nan:
                return None
            if has_inf:
                if call.op in _EXPONENTIALS and inputs[0][1] != math.inf:  # exp turns a mask's -inf into 0
                    return self._kind(watched, call, tensors, named, [FINITE])
                more = self._has_more_than_wider(watched, tensors)
                return Verdict("overflow in the op", call.name) if more else None
            if self._is_mask(watched, call, named, inputs, outputs):
                return None
        if self._only_scaled(watched, call, tensors, inputs):
            return None
        return self._kind(watched, call, tensors, named, inputs)

    @staticmethod
    def _writes_a_part(
        watched: Watched, call: Call, named: list[tuple[str, torch.Tensor]], inputs: Sequence[Extremes]
    ) -> bool:
        """Whether a call keeps NaNs in the rest of a buffer, such as a cache made by `torch.empty`."""
        others = [one for (_, tensor), one in zip(named, inputs, strict=True) if id(tensor) not in watched.before]
        return call.op.removeprefix("aten::") in _PARTIAL and all(map(is_finite, others))

    def _input_extremes(self, watched: Watched, named: list[tuple[str, torch.Tensor]]) -> list[Extremes]:
        outs = {id(tensor) for tensor in tensors_in(_out_arguments(watched))}
        fresh = [tensor for _, tensor in named if id(tensor) not in watched.before and id(tensor) not in outs]
        before = {} if watched.op._schema.name in _OVERWRITING else watched.before
        found = dict(zip(map(id, fresh), extremes(fresh), strict=True)) | before
        return [found.get(id(tensor), FINITE) for _, tensor in named]

    def _is_mask(
        self,
        watched: Watched,
        call: Call,
        named: list[tuple[str, torch.Tensor]],
        inputs: Sequence[Extremes],
        outputs: Sequence[Extremes],
    ) -> bool:
        asked = any(isinstance(arg, float) and math.isinf(arg) for arg in watched.args)
        numbers = [tensor for _, tensor in named if tensor.dtype is not torch.bool]
        lowest = all(high != math.inf for _, high in outputs) and any(
            _is_lowest(one[0], tensor.dtype) for (_, tensor), one in zip(named, inputs, strict=True)
        )
        if asked or not numbers or lowest:
            self._add_benign("mask", call)
            return True
        return False

    def _has_more_than_wider(self, watched: Watched, tensors: list[torch.Tensor]) -> bool:
        """Whether a call in a lower dtype makes more values infinite than in float32."""
        if not any(tensor.dtype in _LOWER for tensor in tensors):
            return False
        wider = call_again(watched.op, watched.args, torch.float32, watched.copies)
        return wider is not None and _count_infinite(tensors) > _count_infinite(wider)

    def _only_scaled(
        self, watched: Watched, call: Call, tensors: list[torch.Tensor], inputs: Sequence[Extremes]
    ) -> bool:
        """Whether the result would be finite without GradScaler's scale."""
        if not self._scale or not (watched.scales or call.phase == "backward"):
            return False
        if not all(is_finite(one) for one in inputs):
            return False
        for dtype in (torch.float32, torch.float64):
            wider = call_again(watched.op, watched.args, dtype, watched.copies)
            if wider is None or len(wider) != len(tensors):
                return False
            found = extremes(wider)
            if all(is_finite(one) for one in found):
                break
        else:
            return False
        largest = [max(abs(low), abs(high)) for low, high in found]
        floats = [(tensor, size) for tensor, size in zip(tensors, largest, strict=True) if tensor.is_floating_point()]
        if any(size / self._scale > torch.finfo(tensor.dtype).max for tensor, size in floats):
            return False
        scaled = max(size for _, size in floats)
        self._scaled_overflow = True
        self._add_benign("GradScaler", call, self._scale, scaled, scaled / self._scale)
        return True

    def _kind(
        self,
        watched: Watched,
        call: Call,
        tensors: list[torch.Tensor],
        named: list[tuple[str, torch.Tensor]],
        inputs: Sequence[Extremes],
    ) -> Verdict:
        finite = all(is_finite(one) for one in inputs)
        if finite and call.name in _CONVERSIONS:
            return Verdict("overflow in a cast", call.name, named[-1][0] if call.name == "aten::copy_" else named[0][0])
        earlier = self.earlier_cast(watched, call) if finite else None
        if earlier is not None:
            return earlier
        dtypes = {tensor.dtype for _, tensor in named} | {tensor.dtype for tensor in tensors}
        dtypes |= {info.dtype for info in call.ran_with}
        if dtypes.isdisjoint(_LOWER):
            return Verdict("mathematics", call.name)
        wider = call_again(watched.op, watched.args, torch.float32, watched.copies)
        if wider is not None and not all(is_finite(one) for one in extremes(wider)):
            return Verdict("mathematics", call.name)
        return Verdict("overflow in the op", call.name)

    def earlier_cast(self, watched: Watched, call: Call) -> Verdict | None:
        """Looks for an infinite value that is in the cast arguments but not in the program's arguments."""
        if watched.cast_args is None or len(watched.cast_args) != len(watched.args):
            return None
        before = dict(tensor_arguments(watched.op, watched.args))
        for name, tensor in tensor_arguments(watched.op, watched.cast_args):
            if tensor.dtype not in _LOWER or name not in before:
                continue
            passed, cast = extremes([before[name], tensor])
            if is_finite(passed) and not is_finite(cast) and not _is_lowest(passed[0], before[name].dtype):
                return Verdict("overflow in a cast", call.name, name)
        return None

    def ended_in_integers(self, call: Call) -> None:
        """Records a call whose infinite results were only converted to integers."""
        self._add_benign("integers", call)

    def _add_benign(
        self,
        kind: BenignKind,
        call: Call,
        scale: float | None = None,
        scaled: float | None = None,
        unscaled: float | None = None,
    ) -> None:
        key = (kind, call.name, call.module, call.line)
        with self._lock:
            known = self._benign.get(key)
            if known is not None:
                self._benign[key] = replace(known, count=known.count + 1, scale=scale, scaled=scaled, unscaled=unscaled)
            elif len(self._benign) < _MOST_BENIGN:
                self._benign[key] = BenignNonfinite(
                    kind, call.name, call.module, call.phase, call.line, 1, scale, scaled, unscaled
                )


def _out_arguments(watched: Watched) -> list[Any]:
    return [
        value for argument, value in zip(watched.op._schema.arguments, watched.args, strict=True) if argument.is_out
    ]


def _is_lowest(value: float, dtype: torch.dtype) -> bool:
    """Whether a value is the lowest of its dtype, or close to it for a dtype with a wide range."""
    if not dtype.is_floating_point:
        return False
    lowest = torch.finfo(dtype).min
    return value == lowest if dtype is torch.float16 else value <= lowest / 2


def _count_infinite(tensors: Sequence[torch.Tensor]) -> int:
    with unnoticed():
        return sum(int(torch.isinf(tensor).sum()) for tensor in tensors if tensor.is_floating_point())
