"""Detects whether a step runs compiled code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["is_compiled"]

#: The depth to which functions that call functions are searched.
_DEPTH = 3


def is_compiled(step: Callable[..., Any], model: nn.Module | None) -> bool:
    """Whether a step calls an object returned by torch.compile, as far as its code shows.

    Args:
        step: The step. Its closure, the globals that its code names, its object and its arguments are searched, and the
            functions among them.
        model: The model, whose modules are searched.

    Example:
        >>> is_compiled(lambda: 0.0, nn.Linear(2, 2))
        False
    """
    if model is not None and _has_compiled_modules(model):
        return True
    return any(map(_is_compiled, _reached(step, _DEPTH, set())))


def _is_compiled(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return _has_compiled_modules(value)
    return callable(value) and hasattr(value, "_torchdynamo_orig_callable")


def _has_compiled_modules(model: nn.Module) -> bool:
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in model.modules())


def _reached(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yields an object and the objects that it refers to."""
    if id(value) in seen or inspect.ismodule(value) or isinstance(value, type):
        return
    seen.add(id(value))
    yield value
    if not depth:
        return
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    if not isinstance(value, nn.Module):
        owner = getattr(value, "__self__", None)
        inner += list(getattr(owner, "__dict__", {}).values())
    function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    if inspect.isfunction(function):
        inner += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        inner += [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    elif not isinstance(value, nn.Module) and inspect.isfunction(call := type(value).__dict__.get("__call__")):
        inner += [call, *getattr(value, "__dict__", {}).values()]
    for one in inner:
        yield from _reached(one, depth - 1, seen)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
