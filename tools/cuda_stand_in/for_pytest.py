"""The option --device of this project's tests. conftest.py calls these functions.

conftest.py imports torch, and is imported before pytest parses its options. So the option is read from the command
line, or from the environment in the processes of pytest-xdist, which have another command line.
"""

from __future__ import annotations

import os
import sys

import pytest

import cuda_stand_in

DEVICES = ("cpu", "cuda", "cuda-stand-in")
STAND_IN = "cuda-stand-in"
#: Set for the worker processes of pytest-xdist.
VARIABLE = "TORCH_PROMOTE_TEST_DEVICE"


def start_if_asked() -> None:
    """Starts the stand-in if --device names it."""
    if _asked(sys.argv) == STAND_IN and cuda_stand_in.why_not() is None and "torch" not in sys.modules:
        cuda_stand_in.start()


def _asked(argv: list[str]) -> str:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return os.environ.get(VARIABLE, "")
    asked = ""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--device"):
            asked = word.partition("=")[2] or following
    return asked


def add_option(parser: pytest.Parser) -> None:
    """Declares the option."""
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="cuda: run the tests of tests/cuda/ on a GPU; cuda-stand-in: on a CUDA device made of host memory",
    )


def check(config: pytest.Config) -> None:
    """Checks that the device is available."""
    device = config.getoption("device")
    os.environ[VARIABLE] = device
    if device == STAND_IN and not cuda_stand_in.running():
        reason = cuda_stand_in.why_not() or "torch was imported before tests/conftest.py: name a folder of tests/."
        raise pytest.UsageError(f"--device {STAND_IN}: {reason}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: PyTorch finds no GPU. Without one, use --device cuda-stand-in.")
