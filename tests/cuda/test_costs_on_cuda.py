"""The default mode takes no more memory and no more kernels than stock on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cuda_stand_in
import torch_promote as tp
from benchmarks.measures import peak_bytes
from helpers.casts import Region
from helpers.models import MODELS, loss_of, made

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")

stock: Region = functools.partial(tp.stock_autocast, "cuda")
ours: Region = functools.partial(tp.my_autocast, "cuda")

Program = Callable[[Region, nn.Module, Tensor], Any]


def train(region: Region, model: nn.Module, x: Tensor) -> None:
    with region():
        loss = loss_of(model, x)
    if loss.requires_grad:
        loss.backward()
    model.zero_grad(set_to_none=True)


def train_inside(region: Region, model: nn.Module, x: Tensor) -> None:
    with region():
        for _ in range(2):
            loss_of(model, x).backward()
    model.zero_grad(set_to_none=True)


def checkpointed(region: Region, model: nn.Module, x: Tensor, reentrant: bool, inside: bool = False) -> None:
    source = x.detach().requires_grad_()
    with region():
        y = checkpoint(model, source, use_reentrant=reentrant)
        loss = checkpoint(model, y.float(), use_reentrant=reentrant).float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    model.zero_grad(set_to_none=True)


def evaluate(region: Region, model: nn.Module, x: Tensor, without: Callable[[], Any]) -> None:
    with region(), without():
        for _ in range(3):
            model(x)


def frozen(region: Region, model: nn.Module, x: Tensor) -> None:
    model.requires_grad_(False)
    train_on_inputs = x.detach().requires_grad_()
    with region():
        loss_of(model, train_on_inputs).backward()
    model.requires_grad_(True)


PROGRAMS: dict[str, Program] = {
    "train": train,
    "train, backward inside": train_inside,
    "checkpoint": functools.partial(checkpointed, reentrant=False),
    "checkpoint, backward inside": functools.partial(checkpointed, reentrant=False, inside=True),
    "reentrant checkpoint": functools.partial(checkpointed, reentrant=True),
    "reentrant checkpoint, backward inside": functools.partial(checkpointed, reentrant=True, inside=True),
    "no_grad": functools.partial(evaluate, without=torch.no_grad),
    "inference_mode": functools.partial(evaluate, without=torch.inference_mode),
    "frozen": frozen,
}


class Layers(nn.Module):
    """Sixteen layers whose weights are large compared with their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Slices(nn.Module):
    """Slices of every length of one parameter, as in a decoder's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for length in range(1, 65):
            y = x @ self.weight[:length].t()
        return torch.tanh(y)


class Shared(nn.Module):
    """One weight in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(16):
            x = torch.tanh(nn.functional.linear(x, self.weight))
        return x


LARGE: dict[str, Callable[[], nn.Module]] = {"layers": Layers, "slices": Slices, "shared": Shared}
NAMES = [*LARGE, *MODELS]


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    if name in LARGE:
        torch.manual_seed(0)
        return LARGE[name]().cuda(), torch.randn(4, 64).cuda()
    model, x = made(name)
    return model.cuda(), x.cuda()


def peak(region: Region, name: str, program: Program) -> int:
    model, x = model_and_input(name)
    return peak_bytes(lambda: program(region, model, x), "cuda")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_default_mode_takes_no_more_memory_than_stock(name: str, program: str) -> None:
    assert 0 < peak(ours, name, PROGRAMS[program]) <= 1.05 * peak(stock, name, PROGRAMS[program])


def test_the_other_modes_take_more() -> None:
    """Otherwise the test above could not fail."""
    for cache in ("all", "persistent"):
        region = functools.partial(ours, cache=cache)
        model, x = model_and_input("layers")
        model.requires_grad_(False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with region(), torch.no_grad():
            model(x)
            held = torch.cuda.memory_allocated() - before
        assert held > 16 * 64 * 64 * 2
        tp.clear_cache()


def test_nothing_is_held_after_the_region() -> None:
    model, x = model_and_input("layers")
    before = torch.cuda.memory_allocated()
    for program in PROGRAMS.values():
        program(ours, model, x)
    assert torch.cuda.memory_allocated() == before


def kernels(region: Region, name: str, program: Program) -> cuda_stand_in.Counts:
    model, x = model_and_input(name)
    with cuda_stand_in.counting() as counts:
        program(region, model, x)
    return counts


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_default_mode_runs_no_more_kernels_than_stock(name: str, program: str) -> None:
    expected, found = kernels(stock, name, PROGRAMS[program]), kernels(ours, name, PROGRAMS[program])
    assert found.total > 0
    assert found.kernels - expected.kernels == {}
