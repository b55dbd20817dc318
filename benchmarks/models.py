"""The models that are timed, and their steps.

Each model represents a kind of cost: an MLP of many small layers for casts of weights; a Llama-like stack for
activations with several consumers (q, k, v; gate, up); an LSTM for ops that take many weights; a conv net for casts of
images.

With `hand=True` a model has the casts written in its code: the lower limit for autocast. The weights are float32 master
weights, and each is cast once per step, at its use. An activation is cast once for all its consumers. So the outputs
have the same bits as under autocast.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cases import LOW, Settings

__all__ = [
    "LSTM",
    "MLP",
    "MODELS",
    "Attention",
    "Block",
    "ConvNet",
    "Llama",
    "LlamaShape",
    "Region",
    "Step",
    "Subject",
    "cast_before",
    "evaluate",
    "forward",
    "subject",
    "train",
]

#: Makes the region of a forward.
Region = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], Any]


class _Linear(nn.Linear):
    """A linear layer that casts its weights."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(LOW)
        return functional.linear(x, self.weight.to(LOW), bias)


class _Conv2d(nn.Conv2d):
    """A convolution that casts its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight.to(LOW), None, self.stride, self.padding)


class MLP(nn.Module):
    """Linear layers with ReLU between them, all of one width."""

    def __init__(self, layers: int = 20, width: int = 32, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        linear = _Linear if hand else nn.Linear
        self.layers = nn.ModuleList(linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        if self.hand:
            x = x.to(LOW)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama-like stack and of its input.

    Attributes:
        layers: The number of blocks.
        width: The width of the hidden states.
        heads: The number of attention heads.
        hidden: The width inside the feed-forward part.
        batch: The number of sequences.
        tokens: The length of a sequence.
        rotary: Whether queries and keys are rotated by position.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    hidden: int = 344
    batch: int = 2
    tokens: int = 32
    rotary: bool = True


class RMSNorm(nn.Module):
    """Llama's norm, in the dtype of its input. The residual stream stays float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Attention with separate projections of queries, keys and values."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, hand: bool = False) -> None:
        super().__init__()
        width = shape.width
        linear = _Linear if hand else nn.Linear
        self.heads, self.rotary, self.hand = shape.heads, shape.rotary, hand
        self.q, self.k, self.v, self.o = (linear(width, width, bias=False) for _ in range(4))
        head = width // shape.heads
        angles = torch.outer(torch.arange(shape.tokens), 10000.0 ** -(torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.hand:
            x = x.to(LOW)
        q, k, v = self.heads_of(x)
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
            if self.hand:
                q, k = q.to(LOW), k.to(LOW)
        return self.join(functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values: [batch, tokens, width] to [batch, heads, tokens, width / heads]."""
        q, k, v = (projection(x).unflatten(-1, (self.heads, -1)) for projection in (self.q, self.k, self.v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates queries or keys by position, in float32."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def join(self, x: Tensor) -> Tensor:
        """Concatenates the outputs of the heads and projects them."""
        return self.o(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Llama's gated feed-forward layer, with separate gate and up projections."""

    def __init__(self, shape: LlamaShape, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        linear = _Linear if hand else nn.Linear
        self.gate, self.up = (linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.hand:
            x = x.to(LOW)
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection."""

    attention: type[Attention] = Attention

    def __init__(self, shape: LlamaShape, hand: bool = False) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attend, self.feed = self.attention(shape, hand), FeedForward(shape, hand)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.feed(self.before_feed_forward(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A stack of blocks on hidden states, with a norm and a projection at the end."""

    block: type[Block] = Block

    def __init__(self, shape: LlamaShape, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        self.blocks = nn.Sequential(*(self.block(shape, hand) for _ in range(shape.layers)))
        self.norm = RMSNorm(shape.width)
        self.head = (_Linear if hand else nn.Linear)(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(x))
        return self.head(x.to(LOW) if self.hand else x)  # type: ignore[no-any-return]


class LSTM(nn.Module):
    """An LSTM with several layers. Returns the output of the last one."""

    def __init__(self, width: int = 32, layers: int = 2, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lstm = self.lstm
        if not self.hand:
            return lstm(x)[0]  # type: ignore[no-any-return]
        state = torch.zeros(lstm.num_layers, x.shape[0], lstm.hidden_size, dtype=LOW, device=x.device)
        weights = [weight.to(LOW) for weight in lstm._flat_weights if weight is not None]
        output: Tensor = torch._VF.lstm(  # type: ignore[attr-defined]
            x.to(LOW), (state, state), weights, True, lstm.num_layers, 0.0, self.training, False, True
        )[0]
        return output


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU, then a linear layer on the mean over all pixels."""

    def __init__(self, width: int = 16, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        widths = (3, width, 2 * width, 2 * width)
        conv = _Conv2d if hand else nn.Conv2d
        self.convs = nn.ModuleList(
            conv(inputs, outputs, 3, stride=2, padding=1, bias=False) for inputs, outputs in itertools.pairwise(widths)
        )
        # Batch norm takes low-precision input with float32 weights, as under autocast.
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for outputs in widths[1:])
        self.head = (_Linear if hand else nn.Linear)(2 * width, 10)

    def forward(self, x: Tensor) -> Any:
        if self.hand:
            x = x.to(LOW)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def cast_before(net: nn.Module) -> nn.Module:
    """Returns a copy of a model with the weights that autocast casts already cast, so that it only casts activations.

    Args:
        net: A model with `hand=True`.
    """
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LSTM):
            module.to(LOW)
        if isinstance(module, _Linear):  # avoids calls of `to` that do nothing but take time
            module.__class__ = nn.Linear
        elif isinstance(module, _Conv2d):
            module.__class__ = nn.Conv2d
    return net


# Models with their inputs


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


def _llama(settings: Settings, rotary: bool = True) -> tuple[nn.Module, nn.Module, Tensor]:
    shape = LlamaShape(rotary=rotary)
    if settings.tiny:
        shape = replace(shape, layers=1, width=16, heads=2, hidden=24, tokens=4)
    elif settings.counted:  # the stand-in is slow
        shape = replace(shape, width=64, hidden=176, tokens=16)
    elif settings.device == "cuda":
        shape = replace(shape, width=1024, heads=16, hidden=2816, batch=4, tokens=512)
    return Llama(shape), Llama(shape, hand=True), torch.randn(shape.batch, shape.tokens, shape.width)


def _mlp(settings: Settings) -> tuple[nn.Module, nn.Module, Tensor]:
    layers = 3 if settings.tiny else 20
    return MLP(layers), MLP(layers, hand=True), torch.randn(32, 32)


def _lstm(settings: Settings) -> tuple[nn.Module, nn.Module, Tensor]:
    width = 8 if settings.tiny else 64
    return LSTM(width), LSTM(width, hand=True), torch.randn(4, 16, width)


def _conv_net(settings: Settings) -> tuple[nn.Module, nn.Module, Tensor]:
    width, side = (4, 8) if settings.tiny else (16, 32)
    return ConvNet(width), ConvNet(width, hand=True), torch.randn(4, 3, side, side)


#: The models by name. Each returns a model, the same model with casts by hand, and an input.
MODELS: Mapping[str, Callable[[Settings], tuple[nn.Module, nn.Module, Tensor]]] = {
    "MLP": _mlp,
    "Llama-like": _llama,
    "Llama-like, no rotary": lambda settings: _llama(settings, rotary=False),
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


# Steps


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
