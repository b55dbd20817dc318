"""Training under `install` has the bits of training under PyTorch's regions, in user and library code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from fuzz.calls import Installed
from fuzz.drawing import draw_program
from fuzz.running import check, quiet
from fuzz.script import script_of
from helpers.comparison import assert_same
from helpers.models import made
from helpers.probes import leaves_no_trace
from helpers.program_comparison import grads
from torch_promote import _C

pytestmark = [
    pytest.mark.usefixtures("nothing_installed"),
    pytest.mark.filterwarnings("ignore:`torch.cpu.amp"),
    pytest.mark.filterwarnings("ignore:.*[Nn]ested tensor"),
]


def assert_like_stock(run: Callable[[], Any]) -> Any:
    """Fails unless `run` gives the same with and without `install`, and differs under the policy "off"."""
    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with leaves_no_trace(), tp.installed_as():
        result = run()
    assert_same(result, expected)
    torch.manual_seed(0)
    # An op may raise for mixed dtypes without casts.
    with tp.installed_as(policy="off"), pytest.raises((AssertionError, RuntimeError)):
        assert_same(run(), expected)
    return result


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_random_programs(cache: str) -> None:
    with quiet(), leaves_no_trace():
        for number in range(40):
            program = draw_program(8, number, "cpu", cache)
            verdict = check(program, functools.partial(Installed, cache=cache))
            assert not verdict.found, script_of(program, f"{number}: {verdict.detail}")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["the region around", "the region inside"])
def test_checkpoint(where: str, use_reentrant: bool) -> None:
    """The recomputation opens regions of torch.autocast: they are ours."""
    depths: list[int] = []

    def run() -> Any:
        model, x = made("qkv")
        x.requires_grad_()

        def inner(x: torch.Tensor) -> torch.Tensor:
            depths.append(_C.depth())
            with torch.autocast("cpu") if where.endswith("inside") else contextlib.nullcontext():
                return model(x)  # type: ignore[no-any-return]

        for _ in range(2):
            with torch.autocast("cpu", enabled=where.endswith("around")):
                output = checkpoint(inner, x, use_reentrant=use_reentrant)
            output.float().square().mean().backward()
        return output, grads(model, x)

    assert_like_stock(run)
    assert depths[:4] == [0] * 4
    assert all(depth > 0 for depth in depths[4:])


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
