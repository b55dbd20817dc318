"""A fixture that checks and restores the settings of a whole program: default policy and registered policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.testing._internal.common_utils import freeze_rng_state

import torch_promote as tp
from torch_promote import _C


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Checks that a test restores the settings."""
    assert tp.default_policy() is None
    assert not tp.registered_policies()
    with freeze_rng_state():
        yield
    tp.set_default_policy(None)
    assert not tp.registered_policies()
    with tp.my_autocast("cpu"):
        assert _C.policy_is_stock()
