"""Locks that are never left locked in a forked child."""

from __future__ import annotations

import os
import threading

__all__ = ["fork_safe_lock"]


def fork_safe_lock() -> threading.RLock:
    """Returns a lock that a forking thread acquires before the fork, and both processes release afterwards.

    A fork copies only the calling thread: a lock that another thread holds at that moment would stay locked in the
    child. Use it only for locks that live as long as the process. csrc/policy/fork_safe_mutex.h is the C++ counterpart.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
