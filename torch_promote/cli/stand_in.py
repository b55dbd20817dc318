"""Runs a command with --device cuda-stand-in: again, in a process that has the device before it imports PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch_promote
from torch_promote.checking.pretend_cuda import STAND_IN, stand_in
from torch_promote.errors import OptionError

__all__ = ["needs_another_process", "run_again"]


def needs_another_process(device: object) -> bool:
    """Whether a command's device is the stand-in, and this process does not have it.

    Example:
        >>> needs_another_process("cpu")
        False
    """
    return device == STAND_IN and stand_in() is None


def run_again(argv: Sequence[str] | None) -> int:
    """Runs the command line in a new process, and returns its exit status. A `main()` of a program is replaced by it.

    Args:
        argv: The arguments, without the program name. None: those of this process.

    Raises:
        OptionError: This is no source checkout.
    """
    tests = Path(torch_promote.__file__).parents[1] / "tools"
    if not tests.joinpath("cuda_stand_in", "__main__.py").exists():
        raise OptionError(
            f"device {STAND_IN!r} is made by the tests of torch_promote, which are not installed with the package. "
            "Run the command in a source checkout: make build, .venv/bin/python -m torch_promote. "
            "For dtypes, shapes and strides alone, parity has fake-cuda."
        )
    arguments = sys.argv[1:] if argv is None else argv
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "cuda_stand_in", "-m", "torch_promote", *arguments]
    if argv is None:  # the whole process is the command's: signals reach the other one as they would reach this one
        os.execve(sys.executable, command, environment)
    return subprocess.run(command, env=environment, check=False).returncode
