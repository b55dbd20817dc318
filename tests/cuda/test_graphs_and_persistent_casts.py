"""Graphs read the casts of persistent regions where they lie: NOTE [ Graphs and persistent casts ]."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16, cache="persistent")
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)
LAYERS = 3

Region = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    tp.clear_cache()
    yield
    gc.collect()
    tp.clear_cache()


def layers(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))).cuda().requires_grad_(not frozen)


class Captured:
    """A forward, captured after one that warms up."""

    def __init__(self, model: nn.Module, region: Region = ours, before: Callable[[], object] = lambda: None) -> None:
        self.x = torch.linspace(-1, 1, 32, device="cuda").view(4, 8).bfloat16()

        def forward() -> Tensor:
            before()
            with region(), torch.no_grad():
                return model(self.x)

        forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = forward()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result.clone()

    @property
    def known(self) -> Any:
        return self.graph._torch_promote_casts  # type: ignore[attr-defined]


def casts_of(run: Callable[[], Any]) -> tuple[int, int]:
    """How many casts of float32 an action makes, and in how many kernels."""
    with cuda_stand_in.counting() as counts:
        run()
    casts = [cast for cast in counts.casts if cast.source == "Float"]
    return len(casts), len({cast.launch for cast in casts})


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


# --- within a capture, "all" shares what it shares outside


@pytest.mark.parametrize("frozen", [False, True])
def test_activations_and_frozen_weights_are_shared_within_a_capture(frozen: bool) -> None:
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)).cuda().requires_grad_(not frozen)
    x = torch.linspace(-1, 1, 32, device="cuda").view(4, 8)
    results = {}
    for name, region in {"stock": stock, "all": functools.partial(ours, cache="all")}.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = x + 1
            with region():
                out = [head(hidden) for head in heads for _ in range(2)]
        x.mul_(0.5)
        casts = casts_of(graph.replay)[0]
        results[name] = (casts, [part.clone() for part in out])
        x.mul_(2)
    assert results["all"][0] == 1 + 3
    assert results["stock"][0] == 6 + (6 if frozen else 3)
    assert_same(results["all"][1], results["stock"][1])


def test_a_cast_from_outside_is_not_used_in_a_capture() -> None:
    head = nn.Linear(8, 8, bias=False).cuda().requires_grad_(False)
    x = torch.ones(4, 8, device="cuda")
    with ours(cache="all"):
        head(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = head(x)
        x.fill_(2)
        graph.replay()
        with torch.no_grad():
            assert_same(out, torch.full((4, 8), 2.0, device="cuda").bfloat16() @ head.weight.bfloat16().t())


# --- captures and graphs that end otherwise


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
