"""Runs a program as a command's child process. Signals go to the program, whose end is the command's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

__all__ = ["end_as", "run_to_end"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the program with all files that are open for it, such as those of `<(command)` in a shell."""
    return subprocess.Popen(command, env=variables, close_fds=False)


def run_to_end(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Runs a program, and passes signals on to it until it ends.

    Args:
        command: The command line.
        variables: The environment.

    Returns:
        The ended program. Its return code is negative if a signal ended it.
    """
    program: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if program is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():  # Ctrl-C reaches the program by itself
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON if _is_ours(number)}
    try:
        program = start(command, variables)
        for number in early:
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)
        program.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return program


def _is_ours(number: signal.Signals) -> bool:
    return signal.getsignal(number) not in (signal.SIG_IGN, None)  # nohup: ignored, in the program as well


def _in_foreground() -> bool:
    """Whether this process is in the group to which the terminal sends Ctrl-C."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def end_as(status: int, is_process: bool) -> int:
    """Returns the exit status for a program's status. If a signal ended the program, so it does this process.

    Args:
        status: The status that `wait_for` returned.
        is_process: Whether this process is the command's alone. Otherwise it stays alive.

    Example:
        >>> end_as(3, False), end_as(-15, False)
        (3, 143)
    """
    if status >= 0:
        return status
    if is_process:  # pragma: no cover: the signal ends the process before it can write the counts
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return 128 - status
