"""Devices in place of a GPU: enabled regions of "cuda" for fake tensors, and the stand-in of this project's tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["STAND_IN", "pretend_cuda", "stand_in"]

#: The device of host memory of tools/cuda_stand_in/, for options. Its tensors are of device type "cuda".
STAND_IN = "cuda-stand-in"


def stand_in() -> Any:
    """Returns the module `cuda_stand_in` in a process that has this device; None in others.

    Example:
        >>> stand_in() is None
        True
    """
    module = sys.modules.get("cuda_stand_in")
    return module if module is not None and module.running() else None


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda", stock's and ours, be enabled where there is no GPU.

    Example:
        >>> with pretend_cuda(), torch.autocast("cuda"):
        ...     torch.is_autocast_enabled("cuda")
        True
    """
    if torch.cuda.is_available():  # pragma: no cover: needs a GPU
        yield
        return
    # Functions, not mocks: a call of a mock takes longer than a region.
    with (
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", _no),
        mock.patch.object(torch.cuda, "is_bf16_supported", _yes),
    ):
        yield


def _no() -> bool:
    return False


def _yes(including_emulation: bool = True) -> bool:
    return True
