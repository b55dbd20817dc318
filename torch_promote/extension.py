"""Settings as the extension stores them: packed region specs, changes of policy, and numbers of module tables."""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.policy.module_tables import Tables
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy
from torch_promote.policy.overrides import parse_policy


def fork_safe_lock() -> threading.RLock:
    """Returns a lock for the life of the process, which forks hold: see NOTE [ Fork ] in csrc/policy/process.h."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


#: The c10::ScalarType number of each dtype that ops can run in.
DTYPE_NUMBERS = {
    dtype: _C.scalar_type(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_POLICY_NAMES = {byte: name for name, byte in _C.POLICY_BYTES.items()}
_STOCK_BYTES = dict(zip(_C.OP_ENTRY_NAMES, map(tuple, _C.stock_policy_bytes()), strict=True))

# The bits of a packed spec, as in csrc/region/region.h.
_BITS_PER_DEVICE = 8
_DTYPE = 0x3F
_NAMED = 1 << 6
_ENABLED = 1 << 7
_CACHE_ENABLED = 1 << 32
_CACHE_MODE_SHIFT = 33
_KEEPS_CACHE = 1 << 35
_POLICY_CHANGE_SHIFT = 40
_CACHE_MODES: tuple[str | None, ...] = (None, *_C.CACHE_MODES)


class DeviceSpec(NamedTuple):
    """The settings of a region for one device type."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


class RegionSpec(NamedTuple):
    """The settings of a region, and the str of 16 hexadecimal digits that regions hold and the extension reads."""

    # It is a str because Dynamo treats a str as a constant (an int that changes between calls becomes a symbol), and FX
    # can print, hash and pickle it. None leaves a setting of the cache unchanged.

    devices: tuple[DeviceSpec, ...] = ()
    cache_enabled: bool | None = None
    cache_mode: str | None = None  # one of `_C.CACHE_MODES`
    # The extension's number for the region's policy change, 0 for none. It is valid only in this process, and only as
    # long as something holds the change.
    policy_change: int = 0

    def pack(self) -> str:
        """Returns the packed form."""
        bits = self.policy_change << _POLICY_CHANGE_SHIFT
        if self.cache_enabled is None:
            bits |= _KEEPS_CACHE
        elif self.cache_enabled:
            bits |= _CACHE_ENABLED
        bits |= _CACHE_MODES.index(self.cache_mode) << _CACHE_MODE_SHIFT
        for device_type, dtype, enabled in self.devices:
            field = DTYPE_NUMBERS[dtype] | _NAMED | (_ENABLED if enabled else 0)
            bits |= field << (_BITS_PER_DEVICE * DEVICE_TYPES.index(device_type))
        return f"{bits:016x}"

    @classmethod
    def unpack(cls, packed: str) -> RegionSpec:
        """Returns the spec that a str was packed from."""
        bits = int(packed, 16)
        fields = ((name, bits >> (_BITS_PER_DEVICE * index)) for index, name in enumerate(DEVICE_TYPES))
        return cls(
            tuple(
                DeviceSpec(name, _DTYPES[field & _DTYPE], bool(field & _ENABLED))
                for name, field in fields
                if field & _NAMED
            ),
            None if bits & _KEEPS_CACHE else bool(bits & _CACHE_ENABLED),
            _CACHE_MODES[bits >> _CACHE_MODE_SHIFT & 3],
            bits >> _POLICY_CHANGE_SHIFT,
        )


def register_change(
    changes: Iterable[tuple[str, str, CastPolicy | torch.dtype]],  # policies that are legal for the overloads
    replaces: bool = False,  # starts from stock's policy and `register_policy`, not from the region around
    tables: int | None = None,  # None: those of the region around, or none if it replaces its policy
) -> _C.HeldChange:
    """Returns a change of policy in the extension. Raises PolicyError if an op cannot get a kernel."""
    coded = [
        (_op_number(name), DEVICE_TYPES.index(device_type), policy_byte(policy))
        for name, device_type, policy in changes
    ]
    return _C.register_change(coded, replaces, tables)


