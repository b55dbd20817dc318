"""Finds the objects that a step refers to: objects with state, and iterators, whose state cannot be restored."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from torch_promote.numerics.runs.kept import STATEFUL, is_random

__all__ = ["found_in", "iterators_in"]


def found_in(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the objects with state that a function refers to, with the function's names for them.

    It searches the function's closure, the globals that its code names, the object of a bound method, arguments of
    `functools.partial`, functions of the same module that it calls, and one level into lists, dicts and objects.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> def make():
        ...     optimizer = torch.optim.SGD([weight])
        ...     return lambda: optimizer.step()
        >>> [name for name, _ in found_in(make())]
        ['optimizer']
    """
    for name, value in _variables(step, set()):
        for inner, one in _one_level(name, value):
            if (isinstance(one, STATEFUL) or is_random(one)) and not isinstance(one, type):
                yield inner, one


def iterators_in(step: Callable[..., Any]) -> list[str]:
    """Returns the names of iterators that a function refers to. Items drawn from them cannot be drawn again.

    Example:
        >>> batches = iter([1, 2])
        >>> iterators_in(lambda: next(batches))
        ['batches']
    """
    return [
        inner
        for name, value in _variables(step, set())
        for inner, one in _one_level(name, value)
        if isinstance(one, Iterator) and not isinstance(one, type)
    ]


def _variables(step: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(step) in seen:
        return
    seen.add(id(step))
    if isinstance(step, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(step.args))
        yield from step.keywords.items()
        yield from _variables(step.func, seen)
        return
    owner = getattr(step, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield "self", owner
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not inspect.isfunction(function):
        call = getattr(type(step), "__call__", None)  # noqa: B004
        if inspect.isfunction(call) and not isinstance(step, type):
            yield from _variables(call.__get__(step), seen)
        return
    scope = {**_globals(function), **_cells(function)}
    for name, value in scope.items():
        yield name, value
        is_own = inspect.isfunction(value) and value.__globals__ is function.__globals__
        if is_own or isinstance(value, types.MethodType):
            yield from _variables(value, seen)


def _globals(function: types.FunctionType) -> dict[str, Any]:
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def _names(code: types.CodeType) -> Iterable[str]:
    """The names that code uses, including those of nested functions."""
    found = dict.fromkeys(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found.update(dict.fromkeys(_names(one)))
    return found


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an unassigned variable
            continue
    return found


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in list(value.items()))
    elif not isinstance(value, (*STATEFUL, type, nn.Module, types.ModuleType, types.FunctionType)):
        yield from ((f"{name}.{key}", one) for key, one in list(getattr(value, "__dict__", {}).items()))
