"""The records of `find_nonfinite`: origins, benign values, what became 0 instead, and what GradScaler did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from torch_promote.observe.call import Call, Phase
from torch_promote.observe.places import shorten
from torch_promote.recording.values import TensorRange
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import module_name
from torch_promote.report.codec import decode_fields, encode

NonfiniteKind = Literal[
    "overflow in the op",
    "overflow in a cast",
    "underflow",
    "rounding",
    "mathematics",
    "data",
    "scaled gradient",
    "optimizer step",
]
"""Why a result is not finite.

- "overflow in the op": the same call on float32 copies of its arguments, without autocast, is finite.
- "overflow in a cast": a cast made a finite value infinite: one of the program, or one that autocast made for the op.
- "underflow": a number too small for the dtype became 0 in the result of a call, for want of which a later call is not
  finite.
- "rounding": the same with a number that was rounded to another one, such as 1, or a difference to 0.
- "mathematics": the call is not finite in float32 either.
- "data": an argument contained a NaN that no observed call made.
- "scaled gradient": a gradient that only GradScaler's scale made infinite went into a loss, without division by it.
- "optimizer step": an optimizer wrote gradients that are not finite because of GradScaler's scale to a parameter.
"""

BenignKind = Literal["mask", "GradScaler", "integers", "replaced", "allowed"]
"""Why a non-finite value is benign.

- "mask": the program asked for an infinite number, as `masked_fill(mask, -inf)` does, or for a NaN that it replaces or
  leaves out before it uses the rest; or the lowest number of a dtype, which stands for -inf in masks, became -inf.
- "GradScaler": only the gradients that GradScaler has scaled overflow; it skips the step.
- "integers": the program only converts the infinite values to integers, as T5 does with log(0).
- "replaced": a call of a backward made them, and a later call of the same autograd node replaced them, as the backward
  of a norm does where the norm is 0.
- "allowed": `allow` names it.
"""


@dataclass(frozen=True)
class NonfiniteOrigin:
    """The first call with finite inputs and a non-finite output, or the call that lost the number it needs.

    It also describes benign values of the same kind and from the same place, by the first call that made them. Of
    these, the attributes from `inner` to `step` are not set.

    Attributes:
        call: The call.
        kind: Why the output is not finite, or why it is benign.
        inner: The op inside it whose result is not finite: "aten::addmm", with its overload. The same op if it is not
            composite; the conversion if a cast overflowed.
        inputs: The ranges of the arguments that the program passed, before the call.
        outputs: The ranges of the results, and of the arguments that the call wrote to and did not return.
        argument: The argument whose cast overflowed; "" for other kinds.
        node: In a backward, the name of the autograd node: "MmBackward0".
        nonfinite: If the call lost a number, the call that is not finite for want of it; None otherwise.
        cures: The calls with which `nonfinite` is finite if they run in float32, one of each op.
        other: A call with which it is, too, in their place; None if there is none, or none has lost values itself.
        text: What was compared, a sentence each.
        step: The number of optimizer steps before.
        count: The number of calls that made benign values.
        scale: GradScaler's scale in the last of them; None for kinds other than "GradScaler".
        scaled: The largest magnitude of the result with the scale, computed in a wider dtype.
        unscaled: The same without the scale.
    """

    call: Call
    kind: NonfiniteKind | BenignKind
    inner: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    argument: str = ""
    node: str = ""
    nonfinite: Call | None = None
    cures: tuple[Call, ...] = ()
    other: Call | None = None
    text: tuple[str, ...] = ()
    step: int = 0
    count: int = 1
    scale: float | None = None
    scaled: float | None = None
    unscaled: float | None = None

    @property
    def is_benign(self) -> bool:
        """Whether the values are benign."""
        return self.kind in get_args(BenignKind)

    @property
    def op(self) -> str:
        """The op that the program called: "aten::linear"; of benign values with its overload."""
        return self.call.name if self.is_benign else self.call.op

    @property
    def module(self) -> str:
        """The path of the module, as in `Call.module`."""
        return self.call.module

    @property
    def phase(self) -> Phase:
        """When it ran: "forward", "recompute", "backward" or "optimizer"."""
        return self.call.phase

    @property
    def line(self) -> str:
        """The line, "path:number", as in `Call.line`."""
        return self.call.line

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        of_benign = "count", "scale", "scaled", "unscaled"
        names = [one.name for one in fields(self) if one.name not in of_benign]
        names = ["call", "kind", *of_benign] if self.is_benign else names
        return {**_place_of(self.call), "op": self.op, **{name: encode(getattr(self, name)) for name in names}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the record from the data of `to_dict`."""
        unset = {one.name: one.default for one in fields(cls) if one.default is not MISSING}
        found: Self = decode_fields(cls, {**unset, **data})
        return found

    @property
    def why(self) -> list[str]:
        """Why the output is not finite: what was compared, a sentence each."""
        return [*(self.text or [WHY.get(self.kind, self.kind).format(argument=self.argument or "an argument")])]

    def __str__(self) -> str:
        if self.is_benign:
            text = f"{self.kind}: {self.where}, {self.count:,} call{'s' * (self.count > 1)}"
            if self.scale is not None:
                text += f": {self.scaled:.4g} with the scale {self.scale:g}, {self.unscaled:.4g} without"
            return text
        inside = f" (in its call of {self.inner})" if self.inner != self.call.name else ""
        module = f'module "{self.module}"' if self.module else module_name("")
        lines = [f"{self.kind}: {self.call.name}{inside}, {self.phase}, {module}, {tell_line(self.call)}", *self.why]
        if self.call.policy is not None:
            lines.append(f"policy: {self.call.policy_name} ({self.call.policy_source}); dtypes: {self.call.dtypes}")
        if self.node:
            lines.append(f"autograd node: {self.node}")
        shown = self.shown
        for what, ranges in (("input", self.inputs), ("output", self.outputs)):
            told = [one for of, one in shown if of == what]
            lines += [f"  {what} {one}" for one in told]
            if len(told) < len(ranges):
                lines.append(f"  {what}s not shown: {len(ranges) - len(told):,}")
        return "\n".join(lines)

    @property
    def where(self) -> str:
        """The op, the module and the line."""
        return f"{self.call.name} in {module_name(self.module)}, {tell_line(self.call)}"

    @property
    def shown(self) -> list[tuple[str, TensorRange]]:
        """The ranges that the text names, as inputs and outputs: of many, those that tell most."""
        outputs = _most_telling(self.outputs, [one.name for one in self.outputs if one.infs or one.nans])
        inputs = _most_telling(self.inputs, [one.name for one in outputs])
        return [*(("input", one) for one in inputs), *(("output", one) for one in outputs)]


