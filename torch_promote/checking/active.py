"""The autocast state that a call made now would find: PyTorch's, and the policy of the innermost region of ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from torch_promote import _C
from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.reference.autocast.state import AutocastState, DeviceAutocast

__all__ = ["active_overrides", "active_state", "ours_is_active"]

_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)
#: The bytes of an op about which stock's policy says nothing.
_UNLISTED = (0,) * len(DEVICE_TYPES)


def ours_is_active() -> bool:
    """Whether calls of this thread pass through our wrappers.

    Example:
        >>> ours_is_active()
        False
    """
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    return included and not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)


def active_overrides() -> Mapping[str, Mapping[str, CastPolicy | torch.dtype]]:
    """Returns what differs from stock in the policy in force in this thread: by overload, then by device type.

    Example:
        >>> import torch_promote as tp
        >>> with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        ...     active_overrides()["aten::mm"]["cpu"]
        <CastPolicy.fp32: 'fp32'>
    """
    return _overrides_of(_C.current_policy_id()) if ours_is_active() else MappingProxyType({})


@functools.lru_cache(maxsize=64)
def _overrides_of(policy_id: int) -> Mapping[str, Mapping[str, CastPolicy | torch.dtype]]:
    """What differs from stock in the policy in force, whose id this is."""
    del policy_id
    found = {}
    for name, bytes_ in _C.current_policy().items():
        changed = zip(DEVICE_TYPES, bytes_, _stock_bytes().get(name, _UNLISTED), strict=True)
        found[name] = MappingProxyType({device: _policy(byte) for device, byte, stock in changed if byte != stock})
    return MappingProxyType(found)


@functools.cache
def _stock_bytes() -> dict[str, tuple[int, ...]]:
    return dict(zip(_C.OP_ENTRY_NAMES, zip(*_C.stock_policy_bytes(), strict=True), strict=True))


def _policy(byte: int) -> CastPolicy | torch.dtype:
    run_in = _C.POLICY_BYTES["run_in"]
    return _dtypes()[byte - run_in] if byte >= run_in else CastPolicy(_names()[byte])


@functools.cache
def _names() -> dict[int, str]:
    return {byte: name for name, byte in _C.POLICY_BYTES.items()}


@functools.cache
def _dtypes() -> dict[int, torch.dtype]:
    return {_C.scalar_type(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def active_state() -> AutocastState | None:
    """Returns the state, or None where autocast is off for every device type.

    Example:
        >>> active_state()
        >>> with torch.autocast("cpu"):
        ...     active_state().devices["cpu"]
        DeviceAutocast(enabled=True, dtype=torch.bfloat16)
    """
    devices = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICE_TYPES)
    if not any(enabled for enabled, _ in devices):
        return None
    policy_id = _C.current_policy_id() if ours_is_active() else None
    return _state(devices, torch.is_autocast_cache_enabled(), policy_id)


@functools.lru_cache(maxsize=64)
def _state(devices: tuple[tuple[bool, torch.dtype], ...], cache_enabled: bool, policy_id: int | None) -> AutocastState:
    by_type = {d: DeviceAutocast(*values) for d, values in zip(DEVICE_TYPES, devices, strict=True)}
    overrides = MappingProxyType({}) if policy_id is None else _overrides_of(policy_id)
    return AutocastState(by_type, cache_enabled, overrides)
