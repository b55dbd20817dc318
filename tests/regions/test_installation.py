"""install and installed: every way to open a region of torch.autocast opens one of ours, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from helpers.installed import ENTER, EXIT, FROM_BEFORE, MARKED, OURS, STOCKS, is_restored, region_is, uninstall
from helpers.probes import in_thread, leaves_no_trace, mm_dtype, seen
from helpers.subprocesses import run_python
from helpers.thread_state import thread_state
from torch_promote import _C
from torch_promote.regions import installation as autocast_methods

pytestmark = pytest.mark.usefixtures("nothing_installed")


def test_install_and_remove() -> None:
    assert tp.installed() is None
    installation = tp.install(**MARKED)
    assert tp.installed() is installation
    assert region_is() is OURS
    for _ in range(2):
        installation.remove()
        assert tp.installed() is None
    assert region_is() is STOCKS
    assert is_restored()


BROKEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "no such policy"}, tp.PolicyError, "no such policy"),
    ({"policy": "no/such/file.toml"}, tp.PolicyError, "file"),
    ({"overrides": {"no_such_op": "fp32"}}, tp.PolicyError, "no_such_op"),
    ({"overrides": "mm"}, tp.PolicyError, "str"),
    ({"cache": "al"}, tp.errors.OptionError, "'all'"),
]


@pytest.mark.parametrize("before", [None, MARKED], ids=["nothing", "marked"])
@pytest.mark.parametrize(("arguments", "error", "text"), BROKEN, ids=str)
def test_broken_arguments_change_nothing(arguments: Any, error: type[Exception], text: str, before: Any) -> None:
    was = tp.install(**before) if before else None
    state, whose, methods = thread_state(), region_is(), (torch.autocast.__enter__, torch.autocast.__exit__)
    with mock.patch.object(torch._dynamo, "reset") as reset:
        with pytest.raises(error, match=text):
            tp.install(**arguments)
        assert not reset.called
    assert tp.installed() is was
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == methods
    assert (thread_state(), region_is()) == (state, whose)


def test_a_block_restores_the_previous_installation() -> None:
    outer = tp.install(policy="off")
    with tp.install() as inner:
        assert (tp.installed(), inner is outer) == (inner, False)
        assert region_is() is torch.bfloat16
        with pytest.raises(ZeroDivisionError), tp.install(**MARKED):
            1 / 0  # noqa: B018
        assert tp.installed() is inner
        inner.remove()
        assert region_is() is torch.float32
    assert tp.installed() is outer
    with tp.install():
        tp.install(**MARKED)  # and its handle is dropped
        assert region_is() is OURS
    assert tp.installed() is outer
    assert region_is() is torch.float32
    outer.remove()
    assert tp.installed() is None


def test_handles_that_are_removed_in_any_order() -> None:
    first, second, third = tp.install(policy="off"), tp.install(policy="off"), tp.install(**MARKED)
    second.remove()
    assert (tp.installed(), region_is()) == (third, OURS)
    third.remove()
    assert (tp.installed(), region_is()) == (first, torch.float32)
    first.remove()
    assert is_restored()


# --- regions that are open meanwhile


@pytest.mark.parametrize("region", [torch.autocast, tp.stock_autocast, tp.my_autocast])
def test_install_inside_an_open_region(region: Any) -> None:
    before = thread_state()
    with region("cpu", torch.float16):
        inside = thread_state()
        tp.install(**MARKED)
        assert thread_state() == inside
        assert mm_dtype() is torch.float16
        with torch.autocast("cpu"):
            assert mm_dtype() is OURS
        assert thread_state() == inside
    assert thread_state() == before
    assert region_is() is OURS


def test_uninstall_inside_an_open_region() -> None:
    before = thread_state()
    tp.install(**MARKED)
    with torch.autocast("cpu", torch.float16):
        inside = thread_state()
        uninstall()
        assert torch.autocast.__enter__ is ENTER
        assert thread_state() == inside
        assert mm_dtype() is torch.float32
        with torch.autocast("cpu"):
            assert thread_state()["regions"] == 1
        assert thread_state() == inside
    assert thread_state() == before
    assert is_restored()


FORK = """
import os, threading, torch, torch_promote as tp
started, over = threading.Event(), threading.Event()
def hold():
    with torch.autocast("cpu"):
        started.set()
        over.wait(60)
def dtype():
    with torch.autocast("cpu"):
        return torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
enter, exit_ = torch.autocast.__enter__, torch.autocast.__exit__
tp.install(overrides={"mm": "fp32"})
thread = threading.Thread(target=hold)
thread.start()
started.wait(60)
with torch.autocast("cpu"):
    child = os.fork()
    if child == 0:
        inherited = tp.installed() is not None and dtype() is torch.float32
        tp.installed().remove()
        ends = torch.autocast.__exit__ is not exit_
if child == 0:
    restored = (torch.autocast.__enter__, torch.autocast.__exit__) == (enter, exit_)
    os._exit(0 if inherited and ends and restored and dtype() is torch.bfloat16 else 1)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
