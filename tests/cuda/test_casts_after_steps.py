"""An optimizer's step makes the persistent casts again, in place and by one kernel: NOTE [ Casts after a step ]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "nothing_persists", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16, cache="persistent")
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)
LAYERS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, foreach=False),
    "foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))).cuda()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32, device="cuda").view(4, 8)


def loss_of(model: nn.Module, region: Callable[..., Any] = ours) -> Tensor:
    with region():
        return model(batch()).float().square().mean()


def addresses(model: nn.Sequential) -> list[int]:
    """The addresses of the casts that a use of each weight gets."""
    seen = []
    x = batch().bfloat16().requires_grad_()
    with ours():
        for layer in model:
            node: Any = (x @ layer.weight).grad_fn
            seen.append(node._saved_mat2.data_ptr())
    return seen


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("batches", [1, 3])
def test_bits_are_stocks(make: str, batches: int) -> None:
    def run(region: Callable[..., Any]) -> list[Tensor]:
        model = layers()
        optimizer = OPTIMIZERS[make](model.parameters())
        seen = []
        for _ in range(3):
            for _ in range(batches):
                loss = loss_of(model, region)
                loss.backward()
                seen.append(loss.detach())
            with torch.no_grad():
                seen.append(loss_of(model, region))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(loss_of(model, region))
        return [*seen, *model.parameters()]

    assert_same(run(ours), run(stock))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_one_kernel_and_the_same_memory(make: str) -> None:
    model = layers()
    optimizer = OPTIMIZERS[make](model.parameters())
    loss_of(model).backward()
    optimizer.step()
    before = addresses(model)
    for _ in range(3):
        loss_of(model).backward()
        with cuda_stand_in.counting() as counts:
            optimizer.step()
        assert [cast.target for cast in counts.casts] == ["BFloat16"] * LAYERS
        assert len({cast.launch for cast in counts.casts}) == 1
        with cuda_stand_in.counting() as counts:
            loss = loss_of(model)
        assert sum(cast.of_leaf for cast in counts.casts) == 0
        loss.backward()
        assert addresses(model) == before


def test_a_cast_that_a_graph_still_needs_is_left_alone() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waiting = loss_of(model)
    expected = torch.autograd.grad(waiting, list(model.parameters()), retain_graph=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert_same(loss_of(model), loss_of(model, stock))
    assert_same(torch.autograd.grad(waiting, list(model.parameters())), expected)


def test_casts_that_nobody_uses_are_made_once_more_and_then_dropped() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    assert tp.cache_info()["persistent_entries"] == LAYERS
    with cuda_stand_in.counting() as counts:
        optimizer.step()
    assert counts.casts == []
    assert tp.cache_info()["persistent_entries"] == 0


def test_a_step_on_another_stream_drops_them() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizer.step()
    assert tp.cache_info()["persistent_entries"] == 0


def test_casts_that_another_stream_used_are_dropped() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        loss_of(model)
    optimizer.step()
    assert tp.cache_info()["persistent_entries"] == 0
    assert_same(loss_of(model), loss_of(model, stock))


def test_views_of_weights_are_made_at_their_next_use() -> None:
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"), requires_grad=False)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = batch()

    def use(region: Callable[..., Any]) -> Tensor:
        with region():
            return x @ weight.t()

    use(ours)
    assert tp.cache_info()["persistent_entries"] == 1
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert_same(use(ours), use(stock))


def test_a_step_takes_no_more_memory_than_before() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with cuda_stand_in.counting() as counts:
        optimizer.step()
    assert counts.kept_bytes == 0
