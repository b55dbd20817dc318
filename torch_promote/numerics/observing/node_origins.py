"""Finds the forward call that recorded an autograd node, by the node's sequence number."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from torch_promote.numerics.observing.running_modules import RunningModules

__all__ = ["NodeOrigins", "Origin"]

#: The number of nodes remembered per thread. The oldest are dropped.
_MOST = 200_000
#: A node that no op recorded, such as that of an autograd.Function, gets its predecessor's origin within this distance.
_NEAR = 64


class Origin(NamedTuple):
    """The origin of a node.

    Attributes:
        module: The path of the module.
        line: "path:number".
    """

    module: str
    line: str


class NodeOrigins:
    """The origins of the nodes that were recorded since the trace began.

    PyTorch counts sequence numbers per thread, and a node does not store its thread. In a backward that this thread
    called, they are assumed to be the thread's own; in autograd's threads, those of the first thread.
    """

    def __init__(self, modules: RunningModules) -> None:
        self._modules = modules
        self._first: dict[int, Origin] = {}
        self._by_thread = {threading.get_ident(): self._first}
        self._next = threading.local()

    @staticmethod
    def next_number() -> int:
        """The sequence number of the next node of this thread."""
        return torch._C._autograd._get_sequence_nr()

    def add_between(self, first: int, origin: Origin) -> None:
        """Remembers the nodes recorded between two calls: they belong to the autograd.Function that makes the second.

        Args:
            first: The next number at the start of the second call.
            origin: The origin of that call.
        """
        before = getattr(self._next, "number", first)
        if before < first:
            self._add(before, first, origin)
        self._next.number = first

    def add(self, first: int, origin: Origin) -> None:
        """Remembers the nodes recorded since the next number was `first`, unless an inner call did so."""
        last = self.next_number()
        if first != last:
            self._add(first, last, origin)
            self._next.number = last

    def _add(self, first: int, last: int, origin: Origin) -> None:
        known = self._by_thread.setdefault(threading.get_ident(), {})
        for number in range(first, last):
            known.setdefault(number, origin)
        if len(known) > _MOST:
            for number in list(known)[: _MOST // 2]:
                del known[number]

    def of_running_node(self, called_here: bool = True) -> Origin | None:
        """The origin of the node whose backward runs in this thread; None if it is unknown.

        Args:
            called_here: Whether this thread has called the backward.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        if hasattr(node, "variable"):  # AccumulateGrad
            path = self._modules.path_of_parameter(node.variable)
            return None if path is None else Origin(path, "")
        number = node._sequence_nr()
        own = self._by_thread.get(threading.get_ident(), {})
        # Other autograd threads may add and drop nodes meanwhile.
        others = [known for known in list(self._by_thread.values()) if known is not own]
        threads = [own, *others] if called_here else [*others, own]
        for known in threads:
            origin = known.get(number)
            if origin is not None:
                return origin
        near = (self._first.get(one) for one in range(number - 1, number - _NEAR, -1))
        return next((origin for origin in near if origin is not None), None)
