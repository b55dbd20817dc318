"""Steps with custom ops that lose accuracy in a low dtype, with places and names drawn from a seed.

A site is a linear layer followed by a custom op in its own module. Autocast casts both: an override of one does not
change the dtype of the other. A planted op computes `(x + big) - big`, which is x in float32 and loses all digits in
bfloat16. The other ops copy.
"""

from __future__ import annotations

import os
import random
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_promote as tp
from torch_promote.regions.defaults import RegisteredPolicy

__all__ = [
    "Calls",
    "Planted",
    "Scaled",
    "different_models",
    "make_op",
    "one_rank_fails",
    "one_rank_raises",
    "planted_step",
    "registered_meanwhile",
    "resumed",
    "scaled",
    "verdicts",
]


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


# ---A step that overflows in float16 where it multiplies, and needs one override.


class Scaled(nn.Module):
    """Overflows in float16 where it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.linear(x) * 1e6 * 1e-6)).square().mean()


def scaled(dtype: torch.dtype = torch.float16) -> tuple[Scaled, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = Scaled()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return model(torch.ones(2, 4) + 0.1 * torch.randn(2, 4))

    return model, step


# ---Tunings in several processes, whose ranks use different batches.


def _tuned(step: Any, model: torch.nn.Module, **options: Any) -> dict[str, Any]:
    tuning = tp.tune(step, model=model, **{"tolerance": 0.06, **options})
    return {
        "overrides": tuning.overrides,
        "errors": dict(tuning.errors),
        "trials": [(one.overrides, one.passed, dict(one.errors)) for one in tuning.trials],
        "order": [one.name for one in tuning.candidates],
        "runs": tuning.runs,
        "planted": getattr(model, "planted", None),
    }


def _of_rank(step: Calls, rank: int) -> Any:
    return lambda number: step(10 * number + rank)


def verdicts(rank: int, world_size: int) -> dict[str, Any]:
    """All ranks have a tuning of the same model."""
    step = planted_step(6, 2, seed=71)
    return _tuned(_of_rank(step, rank), step.model)


def one_rank_fails(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 1 needs an override."""
    step = planted_step(4, 1, seed=72)
    [planted] = step.model.planted  # type: ignore[union-attr, misc]

    def other(number: int) -> torch.Tensor:
        result = step(number)
        if rank == 0:
            with tp.my_autocast("cpu", overrides={planted: "fp32"}):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
                result = step.model(x)
        return result

    return _tuned(other, step.model)


def resumed(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second call repeats no trial."""
    file = Path(os.environ["TUNED_RANKS_FILE"])
    step = planted_step(4, 1, seed=73)
    first = _tuned(_of_rank(step, rank), step.model, resume=file)
    torch.distributed.barrier()
    return first, _tuned(_of_rank(step, rank), step.model, resume=file)


def different_models(rank: int, world_size: int) -> None:
    """The ranks run different ops."""
    model = Scaling(torch.div if rank else torch.mul)
    _tuned(Calls(model), model, tolerance=1e-6)


def one_rank_raises(rank: int, world_size: int) -> None:
    """The step raises on rank 1."""

    def step() -> torch.Tensor:
        if rank:
            raise ZeroDivisionError("mine")
        return torch.ones(())

    _tuned(step, torch.nn.Linear(2, 2))


class Scaling(torch.nn.Module):
    """Overflows."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear, self.op = torch.nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.linear(x), 8.0 if self.op is torch.mul else 1 / 8.0).float().sum()
