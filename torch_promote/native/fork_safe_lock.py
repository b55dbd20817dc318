"""Locks that no fork leaves locked in the child."""

from __future__ import annotations

import os
import threading

__all__ = ["fork_safe_lock"]


def fork_safe_lock() -> threading.RLock:
    """Returns a lock that the thread that forks acquires first, and both processes release afterwards.

    A fork copies one thread: in the child, nobody would release a lock that another thread holds at that moment. For
    locks that live as long as the process. csrc/policy/fork_safe_mutex.h is the same for C++.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
