"""Tells whoever follows regions, such as a trace, of each one that is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_promote import _C
from torch_promote.native.fork_safe_lock import fork_safe_lock

__all__ = ["Watcher", "tell_watchers", "watch_regions"]

Watcher = Callable[[object], None]
"""Gets the owner of a region that has been entered: an object of `my_autocast`, or, under `install`, of torch.autocast.
It is called in the region's thread, from within `__enter__`, and must not raise."""

_lock = fork_safe_lock()
_watchers: list[Watcher] = []


@contextmanager
def watch_regions(watcher: Watcher) -> Iterator[None]:
    """Has a watcher told of the regions that any thread enters during a block. Regions of graphs are left out.

    Args:
        watcher: What is called.

    Example:
        >>> import torch_promote as tp
        >>> with watch_regions(print), tp.my_autocast("cpu"):
        ...     pass
        my_autocast('cpu')
    """
    with _lock:
        _watchers.append(watcher)
        _C.set_regions_watched(True)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            _C.set_regions_watched(bool(_watchers))


def tell_watchers(owner: object) -> None:
    """Tells the watchers of a region that has just been entered."""
    for watcher in tuple(_watchers):
        watcher(owner)
