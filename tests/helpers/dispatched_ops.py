"""Overloads outside of the op table that the entries of PyTorch's op database call first, each with sample calls."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from helpers.override_effects import full_name
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.observe.ops import tensors_in
from torch_promote.parity.entry_run import Bound, copied
from torch_promote.parity.samples import op_database
from torch_promote.policy.op_table import op_table

__all__ = ["functional_ops"]

#: The number of samples called per entry.
_SAMPLES = 2


class _First:
    """Keeps the first call that it observes: the op as it is dispatched, before autocast sees it."""

    def __init__(self) -> None:
        self.call: tuple[Any, list[Any]] | None = None

    def begin(self, op: Any, args: list[Any]) -> None:
        if self.call is None:
            self.call = op, copied(args)


@functools.cache
def functional_ops() -> dict[str, list[Bound]]:
    """Returns the overloads outside of the table that write nothing, by their full names, with their sample calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _collect()
    return {name: calls for name, calls in found.items() if not calls[0][0]._schema.is_mutable}


def _collect() -> dict[str, list[Bound]]:
    rows = {row.name for row in op_table()}
    found: dict[str, list[Bound]] = {}
    for entry in op_database().values():
        if torch.float32 not in entry.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        random.seed(0)
        # Not through entry.sample_inputs, which walks the stack for each sample to name the test that it is for.
        for sample in itertools.islice(
            entry.sample_inputs_func(entry, "cpu", torch.float32, entry.supports_autograd), _SAMPLES
        ):
            call = _first_call(functools.partial(entry.op, sample.input, *sample.args, **sample.kwargs))
            if call is not None and full_name(call[0]) not in rows and tensors_in(call[1]):
                found.setdefault(full_name(call[0]), []).append(_bound(*call))
    return {name: found[name] for name in sorted(found)}


def _first_call(run: Callable[[], Any]) -> tuple[Any, list[Any]] | None:
    first = _First()
    with observe_dispatch(first):
        try:
            run()
        except Exception:  # keep the calls dispatched until then
            return first.call
    return first.call


def _bound(op: Any, args: list[Any]) -> Bound:
    """The call, with keyword-only arguments by name."""
    both = list(zip(op._schema.arguments, args, strict=True))
    by_name = {argument.name: value for argument, value in both if argument.kwarg_only}
    return op, tuple(value for argument, value in both if not argument.kwarg_only), by_name
