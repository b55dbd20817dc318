"""The memory that casts take: no more than stock's by default, and how much more in the modes that keep more."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from benchmarks.measures import peak_bytes
from benchmarks.programs import PROGRAMS
from helpers.casts import Region, ours, stock
from helpers.models import EVERY_MODEL, loss_of, made
from helpers.program_peaks import EVERY_PROGRAM, TRAINING, bytes_beyond_stock, check_bounds, peaks

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")

#: Takes a maker of regions, a model and its input.
Use = Callable[[Region, nn.Module, torch.Tensor], Any]


def train(region: Region, model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        with region():
            loss = loss_of(model, x)
        loss.backward()


def train_in_one_region(region: Region, model: nn.Module, x: torch.Tensor) -> None:
    with region():
        for _ in range(2):
            loss_of(model, x).backward()


def train_with_checkpoints(region: Region, model: nn.Module, x: torch.Tensor, reentrant: bool = False) -> None:
    with region():
        y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        y = checkpoint(model, y.float().reshape(-1)[: x.numel()].view_as(x), use_reentrant=reentrant)
        loss = y.float().square().mean()
    loss.backward()


def without_autograd(region: Region, model: nn.Module, x: torch.Tensor, no_autograd: Any = torch.no_grad) -> None:
    with region(), no_autograd():
        for _ in range(3):
            model(x)


def frozen(region: Region, model: nn.Module, x: torch.Tensor) -> None:
    without_autograd(region, model.requires_grad_(False), x)


def partly_frozen(region: Region, model: nn.Module, x: torch.Tensor) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    train(region, model, x.clone().requires_grad_())


USES: dict[str, Use] = {
    "train": train,
    "one region": train_in_one_region,
    "checkpoint": train_with_checkpoints,
    "reentrant checkpoint": functools.partial(train_with_checkpoints, reentrant=True),
    "no_grad": without_autograd,
    "inference_mode": functools.partial(without_autograd, no_autograd=torch.inference_mode),
    "frozen": frozen,
    "partly frozen": partly_frozen,
}


def peak(use: Use, region: Region, model: nn.Module, x: torch.Tensor) -> int:
    """The peak memory of the program above the model and its input, including casts that outlive it."""
    model = copy.deepcopy(model)
    use(region, copy.deepcopy(model), x)  # what PyTorch allocates once
    tp.clear_cache()
    return peak_bytes(lambda: use(region, model, x), "cpu", warm=False)


#: The uses of the small models that `make test` runs; the large models are used in every way.
EVERY_DAY = ("train", "inference_mode")
CHOSEN = [pytest.param(use, id=name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name, use in USES.items()]


@EVERY_MODEL
@pytest.mark.parametrize("use", CHOSEN)
def test_the_default_mode_takes_no_more_memory_than_stock(use: Use, name: str) -> None:
    model, x = made(name)
    assert 0 < peak(use, ours, model, x) <= 1.05 * peak(use, stock, model, x)


class Layers(nn.Module):
    """Layers whose weights are large compared with their activations."""

    def __init__(self, count: int = 16, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Slices(nn.Module):
    """Slices of every length of one parameter, as in a decoder's positions or a growing vocabulary."""

    def __init__(self, length: int = 96) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for length in range(1, len(self.weight) + 1):
            y = x @ self.weight[:length].t()
        return y


class Shared(nn.Module):
    """One weight in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = torch.tanh(nn.functional.linear(x, self.weight))
        return x


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
LARGE: dict[str, Callable[[], nn.Module]] = {"layers": Layers, "slices": Slices, "shared": Shared}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_models_that_consist_of_weights(model: Callable[[], nn.Module], use: Use) -> None:
    torch.manual_seed(0)
    made = model()
    assert 0 < peak(use, ours, made, X) <= 1.05 * peak(use, stock, made, X)


# --- the programs of the benchmark stay within the bounds of docs/casts.md, in each mode


@functools.cache
def of_stock(name: str) -> tuple[int, int]:
    return peaks(name, "stock", "cpu")


#: Every day, the mode that keeps most; tests/cuda has all modes on the device made of host memory, which is faster.
PROGRAMS_BY_MODE = [
    param if "all" in param.values else pytest.param(*param.values, marks=[*param.marks, pytest.mark.slow], id=param.id)
    for param in EVERY_PROGRAM
]


@pytest.mark.parametrize(("name", "mode"), PROGRAMS_BY_MODE)
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cpu", of_stock(name))


def test_what_a_mode_keeps_is_needed() -> None:
    """Otherwise the bounds beyond stock's would be too wide to prove anything."""
    for name, mode in (("Llama-like, inference mode", "persistent"), ("Llama-like, inference mode", "all")):
        first, _ = peaks(name, mode, "cpu")
        assert first > of_stock(name)[0] + bytes_beyond_stock(name, mode, "cpu") / 2


def test_sharing_activations_takes_less_memory_in_training() -> None:
    name = "Llama-like, training"
    assert peaks(name, "all", "cpu")[1] < 0.98 * of_stock(name)[1]


def test_programs_are_told_apart() -> None:
    assert set(PROGRAMS) > TRAINING
    assert {bytes_beyond_stock(name, "weights", "cpu") for name in PROGRAMS} == {0}
