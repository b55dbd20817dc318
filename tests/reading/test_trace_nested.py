"""A trace in and around crosscheck, check_casts and other traces, and blocks that end in unusual ways."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as module_globals

import torch_promote as tp
from helpers.traced_programs import PROGRAMS, with_half_of
from torch_promote import _C
from torch_promote.errors import DispatchObserverError, OptionError
from torch_promote.observe import observer
from torch_promote.observe.call import Call
from torch_promote.observe.observer import observe_dispatch
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import TraceReport


def _run(name: str, region: Callable[[], Any] = lambda: tp.my_autocast("cpu")) -> torch.Tensor:
    torch.manual_seed(0)
    return _overflow(region) if name == "overflow" else PROGRAMS[name](region)


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
    key = torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY)
    observer = _C.swap_observer(None)
    _C.swap_observer(observer)
    return hooks, observer, torch._C._dispatch_tls_is_dispatch_key_included(key)


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before


def _overflow(region: Callable[[], Any]) -> torch.Tensor:
    with tp.my_autocast("cpu", torch.float16):
        return torch.mm(torch.full((2, 2), 300.0), torch.full((2, 2), 300.0)).float().sqrt()


_NAMES = ["attention", "checkpoint", "reentrant checkpoint", "gru", "double backward", "overflow"]
_TOOLS: dict[str, Callable[[], Any]] = {
    "trace": trace,
    "crosscheck": tp.crosscheck,
    "bits": lambda: tp.crosscheck(level="bits"),
    "find_nonfinite": tp.find_nonfinite,
}


@pytest.mark.parametrize(("name", "tool"), with_half_of(_NAMES, _TOOLS))
def test_in_and_around_another_tool(name: str, tool: str) -> None:
    def said(report: Any) -> Any:
        if isinstance(report, TraceReport):
            return _without_times(report)
        data = report.to_dict()
        origin = data.pop("origin", None) or {}  # its lines are those of the calls below
        return data, origin.get("op"), origin.get("kind")

    with trace() as alone:
        _run(name)
    with _TOOLS[tool]() as tool_alone:
        _run(name)
    with _TOOLS[tool]() as outer, trace() as inside:
        _run(name)
    with trace() as around, _TOOLS[tool]() as inner:
        _run(name)
    assert said(inner) == said(outer) == said(tool_alone)
    assert _without_times(inside) == _without_times(around) == _without_times(alone)
    if tool == "find_nonfinite":
        assert (inner.origin is not None) == (name == "overflow")


def test_find_nonfinite_that_raises_in_a_trace() -> None:
    with trace() as alone:
        _run("overflow")
    with trace() as around, pytest.raises(ArithmeticError), tp.find_nonfinite(raise_at_first=True):
        _run("overflow")
    assert len(around.calls) > 3
    assert [call.op for call in around.calls[:3]] == [call.op for call in alone.calls[:3]]


def test_a_crosscheck_that_raises_ends_the_calls_of_a_trace() -> None:
    class Wrong:
        def begin(self, op: Any, args: Any) -> Any:
            if "exp" in str(op):
                raise ArithmeticError("planted")

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
    observer._thread.observers.clear()
    _C.swap_observer(None)
    torch._C._dispatch_tls_set_dispatch_key_included(observer._KEY, False)


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
        ({"max_calls": -1}, r"must be 0 or more, got -1\."),
        ({"max_calls": "all"}, "got 'all'"),
    ],
)
def test_an_argument_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message), tp.trace(**options):
        pass
