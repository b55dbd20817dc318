"""Compares stock and ours on every entry of PyTorch's own lists of autocast ops.

The lists of the CPU run for real, and those of CUDA on fake tensors. tests/cuda/ runs them with values.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.autocast_lists import ListedCall, autocast_lists, calls_of
from helpers.side_by_side import Outcome, Watch, assert_alike, run

#: Ops whose entries stock refuses too, and why. All others must run.
REFUSED = {"einsum": "the equation is for four dimensions, the matrices have two"}
REFUSED_IF_FAKE = {"equal": "its result is read from the values, and there are none"}


@dataclass(frozen=True)
class Place:
    """Where a set of lists runs."""

    name: str
    device: str
    mode: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)

    @functools.cached_property
    def lists(self) -> dict[str, list[tuple[Any, ...]]]:
        with self.mode:
            return autocast_lists(self.device)

    @property
    def refused(self) -> set[str]:
        return {*REFUSED, *(REFUSED_IF_FAKE if isinstance(self.mode, FakeTensorMode) else ())}

    def outcomes(self, call: ListedCall) -> tuple[Outcome, Outcome]:
        bound = call.function, call.args, call.kwargs
        with self.mode:
            stock = run(tp.stock_autocast(self.device, call.lower), bound, Watch(stand_in=True))
            ours = run(tp.my_autocast(self.device, call.lower), bound, Watch(stand_in=True))
        return stock, ours


CPU, FAKE_CUDA = Place("cpu", "cpu"), Place("fake cuda", "cuda", FakeTensorMode())
PLACES = [CPU, FAKE_CUDA]
ENTRIES = [
    (place, name, index) for place in PLACES for name, entries in place.lists.items() for index in range(len(entries))
]


def _name(entry: tuple[Place, str, int]) -> str:
    place, list_name, index = entry
    return f"{place.name}-{list_name}-{index}-{place.lists[list_name][index][0]}"


pytestmark = pytest.mark.usefixtures("pretend_cuda")


@pytest.mark.parametrize(("place", "list_name", "index"), ENTRIES, ids=map(_name, ENTRIES))
def test_entry(place: Place, list_name: str, index: int) -> None:
    for call in calls_of(list_name, place.lists[list_name][index]):
        stock, ours = place.outcomes(call)
        assert_alike(ours, stock, call.label, same_text=not call.banned)
        if call.banned:
            assert type(ours.error) is RuntimeError, call.label
        elif call.op not in place.refused:
            assert ours.error is None, call.label
            given = {leaf.dtype for leaf in tree_leaves(ours.result) if isinstance(leaf, torch.Tensor)}
            assert given <= {call.expected}, call.label


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_nearly_all_entries_run(place: Place) -> None:
    ran: list[str] = []
    only_raised: list[str] = []
    for list_name, entries in place.lists.items():
        for entry in entries:
            errors = [ours.error for _, ours in map(place.outcomes, calls_of(list_name, entry))]
            (only_raised if all(errors) else ran).append(entry[0])
    banned = {entry[0] for entry in place.lists.get("banned", [])}
    assert set(only_raised) <= place.refused | banned
    assert len(ran) > 40
    assert len(only_raised) < len(ran) / 20
