"""Every way of opening a region of torch.autocast opens one of ours, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.installed import FROM_BEFORE, OURS, STOCKS
from helpers.probes import leaves_no_trace, mm_dtype
from torch_promote import _C
from torch_promote.regions import installation as autocast_methods

pytestmark = pytest.mark.usefixtures("installed_marked")

CPU = "cpu"


class Subclass(torch.autocast):
    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []

    def __enter__(self) -> Any:
        self.log.append("enter")
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.log.append("exit")
        return super().__exit__(*error)


def by_with(make: Callable[[], Any]) -> torch.dtype:
    with make() as region:
        assert region is None or isinstance(region, torch.autocast)
        return mm_dtype()


def by_calls(make: Callable[[], Any]) -> torch.dtype:
    region = make()
    assert region.__enter__() is region
    try:
        return mm_dtype()
    finally:
        assert not region.__exit__(None, None, None)


def by_calls_of_the_class(make: Callable[[], Any]) -> torch.dtype:
    region = make()
    torch.autocast.__enter__(region)
    try:
        return mm_dtype()
    finally:
        torch.autocast.__exit__(region, None, None, None)


def by_exit_stack(make: Callable[[], Any]) -> torch.dtype:
    with contextlib.ExitStack() as stack:
        stack.enter_context(make())
        kept = stack.pop_all()
    dtype = mm_dtype()
    kept.close()
    return dtype


def by_decorator(make: Callable[[], Any]) -> torch.dtype:
    decorated = make()(mm_dtype)
    assert decorated() is decorated()
    return decorated()  # type: ignore[no-any-return]


def by_generator_context_manager(make: Callable[[], Any]) -> torch.dtype:
    @contextlib.contextmanager
    def region() -> Iterator[None]:
        with make():
            yield

    with region():
        return mm_dtype()


HOWS = (by_with, by_calls, by_calls_of_the_class, by_exit_stack, by_decorator, by_generator_context_manager)
MAKERS: dict[str, Callable[[], Any]] = {
    "torch.autocast": lambda: torch.autocast(CPU),
    "a name from before": lambda: FROM_BEFORE(device_type=CPU),
    "torch.amp.autocast": lambda: torch.amp.autocast(CPU, torch.bfloat16, True, True),
    "autocast_mode.autocast": lambda: torch.amp.autocast_mode.autocast(CPU, cache_enabled=False),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(),
    "subclass": Subclass,
}


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast")
@pytest.mark.parametrize("how", HOWS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("maker", MAKERS)
def test_opened(maker: str, how: Any) -> None:
    with leaves_no_trace():
        assert how(MAKERS[maker]) is OURS
    assert mm_dtype() is torch.float32


SEEN: list[Any] = []


class Fwd(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=CPU)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(mm_dtype())
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type=CPU)
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        SEEN.append((mm_dtype(), _C.depth()))
        return grad * 2


class Casting(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=CPU, cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((x.dtype, _C.depth(), torch.is_autocast_enabled(CPU)))
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type=CPU)
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_custom_fwd_and_custom_bwd() -> None:
    SEEN.clear()
    x = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with leaves_no_trace():
        with torch.autocast(CPU):
            y = Fwd.apply(x)
            Casting.apply(x)
        y.sum().backward()
    assert [OURS, (torch.float32, 2, False), (OURS, 1)] == SEEN


# --- objects entered several times, in several threads, and dropped


def test_ended_out_of_order() -> None:
    first, second = torch.autocast(CPU), torch.autocast(CPU, torch.float16)
    with leaves_no_trace():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_autocast_dtype(CPU) is torch.float16
        assert torch.is_autocast_enabled(CPU)
        second.__exit__(None, None, None)


# --- nested with other kinds


@pytest.mark.parametrize("outer", [tp.my_autocast, torch.autocast, tp.stock_autocast])
@pytest.mark.parametrize("inner", [tp.my_autocast, torch.autocast, tp.stock_autocast])
def test_nested_with_other_kinds(outer: Any, inner: Any) -> None:
    def expected(region: Any) -> torch.dtype:
        return OURS if region is torch.autocast else STOCKS

    with leaves_no_trace(), outer(CPU):
        assert mm_dtype() is expected(outer)
        with inner(CPU):
            # The policy of the region around goes on in both.
            goes_on = inner is not torch.autocast and outer is torch.autocast
            assert mm_dtype() is (OURS if goes_on else expected(inner))
        assert mm_dtype() is expected(outer)


def test_generator_that_holds_a_region() -> None:
    def body() -> Iterator[torch.dtype]:
        with torch.autocast(CPU):
            yield mm_dtype()
            yield mm_dtype()

    with leaves_no_trace():
        assert list(body()) == [OURS, OURS]
        started = body()
        next(started)
        started.close()


def test_tasks_do_not_see_each_others_regions() -> None:
    async def inside(region: Any) -> list[torch.dtype]:
        seen = []
        with region:
            for _ in range(3):
                seen.append(torch.get_autocast_dtype(CPU))
                await asyncio.sleep(0)
        return seen

    async def outside() -> list[bool]:
        seen = []
        for _ in range(3):
            seen.append(torch.is_autocast_enabled(CPU))
            await asyncio.sleep(0)
        return seen

    async def main() -> list[Any]:
        regions = [torch.autocast(CPU), torch.autocast(CPU, torch.float16)]
        return await asyncio.gather(*map(inside, regions), outside())

    with leaves_no_trace():
        assert asyncio.run(main()) == [[torch.bfloat16] * 3, [torch.float16] * 3, [False] * 3]
    assert not autocast_methods._thread.objects


def test_cancelled_and_abandoned_tasks() -> None:
    async def forever() -> None:
        with torch.autocast(CPU):
            await asyncio.sleep(3600)

    async def agen() -> AsyncIterator[torch.dtype]:
        with torch.autocast(CPU):
            yield mm_dtype()
            yield mm_dtype()

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for dtype in agen():
            assert dtype is OURS
            break
        abandoned.append(forever())
        abandoned[0].send(None)

    abandoned: list[Any] = []
    with leaves_no_trace():
        with contextlib.suppress(RuntimeError):
            asyncio.run(main())
        abandoned.pop().close()
    assert not autocast_methods._thread.objects
