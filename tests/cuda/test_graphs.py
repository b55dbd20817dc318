"""CUDA graphs on a GPU: compares a captured region, eagerly and at each replay, with stock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp

Region = Callable[[], AbstractContextManager[object]]

MODES = ("none", "weights", "persistent", "all")
OURS: dict[str, Region] = {mode: partial(tp.my_autocast, "cuda", torch.bfloat16, cache=mode) for mode in MODES}


def stock(mode: str) -> Region:
    """Stock's region for a mode: without its cache, each use of a weight has its own gradient."""
    return partial(tp.stock_autocast, "cuda", torch.bfloat16, cache_enabled=mode != "none")


STOCK = stock("none")


class Twice(nn.Module):
    """A weight that is used twice in a forward, so that its cast is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x).relu()))


def model() -> Twice:
    torch.manual_seed(0)
    return Twice().cuda()


def captured_training(region: Region, steps: int) -> list[Tensor]:
    """Captures a forward and a backward, and replays them with new inputs and weights that an optimizer changes."""
    net, x = model(), torch.zeros(16, 64, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def forward_and_backward() -> Tensor:
        with region():
            loss = net(x).float().square().mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)

    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_and_backward()
    results = []
    for step in range(steps):
        x.copy_(torch.randn(16, 64, generator=torch.Generator("cpu").manual_seed(step)))
        graph.replay()
        results += [loss.clone(), *(weight.grad.clone() for weight in net.parameters() if weight.grad is not None)]
        optimizer.step()
    return results


@pytest.mark.parametrize("mode", OURS)
def test_replayed_training_has_the_bits_of_stock(mode: str) -> None:
    expected, got = captured_training(stock(mode), 4), captured_training(OURS[mode], 4)
    assert len(expected) == 4 * 5
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("mode", OURS)
def test_a_cast_from_before_a_capture_is_not_in_the_graph(mode: str, grad: bool) -> None:
    net, x = model(), torch.randn(16, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with OURS[mode](), torch.set_grad_enabled(grad):
        net(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = net(x)
        eager = net(x)  # must not read what was captured and never computed
    graph.replay()
    assert torch.equal(captured, eager)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2)
    graph.replay()
    with STOCK(), torch.no_grad():
        assert torch.equal(captured, net(x))


def test_a_captured_optimizer_leaves_no_stale_cast() -> None:
    net, x = model(), torch.randn(16, 64, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), fused=True, capturable=True)
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        with torch.no_grad():
            with OURS["persistent"]():
                got = net(x)
            with STOCK():
                assert torch.equal(got, net(x))


@pytest.mark.parametrize("mode", ["weights", "persistent", "all"])
def test_streams_share_casts_only_when_they_are_done(mode: str) -> None:
    net, x = model(), torch.randn(16, 64, device="cuda")
    with STOCK(), torch.no_grad():
        expected = net(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(3):
        with OURS[mode](), torch.no_grad():
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(100_000)
                    results.append(net(x))
    torch.cuda.synchronize()
    assert len(results) == 12
    assert all(torch.equal(result, expected) for result in results)
