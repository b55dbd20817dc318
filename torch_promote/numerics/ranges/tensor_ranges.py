"""Whether tensors are finite, and the ranges of their values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.numerics.ranges.unnoticed import stored_values, unnoticed
from torch_promote.reference.dtypes import dtype_name

__all__ = ["FINITE", "Extremes", "TensorRange", "extremes", "is_finite"]

Extremes = tuple[float, float]
"""The smallest and the largest value. Both are NaN if the tensor contains a NaN."""

FINITE: Extremes = (0.0, 0.0)
"""The extremes of a tensor that has no floating point numbers or cannot be read."""


def extremes(tensors: Sequence[torch.Tensor]) -> list[Extremes]:
    """Returns the extremes of tensors, with one synchronization per device.

    Example:
        >>> extremes([torch.tensor([1.0, -3.0]), torch.tensor([1]), torch.tensor([1.0, float("nan")])])
        [(-3.0, 1.0), (0.0, 0.0), (nan, nan)]
    """
    found = [FINITE] * len(tensors)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with unnoticed():
        for i, tensor in enumerate(tensors):
            try:
                real = _real(tensor)
                if real is None:
                    continue
                low, high = torch.aminmax(real)
            except RuntimeError:  # the dtype, device or subclass lacks an op, which must not break the program
                continue
            if real.device.type == "cpu":
                found[i] = low.item(), high.item()
            else:
                on_devices.setdefault(real.device, []).append((i, torch.stack([low, high]).double()))
        for waiting in on_devices.values():
            values = torch.cat([pair for _, pair in waiting]).tolist()
            for place, (i, _) in enumerate(waiting):
                found[i] = values[2 * place], values[2 * place + 1]
    return found


def is_finite(found: Extremes) -> bool:
    """Whether all values are finite, given their extremes."""
    return math.isfinite(found[0]) and math.isfinite(found[1])


def _real(tensor: torch.Tensor) -> torch.Tensor | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    stored = stored_values(tensor)
    if stored is None:
        return None
    if stored.is_complex():
        stored = torch.view_as_real(stored.resolve_conj())
    return stored if stored.dtype.itemsize > 1 else stored.float()


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The range of an argument or a result.

    Attributes:
        name: The argument, "mat2"; for a result its index, "0".
        dtype: The dtype.
        shape: The shape; empty for a nested tensor.
        min: The smallest finite value; None if there is none, or if it is unknown.
        max: The largest finite value.
        infs: The number of infinite values.
        nans: The number of NaNs.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    infs: int = 0
    nans: int = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, before: Extremes | None = None) -> TensorRange:
        """Reads the range of a tensor; `before` are its extremes before the call, if the call has overwritten it."""
        shape = () if tensor.is_nested else tuple(tensor.shape)
        if before is not None:
            known = before if is_finite(before) else (None, None)
            return cls(name, tensor.dtype, shape, min=known[0], max=known[1])
        with unnoticed(), contextlib.suppress(RuntimeError):  # as in `extremes`
            real = _real(tensor)
            if real is None:
                return cls(name, tensor.dtype, shape)
            finite = real[torch.isfinite(real)]
            infs, nans = int(torch.isinf(real).sum()), int(torch.isnan(real).sum())
            if not finite.numel():
                return cls(name, tensor.dtype, shape, infs=infs, nans=nans)
            low, high = torch.aminmax(finite)
            return cls(name, tensor.dtype, shape, low.item(), high.item(), infs, nans)
        return cls(name, tensor.dtype, shape)

    def to_dict(self) -> dict[str, Any]:
        """Returns the range as JSON-compatible values."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "min": self.min,
            "max": self.max,
            "infs": self.infs,
            "nans": self.nans,
        }

    def __str__(self) -> str:
        text = f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"
        if self.min is not None:
            text += f" from {self.min:.4g} to {self.max:.4g}"
        text += f", {self.infs:,} inf" if self.infs else ""
        return f"{text}, {self.nans:,} NaN" if self.nans else text
