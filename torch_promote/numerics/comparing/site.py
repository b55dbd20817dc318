"""What `compare` tells of the calls of one op in one module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_promote.numerics.pages.plain_data import to_plain

__all__ = ["Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """The calls of one overload in one module, in the forward.

    Errors are those of the candidate relative to the reference, over the results of all calls together. A local error
    is that of the op alone: on the reference's inputs, cast to the dtypes in which the candidate ran it. An accumulated
    one is that of the candidate's own run, with what came in through its inputs. A value beyond 1e30 stands for
    infinity, in masks, and is left out.

    Attributes:
        op: The op: "aten::linear".
        overload: Its overload: "", "int".
        module: The path of the module that calls it; "" in the model itself and outside of it.
        calls: How many calls a run has.
        line: "path:number" of the line that made the first call.
        dtypes: What the candidate ran the op in: "float16", "float16, float32".
        policy: The candidate's policy of the op: "lower_precision_fp"; "" without one.
        local: The local error, as a relative L2 norm. Infinite if a result is not finite where the reference's is.
        local_ulp: The largest local error of an element, in units in the last place of the candidate's result dtype.
        local_sqnr: The local signal to quantization noise ratio in dB; infinite without an error.
        accumulated: The accumulated error, as a relative L2 norm; None if the candidate made no such call.
        accumulated_ulp: The largest of an element, as `local_ulp`.
        accumulated_sqnr: The ratio in dB.
        impact: By how much the local errors change the loss, first order, in the loss's unit: abs(sum(g * d)) with the
            gradients g of the loss and the local errors d; of several batches the root of the sum of squares. Infinite
            if an error that is not finite reaches the loss. None if it is not known. With random cotangents
            in place of gradients: the root of the mean square over these of the sum for each sample, about the L2 norm
            of the change of the outputs; or `impact_spread` if there is one backward.
        signed_impact: sum(g * d) over all batches. None if it is not known, and with random cotangents.
        impact_spread: sqrt(sum((g * d) ** 2)), in which the errors of elements do not cancel each other: what the
            impact would be on average with other inputs, if their roundings are independent.
        nonfinite: How many elements a local run made infinite or NaN that are finite in the reference.
        bytes: The size of the results of all calls, in the reference.
        in_region: Whether a region of autocast is open there, so that a policy can decide.
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
        """Returns the site as values that JSON has. Infinite numbers are strings: "inf"."""
        plain: dict[str, Any] = to_plain(self)
        return plain
