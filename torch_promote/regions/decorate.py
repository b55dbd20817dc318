"""Regions as decorators of functions, coroutines and generators."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from typing import Any

from torch_promote.regions.steps import Awaited, Steps, drive

__all__ = ["decorate"]


def decorate(region: AbstractContextManager[Any], func: Any) -> Any:
    """Returns a function that runs `func` in `region`. Of a coroutine or generator, each step runs in the region.

    Args:
        region: The region.
        func: A callable.
    """
    body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    wrapper: Any
    if inspect.iscoroutinefunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return await Awaited(steps, func(*args, **kwargs))
            finally:
                steps.end()

    elif inspect.isasyncgenfunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = func(*args, **kwargs)
            steps = Steps(region)
            step = generator.asend(None)
            try:
                while True:
                    try:
                        item: Any = await Awaited(steps, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)
            finally:
                try:
                    await Awaited(steps, generator.aclose())
                finally:
                    steps.end()

    elif inspect.isgeneratorfunction(body):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return (yield from drive(steps, func(*args, **kwargs)))
            finally:
                steps.end()

        if inspect.isfunction(func) and func.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:
            wrapper = types.coroutine(wrapper)

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with region:
                return func(*args, **kwargs)

    # If torch.jit compiles a function with this attribute, it raises the text.
    wrapper.__script_unsupported = "@my_autocast() decorator is not supported in script mode"
    return wrapper
