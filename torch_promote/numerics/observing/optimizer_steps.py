"""Notifies listeners after each optimizer step in this process.

NOTE [ One hook for all listeners ]
PyTorch iterates over its post-step hooks without a copy, so the optimizer raises if a hook adds or removes another one.
A trace that begins or ends at a step would do that. So all listeners share one hook, and may be added and removed
during notification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from torch_promote.integrations.compile import skip_frames
from torch_promote.native.fork_safe_lock import fork_safe_lock

__all__ = ["Listener", "watch_steps"]

Listener = Callable[[], None]

_lock = fork_safe_lock()
_listeners: list[Listener] = []
_hook: RemovableHandle | None = None


@contextmanager
def watch_steps(listener: Listener) -> Iterator[None]:
    """Calls a function after each optimizer step, on any thread, during a block. Compiled steps are not reported.

    Args:
        listener: The function to call. The newest listeners are called first.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> with watch_steps(lambda: print("a step")):
        ...     torch.optim.SGD([weight], lr=0.1).step()
        a step
    """
    global _hook
    try:
        with _lock:
            _listeners.append(listener)
            if _hook is None:
                skip_frames(_tell, _remove)
                # As register_optimizer_step_post_hook does it. The handle is kept first: an interrupt loses no hook.
                _hook = RemovableHandle(_global_optimizer_post_hooks)
                _global_optimizer_post_hooks[_hook.id] = _tell
        yield
    finally:
        try:
            _remove(listener)
        except BaseException:  # pragma: no cover: a signal handler raises
            _remove(listener)
            raise


def _remove(listener: Listener) -> None:
    global _hook
    with _lock:
        if listener in _listeners:  # not if an interrupt came before
            _listeners.remove(listener)
        if not _listeners and _hook is not None:
            _global_optimizer_post_hooks.pop(_hook.id, None)
            _hook = None


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        for listener in reversed(tuple(_listeners)):
            listener()