@dataclass(frozen=True)
class Vanished:
    """Values of a backward that are 0 in float16 or bfloat16, and not 0 if the same call is repeated in float32."""

    call: Call  # the first call that made them
    count: int  # the number of values that became 0
    total: int  # the number of values of its result
    largest: float  # the largest of these values in float32
    calls: int = 1  # the number of repeated calls from this place that made such values

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        names = "count", "total", "largest", "calls", "call"
        return {**_place_of(self.call), **{name: encode(getattr(self, name)) for name in names}}

    def __str__(self) -> str:
        where = f"{self.call.phase}, {module_name(self.call.module)}, {tell_line(self.call)}"
        return (
            f"{self.call.name}, {where}: {self.count:,} of {self.total:,} values became 0 in "
            f"{dtype_name(self.call.outputs[0].dtype)}; the largest of them is {self.largest:.3g} in float32"
        )


@dataclass
class OptimizerSteps:
    """The steps of an optimizer with gradients that GradScaler has checked.

    Attributes:
        name: Its class.
        line: The line that first had its gradients checked: `scaler.step(optimizer)`, or `scaler.unscale_(optimizer)`.
        count: The number of steps.
        skipped: The number of steps that GradScaler skipped.
    """

    name: str
    line: str
    count: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.skipped:,} of {self.count:,} steps of {self.name} ({shorten(self.line) or 'line unknown'})"


