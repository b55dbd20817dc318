"""Follows infinite values through a program, to detect that it only converts them to integers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote.numerics.ranges.unnoticed import can_be_read

__all__ = ["Spread"]


class Spread:
    """The tensors that contain the infinite values of an origin, and the tensors computed from them.

    T5's bucket of position 0 is log(0) = -inf, cast to an integer that is not used. That is benign. So the values of an
    origin are benign if each tensor that contains some was passed on or cast to integers, and the last ones were cast.

    Args:
        origin: The results of the origin.
    """

    def __init__(self, origin: Iterable[torch.Tensor]) -> None:
        self._ended: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._lost = False  # some values are in a tensor that cannot be followed, such as a sparse one
        self._add(origin)

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for reference in map(_storage, tensors):
            if reference is None:
                self._lost = True
            else:
                self._ended[reference.cdata] = reference, False

    def end(self, tensor: torch.Tensor) -> bool:
        """Called when a tensor is cast to integers or passed on. Returns whether it contains values of the origin."""
        reference = _storage(tensor)
        if reference is None or reference.cdata not in self._ended:
            return False
        self._ended[reference.cdata] = reference, True
        return True

    def pass_on(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Called when a call computes non-finite outputs from its inputs."""
        passed = [self.end(tensor) for tensor in inputs]
        if any(passed):
            self._add(outputs)

    @property
    def ended_well(self) -> bool:
        """Whether the values were only converted to integers."""
        return not self._lost and all(ended for _, ended in self._ended.values())


def _storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    if tensor.layout is not torch.strided or tensor.is_nested or not can_be_read(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())
