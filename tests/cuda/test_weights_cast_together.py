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
from helpers.cast_together import BESIDE, LAYERS, Layers, batch, casts_of, forward, layers, ours, step, stock, trained
from helpers.casts import CastCount
from helpers.comparison import assert_same
from helpers.probes import in_thread

pytestmark = pytest.mark.usefixtures("stand_in", "nothing_persists", "no_cast_checks")

__all__ = ["trained"]  # a fixture


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
    """A cast in advance would allocate its memory earlier than stock."""
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


def test_a_region_that_goes_on_for_a_whole_training_remembers_no_inputs() -> None:
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"))

    def use(count: int) -> int:
        for _ in range(count):
            torch.mm(torch.ones(2, 8, device="cuda", requires_grad=True), weight)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with ours():
        before = use(2_000)
        assert use(20_000) - before < 3 << 20


def test_the_oldest_plan_is_dropped() -> None:
    models = [Layers(2).cuda() for _ in range(65)]  # kMaxPlans, and one more
    for model in models:
        forward(ours, model)
    assert casts_of(lambda: forward(ours, models[-1])) == (BESIDE, 1)
    assert casts_of(lambda: forward(ours, models[0])) == (2 + BESIDE, 0)
    assert casts_of(lambda: forward(ours, models[0])) == (BESIDE, 1)


def test_a_region_that_ends_in_another_thread_leaves_the_plan(trained: tuple[Layers, torch.optim.Optimizer]) -> None:
    model, _ = trained

    @ours()
    def steps() -> Iterator[Tensor]:
        yield model(batch(), skip=frozenset({2}))

    for _ in range(3):  # here, the casts that are not used would end it
        running = steps()
        assert casts_of(lambda running=running: next(running))[1] == 1  # type: ignore[misc]
        in_thread(lambda running=running: next(running, None))  # type: ignore[misc]
    assert casts_of(lambda: forward(ours, model)) == (BESIDE, 1)
    assert_same(forward(ours, model), forward(stock, model))
