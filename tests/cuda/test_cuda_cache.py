"""The cast cache on a GPU: streams, captures of CUDA graphs, and the engine's device thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp
from torch_promote import _C
from torch_promote.integrations import cast_invalidation as cuda_graphs

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    tp.clear_cache()
    yield
    tp.clear_cache()


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4, device="cuda"), requires_grad=requires_grad)


def activation() -> torch.Tensor:
    return torch.randn(8, 16, device="cuda", dtype=torch.bfloat16)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), tp.stock_autocast("cuda", enabled=False):
        return x @ w.to(torch.bfloat16)


def kept_in(action: Callable[[], object]) -> int:
    """The number of casts that the function adds to the cache."""
    before = tp.cache_info()["misses"]
    action()
    return tp.cache_info()["misses"] - before


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
def test_gradients_inside_and_outside_of_a_capture() -> None:
    """Uses outside of the capture have one node, as if there were no capture."""

    def gradient(captures: bool) -> Any:
        torch.manual_seed(0)
        w, x = weight(), activation()
        with ours():
            loss = (x @ w).float().pow(2).sum()
            if captures:
                with capture():
                    x @ w
            loss = loss + (x @ w).float().sum()
        loss.backward()
        return w.grad

    assert torch.equal(gradient(captures=True), gradient(captures=False))


@pytest.mark.usefixtures("stand_in")
def test_captures_are_counted_from_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, pool=None: begun.append(pool))
    cuda_graphs._count_captures()
    w, x = weight(), activation()
    with ours(), cuda_stand_in.capturing():
        x @ w
        torch.cuda.CUDAGraph.capture_begin(object(), pool=1)  # type: ignore[arg-type]
        assert kept_in(lambda: x @ w) == 1
    assert begun == [1]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_streams_share_a_persistent_cast(grad: bool) -> None:
    w, x = weight(), activation()
    streams = [torch.cuda.Stream() for _ in range(3)]
    right = product(x, w)

    def use() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.set_grad_enabled(grad), ours(cache="persistent"):
                assert torch.equal(x @ w, right)
            torch.cuda.current_stream().wait_stream(stream)

    assert kept_in(use) == 1
    assert [kept_in(use) for _ in range(3)] == [0, 0, 0]


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
