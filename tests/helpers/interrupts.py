"""A program that interrupts a loop of empty regions, and counts how often a region stays open.

    python -m helpers.interrupts KIND INTERRUPTS       # KIND: stock, my_autocast, promotion or installed

It prints how many interrupts left a region open.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import torch_promote as tp
from torch_promote import _C

Make = Callable[[], AbstractContextManager[Any]]
KINDS: dict[str, Make] = {
    "stock": lambda: tp.stock_autocast("cpu", torch.bfloat16),
    "my_autocast": lambda: tp.my_autocast("cpu"),
    "promotion": lambda: tp.promotion("numpy"),
    "installed": lambda: torch.autocast("cpu", torch.bfloat16),
}


class InterruptError(Exception):
    """Raised by the signal handler, as KeyboardInterrupt is by Python's."""


def _raise(*_: object) -> None:
    raise InterruptError


def count_left_open(make: Make, interrupts: int) -> int:
    """Interrupts a loop of regions at different moments, and ends by hand what stays open."""
    left_open = 0
    region = make()
    for number in range(interrupts):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + number % 97 * 1.3e-6)
            while True:
                with region:
                    pass
        except InterruptError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if _C.depth() > 0:
            left_open += 1
            _C.suspend_regions(0)
        elif torch.is_autocast_enabled("cpu"):
            left_open += 1
            torch.set_autocast_enabled("cpu", False)
            torch.autocast_decrement_nesting()
    return left_open


def main(kind: str, interrupts: str) -> None:
    signal.signal(signal.SIGALRM, _raise)
    if kind == "installed":
        tp.install()
    print(count_left_open(KINDS[kind], int(interrupts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
