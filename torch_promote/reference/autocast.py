"""`autocast_plan`: what autocast does with a call of an op: the policy, the casts, and the overload that runs.

The op table, `op_policies.def`, is data that the whole package shares. Everything else is implemented here
independently from the definition of autocast, so that checks can compare it with what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy, rows_by_name
from torch_promote.reference.dtypes import dtype_name, is_floating
from torch_promote.reference.ops.call import Call
from torch_promote.reference.ops.infer import is_registered

#: The device types with policies, in the order in which they cast, each with the devices whose tensors it casts.
TURNS: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "xla"), "mps": ("mps",), "xpu": ("xpu",), "cpu": ("cpu",)}

#: A policy for every device type, or a mapping of device types to policies.
Override = CastPolicy | torch.dtype | Mapping[str, CastPolicy | torch.dtype]
#: Replaces the table's policies: maps full names of overloads, such as `aten::mm` or `mylib::op`, to overrides.
Overrides = Mapping[str, Override]


@dataclass(frozen=True, slots=True)
class DeviceAutocast:
    """The autocast state of one device type.

    Attributes:
        enabled: Whether autocast is on.
        dtype: The autocast dtype.

    Example:
        >>> DeviceAutocast(enabled=True, dtype=torch.bfloat16).dtype
        torch.bfloat16

    Source: aten/src/ATen/autocast_mode.cpp, is_autocast_enabled (v2.13); aten/src/ATen/autocast_mode.cpp,
    get_autocast_dtype (v2.13).
    """

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The autocast state during a call: what decides which casts autocast makes, not which of them a cache has.

    Attributes:
        devices: The state of each device type. Autocast is off for the others.
        overrides: Policies by the overload's full name, such as `aten::mm`: for every device type, or by device type.
            For other ops, the table's policies apply.

    Example:
        >>> AutocastState.region("cpu").devices["cpu"]
        DeviceAutocast(enabled=True, dtype=torch.bfloat16)
    """

    devices: Mapping[str, DeviceAutocast]
    overrides: Overrides = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def region(
        cls, device_type: str, dtype: torch.dtype | None = None, *, overrides: Overrides | None = None
    ) -> AutocastState:
        """Returns the state inside a region of one device type.

        Args:
            device_type: A key of `TURNS`.
            dtype: The autocast dtype. None: PyTorch's default, bfloat16 on the CPU and float16 elsewhere.
            overrides: Policies by the overload's full name: for every device type, or by device type.

        Example:
            >>> AutocastState.region("cuda").devices
            {'cuda': DeviceAutocast(enabled=True, dtype=torch.float16)}

        Source: torch/amp/autocast_mode.py, autocast::__init__ (v2.13).
        """
        chosen = dtype or (torch.bfloat16 if device_type == "cpu" else torch.float16)
        return cls({device_type: DeviceAutocast(True, chosen)}, MappingProxyType(dict(overrides or {})))

    def override(self, name: str, device_type: str) -> CastPolicy | torch.dtype | None:
        """Returns the override for an op on a device type, or None.

        Args:
            name: The overload's full name.
            device_type: A key of `TURNS`.

        Example:
            >>> state = AutocastState.region("cpu", overrides={"aten::mm": {"cpu": CastPolicy.fp32}})
            >>> state.override("aten::mm", "cpu"), state.override("aten::mm", "cuda")
            (<CastPolicy.fp32: 'fp32'>, None)
        """
        found = self.overrides.get(name)
        return found.get(device_type) if isinstance(found, Mapping) else found


