"""The steps of the suites of models: forward, training step, evaluation loop; and the models with their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_promote.bench import by_hand, nets
from torch_promote.bench.cases import HAND, Measured, Settings
from torch_promote.bench.casts import count_casts
from torch_promote.bench.memory import peak_bytes

__all__ = ["MODELS", "Region", "Step", "Subject", "evaluate", "forward", "measured", "subject", "train"]

#: Makes the region of a forward.
Region = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the same model with casts by hand, and their input and target.

    Attributes:
        net: The model.
        by_hand: The same model with casts in its code, and with equal weights.
        x: The input, float32.
        target: The target of the loss.
    """

    net: nn.Module
    by_hand: nn.Module
    x: Tensor
    target: Tensor


_Pair = tuple[nn.Module, nn.Module, Tensor]


def _mlp(settings: Settings) -> _Pair:
    layers = 3 if settings.tiny else 20
    return nets.MLP(layers), by_hand.MLP(layers), torch.randn(32, 32)


def _llama(settings: Settings, rotary: bool = True) -> _Pair:
    shape = nets.LlamaShape(rotary=rotary)
    if settings.tiny:
        shape = replace(shape, layers=1, width=16, heads=2, hidden=24, tokens=4)
    elif settings.counted:  # the stand-in is slow
        shape = replace(shape, width=64, hidden=176, tokens=16)
    elif settings.device == "cuda":
        shape = replace(shape, width=1024, heads=16, hidden=2816, batch=4, tokens=512)
    return nets.Llama(shape), by_hand.Llama(shape), torch.randn(shape.batch, shape.tokens, shape.width)


def _llama_without_rotary(settings: Settings) -> _Pair:
    return _llama(settings, rotary=False)


def _lstm(settings: Settings) -> _Pair:
    width = 8 if settings.tiny else 64
    return nets.LSTM(width), by_hand.LSTM(width), torch.randn(4, 16, width)


def _conv_net(settings: Settings) -> _Pair:
    width, side = (4, 8) if settings.tiny else (16, 32)
    return nets.ConvNet(width), by_hand.ConvNet(width), torch.randn(4, 3, side, side)


#: The models by name.
MODELS: Mapping[str, Callable[[Settings], _Pair]] = {
    "MLP": _mlp,
    "Llama-like": _llama,
    "Llama-like, no rotary": _llama_without_rotary,
    "LSTM": _lstm,
    "conv net": _conv_net,
}


def subject(name: str, settings: Settings) -> Subject:
    """Makes a model of `MODELS` and its inputs. Every call returns the same values.

    Args:
        name: A key of `MODELS`.
        settings: The device, and whether the model is tiny.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, same, x = MODELS[name](settings)
        same.load_state_dict(net.state_dict())
        with torch.no_grad():
            target = torch.randn_like(net(x))
        same.load_state_dict(net.state_dict())  # again: the forward has updated the running means of batch norm
    device = settings.device
    return Subject(net.to(device), same.to(device), x.to(device), target.to(device))


def forward(net: Callable[[Tensor], Tensor], x: Tensor, region: Region = nullcontext, graph: bool = False) -> Step:
    """Returns a forward in its own region, without gradients, or with a graph that the step drops."""

    def step() -> Tensor:
        with torch.set_grad_enabled(graph), region():
            return net(x)

    return step


def train(
    subject: Subject, net: nn.Module, region: Region = nullcontext, batches: int = 1, around: Region = nullcontext
) -> Step:
    """Returns a training step without the optimizer: forward, loss, backward. It then frees the gradients.

    Args:
        subject: Provides the input and the target.
        net: One of its models.
        region: Makes the region of a forward.
        batches: The number of forwards and backwards in a step. Their gradients add up.
        around: Makes the region of the whole step.
    """
    x, target = subject.x, subject.target

    def step() -> None:
        with around():
            for _ in range(batches):
                with region():
                    # The cast of the loss is written out; autocast computes mse_loss in float32 too.
                    loss = functional.mse_loss(net(x).float(), target)
                loss.backward()
        net.zero_grad(set_to_none=True)

    return step


def evaluate(net: Callable[[Tensor], Tensor], x: Tensor, region: Region = nullcontext, batches: int = 8) -> Step:
    """Returns an evaluation loop without gradients that enters a region for each batch."""
    one = forward(net, x, region)

    def step() -> None:
        for _ in range(batches):
            one()

    return step


def measured(steps: Mapping[str, Step], subject: Subject, device: str) -> dict[str, Measured]:
    """Measures casts and memory of the contenders' steps, each after a warm-up step."""
    found = {}
    for name, step in steps.items():
        net = subject.by_hand if name == HAND else subject.net
        step()
        peak = peak_bytes(step, device)
        found[name] = Measured(count_casts(step, net.parameters()), peak)
    return found
