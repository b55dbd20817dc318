"""For programs of tests: forks the process again and again while its threads work, and looks whether a child hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

#: How long a child may take.
SECONDS = 20


def fork_for(seconds: float, in_child: Callable[[], object], enough: Callable[[], bool] = lambda: True) -> list[int]:
    """Forks children that call a function and end: three at least, until the time is over and `enough` says so.

    It stops when a child hangs.

    Returns:
        How many children there were, and how many of them hung.
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
