"""`Site`: the record of `compare` for the calls of one op in one module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_promote.observe.pages import to_plain

__all__ = ["Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """The calls of one overload in one module, in the forward.

    Errors are those of the candidate relative to the reference, over the results of all calls together. The local error
    is that of the op alone: on the reference's inputs, cast to the dtypes in which the candidate ran it. The
    accumulated error is that of the candidate's own run, including the errors of its inputs. Values beyond 1e30, which
    stand for infinity in masks, are ignored.

    Attributes:
        op: The op: "aten::linear".
        overload: Its overload: "", "int".
        module: The path of the module that calls it; "" in the model itself and outside of it.
        calls: The number of calls per run.
        line: "path:number" of the line that made the first call.
        dtypes: The dtypes in which the candidate ran the op: "float16", "float16, float32".
        policy: The candidate's policy for the op: "lower_precision_fp"; "" if there is none.
        local: The local error, as a relative L2 norm. Infinite if a result is not finite where the reference's is.
        local_ulp: The largest local error of an element, in units in the last place of the candidate's result dtype.
        local_sqnr: The local signal to quantization noise ratio in dB; infinite without an error.
        accumulated: The accumulated error, as a relative L2 norm; None if the candidate made no such call.
        accumulated_ulp: The largest accumulated error of an element, like `local_ulp`.
        accumulated_sqnr: The accumulated signal to quantization noise ratio in dB.
        impact: The change of the loss by the local errors, first order, in the loss's unit: abs(sum(g * d)) with the
            gradients g of the loss and the local errors d; for several batches, the root of the sum of squares.
            Infinite if a non-finite error reaches the loss. None if unknown. With random cotangents instead of
            gradients: the root mean square over the cotangents of the sum for each sample, which approximates the L2
            norm of the change of the outputs; or `impact_spread` if there is one backward.
        signed_impact: sum(g * d) over all batches. None if unknown, and with random cotangents.
        impact_spread: sqrt(sum((g * d) ** 2)), in which the errors of elements do not cancel each other: the expected
            impact for other inputs if their roundings are independent.
        nonfinite: The number of elements that are finite in the reference and infinite or NaN in a local run.
        bytes: The size of the results of all calls, in the reference.
        in_region: Whether an autocast region is open at the site, so that a policy applies.
    """

    op: str
    overload: str
    module: str
    calls: int
    line: str = ""
    dtypes: str = ""
    policy: str = ""
    local: float = 0.0
    local_ulp: float = 0.0
    local_sqnr: float = math.inf
    accumulated: float | None = None
    accumulated_ulp: float | None = None
    accumulated_sqnr: float | None = None
    impact: float | None = None
    signed_impact: float | None = None
    impact_spread: float | None = None
    nonfinite: int = 0
    bytes: int = 0
    in_region: bool = True

    @property
    def name(self) -> str:
        """The overload's full name: "aten::softmax.int"."""
        return f"{self.op}.{self.overload}" if self.overload else self.op

    def to_dict(self) -> dict[str, Any]:
        """Returns the site as JSON-compatible values. Infinite numbers are strings: "inf"."""
        plain: dict[str, Any] = to_plain(self)
        return plain
