"""Bugs for the tests of parity to plant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from torch_promote.checking.comparison import copy_with_strides
from torch_promote.parity import entry_run
from torch_promote.parity.entry_run import Outcome


def change_outcomes(monkeypatch: pytest.MonkeyPatch, change: Callable[[Outcome], None]) -> None:
    """Changes the outcomes of calls in regions of ours."""

    def run(region: Any, bound: Any, **options: Any) -> Outcome:
        outcome = unpatched(region, bound, **options)
        if not isinstance(region, torch.autocast):
            change(outcome)
        return outcome

    unpatched = entry_run.run
    monkeypatch.setattr(entry_run, "run", run)


def change_results(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the tensors that calls return in regions of ours."""

    def change_result(outcome: Outcome) -> None:
        outcome.result = tree_map_only(torch.Tensor, change, outcome.result)

    change_outcomes(monkeypatch, change_result)


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Adds one to the first element: each sample with a result then shows up in a mismatch, with its values."""
    changed = copy_with_strides(tensor)
    if tensor.numel():
        changed.view(-1)[0] += 1
    return changed.requires_grad_(tensor.requires_grad)
