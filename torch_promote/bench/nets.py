"""The models of the suites `models` and `caches`, written without casts.

Each represents a kind of cost: an MLP of many small layers for casts of weights; a Llama-like stack for activations
with several consumers (q, k, v; gate, up); an LSTM for ops that take many weights; a conv net for casts of images.
torch_promote/bench/by_hand.py has the same models with casts in the code.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LSTM", "MLP", "Attention", "Block", "ConvNet", "FeedForward", "Llama", "LlamaShape", "RMSNorm"]


class MLP(nn.Module):
    """Linear layers with ReLU between them, all of one width."""

    def __init__(self, layers: int = 20, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.linear(width, width) for _ in range(layers))

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a layer."""
        return nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
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

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Attention with separate projections of queries, keys and values."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.rotary = shape.heads, shape.rotary
        self.q, self.k, self.v, self.o = (self.linear(width, width) for _ in range(4))
        cos, sin = _rotations(shape.tokens, width // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a projection."""
        return nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = (self.split(projection(x)) for projection in (self.q, self.k, self.v))
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
        return self.join(functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def split(self, x: Tensor) -> Tensor:
        """Splits the width into heads: [batch, tokens, width] to [batch, heads, tokens, width / heads]."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates queries or keys by position, in float32."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def join(self, x: Tensor) -> Tensor:
        """Concatenates the outputs of the heads and projects them."""
        return self.o(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotations(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class FeedForward(nn.Module):
    """Llama's gated feed-forward layer, with separate gate and up projections."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate, self.up = (self.linear(shape.width, shape.hidden) for _ in range(2))
        self.down = self.linear(shape.hidden, shape.width)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a projection."""
        return nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection."""

    attention: type[Attention] = Attention
    feed_forward: type[FeedForward] = FeedForward

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attend, self.feed = self.attention(shape), self.feed_forward(shape)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attend(self.before_attention(x))
        return x + self.feed(self.before_feed_forward(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A stack of blocks on hidden states, with a norm and a projection at the end."""

    block: type[Block] = Block

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block(shape) for _ in range(shape.layers)))
        self.norm, self.head = RMSNorm(shape.width), self.linear(shape.width, shape.width)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes the last projection."""
        return nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class LSTM(nn.Module):
    """An LSTM with several layers. Returns the output of the last one."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        output: Tensor = self.lstm(x)[0]
        return output


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU, then a linear layer on the mean over all pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 2 * width)
        self.convs = nn.ModuleList(self.conv(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for outputs in widths[1:])
        self.head = self.linear(2 * width, 10)

    def conv(self, inputs: int, outputs: int) -> nn.Module:
        """Makes a convolution that halves height and width."""
        return nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Makes the last layer."""
        return nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Any:  # noqa: D102
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))
