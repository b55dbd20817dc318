"""An op in a namespace of PyTorch's collectives, which counts its calls: every rank has to make as many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def counted_collective() -> Iterator[tuple[Any, list[torch.dtype]]]:
    """Yields the op, which doubles a tensor, and the dtypes of its calls."""
    calls: list[torch.dtype] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        return x + x

    with torch.library._scoped_library("_dtensor", "FRAGMENT") as library:
        library.define("counted_by_tests(Tensor x) -> Tensor")
        library.impl("counted_by_tests", kernel, "CompositeExplicitAutograd")
        yield torch.ops._dtensor.counted_by_tests, calls
