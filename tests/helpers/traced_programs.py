"""Training steps of small models, for the tests of the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torch_promote.parity.model import Entry, Options
from torch_promote.parity.samples import Sample, samples

#: Opens an autocast region.
Region = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    """Attention and a network behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v
        return x + self.down(F.gelu(self.up(x)))


def _step(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, region: Region) -> torch.Tensor:
    with region():
        output = model(x)
    output.float().square().mean().backward()
    return output


def _attention(region: Region) -> torch.Tensor:
    return _step(nn.Sequential(Block(), Block()), torch.randn(2, 3, 8), region)


def _conv(region: Region) -> torch.Tensor:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    with region():
        loss = F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1]))
    loss.backward()
    return loss


def _gru(region: Region) -> torch.Tensor:
    model = nn.GRU(4, 5, 2, bidirectional=True, dropout=0.1)
    return _step(lambda x: model(x)[0], torch.randn(3, 2, 4), region)


def _gru_cell(region: Region) -> torch.Tensor:
    model = nn.GRUCell(4, 5)
    return _step(lambda x: model(x), torch.randn(3, 4), region)


def _checkpointed(use_reentrant: bool) -> Callable[[Region], torch.Tensor]:
    def program(region: Region) -> torch.Tensor:
        first, second = Block(), Block()
        x = torch.randn(2, 3, 8, requires_grad=True)
        return _step(lambda x: second(checkpoint(first, x, use_reentrant=use_reentrant)), x, region)

    return program


def _transformer(region: Region) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return _step(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 3, 8), region)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t().to(grad.dtype) * 2, x.t().to(grad.dtype) @ grad * 2


def _function(region: Region) -> torch.Tensor:
    weight = nn.Parameter(torch.randn(4, 4))
    return _step(lambda x: _Scaled.apply(x, weight).clamp_min_(0), torch.randn(3, 4, requires_grad=True), region)


def _double_backward(region: Region) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)
    with region():
        output = model(x).sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        penalty = (grad.norm(2, -1) - 1).square().mean()
    penalty.backward()
    return penalty


def _trained(region: Region) -> torch.Tensor:
    """Two steps with AdamW, accumulated gradients, clipping, and conversions of the program's own."""
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        for _ in range(2):
            loss = _step(model, torch.randn(2, 3, 8).double().float(), region)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def _promoting(region: Region) -> torch.Tensor:
    """Ops whose policies are `promote`, fp32_append_dtype, fp32_set_opt_dtype, and inputs of several dtypes."""
    x = torch.randn(3, 3, requires_grad=True)
    with region():
        low = x @ x
        mixed = torch.cat([low, x]).cumsum(0) + torch.stack([low.sum(), x.prod()]).mean()
        mixed = mixed + torch.addcmul(x, low, low).norm() + low.softmax(-1).log().sum() + x.half().exp().sum()
        mixed = mixed + torch.nn.functional.cosine_similarity(low, x).sum() + torch.dist(x, low)
        out = torch.empty(3, 3)
        torch.mm(x.detach(), x.detach(), out=out)
    mixed.float().sum().backward()
    return mixed


#: Programs, each of which gets what opens its autocast region.
PROGRAMS: dict[str, Callable[[Region], torch.Tensor]] = {
    "attention": _attention,
    "conv": _conv,
    "gru": _gru,
    "gru cell": _gru_cell,
    "reentrant checkpoint": _checkpointed(True),
    "checkpoint": _checkpointed(False),
    "transformer": _transformer,
    "autograd.Function": _function,
    "double backward": _double_backward,
    "trained": _trained,
    "promoting": _promoting,
}


def with_half_of(names: Iterable[str], others: Iterable[str]) -> list[Any]:
    """All pairs as parameters of a test; its everyday run has each name with half of the others."""
    pairs = [(i + j, name, other) for i, name in enumerate(names) for j, other in enumerate(others)]
    return [pytest.param(name, other, marks=pytest.mark.slow if i % 2 else ()) for i, name, other in pairs]


def database_steps(name: str, most: int) -> list[tuple[str, Callable[[Region], Any]]]:
    """Returns labels and training steps of samples of an entry of PyTorch's op database.

    A step returns the results and gradients, or the text of its error.
    """

    def step(sample: Sample, region: Region) -> Any:
        function, args, kwargs = sample.bound
        torch.manual_seed(0)
        try:
            with region():
                results = function(*args, **kwargs)
                roots = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor) and one.requires_grad]
                torch.autograd.backward([root.real.sum() if root.is_complex() else root.sum() for root in roots])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.is_leaf]
        return [results, *(leaf.grad for leaf in leaves)]

    found = []
    for sample in samples(Entry(name, "op_db"), Options(quick=True)):
        if isinstance(sample, Sample) and len(found) < most:
            found.append((sample.label, functools.partial(step, sample)))
    return found
