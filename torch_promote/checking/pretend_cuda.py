"""Enabled regions of "cuda" where there is no GPU, for fake tensors and for regions in which nothing runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

__all__ = ["pretend_cuda"]


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda", stock's and ours, be enabled where there is no GPU.

    Example:
        >>> with pretend_cuda(), torch.autocast("cuda"):
        ...     torch.is_autocast_enabled("cuda")
        True
    """
    if torch.cuda.is_available():
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
