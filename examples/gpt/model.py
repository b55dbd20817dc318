"""A small GPT: a decoder-only transformer that predicts the next character."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)


@dataclass(frozen=True)
class Config:
    """The size of the model.

    Attributes:
        symbols: Size of the vocabulary.
        context: The maximum length of the input, in characters.
        width: The width of the hidden states.
        heads: The number of attention heads, which share the width.
        layers: The number of blocks.
    """

    symbols: int
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(linear(x)) for linear in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits of the next character at every position.

    Example:
        >>> GPT(Config(symbols=10))(torch.zeros(3, 5, dtype=torch.int64)).shape
        torch.Size([3, 5, 10])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.symbol = nn.Embedding(config.symbols, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.symbols, bias=False)
        self.apply(_init)
        # Every block adds to the residual path twice: keep its initial variance.
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.symbol(ids) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))

    def size(self) -> int:
        """Returns the number of parameters."""
        return sum(weight.numel() for weight in self.parameters())


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
