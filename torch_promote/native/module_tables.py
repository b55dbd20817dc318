"""Which tables for modules are in force in this thread: a number that the policy in force carries.

NOTE [ Tables in the policy ]
Tables for modules hold where the policy of a region holds: in nested regions, in the steps of a coroutine, in what
checkpointing runs again, on the autograd engine's threads, and Dynamo has to compile again under others. All of this is
solved for policies. So a policy with tables contains their number: as policies of overloads of an op that nobody calls,
of which each gives a digit on each device type. A region whose `policy` argument replaces the policy around it replaces
the number, too, and one with `overrides` keeps it.
A number belongs to tables and the model that `my_autocast(model=...)` names, or, for None, to tables alone. It is valid
in this process only, and never used again for others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.module_tables import Tables
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = [
    "applied_number",
    "changes_for",
    "is_marker",
    "keep",
    "kept_in_force",
    "note_applied",
    "number_in_force",
    "number_of",
    "tables_in_force",
]

_OP = "torch_promote::module_tables"
#: The digits, beside 0, which is no policy. None of them casts.
_DIGITS = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)
_BASE = len(_DIGITS) + 1
_OVERLOADS = tuple(f"{_OP}.digit_{place}" for place in range(6))
_MOST = _BASE ** (len(_OVERLOADS) * len(DEVICE_TYPES))
#: How many policies in force the thread's last lookups are kept for.
_KEPT_LOOKUPS = 1024

_lock = fork_safe_lock()
_tables: dict[int, Tables] = {}
_of_any: dict[Tables, int] = {}
_of_model: weakref.WeakKeyDictionary[Any, dict[Tables, int]] = weakref.WeakKeyDictionary()
#: What has to live as long as a number may be in force, by the number.
_kept: dict[int, weakref.WeakSet[Any]] = {}
#: How many models the tables with a number are applied to.
_applied: dict[int, int] = {}
_numbers: dict[int, int] = {0: 0}  # by the id of the policy in force


def number_of(tables: Tables, model: torch.nn.Module | None) -> int:
    """Returns the number of tables for a model, or, for None, of tables for the models that they are applied to."""
    with _lock:
        known = _of_any if model is None else _of_model.setdefault(model, {})
        if tables not in known:
            if len(_tables) + 1 >= _MOST:
                raise PolicyError(f"this process has used {len(_tables)} different policies with tables for modules.")
            known[tables] = len(_tables) + 1
            _tables[known[tables]] = tables
        return known[tables]


def note_applied(tables: Tables, change: int) -> None:
    """Notes that tables are applied to one model more, or, for -1, less."""
    number = number_of(tables, None)
    with _lock:
        _applied[number] = _applied.get(number, 0) + change


def applied_number(tables: Tables) -> int:
    """Returns the number of tables that are applied to some model; 0 if they are applied to none."""
    number = number_of(tables, None)
    return number if _applied.get(number) else 0


def changes_for(number: int) -> Iterator[tuple[str, str, CastPolicy]]:
    """Yields the changes of a policy that carries a number."""
    if number:
        _define()
    for overload in _OVERLOADS:
        for device_type in DEVICE_TYPES:
            number, digit = divmod(number, _BASE)
            if digit:
                yield overload, device_type, _DIGITS[digit - 1]


@functools.cache
def _define() -> Any:
    library = torch.library.Library(_OP.partition("::")[0], "FRAGMENT")
    for overload in _OVERLOADS:
        library.define(f"{overload.partition('::')[2]}(Tensor never_called) -> Tensor")
    return library  # its end would undefine them


def is_marker(overload: str) -> bool:
    """Whether an overload is one whose policies are digits of a number."""
    return overload.startswith(_OP)


def number_in_force() -> int:
    """Returns the number that the policy in force in this thread carries; 0 for none."""
    policy_id = _C.current_policy_id()
    number = _numbers.get(policy_id)
    return _read(policy_id) if number is None else number


# Dynamo calls it while it traces, and guards on the fingerprint of the policy.
number_in_force._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _read(policy_id: int) -> int:
    digits = {_C.POLICY_BYTES[policy.value]: value for value, policy in enumerate(_DIGITS, start=1)}
    policies = _C.current_policy()
    number = 0
    for overload in reversed(_OVERLOADS):
        for byte in reversed(policies.get(overload, (0,) * len(DEVICE_TYPES))):
            number = number * _BASE + digits.get(byte, 0)
    if len(_numbers) > _KEPT_LOOKUPS:
        _numbers.clear()
    _numbers[policy_id] = number
    return number


def tables_in_force() -> Tables:
    """Returns the tables for modules that are in force in this thread."""
    number = number_in_force()
    return _tables[number] if number else ()


def keep(number: int, kept: Any) -> None:
    """Notes what has to live as long as the number may be in force. It is held weakly."""
    with _lock:
        _kept.setdefault(number, weakref.WeakSet()).add(kept)


def kept_in_force() -> tuple[Any, ...]:
    """Returns what has to live as long as the tables in force may be; whoever puts them in force again holds it."""
    number = number_in_force()
    if not number:
        return ()
    with _lock:
        return tuple(_kept.get(number, ()))
