"""Small models that use weights in different ways: tied, frozen, in views, in float16, in fused modules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from helpers.casts import Region, ours


class QKV(nn.Module):
    """Three projections of one activation, then gate and up of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        y = y + self.o(torch.softmax(self.q(y) @ self.k(y).t(), -1) @ self.v(y))
        z = F.layer_norm(y, (16,))
        return y + self.down(F.silu(self.gate(z)) * self.up(z))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.second(torch.tanh(self.first(x))), self.first.weight.t())


class Frozen(nn.Module):
    """A frozen trunk, used twice, with a trained adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.trunk(x) + self.up(self.down(x)))
        return x


class Chunks(nn.Module):
    """Views of one weight: rows, a transpose, and columns, each of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = (F.linear(x, part) for part in self.weight.chunk(3))
            x = x + torch.tanh(q * k + v) @ self.weight[:16].t() + torch.tanh(q) @ self.weight[16:32, :]
        return x


class PartsFirst(nn.Module):
    """Uses parts of a weight, and then the whole weight, so that the order of summing three gradients shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Gradients of many sizes: otherwise sums of a few 8-bit numbers would be exact in float32.
        x = torch.cat([F.linear(x, self.weight[:8]) / 3e4, F.linear(x, self.weight[4:12]) / 7e2], -1)
        return F.linear(x, self.weight) * 1e3


class HalfPrecision(nn.Module):
    """Weights in float16, which a bfloat16 region casts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0] + self.attention(x, x * 2, x * 3, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """No LSTM, which oneDNN has in half precision for some processors only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.cell = nn.GRU(16, 16, num_layers=2), nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x.unsqueeze(1))[0].squeeze(1)
        return self.cell(y, x.to(y.dtype))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 16)),
    "qkv": QKV,
    "tied": Tied,
    "frozen": Frozen,
    "chunks": Chunks,
    "parts first": PartsFirst,
    "half precision": HalfPrecision,
    "attention": Attention,
    "recurrent": Recurrent,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0),
}


EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(6, 16)


def region_of(cache: str) -> Region:
    return functools.partial(ours, cache=cache)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def trained(
    region: Region,
    name: str,
    dtype: torch.dtype,
    inside: bool,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Losses, gradients and weights of some steps, with accumulation, and an evaluation before each step."""
    model, x = made(name)
    model, x = model.to(device), x.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    seen = []
    for step in range(3):
        for batch in range(2):
            with region(dtype=dtype):
                loss = loss_of(model, x + batch)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            seen.append(loss.detach().clone())
        seen += [p.grad.clone() for p in parameters if p.grad is not None]
        with torch.no_grad() if step else torch.inference_mode(), region(dtype=dtype):
            seen += [model(x).clone(), model(x * 2).clone()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return [*seen, *(p.detach() for p in model.parameters())]


def checkpointed(
    region: Region, name: str, use_reentrant: bool, inside: bool, device: str = "cpu"
) -> list[torch.Tensor | None]:
    """Two steps over a model whose block is used twice, with an activation that is also cast before the block."""
    model, x = made(name)
    model, x, head = model.to(device), x.to(device), nn.Linear(16, 16).to(device)
    seen = []
    for _ in range(2):
        source = x.clone().requires_grad_()
        with region():
            hidden = source * 2
            before = head(hidden)
            for _ in range(2):
                hidden = checkpoint(model, hidden, use_reentrant=use_reentrant).float()
            loss = (head(hidden) + before).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        seen += [loss.detach(), source.grad]
    return [*seen, *(p.grad for p in (*head.parameters(), *model.parameters()) if p.requires_grad)]
