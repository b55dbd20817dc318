"""The second run of a call, under stock autocast, without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.checking.strided_copy import copy_with_strides
from torch_promote.checking.uninitialized_results import UNINITIALIZED
from torch_promote.observe.ops import overload_name

__all__ = ["StockRun", "written_results"]

_hooks: Any = torch._C._autograd

#: Arguments that an op may write to although its schema does not say so: batch and instance normalization in training.
_WRITTEN = frozenset({"running_mean", "running_var"})


@dataclass
class StockRun:
    """One run. Between `start` and `stop`, stock's cast cache is off, and the caller's saved-tensor hooks see nothing.

    With its cache on, stock could return stale results: it keeps using the old casts of weights that change inside a
    region. Hooks that count saved tensors, such as those of torch.utils.checkpoint, must not count those of this run.

    Attributes:
        results: The results; None if the run has not ended.
        error: The text of the error that the run raised; None if it raised none.
        has_hooks: Whether the caller has saved-tensor hooks. They may raise in the other run of the call.
    """

    results: list[Any] | None = None
    error: str | None = None
    has_hooks: bool = False
    _cache: bool = field(default_factory=torch.is_autocast_cache_enabled)
    _random: tuple[torch.Tensor, torch.Tensor | None] | None = None
    _shielded: bool = False

    def start(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> list[Any]:
        """Prepares the run.

        Args:
            op: The overload.
            args: All its arguments, in the schema's order.

        Returns:
            For each argument, a copy if the op writes to it, otherwise None.
        """
        written = [
            a.name in _WRITTEN or (a.alias_info is not None and a.alias_info.is_write) for a in op._schema.arguments
        ]
        copies = [_copy(value) if writes else None for value, writes in zip(args, written, strict=True)]
        self._random = _random_state()
        torch.set_autocast_cache_enabled(False)
        if _hooks._saved_tensors_hooks_is_enabled():
            self.has_hooks = _hooks._top_saved_tensors_default_hooks(True) is not None
            _hooks._push_saved_tensors_default_hooks(_save_nothing, _save_nothing)
            self._shielded = True
        return copies

    def stop(self) -> None:
        """Restores the state. Does nothing if the run has been stopped already, or was never started."""
        if self._random is None:
            return
        _set_random_state(self._random)
        self._random = None
        torch.set_autocast_cache_enabled(self._cache)
        if self._shielded:
            _hooks._pop_saved_tensors_default_hooks()


def written_results(op: torch._ops.OpOverload, results: Sequence[Any]) -> list[Any]:
    """Returns an op's results, with None in place of those whose memory it leaves uninitialized.

    Results of an op that writes to its arguments are detached, since stock wrote to detached copies.

    Example:
        >>> written_results(torch.ops.aten.mkldnn_rnn_layer.default, [1, 2, 3, 4])
        [1, 2, 3, None]
    """
    left_out = UNINITIALIZED.get(overload_name(op), ())
    if op._schema.is_mutable:
        results = _detached(list(results))
    return [None if position in left_out else result for position, result in enumerate(results)]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_detached(element) for element in value] if isinstance(value, list) else value


def _save_nothing(saved: object) -> None:
    """Saves None: no backward goes through this run, and a saved result would keep itself and its graph alive."""


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return copy_with_strides(value)
    return [_copy(element) for element in value] if isinstance(value, list) else value


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
