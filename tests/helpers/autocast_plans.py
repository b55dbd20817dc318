"""Carries out an autocast plan by hand, with autocast off, and compares with a call in a region."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import torch_promote as tp
from helpers.override_effects import Kept, carry_out
from helpers.rows import calls
from helpers.side_by_side import Bound, SeenOp, Watch
from torch_promote.parity.row_samples import KINDS
from torch_promote.policy.op_table import CastPolicy, Row
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan

#: A class of regions: tp.stock_autocast or ours.
Autocast = Callable[..., contextlib.AbstractContextManager[Any]]
#: The outcome of a call: the ops below autocast, and the type and text of the error if it raised.
Seen = tuple[list[SeenOp], tuple[type, str] | None]

#: A cast as it arrives below autograd, and as it arrives if autograd is skipped.
_CASTS = ("aten._to_copy.default", "aten.to.dtype")
#: The errors of stock's promote for calls to which ours gives a result: docs/differences.md.
_STOCK_PROMOTE = ("Unexpected floating ScalarType in at::autocast::prioritize", "promote type is double")


def watched(call: Callable[[], Any], region: contextlib.AbstractContextManager[Any], *, fake: bool = False) -> Seen:
    """Runs a call in a region and returns the ops below autocast, with the leading casts sorted."""
    watch, error = Watch(stand_in=fake), None
    with warnings.catch_warnings(), region, watch:
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as raised:
            error = type(raised), str(raised).partition("\n")[0]
    first = next((i for i, (name, _, _) in enumerate(watch.ops) if name not in _CASTS), len(watch.ops))
    # In which order the arguments of one call are cast is the C++ compiler's choice, and so is what comes before a cast
    # that raises.
    if any(not results for _, _, results in watch.ops[:first]):
        return [], error
    return sorted(watch.ops[:first]) + watch.ops[first:], error


def overriding(
    autocast: Autocast,
    device: str,
    lower: torch.dtype,
    overrides: Mapping[str, CastPolicy | torch.dtype] | None,
    **region: Any,
) -> contextlib.AbstractContextManager[Any]:
    """Makes a region with overrides of single overloads: `aten::stft` alone would mean all of them."""
    if overrides:
        region["overrides"] = {name if "." in name else f"{name}.default": p for name, p in overrides.items()}
    return autocast(device, lower, **region)


def check_call(
    label: str,
    bound: Bound,
    device: str,
    lower: torch.dtype,
    autocast: Autocast,
    *,
    fake: bool = False,
    overrides: Mapping[str, CastPolicy | torch.dtype] | None = None,
) -> AutocastPlan:
    """Compares two equal calls in one region: the casts missing in the second are those that the plan caches."""
    op, args, kwargs = bound
    state = replace(
        AutocastState.region(device, lower, overrides=overrides),
        inference_mode=torch.is_inference_mode_enabled(),
    )
    plan = autocast_plan(op, args, kwargs, state)
    kept: Kept = {}
    with overriding(autocast, device, lower, overrides):
        for _ in range(2):
            held = tuple((source, to) for (_, to), (source, _) in kept.items())
            planned = autocast_plan(op, args, kwargs, replace(state, cached=held))
            real = watched(functools.partial(op, *args, **kwargs), contextlib.nullcontext(), fake=fake)
            if planned.error is not None:
                assert real[0] == [], label
                assert real[1] is not None, label
                assert real[1][0] is RuntimeError, label
            elif planned.policy is CastPolicy.promote and _refused_by_stock_alone(real, autocast):
                return plan
            elif real[0] == [] and real == watched(
                functools.partial(op, *args, **kwargs), autocast(device, enabled=False)
            ):
                return plan  # refused while the arguments are read, before autocast sees them
            else:
                hand = functools.partial(carry_out, planned, bound, kept)
                off = watched(hand, autocast(device, enabled=False), fake=fake)
                assert real == off, f"{label}: {planned}"
    return plan


def _refusal(bound: Bound) -> tuple[type, str] | None:
    """PyTorch's error for the arguments themselves, before autocast sees them, or None."""
    op, args, kwargs = bound
    with tp.my_autocast("cpu", enabled=False):
        ops, error = watched(functools.partial(op, *args, **kwargs), contextlib.nullcontext())
    return None if ops else error


def _refused_by_stock_alone(real: Seen, autocast: Autocast) -> bool:
    return autocast is tp.stock_autocast and real[1] is not None and real[1][1].startswith(_STOCK_PROMOTE)


def check_row(row: Row, device: str, lower: torch.dtype, autocast: Autocast, *, fake: bool) -> None:
    """Checks the row's sample calls in every kind of dtypes."""
    for kind in KINDS:
        for label, bound in calls(row, kind, lower, device, fake=fake):
            plan = check_call(label, bound, device, lower, autocast, fake=fake)
            assert plan.policy is row.policy(device), label
            assert (plan.device, plan.then) == (device, None), label
