"""Tests that need a CUDA device: a GPU (pytest --device cuda) or the stand-in (pytest --device cuda-stand-in).

Without --device, nothing here is collected; tests/test_cuda.py runs each file on the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cuda_stand_in


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("device") == "cpu" else None


@pytest.fixture
def cuda() -> torch.device:
    """The device."""
    return torch.device("cuda", 0)


@pytest.fixture
def stand_in() -> Iterator[None]:
    """For tests of what only the stand-in has: counts, and settings."""
    if not cuda_stand_in.running():
        pytest.skip("asks the stand-in; run with --device cuda-stand-in")
    cuda_stand_in.reset()
    yield
    cuda_stand_in.reset()
