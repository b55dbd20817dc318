"""Models with ops that lose accuracy in a lower dtype, at known places."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import torch_promote as tp
from torch_promote.numerics.comparison import Site

__all__ = ["INPUTS", "Cancels", "Overflows", "by_place", "chain", "half", "ranks_agree", "step_of"]

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("planted_sites::cancel", mutates_args=())
def cancel(x: torch.Tensor, big: float) -> torch.Tensor:
    """X without its last digits, which are lost in a sum with a large number."""
    return (x + big) - big


cancel.register_fake(lambda x, big: torch.empty_like(x))
cancel.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None)


class Cancels(nn.Module):
    """Adds a large number and takes it away again, hidden in a custom op."""

    def __init__(self, big: float = 64.0) -> None:
        super().__init__()
        self.big = big

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.planted_sites.cancel(x, self.big)  # type: ignore[no-any-return]


class Overflows(nn.Module):
    """A square beyond float16's range, and its root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1000 + 300).square().sqrt() / 1000


def chain(seed: int, depth: int, planted: dict[int, nn.Module], width: int = 16) -> nn.Sequential:
    """Layers with activations; `planted[n]` follows layer n."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number in range(depth):
        linear = nn.Linear(width, width)
        nn.init.orthogonal_(linear.weight)
        layers += [linear, (nn.Tanh, nn.GELU, nn.SiLU)[number % 3]()]
        if number in planted:
            layers.append(planted[number])
    return nn.Sequential(*layers)


def ranks_agree(ours: list[float], theirs: list[float]) -> float:
    """Spearman's rank correlation."""
    first, second = (torch.tensor(one, dtype=torch.float64).argsort().argsort().double() for one in (ours, theirs))
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


def half() -> torch.autocast:
    """A region in float16."""
    return torch.autocast("cpu", torch.float16)


def step_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    """A step that returns a loss with a graph."""

    def step() -> torch.Tensor:
        with half():
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    return step


def by_place(comparison: tp.Comparison) -> dict[tuple[str, str], Site]:
    """The sites by module and op."""
    return {(site.module, site.op): site for site in comparison.sites}
