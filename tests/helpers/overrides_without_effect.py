"""Programs whose overrides have no effect, and the warnings that they get."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_promote as tp

__all__ = ["BATCH", "NET", "Body", "W", "X", "in_lines", "linear_12_times", "program", "region", "told"]

X, W = torch.randn(4, 8), torch.randn(8, 8)
BATCH = torch.randn(2, 4, 4)
NET = nn.Linear(8, 8)
Body = Callable[[], object]

_number = iter(range(10**6))


def program(source: str, **names: Any) -> Callable[..., None]:
    """Returns a function that runs the source: each time a program of its own, whose lines nobody has run before."""
    scope = {"torch": torch, "tp": tp, **names}
    code = compile(source, f"<program {next(_number)}>", "exec")
    return lambda: exec(code, scope)


def told(run: Body) -> list[str]:
    """Returns the texts of the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run()
    return [str(warning.message) for warning in caught if warning.category is tp.UnusedOverrideWarning]


def region(overrides: dict[Any, Any], body: Body, enter: str = 'tp.my_autocast("cpu", overrides=overrides)') -> Body:
    """Returns a program with one region."""
    return program(f"with {enter}:\n    body()", overrides=overrides, body=body)


def in_lines(text: str) -> str:
    return textwrap.fill(text, 112)


def linear_12_times() -> None:
    for _ in range(12):
        NET(X)
