"""The suite `overrides`: calls with a user's cast policy, compared with casts by hand (stock has no overrides)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import torch_promote as tp
from torch_promote.bench.cases import HAND, OURS, Case, Prepared, Settings
from torch_promote.bench.timing import stopwatch

__all__ = ["cases", "prepare_overridden"]

_OVERRIDES = {
    "mm": "fp32",
    "bmm": "keep",
    "aten::neg": "fp32",
    "aten::sigmoid": "fp32",
    "aten::add_.Tensor": "match_self",
}

# A name, the call, and the same call by hand.
_CASES = (
    ("a row (mm as fp32), two casts", "torch.mm(low, low)", "torch.mm(low.float(), low.float())"),
    ("a row (mm as fp32), nothing to cast", "torch.mm(single, single)", "torch.mm(single, single)"),
    ("a row (bmm as keep)", "torch.bmm(batch, batch)", "torch.bmm(batch, batch)"),
    ("another op (neg as fp32), a cast", "torch.neg(low)", "torch.neg(low.float())"),
    ("another op (neg as fp32), nothing to cast", "torch.neg(single)", "torch.neg(single)"),
    ("another op (add_ as match_self), a cast", "written.add_(low)", "written.add_(low.float())"),
    ("an op that is not overridden (abs)", "torch.abs(single)", "torch.abs(single)"),
)


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    for name, statement, by_hand in _CASES:
        yield Case("overrides", name, partial(prepare_overridden, statement, by_hand))


def prepare_overridden(statement: str, by_hand: str, settings: Settings) -> Prepared:
    """Prepares a call in a region with overrides of `mm`, `bmm`, `neg`, `sigmoid` and `add_`, and the call by hand.

    Args:
        statement: The call. It can use the names `torch`, `low`, `single`, `batch` and `written`.
        by_hand: The call with casts in the code.
        settings: The device, and the length of a slice.
    """
    single = torch.randn(4, 4, device=settings.device)
    names = {
        "torch": torch,
        "low": single.bfloat16(),
        "single": single,
        "batch": single.reshape(1, 4, 4),
        "written": torch.zeros_like(single),
    }
    region = partial(tp.my_autocast, settings.device, overrides=_OVERRIDES)
    timers = {OURS: stopwatch(statement, names, settings, region), HAND: stopwatch(by_hand, names, settings)}
    return Prepared(timers)
