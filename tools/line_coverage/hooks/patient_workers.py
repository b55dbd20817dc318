"""A plugin of pytest: pytest-xdist waits for workers that write their counts, instead of killing them after 10 s."""

from __future__ import annotations

import pytest
from xdist.workermanage import NodeManager


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    NodeManager.EXIT_TIMEOUT = 300