@dataclass
class ScalerSteps:
    """The steps of GradScaler: the updates of its scale.

    Attributes:
        count: Their number.
        skipped: The number of steps in which a gradient was not finite: GradScaler skipped the step of an optimizer.
        last_skipped: The number of the last skipped step, counted from 0; None if there is none.
        after_growth: The number of skipped steps that were the first after the scale grew.
        first_scale: The scale of the first step.
        scale: The scale after the last step.
        backoff: The factor by which a skipped step changes the scale.
        growth_interval: The number of steps without a skipped one after which the scale grows.
        optimizers: The steps of each optimizer, where PyTorch's GradScaler itself checks the gradients.
    """

    count: int = 0
    skipped: int = 0
    last_skipped: int | None = None
    after_growth: int = 0
    first_scale: float = 0.0
    scale: float = 0.0
    backoff: float = 0.5
    growth_interval: int = 0
    optimizers: list[OptimizerSteps] = field(default_factory=list)

    def add(self, scale: float, is_skipped: bool, backoff: float, growth_interval: int) -> None:
        """Adds a step, with the scale before the update, and the scaler's settings."""
        if not self.count:
            self.first_scale = self.scale = scale
        if is_skipped:
            self.skipped += 1
            self.last_skipped = self.count
            self.after_growth += scale > self.scale
        self.count += 1
        self.scale = scale * backoff if is_skipped else scale
        self.backoff, self.growth_interval = backoff, growth_interval

    @property
    def never_stepped(self) -> bool:
        """Whether GradScaler skipped all steps, so that no weight has changed."""
        return 0 < self.count == self.skipped and all(one.skipped == one.count for one in self.optimizers)

    @property
    def counts(self) -> str:
        """How many steps were skipped, of each optimizer if there are several."""
        several = [str(one) for one in self.optimizers if one.skipped] if len(self.optimizers) > 1 else []
        return " and ".join(filter(None, (", ".join(several[:-1]), *several[-1:]))) or (
            f"{self.skipped:,} of {self.count:,} steps"
        )

    def __str__(self) -> str:
        if not self.never_stepped:
            return f"GradScaler skipped {self.counts}"
        return "GradScaler skipped " + (
            "the only step, which changed no weight"
            if self.count == 1
            else f"all {self.count:,} steps, which changed no weight"
        )

    def explain(
        self, first: str, size: float, largest: float, codes: Sequence[str], is_uncleared: bool = False
    ) -> list[str]:
        """Returns what the skipped steps mean, and what to do; nothing if there are none.

        Args:
            first: In the last skipped step, the call whose result overflowed first because of the scale, or "".
            size: Of the results that overflowed because of the scale, the one that needs the lowest scale, without it;
                0 if there is none.
            largest: The largest number of its dtype.
            codes: The policies under which the gradients may be finite, the narrowest first.
            is_uncleared: Whether GradScaler skipped a step for gradients of an earlier one, whatever the scale.
        """
        if not self.skipped:
            return []
        since = "now" if self.last_skipped == self.count - 1 else "in the last step"
        several = len(self.optimizers) > 1
        what, did = ("update", "lowered") if several else ("step", "skipped the optimizer's step and lowered")
        lines = [
            f"In {self.skipped:,} of {self.count:,} {what}s, the last of them {what} {self.last_skipped:,} (from 0), a "
            f"scaled gradient was not finite. Each time, GradScaler {did} the scale, which was "
            f"{_spell(self.first_scale)} at first and is {_spell(self.scale)} {since}.",
            *([f"It skipped {self.counts}."] if several else []),
        ]
        if is_uncleared:
            return lines
        lines.append(
            f"In the last of them, the first overflow was in {first}."
            if first
            else "No observed call overflowed because of the scale: the cause is in code that was not observed."
        )
        if 2 * self.after_growth >= max(self.skipped, 2):
            lines.append(
                f"{self.after_growth:,} of these steps came after the scale had grown, as it does after "
                f"{self.growth_interval:,} good steps. A larger growth_interval of GradScaler makes them rarer."
            )
        elif self.last_skipped == self.count - 1:
            if size and largest:
                lines.append(self._about_scale(size, largest))
            if codes:
                lines.append(f"To keep a high scale, try the op in float32: {codes[0]}.")
        else:
            lines.append("Later steps were not skipped: this is normal until the scale has settled.")
        return lines

    def _about_scale(self, size: float, largest: float) -> str:
        """Which scale would do for a gradient of a size, if GradScaler skipped the last step."""
        fits = 2.0 ** math.floor(math.log2(largest / size))
        text = "Of the results that overflowed, the one that needs the lowest scale "
        text += f"is {size:.3g} without the scale, so it fits with {_spell(fits)} or less."
        if fits < 1:
            return f"{text} So low a scale makes small gradients 0: run the op in float32, or use bfloat16."
        more = math.ceil(math.log(self.scale / fits, 1 / self.backoff)) if self.scale > fits else 0
        when = f"after {more:,} more skipped steps" if more > 1 else "after one more skipped step" if more else "now"
        text += f" The scale is that low {when}: run longer, or start there: GradScaler(init_scale={fits:g})."
        return f"{text} It is not known what fits of the results that are computed from those that overflowed."


def _spell(scale: float) -> str:
    return f"{scale:,.10g}"


#: The number of inputs and outputs of an op on lists that the text of an origin names.
_MOST_SHOWN = 8


def _most_telling(ranges: Sequence[TensorRange], names: Sequence[str]) -> Sequence[TensorRange]:
    """Of many ranges, those in the same places of their lists as these, and those that are in no list."""
    if len(ranges) <= _MOST_SHOWN:
        return ranges
    places = {name.partition("[")[2] for name in names}
    return [one for one in ranges if one.name in names or one.name.partition("[")[2] in {"", *places}][:_MOST_SHOWN]


WHY = {
    "overflow in the op": "The inputs are finite, and so is the result of the same call in float32.",
    "overflow in a cast": "A finite value of {argument} became infinite when it was cast.",
    "mathematics": "The same call in float32 is not finite either.",
    "data": "An argument contained a NaN that no observed call made: check the data, and code that was not observed.",
    "scaled gradient": "Divide such gradients by scaler.get_scale() before the program computes with them.",
    "optimizer step": "The optimizer stepped with gradients that are not finite because of GradScaler's scale. "
    "scaler.step(optimizer) skips such a step; a call of optimizer.step() does not.",
}


def _place_of(call: Call) -> dict[str, str]:
    return {name: getattr(call, name) for name in ("op", "module", "phase", "line")}


def tell_where(call: Call) -> str:
    """The op, the phase and the line."""
    return f"{call.name}, {call.phase}, {tell_line(call)}"


def tell_line(call: Call) -> str:
    """The line, or that it is unknown."""
    return shorten(call.line) or "line unknown"
