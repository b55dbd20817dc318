"""A trace in and around crosscheck, check_casts and other traces, and blocks that end in unusual ways."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as module_globals

import torch_promote as tp
from helpers.traced_programs import PROGRAMS
from torch_promote import _C
from torch_promote.errors import OptionError
from torch_promote.observe.dispatch import DispatchObserverError
from torch_promote.observe.events import Call
from torch_promote.observe.trace import trace
from torch_promote.observe.trace_report import TraceReport


def _run(name: str, region: Callable[[], Any] = lambda: tp.my_autocast("cpu")) -> torch.Tensor:
    torch.manual_seed(0)
    return PROGRAMS[name](region)


def _without_times(report: TraceReport) -> list[Call]:
    def same(cast: Any) -> Any:
        return replace(cast, tensor=0)

    return [
        replace(call, start=0, duration=0, cast_time=0, casts=tuple(map(same, call.casts))) for call in report.calls
    ]


def _state() -> Any:
    hooks = {
        name: len(value)
        for name, value in vars(module_globals).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    key = torch._C._dispatch_key_parse(_C.dispatch_observer_key())
    observer = _C.swap_observer(None)
    _C.swap_observer(observer)
    return hooks, observer, torch._C._dispatch_tls_is_dispatch_key_included(key)


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before


@pytest.mark.parametrize("level", ["dtype", "bits"])
@pytest.mark.parametrize("name", ["attention", "checkpoint", "reentrant checkpoint", "lstm", "double backward"])
def test_in_and_around_a_crosscheck(name: str, level: Any) -> None:
    with trace() as alone:
        _run(name)
    with tp.crosscheck(level=level) as checked_alone:
        _run(name)
    with tp.crosscheck(level=level) as outer, trace() as inside:
        _run(name)
    with trace() as around, tp.crosscheck(level=level) as inner:
        _run(name)
    assert checked_alone.ok, checked_alone
    assert inner.to_dict() == outer.to_dict() == checked_alone.to_dict()
    assert _without_times(inside) == _without_times(around) == _without_times(alone)


def test_a_trace_in_a_trace() -> None:
    with trace() as alone:
        _run("attention")
    with trace() as outer:
        with trace() as inner:
            _run("attention")
        before = len(outer.calls)
        torch.ones(2).exp()
    assert _without_times(inner) == _without_times(outer)[:before] == _without_times(alone)
    assert [call.op for call in outer.calls[before:]] == ["aten::ones", "aten::exp"]


@pytest.mark.parametrize("raises", [False, True])
def test_find_nonfinite_inside_and_around(raises: bool) -> None:
    def program() -> None:
        with tp.my_autocast("cpu", torch.float16):
            big = torch.mm(torch.full((2, 2), 300.0), torch.full((2, 2), 300.0))
            big.float().sqrt()

    with trace() as alone:
        program()
    with tp.find_nonfinite() as found_alone:
        program()
    with contextlib.suppress(ArithmeticError), tp.find_nonfinite(raise_at_first=raises) as outer, trace() as inside:
        program()
    with contextlib.suppress(ArithmeticError), trace() as around, tp.find_nonfinite(raise_at_first=raises) as inner:
        program()
    assert found_alone.origin is not None
    for found in (outer, inner):
        assert found.origin is not None
        assert (found.origin.op, found.origin.kind) == (found_alone.origin.op, found_alone.origin.kind)
    if not raises:
        assert _without_times(inside) == _without_times(around) == _without_times(alone)
    assert [call.op for call in around.calls[:3]] == [call.op for call in alone.calls[:3]]


def test_a_crosscheck_that_raises_ends_the_calls_of_a_trace() -> None:
    class Wrong:
        def begin(self, op: Any, args: Any) -> Any:
            if "exp" in str(op):
                raise ArithmeticError("planted")

    from torch_promote.observe.dispatch import observe_dispatch

    with trace() as report:
        with observe_dispatch(Wrong()), pytest.raises(ArithmeticError, match="planted"):
            torch.ones(2).exp()
        torch.ones(2).log()
    assert [(call.op, call.error) for call in report.calls] == [
        ("aten::ones", False),
        ("aten::exp", True),
        ("aten::ones", False),
        ("aten::log", False),
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_in_the_block(error: type[BaseException]) -> None:
    reports: list[TraceReport] = []

    def block() -> None:
        with trace() as report, tp.my_autocast("cpu"):
            reports.append(report)
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            raise error

    with pytest.raises(error):
        block()
    (report,) = reports
    assert report.calls[-1].op == "aten::mm"


def test_a_block_that_ends_in_another_thread() -> None:
    block = trace()
    block.__enter__()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [DispatchObserverError]
    assert "ended in another thread" in str(errors[0])
    # The thread of the block has left it active, so the test ends it by hand.
    from torch_promote.observe import dispatch as dispatch_observer

    dispatch_observer._thread.observers.clear()
    _C.swap_observer(None)
    torch._C._dispatch_tls_set_dispatch_key_included(dispatch_observer._KEY, False)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_inside_of_a_block() -> None:
    x = torch.ones(2)
    with trace() as report:
        x.exp()
        child = os.fork()
        if child == 0:
            x.log()
            os._exit(0 if [call.op for call in report.calls] == ["aten::exp", "aten::log"] else 1)
        assert os.waitpid(child, 0)[1] == 0
        x.sqrt()
    assert [call.op for call in report.calls] == ["aten::exp", "aten::sqrt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "model"}, "model must be an nn.Module or None, got 'model'"),
        ({"where": "modules"}, "got 'modules'"),
        ({"max_calls": -1}, "got -1"),
        ({"max_calls": "all"}, "got 'all'"),
    ],
)
def test_an_argument_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message), tp.trace(**options):
        pass
