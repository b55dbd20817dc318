"""Graphs read the casts of persistent regions where they lie: NOTE [ Graphs and persistent casts ]."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp
from helpers.captured_forwards import LAYERS, Captured, Region, casts_of, layers, ours, stock
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "no_cast_checks")


@pytest.fixture(autouse=True)
def graphs_are_gone(nothing_persists: None) -> Iterator[None]:
    yield
    gc.collect()


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "in place": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "copy_": lambda model: [p.copy_(torch.ones_like(p)) for p in model.parameters()],
}


@pytest.mark.parametrize("frozen", [False, True])
def test_replays_cast_nothing(frozen: bool) -> None:
    model = layers(frozen)
    captured, expected = Captured(model), Captured(model, stock)
    assert captured.known.reads == 2 * LAYERS
    assert not captured.known.may_write_to_all
    for _ in range(3):
        assert casts_of(captured) == (0, 0)
        assert_same(captured(), expected())


@pytest.mark.parametrize("change", CHANGES)
def test_one_kernel_after_a_change(change: str) -> None:
    model = layers()
    captured, expected = Captured(model), Captured(model, stock)
    for _ in range(2):
        with torch.no_grad():
            CHANGES[change](model)
        assert casts_of(captured) == (2 * LAYERS, 1)
        assert casts_of(captured) == (0, 0)
        assert_same(captured(), expected())


@pytest.mark.parametrize("fused", [False, True])
def test_one_kernel_after_a_step(fused: bool) -> None:
    model = layers()
    captured, expected = Captured(model), Captured(model, stock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        with ours():
            model(captured.x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert casts_of(captured) == (2 * LAYERS, 1)
        assert_same(captured(), expected())


def test_weights_that_others_share_are_cast_at_each_replay() -> None:
    model = layers()
    captured, expected = Captured(model), Captured(model, stock)
    shared = model[0].weight.data
    for _ in range(3):
        shared.mul_(2)  # changes no version that the weight has
        assert_same(captured(), expected())
    del shared
    captured()
    assert casts_of(captured) == (0, 0)


def test_a_graph_that_writes_to_the_weights_it_reads() -> None:
    def run(region: Region) -> list[Tensor]:
        model = layers()
        with torch.no_grad():
            captured = Captured(model, region, before=lambda: [p.mul_(1.5) for p in model.parameters()])
        return [*(captured() for _ in range(3)), *model.parameters()]

    assert_same(run(ours), run(stock))


def test_a_graph_that_writes_to_the_weights_another_reads() -> None:
    model = layers()
    reader, expected = Captured(model), Captured(model, stock)
    writer = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(writer):
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_same(reader(), expected())
    for _ in range(2):
        writer.replay()
        assert_same(reader(), expected())
        with ours(), torch.no_grad():
            mine = model(reader.x)
        with stock(), torch.no_grad():
            assert_same(mine, model(reader.x))


def test_a_graph_that_writes_to_the_weights_it_and_another_read() -> None:
    def run(region: Region) -> list[Tensor]:
        model = layers()
        with torch.no_grad():
            reader = Captured(model, region)
            writer = Captured(model, region, before=lambda: [p.mul_(1.5) for p in model.parameters()])
        return [*(captured() for _ in range(2) for captured in (reader, writer)), *model.parameters()]

    assert_same(run(ours), run(stock))


def test_a_graph_that_writes_to_weights_that_had_no_casts_then() -> None:
    first, second = layers(), layers()
    writer = torch.cuda.CUDAGraph()
    Captured(first)
    with torch.no_grad(), torch.cuda.graph(writer):
        for parameter in second.parameters():
            parameter.mul_(1.5)
    reader, expected = Captured(second), Captured(second, stock)
    for _ in range(2):
        writer.replay()
        assert_same(reader(), expected())


def test_a_whole_step() -> None:
    def run(region: Region) -> list[Tensor]:
        model, x = layers(), torch.linspace(-1, 1, 32, device="cuda").view(4, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device="cuda"), capturable=True)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            with region():
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(loss.clone())
        with region(), torch.no_grad():
            seen.append(model(x))
        return [*seen, *model.parameters()]

    assert_same(run(ours), run(stock))


def test_graphs_share_the_casts_of_a_weight() -> None:
    model = layers()
    first = Captured(model)
    before = torch.cuda.memory_allocated()
    second = Captured(model)
    assert second.known.reads == first.known.reads
    casts = sum(p.numel() * 2 for p in model.parameters())
    assert torch.cuda.memory_allocated() - before <= casts + 4096  # for code outside of graphs; and the results
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert casts_of(first) == (1, 1)
    assert casts_of(second) == (0, 0)


def test_a_capture_makes_no_cast_again() -> None:
    """It may run on a stream that has not waited for the weights."""
    model = layers()
    captured = Captured(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    graph = torch.cuda.CUDAGraph()
    with cuda_stand_in.counting() as counts, torch.cuda.graph(graph), ours(), torch.no_grad():
        result = model(captured.x)
    assert counts.casts == []
    assert graph._torch_promote_casts.reads == 2 * LAYERS  # type: ignore[attr-defined]
    assert casts_of(graph.replay) == (1, 1)
    with stock(), torch.no_grad():
        assert_same(result, model(captured.x))


def test_a_graph_keeps_its_casts_and_code_outside_has_others() -> None:
    model = layers()
    captured, expected = Captured(model), Captured(model, stock)
    with ours():
        loss = model(captured.x).float().sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    captured()  # overwrites the casts of the graph, and not those that the backward needs
    assert torch.autograd.grad(loss, [model[0].weight])[0].isfinite().all()
    tp.clear_cache()
    gc.collect()
    assert_same(captured(), expected())
    del model
    gc.collect()
    captured()


def test_casts_go_with_the_last_graph() -> None:
    model = layers()
    with ours(), torch.no_grad():
        model(torch.ones(4, 8, device="cuda"))
    tp.clear_cache()
    before = torch.cuda.memory_allocated()
    captured = Captured(model)
    del captured
    gc.collect()
    tp.clear_cache()
    assert torch.cuda.memory_allocated() == before


def test_without_a_warm_up_the_graph_casts() -> None:
    model = layers()
    x = torch.ones(4, 8, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ours(), torch.no_grad():
        result = model(x)
    assert graph._torch_promote_casts.reads == 0  # type: ignore[attr-defined]
    with torch.no_grad():
        model[0].weight.mul_(3)
    graph.replay()
    with stock(), torch.no_grad():
        assert_same(result, model(x))


def test_after_a_graph_that_nothing_is_known_of_all_casts_end() -> None:
    model = layers()
    captured = Captured(model)
    with ours(), torch.no_grad():
        model(captured.x)
    assert tp.cache_info()["persistent_entries"] == 2 * LAYERS
    unknown = torch.cuda.CUDAGraph()
    with torch.cuda.graph(unknown):
        torch.ones(2, device="cuda")
    del unknown._torch_promote_casts  # type: ignore[attr-defined]
    unknown.replay()
    assert tp.cache_info()["persistent_entries"] == 0
    assert casts_of(captured) == (2 * LAYERS, 1)


@pytest.mark.parametrize("on", ["capture", "replay"])
def test_replays_on_another_stream_wait_for_the_cast(on: str) -> None:
    model = layers()
    captured = Captured(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    side = torch.cuda.Stream()
    if on == "capture":
        captured()
    with torch.cuda.stream(side), cuda_stand_in.counting() as counts:
        captured()
        captured()
    assert counts.events_waited_for >= 1
