"""A weight that is cast in advance is cast again if it was written to: NOTE [ Weights cast together ]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
from helpers.cast_together import BESIDE, LAYERS, Layers, batch, casts_of, forward, layers, ours, step, stock, trained
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "nothing_persists", "no_cast_checks")

__all__ = ["trained"]  # a fixture


def test_a_weight_that_changes_before_its_use_is_cast_again(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    x = batch()
    with ours():
        model.layers[0](x)
        with torch.no_grad():
            model.layers[3].weight.mul_(2)
            model.layers[4].weight.data = torch.ones(8, 8, device="cuda")
        results = [layer(x).clone() for layer in model.layers]
    with stock():
        expected = [layer(x).clone() for layer in model.layers]
    for mine, theirs in zip(results, expected, strict=True):
        assert_same(mine, theirs)


def through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def through_detach(weight: nn.Parameter) -> None:
    torch.autograd.graph.increment_version(weight.detach().mul_(2))


def under_a_preserved_version(weight: nn.Parameter) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
        weight.mul_(2)


def through_another_owner(weight: nn.Parameter) -> None:
    SHARED[0].fill_(0.5)


SHARED: list[Tensor] = []


@pytest.mark.parametrize("write", [through_data, through_detach, under_a_preserved_version, through_another_owner])
def test_a_write_without_a_version_before_the_use_is_seen(write: Callable[[nn.Parameter], None]) -> None:
    """As in a layer that clips its weight in its forward."""

    class Clipped(Layers):
        def forward(self, x: Tensor, skip: frozenset[int] = frozenset()) -> Tensor:
            for at, layer in enumerate(self.layers):
                if at == LAYERS - 2:
                    write(layer.weight)
                x = torch.tanh(layer(x))
            return x

    def run(region: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Clipped().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SHARED[:] = [model.layers[LAYERS - 2].weight.data] if write is through_another_owner else []
        losses = [step(model, optimizer, region) for _ in range(4)]
        SHARED.clear()
        return losses

    assert_same(run(ours), run(stock))


def test_a_fused_step_before_the_use_is_seen() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.layers[2:].parameters(), lr=1.0, fused=True)
    forward(ours, model).backward()
    x = batch()
    with ours():
        model.layers[0](x)
        optimizer.step()
        results = [layer(x) for layer in model.layers]
    with stock():
        expected = [layer(x) for layer in model.layers]
    for mine, theirs in zip(results, expected, strict=True):
        assert_same(mine, theirs)


def test_a_write_that_is_no_optimizers_step_is_waited_for(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    """Code that streams weights to the GPU waits for each just before its use."""
    model, _ = trained
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for layer in model.layers[1:]:
            layer.weight.copy_(torch.randn(8, 8))
    assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)


def test_a_write_through_data_between_regions_is_waited_for(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    with torch.cuda.stream(torch.cuda.Stream()):
        for layer in model.layers[1:]:
            layer.weight.data.copy_(torch.randn(8, 8))
    assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)


def test_weights_that_a_graph_steps_are_cast_at_their_use(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, optimizer = trained
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with cuda_stand_in.capturing():
        optimizer.step()
    for _ in range(3):
        assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)


def test_a_step_on_another_stream_is_waited_for(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, optimizer = trained
    forward(ours, model).backward()
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizer.step()
    assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)


def test_a_forward_on_another_stream(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    with torch.cuda.stream(torch.cuda.Stream()):
        assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
        assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)


@pytest.mark.parametrize("cache", ["weights", "all", "persistent"])
def test_a_replay_in_the_region_may_write_to_weights(cache: str) -> None:
    def run(region: Callable[..., Any]) -> list[Tensor]:
        model, x = layers(), batch()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            model.layers[2].weight.mul_(1.5)
        seen = []
        for _ in range(3):
            with region():
                hidden = model.layers[1](model.layers[0](x))
                graph.replay()
                seen.append(model.layers[2](hidden))
        return seen

    assert_same(run(functools.partial(ours, cache=cache)), run(stock))


def test_a_replay_on_another_stream_is_waited_for(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    """The replay comes before the first use of a weight that its graph writes to."""
    model, _ = trained
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        model.layers[2].weight.mul_(1.5)
    forward(ours, model)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)
