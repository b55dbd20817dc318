"""Forks the process repeatedly while its threads work, and detects children that hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

#: The time limit of a child.
SECONDS = 20


def fork_for(seconds: float, in_child: Callable[[], object], enough: Callable[[], bool] = lambda: True) -> list[int]:
    """Forks children that call a function and end: at least three, until the time is over and `enough` returns true.

    It stops when a child hangs.

    Returns:
        The number of children, and the number that hung.
    """
    forks = hung = 0
    started = time.monotonic()
    while (forks < 3 or time.monotonic() - started < seconds or not enough()) and not hung:
        child = os.fork()
        if child == 0:
            in_child()
            os._exit(0)
        forks += 1
        deadline = time.monotonic() + SECONDS
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                hung += 1
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.001)
    return [forks, hung]
