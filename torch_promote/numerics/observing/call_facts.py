"""Questions about a call that is being traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_promote.checking.overloads import argument_names, tensors_in
from torch_promote.numerics.ranges.unnoticed import stored_values, unnoticed
from torch_promote.numerics.records.calls import Kind, Phase, TensorInfo
from torch_promote.reference.autocast import AutocastState, has_policy
from torch_promote.regions.promotion_tables import promoting_ops

__all__ = [
    "PoliciesOfStates",
    "autograd_may_call",
    "bytes_of",
    "cast_key",
    "device_type_of",
    "dtype_arguments_of",
    "has_row",
    "is_excluded",
    "is_of_a_transform",
    "kind_of",
    "promotes",
]


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def has_row(name: str, device_type: str) -> bool:
    """Whether PyTorch's table has a policy for an op on a device type."""
    return has_policy(name, device_type, AutocastState.region(device_type))


class PoliciesOfStates:
    """Answers questions about an autocast state, with caching for repeated calls."""

    def __init__(self) -> None:
        self._last: AutocastState | None = None
        self._devices: tuple[tuple[str, torch.dtype], ...] = ()
        self._known: dict[str, bool] = {}

    def devices(self, state: AutocastState) -> tuple[tuple[str, torch.dtype], ...]:
        """The device types for which autocast is on, with their dtypes."""
        self._use(state)
        return self._devices

    def has_one(self, name: str, state: AutocastState) -> bool:
        """Whether a device type has a policy for an op, or a library has an autocast kernel for it."""
        self._use(state)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = any(has_policy(name, device, state) for device, _ in self._devices)
        return found

    def _use(self, state: AutocastState) -> None:
        if state is not self._last:
            on = ((device, one.dtype) for device, one in state.devices.items() if one.enabled)
            self._last, self._devices, self._known = state, tuple(on), {}


def promotes(name: str, inputs: tuple[TensorInfo, ...]) -> bool:
    """Whether an op promotes inputs of several dtypes."""
    return len({info.dtype for info in inputs}) > 1 and name in _promoting_names()


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address")  # noqa: B009 (no stub names it)
#: Whether a dispatch key is excluded in this thread.
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def autograd_may_call(op: torch._ops.OpOverload) -> bool:
    """Whether an op's autograd kernel may call ops before or after the op's own kernel."""
    return torch.is_grad_enabled() and (_is_in_place(op) or _saved_tensors_hooks(True) is not None)


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def _is_in_place(op: torch._ops.OpOverload) -> bool:
    return op._schema.is_mutable and op._schema.name.endswith("_")


@functools.cache
def _promoting_names() -> frozenset[str]:
    return frozenset(op.name for op in promoting_ops() if not op.matmul)


def device_type_of(args: Sequence[Any]) -> str:
    """The device type whose kernel runs: that of the first tensor that is not on the CPU, or the CPU."""
    types = [tensor.device.type for tensor in tensors_in(args)]
    return next((device for device in types if device != "cpu"), "cpu")


def dtype_arguments_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[tuple[str, torch.dtype], ...]:
    """The arguments that are dtypes, by name."""
    if not any(isinstance(arg, torch.dtype) for arg in args):
        return ()
    named = zip(argument_names(op), args, strict=False)
    return tuple((name, arg) for name, arg in named if isinstance(arg, torch.dtype))


def kind_of(tensor: torch.Tensor, phase: Phase) -> Kind:
    """The kind of a cast tensor."""
    owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    if isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return "weight"
    return "gradient" if phase == "backward" else "activation"


def cast_key(tensor: torch.Tensor, to: torch.dtype | None) -> tuple[Any, ...]:
    """A key that identifies a cast of a tensor. An observer may get copies of a tensor, which share its storage."""
    shared: Any = None
    if tensor.layout is torch.strided and not tensor.is_nested:
        with contextlib.suppress(RuntimeError):  # a wrapper has no storage
            # Not untyped_storage(): Python code could write through it, so the cache would drop the casts.
            shared = _address(tensor), tensor.storage_offset(), tensor.stride()
    return shared, tensor.dtype, to, () if tensor.is_nested else tuple(tensor.shape)


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; for a sparse or nested tensor, of its stored elements."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    with unnoticed():
        stored = stored_values(tensor)
        return 0 if stored is None else stored.nbytes


def is_of_a_transform(args: Sequence[Any]) -> bool:
    """Whether a torch.func transform wraps one of a call's tensors. The transform calls ops on the tensors inside."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors_in(args))
