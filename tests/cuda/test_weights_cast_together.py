"""From the second region on, the weights of a training are cast by one kernel: NOTE [ Weights cast together ]."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cuda_stand_in
import torch_promote as tp
from helpers.casts import CastCount
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16)
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)
LAYERS = 6


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    tp.clear_cache()
    yield
    tp.clear_cache()


class Layers(nn.Module):
    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

    def forward(self, x: Tensor, skip: frozenset[int] = frozenset()) -> Tensor:
        for at, layer in enumerate(self.layers):
            if at not in skip:
                x = torch.tanh(layer(x))
        return x


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().cuda()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32, device="cuda").view(4, 8)


def casts_of(action: Callable[[], Any]) -> tuple[int, int]:
    """How many casts of float32 tensors an action launches one by one, and how many together with others."""
    with cuda_stand_in.counting() as counts:
        action()
    return counts.kernels["aten::copy_"], counts.kernels["aten::_foreach_copy_"]


def forward(region: Callable[..., Any], model: nn.Module, **options: Any) -> Tensor:
    with region():
        return model(batch().bfloat16(), **options).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, region: Callable[..., Any] = ours) -> Tensor:
    loss = forward(region, model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def trained() -> tuple[Layers, torch.optim.Optimizer]:
    """A model after its first step."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


# Casts in a forward beside those of the weights: the input's, the loss's.
BESIDE = 2


@pytest.mark.parametrize("cache", ["weights", "all", "persistent"])
@pytest.mark.parametrize("foreach", [False, True])
def test_one_kernel_from_the_second_step_on(cache: str, foreach: bool) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    region = functools.partial(ours, cache=cache)
    assert casts_of(lambda: forward(region, model)) == (LAYERS + BESIDE, 0)
    tp.clear_cache()
    step(model, optimizer, region)
    tp.clear_cache()
    for _ in range(3):
        assert casts_of(lambda: forward(region, model)) == (BESIDE, 1)
        tp.clear_cache()
        step(model, optimizer, region)
        tp.clear_cache()


def test_bits_nodes_and_memory_are_stocks() -> None:
    def run(region: Callable[..., Any]) -> list[Tensor]:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen = []
        for _ in range(4):
            with region():
                loss = (model(batch()) + model(batch() * 2)).float().square().mean()
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    for mine, theirs in zip(run(ours), run(stock), strict=True):
        assert_same(mine, theirs)


def test_the_casts_are_freed_layer_by_layer(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, optimizer = trained

    def peak(region: Callable[..., Any]) -> int:
        with cuda_stand_in.counting() as counts:
            step(model, optimizer, region)
        return counts.peak_bytes

    theirs = peak(stock)
    assert casts_of(lambda: forward(ours, model))[1] == 1
    assert peak(ours) <= theirs


def test_each_cast_has_memory_of_its_own(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    x = batch().bfloat16().requires_grad_()
    with ours():
        nodes = [torch.mm(x, layer.weight).grad_fn for layer in model.layers]
    saved: list[Any] = [node._saved_mat2 for node in nodes]  # type: ignore[union-attr]
    assert len({cast.untyped_storage().data_ptr() for cast in saved}) == LAYERS


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


def test_two_wasted_casts_end_it(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    assert casts_of(lambda: forward(ours, model, skip=frozenset({2}))) == (BESIDE, 1)
    assert casts_of(lambda: forward(ours, model)) == (1 + BESIDE, 1)
    assert casts_of(lambda: forward(ours, model, skip=frozenset({2}))) == (BESIDE, 1)
    for _ in range(2):
        assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)


def test_each_block_of_a_checkpointed_model_has_its_own() -> None:
    model = layers()

    def blocks() -> Tensor:
        x = batch().requires_grad_()
        for start in range(0, LAYERS, 2):

            def run(x: Tensor, start: int = start) -> Tensor:
                with ours():
                    return model.layers[start + 1](model.layers[start](x))

            x = checkpoint(run, x, use_reentrant=False)
        return x

    def train() -> None:
        blocks().float().sum().backward()

    train()
    _, together = casts_of(train)
    assert together == LAYERS  # three blocks, each twice


def test_inputs_that_want_gradients_are_other_tensors_each_time(
    trained: tuple[Layers, torch.optim.Optimizer],
) -> None:
    model, _ = trained

    def run() -> None:
        x = batch().requires_grad_()
        with ours():
            model(x)

    run()
    for _ in range(3):
        assert casts_of(run) == (1, 1)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_each_is_cast_when_it_is_needed(
    trained: tuple[Layers, torch.optim.Optimizer], without: Callable[[], Any]
) -> None:
    """Its memory would come earlier than stock's."""
    model, _ = trained
    with without():
        assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)


def test_tools_see_each_cast(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    with CastCount() as count:
        assert casts_of(lambda: forward(ours, model))[1] == 0
    assert count.casts == LAYERS + 1  # and the input's


def test_two_dtypes_in_one_region() -> None:
    model = layers()
    other = nn.Linear(8, 8, bias=False).cuda()

    def run() -> Tensor:
        with ours(dtype=torch.bfloat16):
            x = model(batch().bfloat16())
            with ours(dtype=torch.float16):
                return other(model.layers[0](x.half())).float().sum()

    run()
    copies, together = casts_of(run)
    assert together == 2
    assert copies <= BESIDE + 1


def test_swapped_tensors_keep_their_own_casts(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained
    forward(ours, model)
    first, last = model.layers[0].weight, model.layers[-1].weight
    torch.utils.swap_tensors(first, last)
    for _ in range(3):
        assert_same(forward(ours, model), forward(stock, model))


def test_weights_that_die_leave_nothing(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    before = torch.cuda.memory_allocated()
    model = layers()
    for _ in range(3):
        forward(ours, model)
    del model
    assert torch.cuda.memory_allocated() == before
    for _ in range(100):  # plans of dead weights, at addresses that come again
        model = layers()
        for _ in range(2):
            assert_same(forward(ours, model), forward(stock, model))


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
    """Before the first use of what its graph writes to, which the region may not begin with."""
    model, _ = trained
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        model.layers[2].weight.mul_(1.5)
    forward(ours, model)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    assert casts_of(lambda: forward(ours, model)) == (LAYERS + BESIDE, 0)
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)


def test_a_region_that_goes_on_for_a_whole_training_remembers_no_inputs() -> None:
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"))

    def use(count: int) -> int:
        for _ in range(count):
            torch.mm(torch.ones(2, 8, device="cuda", requires_grad=True), weight)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with ours():
        before = use(2_000)
        assert use(20_000) - before < 3 << 20
