"""Inputs, results with gradients, and regions for the tests of torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from helpers.program_comparison import Region

HALF, BF16 = torch.float16, torch.bfloat16

#: As many as a body may need: it uses each once.
Weights = tuple[torch.Tensor, ...]
#: Code with regions in it.
Body = Callable[[Region, torch.Tensor, Weights], Any]
#: Where a compiled function is called: a maker of regions and its arguments, or outside of any region.
Place = tuple[Region, dict[str, Any]] | None


def compute(x: torch.Tensor, weights: Weights) -> Any:
    """Ops of three policies, and dtypes that show in the results."""
    hidden = x @ weights[0]
    joined = torch.cat([hidden, x], dim=-1)
    return hidden, joined, F.mse_loss(hidden, torch.zeros_like(hidden)), torch.softmax(x @ weights[1], -1)


def inputs() -> tuple[torch.Tensor, Weights]:
    return torch.randn(3, 6), tuple(torch.randn(6, 6, requires_grad=True) for _ in range(6))


def with_gradients(function: Callable[..., Any], x: torch.Tensor, weights: Weights) -> Any:
    """Outputs and gradients.

    No weight is used twice: in compiled code each use has its own cast, which changes the bits of gradient sums.
    """
    outputs = function(x, weights)
    loss = sum(leaf.float().square().sum() for leaf in tree_leaves(outputs))
    return outputs, torch.autograd.grad(loss, weights, allow_unused=True)


def called_in(place: Place, function: Callable[..., Any], x: torch.Tensor, weights: Weights) -> Any:
    """Outputs and gradients of a call in a region.

    The backward is called there too: a compiled function has the backward of the region that it was called in.
    """
    with place[0](**place[1]) if place is not None else contextlib.nullcontext():
        return with_gradients(function, x, weights)
