"""One keyword for a device type in the whole public interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch_promote as tp
from torch_promote import reference


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, methods and regions. Classes of values have attributes of their own."""
    for module in (tp, reference):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or value in (tp.my_autocast, tp.promotion):
                yield name, value
            elif isinstance(value, type):
                yield from ((f"{name}.{key}", getattr(value, key)) for key in vars(value) if not key.startswith("_"))


def test_the_keyword_is_device_type() -> None:
    found = {}
    for name, function in functions():
        if callable(function):
            named = [one for one in inspect.signature(function).parameters if one.startswith("device")]
            found |= {name: named} if named else {}
    assert set(map(tuple, found.values())) == {("device_type",)}, found
    assert found.keys() >= {"my_autocast", "register_policy", "Policy.override", "Policy.lookup", "infer_elementwise"}
