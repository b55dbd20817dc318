"""Steps with custom ops that lose accuracy in a low dtype, with places and names drawn from a seed.

A site is a linear layer followed by a custom op in its own module. Autocast casts both: an override of one does not
change the dtype of the other. A planted op computes `(x + big) - big`, which is x in float32 and loses all digits in
bfloat16. The other ops copy.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import torch_promote as tp
from torch_promote.regions.defaults import RegisteredPolicy

__all__ = ["Calls", "Planted", "make_op", "planted_step", "registered_meanwhile"]

_BIG = 4096.0
_registered: list[RegisteredPolicy] = []


@contextmanager
def registered_meanwhile() -> Iterator[None]:
    """Removes the policies of ops that the block makes."""
    try:
        yield
    finally:
        while _registered:
            _registered.pop().remove()


def make_op(name: str, planted: bool, policy: str = "lower_precision_fp") -> Callable[[torch.Tensor], torch.Tensor]:
    """Registers an op, and its policy: by default, in the region's dtype."""

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return (x + _BIG) - _BIG if planted else x.clone()

    op.register_autograd(lambda ctx, gradient: gradient)
    op.register_fake(torch.empty_like)
    _registered.append(tp.register_policy(name, policy, replace=True))  # a seed makes the same names again
    return op


class Site(nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.inner = Inner(op)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


class Inner(nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Planted(nn.Module):
    """Branches, each a chain of sites, whose results' squares are summed up.

    Args:
        chains: For each branch, which of its sites are planted.
        seed: The seed of the names and the weights.
        same_op: Whether all planted sites use one op, and all others another op.
        policy: The policy of all ops.

    Attributes:
        planted: The ops of planted sites.
        places: The paths of the modules that call them.
    """

    def __init__(
        self,
        chains: Sequence[Sequence[bool]],
        seed: int,
        same_op: bool = False,
        policy: str = "lower_precision_fp",
    ) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        namespace = f"lib{_word(draw)}"
        shared = {planted: make_op(f"{namespace}::{_word(draw)}", planted, policy) for planted in (False, True)}
        self.branches = nn.ModuleList()
        self.planted: set[str] = set()
        self.places: set[str] = set()
        for number, chain in enumerate(chains):
            sites = nn.Sequential()
            for planted in chain:
                op = shared[planted] if same_op else make_op(f"{namespace}::{_word(draw)}", planted, policy)
                name = _word(draw)
                sites.add_module(name, Site(op, 8))
                if planted:
                    self.planted.add(op._qualname)
                    self.places.add(f"branches.{number}.{name}.inner")
            self.branches.append(sites)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x).float().square().mean() for branch in self.branches]).sum()


class Calls:
    """A step of a model that counts its calls, with a batch for each number."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.dtype = model, dtype
        self.count = 0

    def __call__(self, number: int) -> torch.Tensor:
        self.count += 1
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", self.dtype):
            return self.model(x)


def planted_step(sites: int, planted: int, seed: int, **options: Any) -> Calls:
    """Returns a step of branches with one site each, some of which are planted at random places."""
    places = set(random.Random(seed).sample(range(sites), planted))
    return Calls(Planted([[number in places] for number in range(sites)], seed, **options))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=10))
