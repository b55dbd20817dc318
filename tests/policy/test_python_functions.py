"""The ops that functions of PyTorch stand for, compared with the ops that the functions call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.testing._internal.common_methods_invocations import op_db

from torch_promote import PolicyError
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.policy.op_names import _path_of, op_of_function


class Outermost:
    """Records the ops that are called, and not those that they call in turn."""

    stock_too = see_through = False

    def __init__(self) -> None:
        self.ops: list[str] = []

    def begin(self, op: Any, args: list[Any]) -> Outermost:
        self.ops.append(op._schema.name.removeprefix("aten::"))
        return self

    def end(self, token: object, results: list[Any]) -> None: ...

    def failed(self, token: object) -> None: ...


def outermost(run: Callable[[], Any]) -> set[str]:
    with observe_dispatch(observer := Outermost()):
        run()
    return set(observer.ops)


def sampled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of PyTorch's functions and methods, with where people find them."""
    for entry in op_db:
        dtype = next((one for one in (torch.float32, torch.int64, torch.complex64) if one in entry.dtypes), None)
        functions = {_path_of(one): one for one in (entry.op, entry.method_variant) if one is not None}
        if dtype is None or not functions.keys() - {None}:
            continue
        for _, sample in zip(range(4), entry.sample_inputs_func(entry, "cpu", dtype, False), strict=False):
            for path, function in functions.items():
                if path is not None and isinstance(sample.input, torch.Tensor | list | tuple):
                    yield path, lambda f=function, s=sample: f(s.input, *s.args, **s.kwargs)  # type: ignore[misc]


@cache
def observed() -> dict[str, list[set[str]]]:
    """The outermost ops of each sampled call, by function."""
    found = defaultdict(list)
    torch.manual_seed(0)
    for path, run in sampled():
        try:
            found[path].append(outermost(run))
        except (RuntimeError, TypeError, AttributeError):  # a sample for the function alone, or for another build
            continue
    return found


def function_at(path: str) -> Any:
    place, _, name = path.rpartition(".")
    found = {"F": F, "torch": torch, "Tensor": torch.Tensor}.get(place) or getattr(torch._C, place[9:])
    return getattr(found, name, None)  # None where an older PyTorch lacks it


@pytest.mark.filterwarnings("ignore")
def test_a_function_stands_for_an_op_that_it_calls() -> None:
    wrong = {}
    for path, calls in observed().items():
        try:
            op = op_of_function(function_at(path)).removeprefix("aten::")
        except PolicyError:
            continue
        # A call may be of another op, as of one that returns indices, or of none, as contiguous() may be.
        called = [ops for ops in calls if ops]
        if sum(op in ops for ops in called) * 3 < len(called):
            wrong[path] = (op, called)
    assert not wrong, wrong
