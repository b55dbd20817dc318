"""Within a capture, `all` shares the same casts as outside."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16)
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)


def casts_of(run: Callable[[], Any]) -> int:
    """The number of casts from float32 that an action makes."""
    with cuda_stand_in.counting() as counts:
        run()
    return len([cast for cast in counts.casts if cast.source == "Float"])


@pytest.fixture(autouse=True)
def graphs_are_gone(nothing_persists: None) -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.parametrize("frozen", [False, True])
def test_activations_and_frozen_weights_are_shared_within_a_capture(frozen: bool) -> None:
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)).cuda().requires_grad_(not frozen)
    x = torch.linspace(-1, 1, 32, device="cuda").view(4, 8)
    results = {}
    for name, region in {"stock": stock, "all": functools.partial(ours, cache="all")}.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = x + 1
            with region():
                out = [head(hidden) for head in heads for _ in range(2)]
        x.mul_(0.5)
        casts = casts_of(graph.replay)
        results[name] = (casts, [part.clone() for part in out])
        x.mul_(2)
    assert results["all"][0] == 1 + 3
    assert results["stock"][0] == 6 + (6 if frozen else 3)
    assert_same(results["all"][1], results["stock"][1])


def test_a_cast_from_outside_is_not_used_in_a_capture() -> None:
    head = nn.Linear(8, 8, bias=False).cuda().requires_grad_(False)
    x = torch.ones(4, 8, device="cuda")
    with ours(cache="all"):
        head(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = head(x)
        x.fill_(2)
        graph.replay()
        with torch.no_grad():
            assert_same(out, torch.full((4, 8), 2.0, device="cuda").bfloat16() @ head.weight.bfloat16().t())


def test_check_casts_compares_nothing_within_a_capture() -> None:
    head = nn.Linear(8, 8, bias=False).cuda()
    x = torch.ones(4, 8, device="cuda")
    with tp.check_casts() as checks, torch.cuda.graph(torch.cuda.CUDAGraph()), ours():
        for _ in range(3):
            head(x)
    assert (checks.checked, checks.skipped) == (0, 2)
