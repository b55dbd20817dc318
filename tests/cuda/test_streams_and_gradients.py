"""A weight that a region uses on several streams: its gradients are summed in one place, as under stock."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("nothing_persists")

MODES = ("weights", "persistent", "all", "none")
#: The streams of the uses, 0 for the current one, and whether each use wants a gradient.
USES = {
    "there and back": ((0, True), (1, True), (0, True)),
    "three streams": ((1, True), (2, True), (0, True), (2, True)),
    "first without a gradient": ((1, False), (0, True), (1, True)),
    "without a gradient between": ((0, True), (1, False), (1, True)),
}


def gradients(region: Any, uses: tuple[tuple[int, bool], ...]) -> list[torch.Tensor]:
    """The gradients of two weights, in regions with the backward outside and inside."""
    torch.manual_seed(0)
    first, second = (nn.Parameter(torch.randn(8, 8, device="cuda")) for _ in range(2))
    x = torch.linspace(-2, 2, 32, device="cuda").view(4, 8)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    seen = []
    for inside in (False, True):
        with region():
            h = x
            for stream, wants in uses:
                streams[stream].wait_stream(streams[0])
                with torch.cuda.stream(streams[stream]), torch.set_grad_enabled(wants):
                    h = torch.tanh(h @ first) @ second
                streams[0].wait_stream(streams[stream])
            loss = h.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        seen += [loss.detach(), *(w.grad.clone() for w in (first, second) if w.grad is not None)]
    return seen


@pytest.mark.parametrize("cache", MODES)
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_gradients_have_stocks_bits(uses: tuple[tuple[int, bool], ...], cache: str) -> None:
    expected = gradients(functools.partial(tp.stock_autocast, "cuda", cache_enabled=cache != "none"), uses)
    assert len(expected) == 6
    assert_same(gradients(functools.partial(tp.my_autocast, "cuda", cache=cache), uses), expected)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("cache", MODES[:3])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_another_stream_waits_once_for_the_cast(trainable: bool, cache: str) -> None:
    """Otherwise it could use the memory before the first stream has written the cast, or after it was freed."""
    w = nn.Parameter(torch.randn(8, 8, device="cuda"), requires_grad=trainable)
    x = torch.randn(4, 8, device="cuda", dtype=torch.float16)
    side = torch.cuda.Stream()
    before = tp.cache_info()["misses"]
    with tp.my_autocast("cuda", cache=cache):
        x @ w
        with cuda_stand_in.counting() as counts, torch.cuda.stream(side):
            x @ w
            x @ w
        x @ w
    kept = trainable or cache != "weights"
    assert tp.cache_info()["misses"] - before == kept
    assert (counts.events_recorded, counts.events_waited_for, counts.data_ptrs_recorded) == (kept, kept, kept)


@pytest.mark.parametrize("wants", [True, False], ids=["with a gradient", "without a gradient"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_the_stream_of_a_gradient_is_that_of_its_first_living_graph(wants: bool, keeps: bool) -> None:
    """As without autocast. Under stock it is that of the first use."""

    def accumulates_on_side(region: Any) -> bool:
        w, x = nn.Parameter(torch.randn(8, 8, device="cuda")), torch.randn(4, 8, device="cuda")
        side, streams = torch.cuda.Stream(), []
        w.register_post_accumulate_grad_hook(lambda _: streams.append(torch.cuda.current_stream()))
        with region:
            with torch.cuda.stream(side), torch.set_grad_enabled(wants):
                first = x @ w
            if not keeps:
                del first
            torch.cuda.current_stream().wait_stream(side)
            loss = (x @ w).sum()
        loss.backward()
        return streams == [side]

    assert accumulates_on_side(tp.stock_autocast("cuda"))
    assert accumulates_on_side(tp.my_autocast("cuda")) is (wants and keeps)
    assert accumulates_on_side(contextlib.nullcontext()) is (wants and keeps)