def _op_number(name: str) -> int:
    namespace, colons, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        return _C.register_op(namespace + colons + op, overload)
    except (RuntimeError, ValueError) as error:
        raise PolicyError(str(error).partition("\n")[0]) from error


def policy_byte(policy: CastPolicy | torch.dtype) -> int:
    """Returns the byte of a policy in the extension's tables."""
    if isinstance(policy, CastPolicy):
        return _C.POLICY_BYTES[policy.name]
    parse_policy(policy)  # raises for a dtype of a policy that was made without checks
    return _C.POLICY_BYTES["run_in"] + DTYPE_NUMBERS[policy]


def policies_beyond_stock() -> dict[str, dict[str, CastPolicy | torch.dtype]]:
    """Returns this thread's current policies that differ from stock, by overload and device type."""
    unlisted = (0,) * len(DEVICE_TYPES)
    found: dict[str, dict[str, CastPolicy | torch.dtype]] = {}
    for name, bytes_ in _C.current_policy().items():
        changed = zip(DEVICE_TYPES, bytes_, _STOCK_BYTES.get(name, unlisted), strict=True)
        found[name] = {device: _policy(byte) for device, byte, stock in changed if byte != stock}
    return found


def _policy(byte: int) -> CastPolicy | torch.dtype:
    run_in = _C.POLICY_BYTES["run_in"]
    return _DTYPES[byte - run_in] if byte >= run_in else CastPolicy[_POLICY_NAMES[byte]]


# NOTE [ Module tables in a policy ]
# A policy may have tables for modules. They are in force where its region's policy is: in nested regions, in the steps
# of a coroutine, in a checkpoint's recomputation and on the autograd engine's threads. Dynamo has to recompile under
# other tables. All of this holds for policies, so the extension's policy tables contain the number of the module
# tables, and their fingerprints depend on it. A region whose `policy` argument replaces the policy around it also
# replaces the number; a region with `overrides` keeps it. A number is valid only in this process, and is never reused.


class NumberedTables:
    """Module tables with a number, for one model or for all models that `Policy.apply_to` was called with."""

    __slots__ = ("__weakref__", "applied", "bindings", "number", "tables")

    def __init__(self, number: int, tables: Tables) -> None:
        self.number: int = number
        self.tables: Tables = tables
        self.applied: int = 0  # to how many models `Policy.apply_to` applies them
        # The live objects that have modules follow the tables. Code that enters the tables again holds them.
        self.bindings: weakref.WeakSet[Any] = weakref.WeakSet()


_ByTables = weakref.WeakValueDictionary[Tables, NumberedTables]

_lock = fork_safe_lock()
_last_number = 0
_by_number: weakref.WeakValueDictionary[int, NumberedTables] = weakref.WeakValueDictionary()
_of_any: _ByTables = weakref.WeakValueDictionary()
_of_model: weakref.WeakKeyDictionary[Any, _ByTables] = weakref.WeakKeyDictionary()
#: Keeps those that were used last: a loop that makes its region in each step gets the same number.
_recent: collections.deque[NumberedTables] = collections.deque(maxlen=256)


def numbered(tables: Tables, model: torch.nn.Module | None) -> NumberedTables:
    """Returns tables for a model, or for None those that follow `Policy.apply_to`, with their number."""
    global _last_number
    with _lock:
        known = _of_any if model is None else _of_model.setdefault(model, weakref.WeakValueDictionary())
        found = known.get(tables)
        if found is None:
            _last_number += 1
            found = known[tables] = _by_number[_last_number] = NumberedTables(_last_number, tables)
        _recent.append(found)
        return found


def number_in_force() -> int:
    """Returns the number of the module tables that are in force in this thread, or 0."""
    return _C.module_tables()


# Dynamo calls it while it traces, and guards on the fingerprint of the policy.
number_in_force._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tables_in_force() -> Tables:
    """Returns the module tables that are in force in this thread."""
    found = _by_number.get(_C.module_tables())
    return () if found is None else found.tables


def kept_in_force() -> tuple[Any, ...]:
    """Returns the objects that must live as long as the current tables, for code that enters the tables again."""
    found = _by_number.get(_C.module_tables())
    return () if found is None else (found, *found.bindings)
