"""Comparison of two results as an assertion."""

from __future__ import annotations

from typing import Any

from torch_promote.checking.comparison import compare


def assert_same(ours: Any, stock: Any, what: str = "result") -> None:
    """Fails unless two results are equal in structure, dtype, shape, strides and bits.

    Results are tensors or nested containers of them. Fake tensors have no bits; everything else of them is compared.
    """
    differences = compare(ours, stock, what)
    assert not differences, "\n".join(f"{difference}, as stock has" for difference in differences)
