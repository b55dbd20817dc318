"""Caches the counts of recent results, for calls that return the same memory: views and composite ops."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote.checking.overloads import find_overload
from torch_promote.numerics.ranges.float_bits import in_memory_order

__all__ = ["RecentCounts"]

_MOST = 64


class RecentCounts:
    """Caches counts while the memory lives and no observed call writes to a tensor.

    Only tensors without gaps in memory are cached: another tensor with the same elements has the same counts in any
    shape. Programs may write to memory from `torch.empty` or `Tensor.numpy` without an op, so results of `torch.empty`
    and similar ops are not cached, and `Tensor.numpy` clears the cache.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, tuple[StorageWeakRef, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def forget_before(self, name: str, has_inputs: bool) -> bool:
        """Clears the cache if an op may write to memory. Returns whether its results may be cached."""
        writes = find_overload(name)._schema.is_mutable or name in _LENDING
        if writes:
            with self._lock:
                self._known.clear()
        return has_inputs and not writes and not name.partition("::")[2].startswith(_MAKING)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the counts of a tensor with the same elements, or None. Call it in `unnoticed`."""
        key = _key(tensor)
        with self._lock:
            found = None if key is None else self._known.get(key)
        return None if found is None or found[0].expired() else found[1]

    def put(self, tensor: torch.Tensor, counts: torch.Tensor) -> None:
        """Caches the counts of a tensor. Call it in `unnoticed`."""
        key = _key(tensor)
        if key is None:
            return
        with self._lock:
            self._known[key] = StorageWeakRef(tensor.untyped_storage()), counts
            if len(self._known) > _MOST:
                self._known.popitem(last=False)


#: The ops that `Tensor.numpy` and `Tensor.data` call.
_LENDING = frozenset({"aten::detach", "aten::alias", "aten::resolve_conj", "aten::resolve_neg"})
#: Prefixes of the names of ops that create a tensor like another one.
_MAKING = ("empty", "new_", "zeros", "ones", "full", "rand")


def _key(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg() or tensor.is_inference():
        return None
    if not in_memory_order(tensor).is_contiguous():
        return None
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version
