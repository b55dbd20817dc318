"""Compares a call under an override with the same call, carried out by hand according to the reference's plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from helpers.rows import calls
from helpers.side_by_side import Outcome, Watch, assert_alike, run
from torch_promote.observe.ops import facts_of
from torch_promote.parity.samples import Bound
from torch_promote.policy.op_table import CastPolicy, Row
from torch_promote.policy.overrides import legal_policies
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan, replace_tensors, tensors_in

#: A cast policy, or a dtype to run in.
Policy = CastPolicy | torch.dtype
#: Casts that were made by hand and are kept, with their sources.
Kept = dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

#: Keys on which an op without its own kernel falls through; a call that starts at them would not.
_STEPPED_OVER = ("AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect")
#: Ops that return uninitialized memory, so that only the dtype, shape and strides of their results can be compared.
_UNFILLED = ("empty", "new_empty", "resize")


def full_name(op: Any) -> str:
    """An overload's name as the dispatcher spells it."""
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a cache keeps casts of a tensor. Source: aten/src/ATen/autocast_mode.cpp, cached_cast (v2.13)."""
    is_leaf = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    return tensor.dtype is torch.float32 and is_leaf and not torch.is_inference_mode_enabled()


def carry_out(plan: AutocastPlan, bound: Bound, kept: Kept | None = None) -> Any:
    """Makes the plan's casts and calls the op that runs. Casts that a cache keeps are taken from `kept`."""
    op, args, kwargs = bound
    kept = {} if kept is None else kept
    arguments = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    sources = {path: tensor for name, value in arguments.items() for path, tensor in tensors_in(name, value)}
    made: dict[str, torch.Tensor] = {}
    for cast in plan.all_casts():
        source = sources[cast.argument]
        assert source.dtype is cast.from_
        key = id(source), cast.to
        made[cast.argument] = kept[key][1] if key in kept else source.to(cast.to)
        if _is_weight(source):
            kept[key] = source, made[cast.argument]
    arguments = {name: replace_tensors(name, value, made) for name, value in arguments.items()}
    arguments |= plan.dtype_arguments
    runs = op
    if plan.runs != full_name(op):  # the defaults are those of the overload that was called
        arguments = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()} | arguments
        packet, _, overload = plan.runs.removeprefix("aten::").partition(".")
        runs = getattr(getattr(torch.ops.aten, packet), overload or "default")
    positional = []
    for argument in runs._schema.arguments:
        if argument.kwarg_only or argument.name not in arguments:
            break
        positional.append(arguments.pop(argument.name))
    return runs(*positional, **arguments)


def runs_and_writes(call: Any, op: Any) -> Any:
    """Makes a function that returns a call's results and the written arguments, with zeros for uninitialized memory."""
    unwritten = facts_of(full_name(op)).unwritten
    written = [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def both(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        if unwritten:
            results = tuple(torch.zeros_like(r) if i in unwritten else r for i, r in enumerate(results))
        return results, [kwargs[name] if name in kwargs else args[index] for index, name in written] or None

    return both


def check_effect(
    label: str,
    bound: Bound,
    policy: Policy,
    device: str = "cpu",
    lower: torch.dtype = torch.bfloat16,
    *,
    fake: bool = False,
) -> tuple[AutocastPlan, Outcome]:
    """Compares one call under an override with its plan, carried out by hand: results, writes, gradients, errors."""
    op, args, kwargs = bound
    label = f"{label}: {full_name(op)} under {policy}"
    state = AutocastState.region(device, lower, overrides={full_name(op): policy})
    plan = autocast_plan(op, args, kwargs, state)
    region = tp.my_autocast(device, lower, overrides={op: policy})
    ours = run(region, (runs_and_writes(op, op), args, kwargs), Watch(stand_in=True) if fake else None)
    if plan.error is not None:
        assert ours.error is not None, label
        return plan, _blank(op, ours)
    if policy is CastPolicy.fallthrough:
        assert (plan.casts, plan.runs, plan.policy) == ((), full_name(op), None), label
        hand, around = _left_alone(op), tp.my_autocast(device, lower)
    else:
        assert (plan.policy, plan.device) == (policy, device), label

        def hand(*args: Any, **kwargs: Any) -> Any:
            return carry_out(autocast_plan(op, args, kwargs, state), (op, args, kwargs))

        around = contextlib.nullcontext()
    by_hand = run(around, (runs_and_writes(hand, op), args, kwargs), Watch(stand_in=True) if fake else None)
    if ours.ops is not None and by_hand.ops is not None:  # in which order arguments are cast is the compiler's choice
        ours.ops, by_hand.ops = sorted(ours.ops), sorted(by_hand.ops)
    assert_alike(_blank(op, ours), _blank(op, by_hand), label)
    return plan, ours


def _left_alone(op: Any) -> Any:
    """The op without a policy: a call that starts below every Autocast key, in a thread in which they are all on."""

    def below_autocast(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C._dispatch_tls_local_include_set()
        for _, tensor in tensors_in("", [args, kwargs]):
            keys = keys | torch._C._dispatch_keys(tensor)
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastPrivateUse1)
        for key in _STEPPED_OVER:
            if key.startswith("Autocast") or not torch._C._dispatch_has_kernel_for_dispatch_key(full_name(op), key):
                below = below.remove(getattr(torch._C.DispatchKey, key))
        below = below.add(torch._C.DispatchKey.PythonTLSSnapshot)  # what fake tensors want to have passed
        return op.redispatch((keys - torch._C._dispatch_tls_local_exclude_set()) & below, *args, **kwargs)

    return below_autocast


def _blank(op: Any, outcome: Outcome) -> Outcome:
    """The outcome of an op that does not initialize memory, with zeros for its content."""
    if not op._opname.startswith(_UNFILLED):
        return outcome
    outcome.result = tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor.detach()), outcome.result)
    return outcome


def by_turns(tree: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Casts the floating tensors of a tree to dtypes in alternation. A tensor that occurs twice stays one."""
    cast: dict[int, torch.Tensor] = {}

    def to_next(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if id(tensor) not in cast:
            made = tensor.detach().to(dtypes[len(cast) % len(dtypes)])
            cast[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return cast[id(tensor)]

    return tree_map_only(torch.Tensor, to_next, tree)


#: Dtypes to run in.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_row_effects(
    row: Row, kinds: Sequence[str], device: str, lower: torch.dtype = torch.bfloat16, *, fake: bool = False
) -> tuple[set[Policy], set[Policy]]:
    """Checks a row's sample calls under every legal policy."""
    cast: set[Policy] = set()
    ran: set[Policy] = set()
    for kind in kinds:
        for label, bound in calls(row, kind, lower, device, fake=fake):
            for policy in (*legal_policies(row), *_DTYPES):
                plan, outcome = check_effect(label, bound, policy, device, lower, fake=fake)
                cast |= {policy} if plan.casts or plan.dtype_arguments else set()
                ran |= {policy} if outcome.error is None else set()
    assert {CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned}.isdisjoint(cast)
    assert CastPolicy.banned not in ran
    return cast, ran
