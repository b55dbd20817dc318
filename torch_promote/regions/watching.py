"""Notifies watchers, such as a trace, of each region that is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_promote import _C
from torch_promote.extension import fork_safe_lock
from torch_promote.integrations.compile import skip_frames

__all__ = ["Watcher", "tell_watchers", "watch_regions"]

Watcher = Callable[[object], None]
"""A function that receives the owner of a region that has been entered: a `my_autocast` object, or, under `install`, a
torch.autocast object. It is called in the region's thread, from within `__enter__`, and must not raise."""

_lock = fork_safe_lock()
_watchers: list[Watcher] = []


@contextmanager
def watch_regions(watcher: Watcher) -> Iterator[None]:
    """Calls a watcher for each region that any thread enters during a block, except for regions of graphs.

    Args:
        watcher: The function to call.

    Example:
        >>> import torch_promote as tp
        >>> with watch_regions(print), tp.my_autocast("cpu"):
        ...     pass
        my_autocast('cpu')
    """
    skip_frames(_remove)
    with _lock:
        _watchers.append(watcher)
        _C.set_regions_watched(True)
    try:
        yield
    finally:
        _remove(watcher)


def _remove(watcher: Watcher) -> None:
    with _lock:
        _watchers.remove(watcher)
        _C.set_regions_watched(bool(_watchers))


def tell_watchers(owner: object) -> None:
    """Notifies the watchers that a region has been entered."""
    for watcher in tuple(_watchers):
        watcher(owner)
