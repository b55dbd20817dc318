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

#: Excluded while the kernel of an op runs; see csrc/policy/dispatch_state.h.
_NOT_IN_KERNELS = torch._C.DispatchKey.ADInplaceOrView
_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)


def my_autocast_is_in_force() -> bool:
    """Whether calls in this thread pass through the kernels of `my_autocast`."""
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
    """Returns the autocast state in force; None if autocast is off for every device type."""
    # An observer asks at each call: no generator, and no further function.
    on: list[tuple[str, torch.dtype]] = []
    for device in DEVICE_TYPES:
        if torch.is_autocast_enabled(device):
            on.append((device, torch.get_autocast_dtype(device)))
    if not on:
        return None
    policy_id = _C.current_policy_id() if my_autocast_is_in_force() else None
    inside = torch._C._dispatch_tls_is_dispatch_key_excluded(_NOT_IN_KERNELS)
    return _state(tuple(on), torch.is_autocast_cache_enabled(), policy_id, inside)


@functools.lru_cache(maxsize=64)
def _state(
    on: tuple[tuple[str, torch.dtype], ...], cache_enabled: bool, policy_id: int | None, inside_kernel: bool
) -> AutocastState:
    devices = {device: DeviceAutocast(True, dtype) for device, dtype in on}
    overrides = MappingProxyType({}) if policy_id is None else _overrides_of(policy_id, inside_kernel)
    return AutocastState(devices, cache_enabled, overrides)


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda" and "mps", stock's and ours, be enabled where there is no such GPU, for fake tensors."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", _no))
            stack.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", _yes))
        if not torch.backends.mps.is_available():  # PyTorch before 2.12 asks, and raises
            stack.enter_context(mock.patch.object(torch.backends.mps, "is_macos_or_newer", _yes))
        yield


# Functions, not mocks: a call of a mock takes longer than a region.
def _no() -> bool:
    return False


def _yes(*_: object, including_emulation: bool = True) -> bool:
    return True
