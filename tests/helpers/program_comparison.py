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

#: A region of ours that casts nothing. A result that is equal under it and under stock does not depend on our casts.
silenced: Region = functools.partial(tp.my_autocast, "cpu", policy="off")
#: The same three kinds of regions of the CPU, and of any device, which a program names first: `region("cuda")`.
ON_THE_CPU = (stock, ours, silenced)
ANYWHERE = (tp.stock_autocast, tp.my_autocast, functools.partial(tp.my_autocast, policy="off"))


def assert_like_stock(
    run: Callable[[Region], Any], casts: bool = True, regions: tuple[Region, Region, Region] = ON_THE_CPU
) -> Any:
    """Fails unless `run(ours)` gives the same results as `run(stock)`.

    Stock's state is on inside our regions, so stock would make the casts if our wrappers did not run. Therefore `run`
    is called once more with a region of ours that casts nothing, and must then differ, unless `casts` is False.
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
    """A copy of a tensor, because later steps update it in place; for nested and sparse tensors, their plain parts."""
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
    """Whether `run(quiet)` gives `expected`. An error, as from checkpoint, counts as different."""
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
