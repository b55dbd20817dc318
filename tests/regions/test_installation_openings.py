"""Every way of opening a region of torch.autocast opens one of ours, and ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.installed import FROM_BEFORE, OURS, STOCKS
from helpers.probes import in_thread, leaves_no_trace, mm_dtype
from helpers.thread_state import thread_state
from torch_promote import _C

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


@pytest.mark.filterwarnings("ignore:`torch.cuda.amp.autocast")
@pytest.mark.usefixtures("pretend_cuda")
def test_opened_for_cuda() -> None:
    with leaves_no_trace():
        for region in (
            torch.autocast("cuda"),
            torch.cuda.amp.autocast(),
            torch.cuda.amp.autocast(dtype=torch.bfloat16),
        ):
            with region:
                assert (mm_dtype("cuda"), mm_dtype("cpu")) == (torch.float32, torch.float32)
                assert torch.is_autocast_enabled("cuda")
                with torch.autocast("cpu"):
                    assert _C.depth() == 2


def test_made_before_install() -> None:
    tp.uninstall()
    region = torch.autocast(CPU)
    decorated = torch.autocast(CPU)(mm_dtype)
    tp.install(overrides={"mm": "fp32"})
    assert (by_with(lambda: region), decorated()) == (OURS, OURS)
    tp.uninstall()
    assert (by_with(lambda: region), decorated()) == (STOCKS, STOCKS)


def test_unmanaged() -> None:
    with leaves_no_trace():
        mode = torch.amp.autocast_mode._enter_autocast(CPU, torch.bfloat16, True, True)
        assert isinstance(mode, torch.autocast)
        assert mm_dtype() is OURS
        torch.amp.autocast_mode._exit_autocast(mode)


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


# --- what is in an object


# --- objects entered several times, in several threads, and dropped


def test_entered_again_and_nested() -> None:
    region = torch.autocast(CPU)
    with leaves_no_trace():
        for _ in range(2):
            with region:
                with region, torch.autocast(CPU, enabled=False), region:
                    assert mm_dtype() is OURS
                assert mm_dtype() is OURS
            assert mm_dtype() is torch.float32


def test_ended_out_of_order() -> None:
    first, second = torch.autocast(CPU), torch.autocast(CPU, torch.float16)
    with leaves_no_trace():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_autocast_dtype(CPU) is torch.float16
        assert torch.is_autocast_enabled(CPU)
        second.__exit__(None, None, None)


def test_ended_in_another_thread() -> None:
    """Autocast's state belongs to a thread: nothing changes in the other one."""
    region = torch.autocast(CPU)
    with leaves_no_trace(), region:

        def run() -> None:
            before = thread_state()
            region.__exit__(None, None, None)
            assert thread_state() == before

        in_thread(run)
        assert mm_dtype() is OURS


def test_an_error_inside() -> None:
    with leaves_no_trace(), pytest.raises(ZeroDivisionError), torch.autocast(CPU):
        1 / 0  # noqa: B018


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


@pytest.mark.parametrize("device", [d for d in torch._C._autocast_supported_devices() if d not in ("cpu", "cuda")])
def test_other_device_types_stay_pytorchs(device: str) -> None:
    if not torch.amp.is_autocast_available(device) or device == "privateuseone":
        return
    with leaves_no_trace(), torch.autocast(device, torch.bfloat16):
        assert _C.depth() == 0
        assert torch.is_autocast_enabled(device)
        with torch.autocast(CPU), torch.autocast(device, torch.float16):
            assert mm_dtype() is OURS
            assert torch.is_autocast_enabled(device)
