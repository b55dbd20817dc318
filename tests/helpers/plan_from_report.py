"""Computes the reference's plan for a call of a trace, from only the trace's record."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch

from torch_promote.observe.call import Call, TensorInfo
from torch_promote.observe.ops import find_overload
from torch_promote.observe.policy_sources import STOCK
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import TURNS, AutocastPlan, AutocastState, DeviceAutocast, autocast_plan


def differences(calls: list[Call]) -> Iterator[str]:
    """Yields the differences between the calls of a trace and the reference's plans."""
    for call in calls:
        plan = plan_of(call)
        policy = CastPolicy.fallthrough if plan.policy is None and call.policy_source else plan.policy
        if call.policy is None:
            policy = plan.policy
        if policy != call.policy:
            yield f"{call.name}: policy {call.policy} ({call.policy_source}), the plan has {plan.policy}"
        planned = [(cast.argument, cast.from_, cast.to) for cast in plan.all_casts()]
        made = [(cast.argument, cast.from_dtype, cast.to_dtype) for cast in call.casts]
        if planned != made and not call.error:
            yield f"{call.name}: casts {made}, the plan has {planned}"
        to = {argument: dtype for argument, _, dtype in planned}
        dtypes = [(info.name, to.get(info.name, info.dtype)) for info in call.inputs]
        if dtypes != [(info.name, info.dtype) for info in call.ran_with] and not call.error:
            yield f"{call.name}: ran with {list(map(str, call.ran_with))}, the plan has {dtypes}"


def plan_of(call: Call) -> AutocastPlan:
    """Returns the reference's plan of a call."""
    op = find_overload(call.name)
    on = dict(call.autocast)
    devices = {device: DeviceAutocast(device in on, on.get(device, torch.float16)) for device in TURNS}
    overrides: dict[str, Any] = {}
    if call.policy is not None and call.policy_source != STOCK:
        device = next(device for device in TURNS if device in on and any(_is_on(info, device) for info in call.inputs))
        overrides[call.name] = MappingProxyType({device: call.policy})
    state = AutocastState(devices, MappingProxyType(overrides))
    return autocast_plan(op, [_argument(one, call) for one in op._schema.arguments], {}, state)


def _is_on(info: TensorInfo, device: str) -> bool:
    return info.device.partition(":")[0] in TURNS[device]


def _argument(argument: Any, call: Call) -> Any:
    infos = {info.name: info for info in call.inputs}
    if argument.name in infos:
        return _tensor(infos[argument.name])
    indices = [name[len(argument.name) + 1 : -1] for name in infos if name.startswith(f"{argument.name}[")]
    if indices:
        values = [None] * (1 + max(map(int, indices)))
        for index in indices:
            values[int(index)] = _tensor(infos[f"{argument.name}[{index}]"])
        return values
    if str(argument.real_type) == "Tensor":  # a Python number
        return 1.0
    dtype = dict(call.arguments).get(argument.name) if "ScalarType" in str(argument.real_type) else None
    return None if dtype is None else getattr(torch, dtype)


def _tensor(info: TensorInfo) -> Any:
    return torch.empty(0, dtype=info.dtype, device=info.device)
