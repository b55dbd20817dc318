"""Whether the cross-check's dispatch observer is on in this thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_promote import _C

KEY = torch._C._dispatch_key_parse(_C.dispatch_observer_key())


def is_on() -> bool:
    included = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    observer = _C.swap_observer(None)
    _C.swap_observer(observer)
    assert included == (observer is not None)
    return included


@pytest.fixture(autouse=True)
def off_before_and_after() -> Iterator[None]:
    assert not is_on()
    yield
    assert not is_on()
