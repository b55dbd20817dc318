"""Detects whether torch.autocast opens a region of ours: under the policy installed here, ours runs `mm` in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from helpers.probes import mm_dtype
from torch_promote.regions.installation import Installation

#: The name that programs got before anything was installed, and the methods that the class had.
FROM_BEFORE = torch.autocast
ENTER, EXIT = torch.autocast.__enter__, torch.autocast.__exit__

#: `mm_dtype()` in a region of the CPU, if it is ours and if it is PyTorch's.
OURS, STOCKS = torch.float32, torch.bfloat16

#: Arguments of `install` under which they differ.
MARKED = {"overrides": {"mm": "fp32"}}


def region_is() -> torch.dtype:
    """`mm_dtype()` in a region of torch.autocast."""
    with torch.autocast("cpu"):
        return mm_dtype()


def is_restored() -> bool:
    """Whether the class has its methods."""
    return torch.autocast.__enter__ is ENTER and torch.autocast.__exit__ is EXIT


def uninstall() -> None:
    """Removes everything that is installed."""
    while (installation := tp.installed()) is not None:
        installation.remove()


@pytest.fixture
def nothing_installed() -> Iterator[None]:
    """Uninstalls before the test, and checks that the class is restored after it."""
    before = tp.installed()
    uninstall()
    methods = torch.autocast.__enter__, torch.autocast.__exit__
    yield
    uninstall()
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == methods
    if before is not None:
        tp.install(policy=before.policy, overrides=before.overrides, cache=before.cache)


@pytest.fixture
def installed_marked(nothing_installed: None) -> Iterator[Installation]:
    """Installs a policy that distinguishes our regions from stock's."""
    with tp.install(**MARKED) as installation:
        assert mm_dtype() is torch.float32
        with torch.autocast("cpu"):
            assert mm_dtype() is OURS
        with tp.stock_autocast("cpu"):
            assert mm_dtype() is STOCKS
        yield installation
