"""Blocks of find_nonfinite, and a fixture that checks that they restore all state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_promote import _C
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import installed

__all__ = ["HALF", "INF", "NAN", "big", "find", "nothing_is_left", "origin_of"]

INF, NAN = float("inf"), float("nan")
HALF = torch.float16


def find(program: Callable[[], Any], **options: Any) -> NonfiniteReport:
    with find_nonfinite(**options) as report:
        program()
    return report


def origin_of(program: Callable[[], Any]) -> tuple[str, str, str] | None:
    origin = find(program).origin
    return None if origin is None else (origin.op, origin.inner, origin.kind)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """Checks that a block leaves no observer, mode or hook active."""

    def state() -> tuple[Any, ...]:
        modules = torch.nn.modules.module
        key = torch._C._dispatch_key_parse(_C.dispatch_observer_key())
        return (
            len(modules._global_forward_hooks),
            len(modules._global_forward_pre_hooks),
            torch._C._dispatch_tls_is_dispatch_key_included(key),
            default_policy(),
            installed(),
        )

    before = state()
    yield
    assert state() == before
    observer = _C.swap_observer(None)
    _C.swap_observer(observer)
    assert observer is None


def big(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((4, 4), value, dtype=dtype)
