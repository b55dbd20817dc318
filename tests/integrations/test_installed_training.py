"""Training under `install` has the bits of training under PyTorch's regions, in user and library code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote import _C

pytestmark = [
    pytest.mark.usefixtures("nothing_installed"),
    pytest.mark.filterwarnings("ignore:`torch.cpu.amp"),
    pytest.mark.filterwarnings("ignore:.*[Nn]ested tensor"),
]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around", ["stock", "nothing"])
def test_checkpoint_of_a_forward_in_stock(around: str, use_reentrant: bool) -> None:
    """Recomputed in a region of stock's, and regions that the function itself opens in ours, as in the forward."""
    seen: list[tuple[bool, torch.dtype]] = []
    weight = torch.randn(4, 4, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        before = _C.depth()
        y = nn.functional.linear(x, weight)
        with torch.autocast("cpu"):
            seen.append((_C.depth() > before, y.dtype))
            return nn.functional.linear(y, weight).float()

    before = tp.set_default_policy(tp.Policy.stock().override({"linear": "fp32"}))
    try:
        with tp.installed_as():
            with tp.stock_autocast("cpu", enabled=around == "stock"):
                y = checkpoint(inner, torch.randn(2, 4, requires_grad=True), use_reentrant=use_reentrant)
            y.sum().backward()
    finally:
        tp.set_default_policy(before)
    assert seen == [(True, torch.bfloat16 if around == "stock" else torch.float32)] * 2


def test_what_stays_pytorchs() -> None:
    """Without a region there is nothing to replace."""

    @contextlib.contextmanager
    def by_hand() -> Iterator[None]:
        torch.set_autocast_enabled("cpu", True)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled("cpu", False)

    with tp.installed_as(policy="off"), by_hand():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert _C.depth() == 0
