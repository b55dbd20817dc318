"""The cast cache on a GPU: streams, captures of CUDA graphs, and the engine's device thread."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp
from helpers.casts import kept_in
from helpers.comparison import assert_same
from torch_promote import _C

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def graphs_are_gone() -> Iterator[None]:
    yield
    gc.collect()


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4, device="cuda"), requires_grad=requires_grad)


def activation() -> torch.Tensor:
    return torch.randn(8, 16, device="cuda", dtype=torch.bfloat16)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), tp.stock_autocast("cuda", enabled=False):
        return x @ w.to(torch.bfloat16)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Does the same as torch.cuda.graph: reports the beginning, and captures."""
    _C.note_capture()
    with cuda_stand_in.capturing():
        yield


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_casts_stay_within_their_capture(cache: str) -> None:
    w, x = weight(), activation()
    use = functools.partial(torch.mm, x, w)
    with ours(cache=cache):
        assert [kept_in(use), kept_in(use)] == [1, 0]
        for _ in range(2):
            with capture():
                assert [kept_in(use), kept_in(use)] == [1, 0]
        assert kept_in(use) == 0, "the cast from before the captures"
    with ours(cache=cache):
        with capture():
            assert [kept_in(use), kept_in(use)] == [1, 0]
        assert [kept_in(use), kept_in(use)] == [int(cache != "persistent"), 0]


@pytest.mark.usefixtures("stand_in")
def test_casts_of_earlier_captures_are_dropped() -> None:
    w, x = weight(), activation()
    with ours():
        x @ w
        for _ in range(5):
            with capture():
                x @ w
        assert tp.cache_info()["entries"] == 2


@pytest.mark.usefixtures("stand_in")
def test_streams_wait_for_a_persistent_cast_and_not_for_one_another() -> None:
    w, x = weight(requires_grad=False), activation()

    def use(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream), ours(cache="persistent"):
            x @ w

    with cuda_stand_in.counting() as counts:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
            use(stream)
    assert counts.events_recorded == 1  # when the cast was made
    assert counts.events_waited_for == counts.data_ptrs_recorded == 2


@pytest.mark.usefixtures("stand_in")
def test_the_default_mode_records_no_events() -> None:
    w, x = weight(), activation()
    with cuda_stand_in.counting() as counts, ours():
        x @ w
    assert counts.events_recorded == 0


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_a_fused_step_on_the_engines_thread(cache: str) -> None:
    w, x = weight(), activation()
    optimizer = torch.optim.SGD([w], lr=0.5, fused=True)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step)
    with ours(cache=cache):
        for _ in range(3):
            loss = (x @ w).float().pow(2).sum()
            assert torch.equal(x @ w, product(x, w))
            loss.backward()
            assert torch.equal(x @ w, product(x, w))


@pytest.mark.usefixtures("stand_in")
def test_check_casts_compares_nothing_within_a_capture() -> None:
    head = nn.Linear(8, 8, bias=False).cuda()
    x = torch.ones(4, 8, device="cuda")
    with tp.check_casts() as checks, torch.cuda.graph(torch.cuda.CUDAGraph()), ours():
        for _ in range(3):
            head(x)
    assert (checks.checked, checks.skipped) == (0, 2)


# --- streams: gradients are summed in one place, as under stock

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
