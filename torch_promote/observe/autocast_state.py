"""The autocast state in force: PyTorch's flags and dtypes, and the policy of the innermost `my_autocast` region."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from unittest import mock

import torch

from torch_promote import _C
from torch_promote.extension import policies_beyond_stock
from torch_promote.loader import AUTOCAST_KEY
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy
from torch_promote.reference.autocast import AutocastState, DeviceAutocast

__all__ = ["my_autocast_is_in_force", "pretend_cuda", "state_in_force"]


#: Excluded while the kernel of an op runs; see csrc/policy/dispatch_state.h.
_NOT_IN_KERNELS = torch._C.DispatchKey.ADInplaceOrView
_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)


def my_autocast_is_in_force() -> bool:
    """Whether calls in this thread pass through the kernels of `my_autocast`.

    Example:
        >>> my_autocast_is_in_force()
        False
    """
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    return included and not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)


@functools.lru_cache(maxsize=64)
def _overrides_of(policy_id: int, inside_kernel: bool) -> Mapping[str, Mapping[str, CastPolicy | torch.dtype]]:
    """The policies in force that differ from stock, by overload and device type. The id is the key of the cache.

    Inside the kernel of an op, policies other than stock's cast nothing.
    """
    del policy_id
    found = {}
    for name, policies in policies_beyond_stock().items():
        if inside_kernel:
            policies = {d: p if p in _CASTING_NOTHING else CastPolicy.fallthrough for d, p in policies.items()}
        found[name] = MappingProxyType(policies)
    return MappingProxyType(found)


_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)


def state_in_force() -> AutocastState | None:
    """Returns the autocast state in force; None if autocast is off for every device type.

    Example:
        >>> state_in_force()
        >>> with torch.autocast("cpu"):
        ...     state_in_force().devices["cpu"]
        DeviceAutocast(enabled=True, dtype=torch.bfloat16)
    """
    # An observer asks at each call: no generator, and no further function.
    flags: list[tuple[bool, torch.dtype]] = []
    is_on = False
    for device in DEVICE_TYPES:
        enabled = torch.is_autocast_enabled(device)
        is_on = is_on or enabled
        flags.append((enabled, torch.get_autocast_dtype(device)))
    if not is_on:
        return None
    policy_id = _C.current_policy_id() if my_autocast_is_in_force() else None
    inside = torch._C._dispatch_tls_is_dispatch_key_excluded(_NOT_IN_KERNELS)
    return _state(tuple(flags), torch.is_autocast_cache_enabled(), policy_id, inside)


@functools.lru_cache(maxsize=64)
def _state(
    devices: tuple[tuple[bool, torch.dtype], ...], cache_enabled: bool, policy_id: int | None, inside_kernel: bool
) -> AutocastState:
    by_type = {d: DeviceAutocast(*values) for d, values in zip(DEVICE_TYPES, devices, strict=True)}
    overrides = MappingProxyType({}) if policy_id is None else _overrides_of(policy_id, inside_kernel)
    return AutocastState(by_type, cache_enabled, overrides)


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda", stock's and ours, be enabled where there is no GPU, for fake tensors.

    Example:
        >>> with pretend_cuda(), torch.autocast("cuda"):
        ...     torch.is_autocast_enabled("cuda")
        True
    """
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", _no),
        mock.patch.object(torch.cuda, "is_bf16_supported", _yes),
    ):
        yield


# Functions, not mocks: a call of a mock takes longer than a region.
def _no() -> bool:
    return False


def _yes(including_emulation: bool = True) -> bool:
    return True
