"""Accumulates the errors of many tensors on their device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BEYOND", "ErrorSums", "Errors", "as_reals"]

#: A value beyond this counts as infinite, like the lowest number of a dtype in masks.
BEYOND = 1e30
#: The number of elements processed at a time, which bounds the memory of their float64 copies.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of results, compared with the reference's.

    Attributes:
        relative: The L2 norm of the difference, relative to the reference's; infinite if a value is not finite where
            the reference's is, or if the reference is zero and the difference is not.
        ulp: The largest difference, in units in the last place of the result's dtype at the reference's value.
        sqnr: The signal to quantization noise ratio in dB; infinite without a difference.
        nonfinite: The number of non-finite values where the reference's are finite.
    """

    relative: float = 0.0
    ulp: float = 0.0
    sqnr: float = math.inf
    nonfinite: int = 0


class ErrorSums:
    """Sums up errors. `add` reads the tensors immediately; only `total` synchronizes with a device.

    Example:
        >>> sums = ErrorSums()
        >>> sums.add(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        >>> sums.total().relative
        0.1
    """

    def __init__(self) -> None:
        self._sums: dict[torch.device, torch.Tensor] = {}

    def add(self, result: torch.Tensor, reference: torch.Tensor) -> None:
        """Adds the errors of a result.

        Args:
            result: The result.
            reference: The reference's, of the same shape.
        """
        dtype = result.dtype if result.dtype.is_floating_point else torch.float64
        for ours, theirs in zip(_pieces(result), _pieces(reference), strict=True):
            found = _sums_of(ours, theirs.to(ours.device), torch.finfo(dtype))
            self._add(found)

    def merge(self, other: ErrorSums) -> None:
        """Adds the sums of another object."""
        for sums in other._sums.values():
            self._add(sums)

    def _add(self, found: torch.Tensor) -> None:
        known = self._sums.get(found.device)
        if known is not None:
            found = torch.stack([*(known + found)[:2], torch.maximum(known, found)[2], (known + found)[3]])
        self._sums[found.device] = found

    def total(self) -> Errors:
        """Returns the errors of all results together."""
        sums = [one.tolist() for one in self._sums.values()]
        if not sums:
            return Errors()
        difference, size = sum(one[0] for one in sums), sum(one[1] for one in sums)
        nonfinite = int(sum(one[3] for one in sums))
        if nonfinite or (difference and not size):
            return Errors(math.inf, max(one[2] for one in sums), -math.inf, nonfinite)
        if not difference:
            return Errors()
        relative = math.sqrt(difference / size)
        return Errors(relative, max(one[2] for one in sums), -20 * math.log10(relative), 0)


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements as a 1-d tensor of reals; a complex number becomes two."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pieces: tuple[torch.Tensor, ...] = as_reals(tensor).split(_AT_ONCE)
    return pieces


def _sums_of(result: torch.Tensor, reference: torch.Tensor, info: Any) -> torch.Tensor:
    """The sums of squares of difference and reference, the largest error in ulp, and the count of values lost."""
    ours, theirs = result.double(), reference.double()
    in_theirs = theirs.abs() < BEYOND  # false for NaN
    in_ours = ours.abs() < BEYOND
    both = in_ours & in_theirs
    difference = torch.where(both, (ours - theirs).abs(), 0.0)
    theirs = torch.where(both, theirs, 0.0)
    _, exponent = torch.frexp(theirs)
    smallest = info.smallest_normal * info.eps  # the smallest subnormal number
    unit = torch.ldexp(torch.full_like(theirs, info.eps), exponent - 1)
    unit = torch.where(theirs == 0, smallest, unit.clamp_min(smallest))
    lost = in_theirs & ~in_ours
    return torch.stack(
        [
            difference.square().sum(),
            theirs.square().sum(),
            (difference / unit).max() if difference.numel() else difference.sum(),
            lost.sum().double(),
        ]
    )
