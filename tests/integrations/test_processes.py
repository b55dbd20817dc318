"""Several processes: DistributedDataParallel and FSDP2 over gloo, forks, and workers that load data."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from helpers import two_processes
from helpers.comparison import assert_same
from helpers.gloo_ranks import in_ranks
from helpers.program_comparison import Region, assert_like_stock, grads, values


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """The results of a training in two processes. It runs once, because starting processes takes most of the time."""
    functions = {"training": two_processes.training}
    return [results["training"] for results in in_ranks(functions, 2, tmp_path_factory.mktemp("two_processes"))]


@pytest.mark.parametrize("strategy", two_processes.STRATEGIES)
def test_training_in_two_processes(trained: list[dict[Any, Any]], strategy: str) -> None:
    for results in trained:
        assert_same(results[strategy, "ours"], results[strategy, "stock"])
        if (strategy, "silenced") in results:
            with pytest.raises(AssertionError):
                assert_same(results[strategy, "silenced"], results[strategy, "stock"])


def test_the_two_processes_trained_together(trained: list[dict[Any, Any]]) -> None:
    """Otherwise the test above would pass for two independent processes."""
    (losses, weights), (others_losses, others_weights) = (results["ddp", "ours"] for results in trained)
    assert_same(weights, others_weights)
    assert not torch.equal(losses[0][0], others_losses[0][0]), "each process has data of its own"
    shards = [results["fsdp2", "ours"][1] for results in trained]
    assert [tuple(shard.shape) for shard in shards[0][:2]] == [(6, 8), (6,)], "each holds a half of the first layer"


# --- forks


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


# --- data loaders


class Rows(Dataset[Any]):
    """Rows that are computed in the worker, and whether autocast is on there."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(8.0).reshape(2, 4) + index
        return row, row @ row.t(), torch.is_autocast_enabled("cpu")
