"""Numbers tensors, to recognize repeated casts of a tensor without keeping it alive."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["TensorNumbers"]


@dataclass(slots=True)
class _Known:
    reference: weakref.ref[torch.Tensor]
    number: int
    version: int
    uses: Counter[Any] = field(default_factory=Counter)  # for this version only


class TensorNumbers:
    """Assigns each tensor a number, shared by its views, and counts the uses of its content."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._last = 0
        self._lock = threading.Lock()

    def count(self, tensor: torch.Tensor, what: torch.dtype) -> tuple[int, int]:
        """Returns the tensor's number, and the number of earlier calls with the same content and `what`."""
        owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        known = self._known.get(id(owner))
        if known is None or known.reference() is not owner:
            known = self._add(owner)
        version = _version(tensor)
        if known.version != version:
            known.version, known.uses = version, Counter()
        content = (what, _place(tensor))
        before = known.uses[content]
        known.uses[content] = before + 1
        return known.number, before

    def _add(self, tensor: torch.Tensor) -> _Known:
        address = id(tensor)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            known = self._known.get(address)
            if known is not None and known.reference is reference:
                del self._known[address]

        with self._lock:
            self._last += 1
            known = self._known[address] = _Known(weakref.ref(tensor, forget), self._last, _version(tensor))
        return known


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.storage_offset(), tensor.shape, tensor.stride()
