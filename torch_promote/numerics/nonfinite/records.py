"""The records of `find_nonfinite`: the origin of the first non-finite value, and the benign ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch_promote.numerics.observing.places import shorten
from torch_promote.numerics.ranges.tensor_ranges import TensorRange
from torch_promote.numerics.records.calls import Call, Phase

__all__ = ["BenignKind", "BenignNonfinite", "NonfiniteKind", "NonfiniteOrigin"]

NonfiniteKind = Literal["overflow in the op", "overflow in a cast", "mathematics", "data"]
"""Why a result is not finite.

- "overflow in the op": the same call on float32 copies of its arguments, without autocast, is finite.
- "overflow in a cast": a cast made a finite value infinite: one of the program, or one that autocast made for the op.
- "mathematics": the call is not finite in float32 either.
- "data": an argument contained a NaN that no observed call made.
"""

BenignKind = Literal["mask", "GradScaler", "integers", "allowed"]
"""Why a non-finite value is benign.

- "mask": the program asked for an infinite number, as `masked_fill(mask, -inf)` does; or the lowest number of a dtype,
  which stands for -inf in masks, became -inf.
- "GradScaler": only the gradients that GradScaler has scaled overflow; it skips the step.
- "integers": the program only converts the infinite values to integers, as T5 does with log(0).
- "allowed": `allow` names it.
"""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """The first call with finite inputs and a non-finite output.

    Attributes:
        op: The op that the program called: "aten::linear".
        inner: The op inside it whose result is not finite: "aten::addmm", with its overload. The same op if it is not
            composite; the conversion if a cast overflowed.
        module: The path of the module, as in `Call.module`.
        phase: "forward", "backward" or "recompute".
        line: "path:number", as in `Call.line`.
        kind: Why the output is not finite.
        inputs: The ranges of the arguments that the program passed.
        outputs: The ranges of the results.
        argument: The argument whose cast overflowed; "" for other kinds.
        node: In a backward, the name of the autograd node: "MmBackward0".
        call: The call in full.
    """

    op: str
    inner: str
    module: str
    phase: Phase
    line: str
    kind: NonfiniteKind
    inputs: tuple[TensorRange, ...]
    outputs: tuple[TensorRange, ...]
    argument: str
    node: str
    call: Call

    def to_dict(self) -> dict[str, Any]:
        """Returns the origin as JSON-compatible values."""
        return {
            **{name: getattr(self, name) for name in ("op", "inner", "module", "phase", "line", "kind")},
            "inputs": [one.to_dict() for one in self.inputs],
            "outputs": [one.to_dict() for one in self.outputs],
            "argument": self.argument,
            "node": self.node,
            "call": self.call.to_dict(),
        }

    def __str__(self) -> str:
        inside = f" (in {self.inner})" if self.inner != self.call.name else ""
        where = f'module "{self.module}"' if self.module else "outside of the model's modules"
        lines = [
            f"{self.kind}: {self.call.name}{inside}, {self.phase}, {where}, {shorten(self.line) or 'line unknown'}",
            _WHY[self.kind].format(argument=self.argument or "an argument"),
        ]
        if self.call.policy is not None:
            lines.append(f"policy: {self.call.policy_name} ({self.call.said_by}); dtypes: {self.call.dtypes}")
        if self.node:
            lines.append(f"autograd node: {self.node}")
        lines += [f"  input {one}" for one in self.inputs] + [f"  output {one}" for one in self.outputs]
        return "\n".join(lines)


_WHY = {
    "overflow in the op": "The inputs are finite, and so is the result of the same call in float32.",
    "overflow in a cast": "A finite value of {argument} became infinite when it was cast.",
    "mathematics": "The same call in float32 is not finite either: another dtype does not help.",
    "data": "An argument contained a NaN that no observed call made: check the data, and code that was not observed.",
}


@dataclass(frozen=True, slots=True)
class BenignNonfinite:
    """Benign non-finite values of the same kind and from the same place.

    Attributes:
        kind: Why they are benign.
        op: The op's name, with its overload.
        module: The path of the module.
        phase: When it ran.
        line: "path:number".
        count: The number of calls.
        scale: GradScaler's scale in the last call; None for other kinds.
        scaled: The largest magnitude of the result with the scale, computed in a wider dtype.
        unscaled: The same without the scale.
    """

    kind: BenignKind
    op: str
    module: str
    phase: Phase
    line: str
    count: int = 1
    scale: float | None = None
    scaled: float | None = None
    unscaled: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as JSON-compatible values."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        text = f"{self.kind}: {self.op} in {self.module or 'no module'}, {shorten(self.line)}, "
        text += f"{self.count:,} call{'s' * (self.count > 1)}"
        if self.scale is None:
            return text
        return f"{text}: {self.scaled:.4g} with the scale {self.scale:g}, {self.unscaled:.4g} without"
