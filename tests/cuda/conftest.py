"""Tests that need a CUDA device: a GPU (pytest --device cuda) or the stand-in (pytest --device cuda-stand-in).

Without --device, nothing here is collected; tests/test_cuda.py runs the files on the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cuda_stand_in


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("device") == "cpu" else None


@pytest.fixture(autouse=True)
def _needs_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("needs_gpu") and cuda_stand_in.running():
        pytest.skip("needs a GPU; run with --device cuda")


@pytest.fixture
def two_devices() -> None:
    """For tests that move tensors between devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and there is one")


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
