"""A replacement for the parts of expecttest that PyTorch's samples import, for offline machines without the package.

`torch.testing._internal.common_utils` derives its TestCase from this one. `make gpu` uses PyTorch's samples, which
compare no expected outputs.
"""

from __future__ import annotations

import unittest
from typing import Any

__all__ = ["TestCase", "assert_expected_inline"]


class TestCase(unittest.TestCase):
    """A test case without comparisons with expected outputs."""

    longMessage = True

    def assertExpectedInline(self, *args: Any, **kwargs: Any) -> None:  # noqa: N802 (the name in expecttest)
        """Raises: expecttest is not installed."""
        assert_expected_inline(*args, **kwargs)


def assert_expected_inline(*args: Any, **kwargs: Any) -> None:
    """Raises: expecttest is not installed."""
    raise NotImplementedError("comparing expected outputs needs the package expecttest: pip install expecttest")
