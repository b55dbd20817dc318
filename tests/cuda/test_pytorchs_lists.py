"""Compares stock and ours on every entry of PyTorch's own lists of CUDA's autocast ops, with values.

tests/dispatch/test_rows.py does so with fake tensors, and for the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.autocast_lists import autocast_lists, calls_of
from helpers.side_by_side import Watch, assert_alike, run

LISTS = autocast_lists("cuda")
ENTRIES = [(name, index) for name, entries in LISTS.items() for index in range(len(entries))]
#: Ops whose entries stock refuses too, and why.
REFUSED = {"einsum": "the equation is for four dimensions, the matrices have two"}
assert len(ENTRIES) >= 95


@pytest.mark.parametrize(("name", "index"), ENTRIES, ids=[f"{n}-{i}-{LISTS[n][i][0]}" for n, i in ENTRIES])
def test_entry(name: str, index: int) -> None:
    for call in calls_of(name, LISTS[name][index]):
        bound = call.function, call.args, call.kwargs
        for watch in (lambda: None, Watch):
            stock = run(tp.stock_autocast("cuda", call.lower), bound, watch())
            ours = run(tp.my_autocast("cuda", call.lower), bound, watch())
            assert_alike(ours, stock, call.label, same_text=not call.banned)
        if call.banned:
            assert type(ours.error) is RuntimeError, call.label
        elif call.op not in REFUSED:
            assert ours.error is None, call.label
            given = {leaf.dtype for leaf in tree_leaves(ours.result) if isinstance(leaf, torch.Tensor)}
            assert given <= {call.expected}, call.label
