"""Tests that only a GPU can run: pytest --device cuda tests/gpu. The rest of the folder is `make gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.is_dir() or collection_path.name.startswith("test_")
    return None if is_test and config.getoption("device") == "cuda" else True
