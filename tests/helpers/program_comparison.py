"""Runs one piece of code under stock's regions and under ours, and compares all results bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

import torch_promote as tp
from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.under_install import assert_stock

#: A region of ours that casts nothing: a result that it shares with stock was not cast by us.
silenced: Region = functools.partial(tp.my_autocast, "cpu", policy="off")
#: The same three kinds of regions of the CPU, and of any device, which a program names first: `region("cuda")`.
ON_THE_CPU = (stock, ours, silenced)
ANYWHERE = (tp.stock_autocast, tp.my_autocast, functools.partial(tp.my_autocast, policy="off"))


def assert_like_stock(
    run: Callable[[Region], Any], casts: bool = True, regions: tuple[Region, Region, Region] = ON_THE_CPU
) -> Any:
    """Fails unless `run(ours)` gives what `run(stock)` gives.

    Stock's state is on inside our regions, so stock would do the casts if our wrappers were passed by. Therefore `run`
    is called once more with a region of ours that casts nothing, and has to come out different then.

    Args:
        run: Takes a maker of regions; returns results in nested containers. The random state is the same each time.
        casts: False for code in which autocast has nothing to do.
        regions: ON_THE_CPU, or ANYWHERE.

    Returns:
        What `run(ours)` gave.
    """
    assert_stock(functools.partial(regions[0], "cpu") if regions is ANYWHERE else regions[0])
    results = [_run(run, region) for region in regions[:2]]
    assert tree_flatten(results[0])[0], "nothing to compare"
    assert_same(results[1], results[0])
    if casts:
        assert not _comes_out_same(run, regions[2], results[0]), "our wrappers have no part in this result"
    return results[1]


def _run(run: Callable[[Region], Any], region: Region) -> Any:
    torch.manual_seed(0)
    return tree_map(_frozen, run(region))


def _frozen(leaf: Any) -> Any:
    """A tensor as it is now, for later steps update in place; of nested and sparse tensors their plain parts."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_nested:
        return str(leaf.layout), leaf.requires_grad, [_frozen(part) for part in leaf.detach().unbind()]
    if leaf.layout is torch.sparse_coo:
        parts = leaf.detach().coalesce()
        return str(leaf.layout), leaf.requires_grad, leaf.is_coalesced(), parts.indices(), parts.values().clone()
    if leaf.layout is torch.sparse_csr:
        parts = leaf.detach()
        return str(leaf.layout), leaf.requires_grad, [parts.crow_indices(), parts.col_indices(), parts.values().clone()]
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _comes_out_same(run: Callable[[Region], Any], quiet: Region, expected: Any) -> bool:
    """Whether `run(quiet)` gives `expected`. If it fails instead, as checkpoint does, that is not the same."""
    try:
        result = _run(run, quiet)
    except Exception:
        return False
    try:
        assert_same(result, expected)
    except AssertionError:
        return False
    return True


def grads(*sources: torch.nn.Module | torch.Tensor) -> list[torch.Tensor | None]:
    """Copies of the gradients of modules' parameters and of tensors."""
    tensors: list[torch.Tensor] = []
    for source in sources:
        tensors += source.parameters() if isinstance(source, torch.nn.Module) else [source]
    return [None if t.grad is None else t.grad.clone() for t in tensors]


def values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors' values."""
    return [t.detach().clone() for t in tensors]
