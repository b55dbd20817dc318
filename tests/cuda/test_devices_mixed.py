"""Several devices in one program: two CUDA devices, CPU and CUDA, regions of both in each other, threads."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torch_promote as tp
from helpers.casts import Region
from helpers.comparison import assert_same
from helpers.program_comparison import ANYWHERE, grads
from helpers.program_comparison import assert_like_stock as compare

pytestmark = pytest.mark.usefixtures("nothing_persists")

assert_like_stock = functools.partial(compare, regions=ANYWHERE)

# --- two CUDA devices


class Halves(nn.Module):
    """The first half of the layers is on one device, the second on the other; one weight is used twice on each."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).to(first), nn.Linear(8, 8).to(second)
        self.norm = nn.LayerNorm(8).to(second)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.first(x))).to(self.second.weight.device)
        return self.norm(self.second(torch.tanh(self.second(x))))


def steps(model: nn.Module, region: Callable[[], Any], x: Tensor) -> list[Any]:
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(3):
        with region():
            y = model(x)
            loss = y.float().square().sum()
        loss.backward()
        seen += [y.detach().clone(), *grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach() for p in model.parameters())]


PAIRS = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cpu", "cuda:1"), ("cuda:0", "cpu")]


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_a_model_on_two_devices(first: str, second: str, cache: str) -> None:
    def program(region: Region) -> Any:
        given = {} if region is tp.stock_autocast else {"cache": cache}

        @contextlib.contextmanager
        def both() -> Any:
            with region("cuda", dtype=torch.bfloat16, **given), region("cpu", dtype=torch.bfloat16, **given):
                yield

        return steps(Halves(first, second), both, torch.randn(4, 8).to(first))

    assert_like_stock(program)


# --- CPU and CUDA


def operands(device: str) -> tuple[Tensor, nn.Parameter]:
    return torch.randn(3, 4).to(device), nn.Parameter(torch.randn(5, 4).to(device))


#: How regions of the two devices are nested: from outside to inside, each with its arguments.
NESTINGS: dict[str, list[dict[str, Any]]] = {
    "cuda": [{"device_type": "cuda"}],
    "cpu": [{"device_type": "cpu"}],
    "cpu in cuda": [{"device_type": "cuda"}, {"device_type": "cpu"}],
    "cuda in cpu": [{"device_type": "cpu"}, {"device_type": "cuda", "dtype": torch.bfloat16}],
    "cuda off in cuda": [{"device_type": "cuda"}, {"device_type": "cuda", "enabled": False}],
    "cpu off in both": [{"device_type": "cuda"}, {"device_type": "cpu"}, {"device_type": "cpu", "enabled": False}],
    "cuda off in both": [{"device_type": "cpu"}, {"device_type": "cuda"}, {"device_type": "cuda", "enabled": False}],
    # With its cache on, stock would serve the casts of the outer dtype.
    "another dtype": [
        {"device_type": "cuda"},
        {"device_type": "cuda", "dtype": torch.bfloat16, "cache_enabled": False},
        {"device_type": "cpu"},
    ],
    "no cache": [{"device_type": "cuda"}, {"device_type": "cuda", "cache_enabled": False}, {"device_type": "cpu"}],
    "on again": [{"device_type": "cuda"}, {"device_type": "cuda", "enabled": False}, {"device_type": "cuda"}],
}


def on_both(regions: list[Callable[[], Any]]) -> Any:
    """Products and a softmax on both devices, before, in and after the inner regions; backward at the end.

    Inside, they are those of other weights: see the next test but one.
    """
    outside, inside = ([operands(device) for device in ("cpu", "cuda")] for _ in range(2))
    seen: list[Tensor] = []

    def use(of_devices: list[tuple[Tensor, nn.Parameter]]) -> None:
        for x, w in of_devices:
            seen.append(torch.softmax(F.linear(x, w) + F.linear(x * 3, w), -1))

    with contextlib.ExitStack() as outer:
        outer.enter_context(regions[0]())
        use(outside)
        with contextlib.ExitStack() as inner:
            for region in regions[1:]:
                inner.enter_context(region())
            use(inside)
            use(inside)
        use(outside)
    for device in ("cpu", "cuda"):
        sum(y.float().square().sum() for y in seen if y.device.type == device).backward()
    return [y.detach() for y in seen], [grads(w) for _, w in [*outside, *inside]]


@pytest.mark.parametrize("name", NESTINGS)
def test_regions_of_both_devices(name: str) -> None:
    assert_like_stock(lambda region: on_both([functools.partial(region, **given) for given in NESTINGS[name]]))


@pytest.mark.parametrize("name", [name for name in NESTINGS if len(NESTINGS[name]) > 1])
@pytest.mark.parametrize("outside", ["ours outside", "stock outside"])
def test_regions_of_stock_and_ours_in_each_other(name: str, outside: str) -> None:
    kinds = [tp.my_autocast, tp.stock_autocast] if outside == "ours outside" else [tp.stock_autocast, tp.my_autocast]

    def run(kinds: list[Any]) -> Any:
        torch.manual_seed(0)
        kind = itertools.chain(kinds[:1], itertools.repeat(kinds[1]))
        return on_both([functools.partial(next(kind), **given) for given in NESTINGS[name]])

    assert_same(run(kinds), run([tp.stock_autocast, tp.stock_autocast]))


# --- threads


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_a_region_opened_in_a_backward_hook_ends_there(cache: str) -> None:
    """Hooks run on the device's thread, whose state persists for every later backward."""
    x, w = operands("cuda")
    seen = []

    def hook(grad: Tensor) -> None:
        with tp.my_autocast("cuda", cache=cache):
            seen.append(F.linear(x, w).dtype)
        seen.append(F.linear(x, w).dtype)

    for _ in range(2):
        y = F.linear(x, w).float()
        y.register_hook(hook)
        y.sum().backward()
    assert seen == [torch.float16, torch.float32] * 2