print(status, tp.installed() is not None, dtype())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_inherits_and_changes_its_own() -> None:
    done = run_python(FORK, quiet=True)
    assert done.stdout.split() == ["0", "True", "torch.float32"], done.stderr


# --- install and remove while threads and tasks have regions open


@pytest.fixture
def nothing_is_left(nothing_installed: None) -> Iterator[None]:
    yield
    uninstall()
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == (ENTER, EXIT)
    assert (_C.depth(), len(autocast_methods._thread.objects)) == (0, 0)


@pytest.mark.parametrize("seconds", [0.5, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_is_left")
def test_changed_while_threads_open_regions(seconds: float) -> None:
    over, wrong = threading.Event(), []

    def work() -> None:
        while not over.is_set():
            with torch.autocast("cpu", torch.float16):
                if mm_dtype() not in (torch.float16, OURS):
                    wrong.append("inside")
            with torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
                pass
            if mm_dtype() is not torch.float32 or _C.depth() or torch.is_autocast_enabled("cpu"):
                wrong.append("outside")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tp.install(**MARKED)
            uninstall()
        over.set()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.usefixtures("nothing_is_left")
def test_uninstalled_while_tasks_and_generators_hold_regions() -> None:
    def steps() -> Iterator[torch.dtype]:
        with torch.autocast("cpu"):
            yield mm_dtype()
            yield mm_dtype()

    async def hold(go_on: asyncio.Event) -> torch.dtype:
        with torch.autocast("cpu"):
            await go_on.wait()
            return mm_dtype()

    async def run() -> list[torch.dtype]:
        go_on = asyncio.Event()
        tasks = [asyncio.create_task(hold(go_on)) for _ in range(2)]
        await asyncio.sleep(0)
        uninstall()
        assert mm_dtype() is torch.float32
        tasks.append(asyncio.create_task(hold(go_on)))
        await asyncio.sleep(0)
        go_on.set()
        return [await task for task in tasks]

    tp.install(**MARKED)
    assert asyncio.run(run()) == [OURS, OURS, STOCKS]
    tp.install(**MARKED)
    generator = steps()
    assert next(generator) is OURS
    uninstall()
    assert next(generator) is OURS
    generator.close()


Opened = Callable[[], Any]


def outcome(function: Opened) -> Any:
    """The outcome of a call: its error, its warnings with their lines, and the state inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = function()
        except Exception as error:
            result = type(error), str(error)
    return result, [(w.category, str(w.message), w.filename, w.lineno) for w in caught]


def opened(*arguments: Any, **keywords: Any) -> Opened:
    def function() -> Any:
        with torch.autocast(*arguments, **keywords):
            return seen(("cpu",))

    return function


CALLS: dict[str, Opened] = {
    "no device": opened(),
    "None": opened(None),
    "a device": opened(torch.device("cpu")),
    "an unknown device": opened("gpu"),
    "an index": opened("cpu:0"),
    "a subclass of str": opened(type("Text", (str,), {})("cpu")),
    "meta": opened("meta"),
    "cuda": opened("cuda"),
    "float32": opened("cpu", torch.float32),
    "int32, off": opened("cpu", torch.int32, False),
    "float8, off": opened("cpu", torch.float8_e4m3fn, False),
    "a str as dtype": opened("cpu", "bfloat16"),
    "a list as dtype, off": opened("cpu", [], False),
    "enabled=1": opened("cpu", enabled=1),
    "enabled=0": opened("cpu", enabled=0),
    "enabled=None": opened("cpu", enabled=None),
    "cache_enabled=str": opened("cpu", cache_enabled="all"),
    "policy": opened("cpu", policy="cuda"),
    "too many": opened("cpu", torch.bfloat16, True, True, None),
    "a decorator without parentheses": lambda: torch.autocast(len),
    "decorates no callable": lambda: type(torch.autocast("cpu")(3)),
    "torch.cpu.amp": lambda: torch.cpu.amp.autocast(True, torch.float32).__enter__().__exit__(None, None, None),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast().__enter__().__exit__(None, None, None),
    "float16": opened("cpu", torch.float16, True, False),
    "off": opened("cpu", enabled=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_errors_and_warnings(name: str) -> None:
    # In separate threads: if PyTorch raises on entering a region, it has changed half of the state.
    expected = in_thread(lambda: outcome(CALLS[name]))
    with tp.install():
        # An equal argument that PyTorch takes must not let through one that it refuses.
        for accepted in (opened("cpu"), opened("cpu", enabled=False)):
            accepted()
        assert in_thread(lambda: outcome(CALLS[name])) == expected


# --- other code that also replaces the methods of torch.autocast


@pytest.mark.usefixtures("installed_marked")
def test_state_that_is_set_directly_acts() -> None:
    """As in regions of `my_autocast`, an op asks PyTorch's state."""
    with torch.autocast("cpu"):
        torch.set_autocast_enabled("cpu", False)
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32
        assert torch._C._is_any_autocast_enabled(), "it counts our key"
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float16
    torch.set_autocast_enabled("cpu", True)
    try:
        assert _C.depth() == 0
        assert mm_dtype() is torch.bfloat16, "what is switched on without a region stays PyTorch's"
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


def spy(calls: list[str], name: str, original: Any) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        calls.append(name)
        return original(self, *arguments)

    return method


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_wrappers_of_the_methods(name: str) -> None:
    """Regions of ours bypass an earlier wrapper, and PyTorch's call it; a later one is called for both."""
    calls: list[str] = []

    def wrapped() -> Any:
        return mock.patch.object(torch.autocast, name, spy(calls, name, getattr(torch.autocast, name)))

    with wrapped() as wrapper:
        tp.install(**MARKED)
        assert (region_is(), calls) == (OURS, [])
        uninstall()
        assert getattr(torch.autocast, name) is wrapper
        assert (region_is(), calls) == (STOCKS, [name])
    assert is_restored()
    tp.install(**MARKED)
    with wrapped():
        assert (region_is(), calls) == (OURS, [name] * 2)
        uninstall()
        assert (region_is(), calls) == (STOCKS, [name] * 3)
        tp.install(**MARKED)
        assert (region_is(), calls) == (OURS, [name] * 4)
    assert region_is() is OURS
    uninstall()
    assert is_restored()


HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    """Of matmul and softmax, in a region of torch.autocast."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu"):
        return (x @ x).dtype, torch.softmax(x.half(), -1).dtype


#: Arguments of `install`, and the dtypes of matmul and softmax, under the default policy "cuda" and under PyTorch's.
POLICIES: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, (BF16, F32), (BF16, HALF)),
    ({"policy": "stock"}, (BF16, HALF), (BF16, HALF)),
    ({"policy": tp.Policy.named("off")}, (F32, HALF), (F32, HALF)),
    ({"overrides": {"matmul": HALF}}, (HALF, F32), (HALF, HALF)),
]


@pytest.mark.parametrize(("arguments", "under_default", "expected"), POLICIES, ids=str)
def test_policies(arguments: dict[str, Any], under_default: Any, expected: Any) -> None:
    before = tp.set_default_policy("cuda")
    try:
        with tp.install(**arguments):
            assert dtypes() == under_default
            tp.set_default_policy(None)
            assert dtypes() == expected
    finally:
        tp.set_default_policy(before)


def test_a_policy_file(tmp_path: Path) -> None:
    tp.Policy.named("off").save(tmp_path / "policy.toml")
    with tp.install(policy=tmp_path / "policy.toml"):
        (tmp_path / "policy.toml").unlink()
        assert dtypes() == (F32, HALF)


def casts_kept(**arguments: Any) -> tuple[int, str]:
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    with torch.autocast("cpu", **arguments):
        x @ weight
        return tp.cache_info()["entries"], _C.cache_mode()


def test_cache_modes() -> None:
    with tp.install():
        assert casts_kept() == (1, "weights")
        with tp.my_autocast("cpu", cache="all"):
            assert casts_kept()[1] == "all"
    for mode in ("weights", "all", "persistent"):
        with tp.install(cache=mode):
            assert casts_kept()[1] == mode
    with tp.install(cache="none"):
        assert casts_kept() == (0, "weights")
        assert casts_kept(cache_enabled=True) == (0, "weights")
        with torch.autocast("cpu"):
            assert not torch.is_autocast_cache_enabled()
    tp.clear_cache()


# --- ways to open a region


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


HOWS = (by_calls_of_the_class, by_exit_stack, by_decorator)
MAKERS: dict[str, Callable[[], Any]] = {
    "torch.autocast": lambda: torch.autocast(CPU),
    "a name from before": lambda: FROM_BEFORE(device_type=CPU),
    "torch.amp.autocast": lambda: torch.amp.autocast(CPU, torch.bfloat16, True, True),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(),
    "subclass": Subclass,
}


@pytest.mark.usefixtures("installed_marked")
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast")
@pytest.mark.parametrize("how", HOWS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("maker", MAKERS)
def test_opened(maker: str, how: Any) -> None:
    with leaves_no_trace():
        assert how(MAKERS[maker]) is OURS
    assert mm_dtype() is torch.float32


@pytest.mark.usefixtures("installed_marked")
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


@pytest.mark.usefixtures("installed_marked")
def test_a_dropped_region_ends_with_the_one_around() -> None:
    with leaves_no_trace():
        with torch.autocast(CPU):
            for _ in range(3):  # the next object may have the address of the last
                torch.autocast(CPU, enabled=False).__enter__()
                with torch.autocast(CPU, torch.float16):
                    assert torch.get_autocast_dtype(CPU) is torch.float16
                assert not torch.is_autocast_enabled(CPU)
            assert _C.depth() == 4
        assert not autocast_methods._thread.objects


@pytest.mark.usefixtures("installed_marked")
def test_abandoned_bodies() -> None:
    async def forever() -> None:
        with torch.autocast(CPU):
            await asyncio.sleep(3600)

    async def agen() -> AsyncIterator[torch.dtype]:
        with torch.autocast(CPU):
            yield mm_dtype()
            yield mm_dtype()

    async def main() -> None:
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
