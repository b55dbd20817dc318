"""Runs one op call under stock and under ours, and compares everything observable of the two runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.comparison import assert_same
from torch_promote.parity import runner as outcome
from torch_promote.parity.model import asks_for_a_gpu
from torch_promote.parity.samples import Bound

#: An op as it arrives below autocast: its name, the dtypes that it gets and those that it gives.
SeenOp = tuple[str, tuple[str, ...], tuple[str, ...]]


class Watch(TorchDispatchMode):
    """Records the ops that arrive below autocast, also those that then raise."""

    def __init__(self, *, stand_in: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[SeenOp] = []
        self._stand_in = stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # how a fake tensor is asked for its device: not an op
            return func(*args, **kwargs)
        index, arrived = len(self.ops), _dtypes((args, kwargs))
        self.ops.append((str(func), arrived, ()))
        try:
            result = func(*args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if not (self._stand_in and asks_for_a_gpu(error)):
                raise
            result = _blank(func, args)
        self.ops[index] = (str(func), arrived, _dtypes(result))
        return result


def _blank(func: Any, args: Any) -> Any:
    """Results of the schema's types; tensors are like the first argument."""
    first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    results = [first.new_empty(first.shape) if str(ret.type) == "Tensor" else 0 for ret in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def _dtypes(tree: Any) -> tuple[str, ...]:
    """The dtypes of the tensors, and dtypes that are arguments themselves, such as that of a cast."""
    found: list[str] = []
    _add_dtypes(tree, found)
    return tuple(found)


def _add_dtypes(tree: Any, found: list[str]) -> None:  # `tree_leaves` would take longer than the ops that are watched
    if isinstance(tree, torch.Tensor):
        found.append(str(tree.dtype))
    elif isinstance(tree, torch.dtype):
        found.append(str(tree))
    elif isinstance(tree, list | tuple):
        for each in tree:
            _add_dtypes(each, found)
    elif isinstance(tree, dict):
        for each in tree.values():
            _add_dtypes(each, found)


@dataclass
class Outcome(outcome.Outcome):
    """The outcome of one run, and the ops that arrived below autocast, if a watch was given."""

    ops: list[SeenOp] | None = None


def run(region: contextlib.AbstractContextManager[Any], bound: Bound, watch: Watch | None = None) -> Outcome:
    """Runs a call in a region, on copies of its arguments and from a fixed seed, and the backward outside of it."""
    made = outcome.run(region, bound, forward=watch)
    return Outcome(**vars(made), ops=watch.ops if watch is not None else None)


def assert_alike(ours: Outcome, stock: Outcome, what: str, *, same_text: bool = True) -> None:
    """Fails unless two runs gave equal results, gradients, errors and ops.

    The text of an error contains dtypes and shapes, so it is compared as well. `same_text=False` is for errors that
    autocast itself raises, whose texts differ.
    """
    assert spell(ours.error, same_text) == spell(stock.error, same_text), f"{what}: not raised alike"
    assert_same(ours.result, stock.result, what)
    assert ours.ops == stock.ops, f"{what}: other ops below autocast"
    assert spell(ours.backward_error) == spell(stock.backward_error), f"{what}: not raised alike in the backward"
    assert_same(ours.gradients, stock.gradients, f"{what}: gradients")


def spell(error: Exception | None, with_text: bool = True) -> str | None:
    """An error's type and the first line of its text, or None."""
    if error is None:
        return None
    text = str(error).partition("\n")[0] if with_text else ""
    return f"{type(error).__qualname__}: {text}"
