"""Nested and failing captures, and captures of a forward and its backward: each graph has the casts that it needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_stand_in
import torch_promote as tp
from helpers.captured_forwards import Captured, Region, layers, ours, stock
from helpers.comparison import assert_same
from torch_promote import _C

pytestmark = pytest.mark.usefixtures("stand_in", "no_cast_checks")


@pytest.fixture(autouse=True)
def graphs_are_gone(nothing_persists: None) -> Iterator[None]:
    yield
    gc.collect()


def pair() -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
    return first, last, torch.linspace(-1, 1, 32, device="cuda").view(4, 8)


@torch.no_grad()
def test_a_capture_that_begins_and_ends_inside_of_another() -> None:
    def run(region: Region) -> Tensor:
        first, last, x = pair()
        with region():
            last(first(x))
        outer, inner = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.Stream()):
            outer.capture_begin(capture_error_mode="thread_local")
            with region():
                hidden = first(x)
            with torch.cuda.stream(side):
                inner.capture_begin(capture_error_mode="thread_local")
            with region():
                result = last(hidden)
            with torch.cuda.stream(side):
                inner.capture_end()
            outer.capture_end()
        for weight in [*first.parameters(), *last.parameters()]:
            weight.mul_(2)
        del inner
        gc.collect()
        outer.replay()
        return result.clone()

    assert_same(run(ours), run(stock))


@torch.no_grad()
def test_a_capture_that_does_not_begin_leaves_the_one_under_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.cuda.CUDAGraph) -> None:
        raise RuntimeError("already capturing")

    def run(region: Region) -> Tensor:
        first, last, x = pair()
        with region():
            last(first(x))
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with region():
                hidden = first(x)
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda.CUDAGraph, "reset", fail)  # the stand-in resets a graph before its capture
                with pytest.raises(RuntimeError, match="already capturing"):
                    other.capture_begin()
            with region():
                result = last(hidden)
        for weight in [*first.parameters(), *last.parameters()]:
            weight.mul_(2)
        graph.replay()
        return result.clone()

    assert_same(run(ours), run(stock))


@torch.no_grad()
def test_a_capture_that_ends_twice_has_its_casts() -> None:
    first, last, x = pair()
    with ours():
        last(first(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ours():
        result = last(first(x))
    _C.end_graph(graph._torch_promote_casts)  # type: ignore[attr-defined]
    first.weight.mul_(2)
    graph.replay()
    with stock():
        assert_same(result.clone(), last(first(x)))


def test_a_replay_whose_casts_fail_leaves_them_to_the_next() -> None:
    class FailingCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "copy" in func.name():
                raise RuntimeError("no copies")
            return func(*args, **(kwargs or {}))

    model = layers()
    captured = Captured(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    with FailingCopies(), pytest.raises(RuntimeError, match="no copies"):
        captured.graph.replay()
    with stock(), torch.no_grad():
        assert_same(captured(), model(captured.x))


def test_a_graph_that_is_reset_keeps_no_casts() -> None:
    model = layers()
    captured = Captured(model)
    before = torch.cuda.memory_allocated()
    del captured.result
    captured.graph.reset()
    tp.clear_cache()
    casts = sum(p.numel() * 2 for p in model.parameters())
    assert torch.cuda.memory_allocated() <= before - casts


def test_the_memory_of_a_cast_is_recorded_on_the_stream_of_a_replay() -> None:
    """A graph may die before its replay is done, and the cast was allocated on another stream."""
    captured = Captured(layers())
    with torch.cuda.stream(torch.cuda.Stream()), cuda_stand_in.counting() as counts:
        captured.graph.replay()
    assert counts.data_ptrs_recorded == captured.known.reads


# --- what autograd saves in a capture


@pytest.mark.parametrize("frozen", [False, True])
def test_a_replay_between_those_of_a_forward_and_its_backward(frozen: bool) -> None:
    def run(region: Region) -> list[Tensor]:
        model, x = layers(), torch.linspace(-1, 1, 32, device="cuda").view(4, 8)
        for layer in list(model)[1:] if frozen else []:
            layer.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]

        def forward() -> Tensor:
            with region():
                return model(x).float().square().mean()

        torch.autograd.grad(forward(), trained)
        forth, back, evaluation = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(forth):
            loss = forward()
        with torch.cuda.graph(back):
            gradients = torch.autograd.grad(loss, trained)
        with torch.cuda.graph(evaluation), torch.no_grad():
            evaluated = forward()
        seen = []
        for _ in range(3):
            forth.replay()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
            evaluation.replay()
            back.replay()
            seen += [part.detach().clone() for part in (loss, evaluated, *gradients)]
        return seen

    assert_same(run(ours), run(stock))


def test_weights_that_change_between_the_captures_of_a_forward_and_its_backward() -> None:
    model, x = layers(), torch.linspace(-1, 1, 32, device="cuda").view(4, 8)

    def forward() -> Tensor:
        with ours():
            return model(x).float().square().mean()

    torch.autograd.grad(forward(), list(model.parameters()))
    forth, back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forth):
        loss = forward()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    with torch.cuda.graph(back):
        torch.autograd.grad(loss, list(model.parameters()))
