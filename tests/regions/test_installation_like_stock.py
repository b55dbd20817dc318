"""`install` does not change arguments, errors, warnings, attributes, signatures and pickles of torch.autocast."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import in_thread, mm_dtype, seen
from torch_promote import _C
from torch_promote.regions import autocast_methods

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


class Text(str):
    """A str that is not exactly one."""


CALLS: dict[str, Opened] = {
    "no device": opened(),
    "None": opened(None),
    "a device": opened(torch.device("cpu")),
    "an unknown device": opened("gpu"),
    "an index": opened("cpu:0"),
    "a subclass of str": opened(Text("cpu")),
    "meta": opened("meta"),
    "cuda": opened("cuda"),
    "float32": opened("cpu", torch.float32),
    "float64": opened("cpu", dtype=torch.float64),
    "int32": opened("cpu", torch.int32),
    "int32, off": opened("cpu", torch.int32, False),
    "complex, off": opened("cpu", torch.complex64, False),
    "float8, off": opened("cpu", torch.float8_e4m3fn, False),
    "a str as dtype": opened("cpu", "bfloat16"),
    "a list as dtype, off": opened("cpu", [], False),
    "a float as dtype, off": opened("cpu", 1.5, False),
    "enabled=1": opened("cpu", enabled=1),
    "enabled=0": opened("cpu", enabled=0),
    "enabled=None": opened("cpu", enabled=None),
    "enabled=str": opened("cpu", enabled="no"),
    "enabled=[]": opened("cpu", enabled=[]),
    "cache_enabled=1": opened("cpu", cache_enabled=1),
    "cache_enabled=str": opened("cpu", cache_enabled="all"),
    "cache": opened("cpu", cache="all"),
    "policy": opened("cpu", policy="cuda"),
    "too many": opened("cpu", torch.bfloat16, True, True, None),
    "a decorator without parentheses": lambda: torch.autocast(len),
    "decorates no callable": lambda: type(torch.autocast("cpu")(3)),
    "torch.cpu.amp": lambda: torch.cpu.amp.autocast(True, torch.float32).__enter__().__exit__(None, None, None),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast().__enter__().__exit__(None, None, None),
    "plain": opened("cpu"),
    "float16": opened("cpu", torch.float16, True, False),
    "off": opened("cpu", enabled=False),
}


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", CALLS)
def test_arguments_errors_and_warnings(name: str) -> None:
    # In separate threads: if PyTorch raises on entering a region, it has changed half of the state.
    expected = in_thread(lambda: outcome(CALLS[name]))
    with tp.installed_as():
        # An equal argument that PyTorch takes must not let through one that it refuses.
        for accepted in (opened("cpu"), opened("cpu", enabled=False)):
            accepted()
        assert in_thread(lambda: outcome(CALLS[name])) == expected


@pytest.mark.usefixtures("installed_marked")
def test_signatures_and_names() -> None:
    for name in ("__enter__", "__exit__", "__init__", "__call__"):
        ours, stocks = getattr(torch.autocast, name), getattr(autocast_methods.stock_autocast, name)
        assert inspect.signature(ours) == inspect.signature(stocks)
        assert (ours.__name__, ours.__qualname__, ours.__module__, ours.__doc__) == (
            stocks.__name__, stocks.__qualname__, stocks.__module__, stocks.__doc__,
        )  # fmt: skip
        assert inspect.isfunction(ours)
    assert list(inspect.signature(torch.autocast).parameters) == ["device_type", "dtype", "enabled", "cache_enabled"]
    assert inspect.getsource(torch.autocast).startswith("class autocast")
    assert inspect.getsource(torch.autocast.__enter__) == inspect.getsource(tp.stock_autocast.__enter__)
    assert torch.autocast.__mro__ == (torch.autocast, object)
    assert issubclass(torch.cuda.amp.autocast, torch.autocast)


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