# --- The tensors of a call, by path: `mat2`, `tensors[1]`, `inputs[key]`, `pairs[0][1]`


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a value with their paths, such as `x[1][k]`: itself, or in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(f"{path}[{key}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(f"{path}[{index}]", item)


def replace_tensors(path: str, value: Any, chosen: Mapping[str, Any]) -> Any:
    """Returns a value, whose own path is `path`, with the tensors at some paths replaced."""
    if path in chosen:
        return chosen[path]
    if isinstance(value, Mapping):
        return {key: replace_tensors(f"{path}[{key}]", item, chosen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [replace_tensors(f"{path}[{index}]", item, chosen) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


# --- The plan of a call


#: The dispatch keys that PyTorch registers its autocast kernels on.
_STOCK_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


@dataclass(frozen=True, slots=True)
class Cast:
    """One cast of an argument.

    Attributes:
        argument: The argument's name, with an index or key for a tensor inside it: `mat2`, `tensors[1]`.
        from_: Its dtype.
        to: The dtype that it is cast to.

    Example:
        >>> str(Cast("mat2", torch.float32, torch.bfloat16))
        'mat2: float32 -> bfloat16'
    """

    argument: str
    from_: torch.dtype
    to: torch.dtype

    def __str__(self) -> str:
        return f"{self.argument}: {dtype_name(self.from_)} -> {dtype_name(self.to)}"


@dataclass(frozen=True, slots=True)
class AutocastPlan:
    """What autocast does with a call.

    Attributes:
        policy: The policy that applies. A dtype means "run in this dtype"; None: no policy applies.
        device: The device type of the policy. None: no policy applies.
        casts: The casts, in the order of the arguments.
        runs: The overload that runs, such as `aten::mm`.
        dtype_arguments: Keyword arguments that autocast adds or changes, by name.
        error: Why autocast refuses the call, or None.
        then: The plan of the next device type, for a call with tensors of several. It is carried out second.
        left_to_stock: Whether a stock autocast kernel handles the op: one of a newer PyTorch or a library, on a device
            type for which the table has no policy and no override exists. The plan does not know what that kernel
            does, so the rest of it is empty.

    Example:
        >>> softmax = torch.ops.aten.softmax.int
        >>> plan = autocast_plan(softmax, (torch.ones(2), 0), {}, AutocastState.region("cpu"))
        >>> plan.policy, plan.casts, plan.runs
        (None, (), 'aten::softmax.int')
    """

    policy: CastPolicy | torch.dtype | None
    device: str | None
    casts: tuple[Cast, ...]
    runs: str
    dtype_arguments: Mapping[str, torch.dtype] = field(default_factory=lambda: MappingProxyType({}))
    error: str | None = None
    then: AutocastPlan | None = None
    left_to_stock: bool = False

    def all_casts(self) -> tuple[Cast, ...]:
        """The casts of this plan and of the one that follows it.

        Example:
            >>> plan = autocast_plan(torch.ops.aten.mm.default, [torch.ones(1, 1)] * 2, {}, AutocastState.region("cpu"))
            >>> [cast.argument for cast in plan.all_casts()]
            ['self', 'mat2']
        """
        return self.casts if self.then is None else self.casts + self.then.all_casts()


def autocast_plan(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None, state: AutocastState
) -> AutocastPlan:
    """Returns what autocast does with a call of an op.

    Args:
        op: An overload, such as `torch.ops.aten.mm.default`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        state: The autocast state during the call.

    Returns:
        The plan. Without a policy, it has no casts. Whether a policy is legal for an op is not checked.

    Example:
        >>> plan = autocast_plan(torch.ops.aten.mm.default, [torch.ones(2, 2)] * 2, {}, AutocastState.region("cpu"))
        >>> plan.policy.value, [str(cast) for cast in plan.casts]
        ('lower_precision_fp', ['self: float32 -> bfloat16', 'mat2: float32 -> bfloat16'])

    The target dtype of `promote`, overrides, and the policies that PyTorch does not have, are this package's.

    Source: aten/src/ATen/autocast_mode.h, WrapFunction_ (v2.13).
    """
    call = Call.of(op, args, kwargs or {}, torch.get_default_dtype())
    name = call.signature.name
    present = _devices(call)
    for device in TURNS:
        here = state.devices.get(device)
        if here is None or not here.enabled or device not in present:
            continue
        policy = _policy(name, device, state)
        if policy is CastPolicy.fallthrough:
            if state.override(name, device) is None and _has_stock_kernel(name, device):
                return AutocastPlan(None, None, (), name, left_to_stock=True)
            continue
        plan = _plan(call, name, device, policy, state)
        if plan.error is not None or plan.runs != name:
            return plan
        off = {**state.devices, device: DeviceAutocast(False, here.dtype)}
        then = autocast_plan(op, args, kwargs, replace(state, devices=off))
        return plan if then.policy is None else replace(plan, then=then)
    return AutocastPlan(None, None, (), name)


def _plan(call: Call, name: str, device: str, policy: CastPolicy | torch.dtype, state: AutocastState) -> AutocastPlan:
    """The plan of one device type."""
    first = next(iter(call.values()), None)
    first_eligible = isinstance(first, torch.Tensor) and _eligible(first, device)
    if policy is CastPolicy.banned:
        return AutocastPlan(policy, device, (), name, error=f"{name} is banned under autocast on {device}.")
    if policy is CastPolicy.fp32_set_opt_dtype:
        absent = [a.name for a in call.signature.arguments if a.type == "Optional[ScalarType]" and call[a.name] is None]
        chosen = dict.fromkeys(absent if first_eligible else (), torch.float32)
        return AutocastPlan(policy, device, (), name, MappingProxyType(chosen))
    if policy is CastPolicy.fp32_append_dtype and isinstance(first, torch.Tensor):
        dtype, row = torch.float32 if first_eligible else first.dtype, rows_by_name()[name]
        runs = f"aten::{row.op}.{row.redispatch_overload}"
        return AutocastPlan(policy, device, (), runs, MappingProxyType({"dtype": dtype}))
    targets: Iterable[_Target]
    if policy is CastPolicy.match_self:
        targets = _matching(call, device)
    else:
        to = _target(call, device, policy, state.devices[device].dtype)
        targets = [] if to is None else [(path, tensor, to) for path, tensor, _ in _candidates(call)]
    with_doubles = policy is CastPolicy.match_self
    casts = (
        Cast(path, tensor.dtype, to)
        for path, tensor, to in targets
        if tensor.dtype is not to and _eligible(tensor, device, with_doubles)
    )
    return AutocastPlan(policy, device, tuple(casts), name)


#: The path of a tensor, the tensor, and a dtype to cast it to.
_Target = tuple[str, torch.Tensor, torch.dtype]


def _matching(call: Call, device: str) -> Iterator[_Target]:
    """The tensors that `match_self` may cast, with the dtype of what is written."""
    # Lists go in step with a list that is written. Beside such a list of several dtypes, no dtype matches other
    # tensors.
    written = (tensors_in(a.name, call[a.name]) for a in call.signature.arguments if a.written)
    first = next(filter(None, ([tensor for _, tensor in named] for named in written)), [])
    dtypes = [one.dtype if _eligible(one, device, with_doubles=True) else None for one in first]
    for argument in call.signature.arguments:
        tensors = [] if argument.written else list(tensors_in(argument.name, call[argument.name]))
        in_step = argument.type == "List[Tensor]" and len(tensors) == len(dtypes)
        if len(set(dtypes)) > 1 and not in_step:
            continue
        for (path, tensor), to in zip(tensors, dtypes if in_step else dtypes[:1] * len(tensors), strict=True):
            if to is not None:
                yield path, tensor, to


def _target(call: Call, device: str, policy: CastPolicy | torch.dtype, lower: torch.dtype) -> torch.dtype | None:
    """The dtype that eligible arguments are cast to. None: the policy casts none."""
    if isinstance(policy, torch.dtype):
        return policy
    if policy is CastPolicy.lower_precision_fp or policy in FLOAT8_POLICIES:  # scaled or not, the result has this dtype
        return lower
    if policy is CastPolicy.fp32:
        return torch.float32
    if policy is CastPolicy.promote:  # optional tensors are not considered
        dtypes = {tensor.dtype for _, tensor, asked in _candidates(call) if asked and _eligible(tensor, device)}
        return None if not dtypes else dtypes.pop() if len(dtypes) == 1 else torch.float32
    return None


def _candidates(call: Call) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The tensors of a call that may be cast, with their paths, and whether `promote` considers their dtypes."""
    # Arguments that the op writes to are none. Nor are, for an op of the table, lists of optional tensors (index_put's
    # indices). `promote` casts optional tensors, but ignores their dtypes.
    # Source: aten/src/ATen/autocast_mode.h, cached_cast (v2.13).
    in_table = call.signature.name in rows_by_name()
    for argument in call.signature.arguments:
        if argument.written or (in_table and not (argument.is_tensor or argument.type == "List[Tensor]")):
            continue
        is_optional = argument.type.startswith(("Optional[", "List[Optional["))
        for path, tensor in tensors_in(argument.name, call[argument.name]):
            yield path, tensor, not is_optional


def _devices(call: Call) -> set[str]:
    """The device types that take part in dispatch. A Python number passed for a tensor is on the CPU."""
    # The keys of MKLDNN tensors include no backend, and backends determine the Autocast keys.
    # Source: c10/core/DispatchKeySet.h, getAutocastRelatedKeySetFromBackend (v2.13).
    found = set()
    for argument in call.signature.arguments:
        value = call[argument.name]
        if argument.is_tensor and value is not None and not isinstance(value, torch.Tensor):
            found.add("cpu")
        found |= {tensor.device.type for _, tensor in tensors_in(argument.name, value) if not tensor.is_mkldnn}
    return found


def _eligible(tensor: torch.Tensor, device: str, with_doubles: bool = False) -> bool:
    """Floating, not double by default, on the device. Source: aten/src/ATen/autocast_mode.h, is_eligible (v2.13)."""
    double = tensor.dtype is torch.float64
    return is_floating(tensor.dtype) and (with_doubles or not double) and tensor.device.type in TURNS[device]


_in_aten = functools.cache(is_registered)


def _has_stock_kernel(name: str, device: str) -> bool:
    """Whether stock autocast has a kernel for an op. Libraries may register kernels at any time."""
    return (_in_aten if name.startswith("aten::") else is_registered)(name, _STOCK_KEYS[device])


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def _policy_of_row(name: str, device: str) -> CastPolicy:
    """The table's policy, if the running PyTorch registers the op for the device type."""
    row = rows_by_name().get(name)
    if row is None or not _has_stock_kernel(name, device):
        return CastPolicy.fallthrough
    return row.policy(device)


def _policy(name: str, device: str, state: AutocastState) -> CastPolicy | torch.dtype:
    return state.override(name, device) or _policy_of_row(name, device)


def has_policy(name: str, device: str, state: AutocastState) -> bool:
    """Whether autocast has a policy for an op on a device type, or a kernel of PyTorch's or a library's."""
    # Source: aten/src/ATen/autocast_mode.cpp, TORCH_LIBRARY_IMPL (v2.13).
    return _policy(name, device, state) is not CastPolicy.fallthrough or _has_stock_kernel(name, device)
