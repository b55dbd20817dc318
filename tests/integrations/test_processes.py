"""A fork inside a region."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, grads, values

# The autograd threads of a CUDA build do not survive a fork; PyTorch refuses a backward there.
CAN_GO_BACK = torch.version.cuda is None


def go_back(loss: torch.Tensor) -> None:
    if CAN_GO_BACK:
        loss.backward()


def in_a_fork(function: Callable[[], Any], folder: Path) -> Any:
    """Runs a function in a forked child."""
    file = folder / "result.pt"

    def run() -> None:
        torch.save(function(), file)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(timeout=60)
    if child.is_alive():
        child.kill()
        child.join()
        pytest.fail("the child did not end")
    assert child.exitcode == 0
    return torch.load(file)


def test_fork_inside_a_region(tmp_path: Path) -> None:
    """The child stays in the region with its cache, and both processes may change their own weights."""

    def train(region: Region) -> Any:
        model, x = nn.Linear(8, 8), torch.randn(4, 8)

        def go_on() -> Any:
            enabled = torch.is_autocast_enabled("cpu")
            losses = [model(x).square().mean()]
            go_back(losses[0])
            with torch.no_grad(), region(enabled=False):
                model.weight.add_(1.0)
            torch.clear_autocast_cache()
            losses.append(model(x).square().mean())
            return enabled, [loss.detach() for loss in losses], grads(model), values(model.parameters())

        with region():
            model(x)
            in_child = in_a_fork(go_on, tmp_path)
            in_parent = go_on()
        return in_child, in_parent

    in_child, in_parent = assert_like_stock(train)
    assert_same(in_child, in_parent, what="in the child against in the parent")
