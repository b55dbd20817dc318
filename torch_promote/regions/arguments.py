"""What a region is asked for: checked as torch.autocast checks it, and packed into one str.

The str is the 16 hexadecimal digits of 64 bits that the extension unpacks (csrc/region/region_spec.h). It is what
`my_autocast` holds, what torch.compile sees as a constant, and what a copy of a region is made from.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import (
    DeviceTypeError,
    DtypeError,
    OptionError,
    PolicyError,
    UnsupportedDeviceError,
    did_you_mean,
)
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.integrations.optimizers import forget_after_steps
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.overrides import parse_overrides
from torch_promote.policy.policy import Policy

__all__ = [
    "allows_cache",
    "has_cache",
    "pack_spec",
    "policy_number",
    "read_policy",
    "register_change",
    "unpack_devices",
    "with_cache_mode",
    "with_policy",
]

_CPU_DTYPES = (torch.bfloat16, torch.float16)

# The layout of a packed spec; csrc/region/region.h, RegionSpec, reads it.
_BITS_PER_DEVICE = 16
_NAMED = 1 << 8
_ENABLED = 1 << 9
_CACHE_ENABLED = 1 << 32
_CACHE_MODE_SHIFT = 33
_CHANGE_DIGITS = 6  # of the policy; the first of the 16
_NO_CACHE = "none"
_CACHES = (*_C.CACHE_MODES, _NO_CACHE)
_NUMBERS = {
    dtype: _C.scalar_type(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}


def pack_spec(device_type: object, dtype: object, enabled: object, cache_enabled: object) -> str:
    """Checks what is asked as torch.autocast does, and returns the packed spec."""
    device_types = (device_type,) if isinstance(device_type, str) else _device_types(device_type)
    if cache_enabled is None:
        cache_enabled = torch.is_autocast_cache_enabled()
    spec = _CACHE_ENABLED if cache_enabled else 0
    for name in device_types:
        dtype_here, enabled_here = _check_device(name, dtype, enabled)
        field = _NUMBERS[dtype_here] | _NAMED | (_ENABLED if enabled_here else 0)
        spec |= field << (_BITS_PER_DEVICE * DEVICE_TYPES.index(name))
    return f"{spec:016x}"


def read_policy(policy: Policy | str | os.PathLike[str] | None) -> Policy | str | None:
    """Returns a policy that means the same from now on: what is in a file now; a name as it is."""
    return policy if policy is None or policy in Policy.names() else Policy.of(policy)


def with_policy(spec: str, policy: object, overrides: Mapping[Any, Any] | None) -> str:
    """Returns a spec with this policy and these overrides, or without any.

    Their number means something in this process only.
    """
    number = 0 if policy is None and overrides is None else policy_number(policy, overrides)
    return f"{number:0{_CHANGE_DIGITS}x}" + spec[_CHANGE_DIGITS:]


def allows_cache(cache: object, cache_enabled: object) -> bool:
    """Whether casts are to be reused, by `cache`, which says so in its own words.

    Raises:
        OptionError: There is no such mode, or cache_enabled says otherwise.
    """
    if not isinstance(cache, str) or cache not in _CACHES:
        legal = ", ".join(map(repr, _CACHES))
        got = repr(cache) if isinstance(cache, str) else f"{cache!r} of type {type(cache).__name__}"
        remedy = did_you_mean(cache, _CACHES) if isinstance(cache, str) else ""
        raise OptionError(f"cache says which casts are reused: a str, or None; got {got}. Legal: {legal}.{remedy}")
    allowed = cache != _NO_CACHE
    if cache_enabled is not None and bool(cache_enabled) != allowed:
        raise OptionError(
            f"cache={cache!r} means cache_enabled={allowed}, got cache_enabled={cache_enabled!r} with it. Legal: cache "
            f"alone, or with cache_enabled={allowed}. Leave cache_enabled out."
        )
    if cache in _C.CACHE_MODES[1:]:
        _teach_checkpoints()
    if cache == "persistent":
        forget_after_steps()
    return allowed


def _teach_checkpoints() -> None:
    _checkpoint.install()


def with_cache_mode(spec: str, cache: str) -> str:
    """Returns a spec with this cache mode, which `allows_cache` has seen."""
    number = 0 if cache == _NO_CACHE else 1 + _C.CACHE_MODES.index(cache)
    return f"{int(spec, 16) | number << _CACHE_MODE_SHIFT:016x}"


# Dynamo calls them while it traces, and keeps what they say.
_teach_checkpoints._dynamo_marked_constant = True  # type: ignore[attr-defined]
with_cache_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_cache(spec: str) -> bool:
    """Whether a spec asks for the cast cache."""
    return bool(int(spec, 16) & _CACHE_ENABLED)


def unpack_devices(spec: str) -> Iterator[tuple[str, torch.dtype, bool]]:
    """Yields the device type, dtype and enabled flag of each device type that a spec names."""
    for index, name in enumerate(DEVICE_TYPES):
        field = int(spec, 16) >> (_BITS_PER_DEVICE * index)
        if field & _NAMED:
            dtype = next(dtype for dtype, number in _NUMBERS.items() if number == field & 0xFF)
            yield name, dtype, bool(field & _ENABLED)


def _device_types(asked: object) -> Sequence[str]:
    if asked is None:
        return ("cuda",) if torch.cuda.is_available() else ("cpu",)
    if isinstance(asked, Sequence):
        if not asked:
            raise DeviceTypeError("no device type given: the sequence is empty. Name 'cpu', 'cuda' or both.")
        for index, name in enumerate(asked):
            if name in asked[:index]:
                raise DeviceTypeError(f"device type {name!r} is named twice in {list(asked)!r}. Name each once.")
        return asked
    remedy = "As a decorator, write it with parentheses: @my_autocast()." if callable(asked) else ""
    remedy = "Of a torch.device, pass its .type." if isinstance(asked, torch.device) else remedy
    raise DeviceTypeError(
        f"expected a device type of type str (or a sequence of them), got {asked!r} of type {type(asked).__name__}. "
        f"Legal: 'cpu', 'cuda'. {remedy}".rstrip()
    )


def _check_device(name: object, dtype: object, enabled: object) -> tuple[torch.dtype, bool]:
    """Returns the dtype and enabled flag that a region gets for a device type, as torch.autocast would."""
    if not isinstance(name, str):
        raise DeviceTypeError(
            f"expected a device type of type str, got {name!r} of type {type(name).__name__}. Legal: 'cpu', 'cuda'."
        )
    if name not in DEVICE_TYPES:
        raise _unsupported(name)
    if dtype is None:
        dtype = torch.get_autocast_dtype(name)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(
            f"dtype is a torch.dtype, such as torch.bfloat16, or None; got {dtype!r} of type {type(dtype).__name__}."
        )
    if dtype not in _NUMBERS:
        raise DtypeError(
            f"{dtype} is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16."
        )
    if not enabled:
        return dtype, False
    if name == "cuda":
        if torch.cuda.amp.common.amp_definitely_not_available():
            _warn("CUDA is not available or torch_xla is imported. Disabling my_autocast.")
            return dtype, False
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise UnsupportedDeviceError("this CUDA device does not support bfloat16. Use dtype=torch.float16.")
    elif dtype not in _CPU_DTYPES:
        _warn(
            f"my_autocast on the CPU supports torch.bfloat16 and torch.float16, got {dtype}. Disabling my_autocast. To "
            f"run single ops in {dtype}, use overrides={{op: {dtype}}}."
        )
        return dtype, False
    return dtype, True


def _unsupported(name: str) -> UnsupportedDeviceError:
    if ":" in name:
        remedy = " Give the type without an index."
    elif name in torch._C._autocast_supported_devices():
        remedy = f" torch.autocast({name!r}) serves that device type."
    elif name.lower() in {"gpu", "nvidia", "rocm", "hip"}:
        remedy = " The device type of GPUs is 'cuda'."
    else:
        remedy = did_you_mean(name, DEVICE_TYPES)
    return UnsupportedDeviceError(f"my_autocast has no device type {name!r}. Legal: 'cpu', 'cuda'.{remedy}")


def _warn(message: str) -> None:
    # _warn, _check_device, pack_spec, __init__, the caller
    warnings.warn(message, stacklevel=5)


def policy_number(policy: object, overrides: Mapping[Any, Any] | None) -> int:
    """Returns the number in the extension of what a region does to the policy; the same gets the same number."""
    chosen = None if policy is None else Policy.of(policy)  # type: ignore[arg-type]
    try:
        return _register(chosen, None if overrides is None else tuple(overrides.items()))
    except (AttributeError, TypeError):  # no mapping, or a value without a hash: nothing legal, and worth its own error
        parse_overrides(overrides)  # type: ignore[arg-type]
        raise


# Dynamo calls it while it traces, and keeps the number.
policy_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register(policy: Policy | None, overrides: tuple[tuple[Any, Any], ...] | None) -> int:
    changes = [] if policy is None else list(policy.changes)
    for name, value in parse_overrides(dict(overrides or ())):
        changes += [(name, device, value) for device in DEVICE_TYPES]
    return register_change(changes, replaces=policy is not None)


def register_change(changes: Iterable[tuple[str, str, CastPolicy | torch.dtype]], replaces: bool = False) -> int:
    """Returns the number of a change of policy in the extension; an op that has no row gets a kernel on our key.

    Args:
        changes: Overloads by their full names, device types, and policies that are legal.
        replaces: Whether the policy is made anew, from stock's and what `register_policy` has given, and not from the
            one around.
    """
    coded = [(_number(name), DEVICE_TYPES.index(device), policy_byte(policy)) for name, device, policy in changes]
    if coded:
        _checkpoint.install()
    return _C.register_change(coded, replaces)


def _number(name: str) -> int:
    namespace, colons, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        return _C.register_op(namespace + colons + op, overload)
    except (RuntimeError, ValueError) as error:
        raise PolicyError(str(error).partition("\n")[0]) from error


def policy_byte(policy: CastPolicy | torch.dtype) -> int:
    if isinstance(policy, CastPolicy):
        return _C.POLICY_BYTES[policy.value]
    return _C.POLICY_BYTES["run_in"] + _NUMBERS[policy]
