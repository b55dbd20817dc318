"""The module tables in force in this thread, identified by a number that the current policy carries.

NOTE [ Tables in the policy ]
Module tables apply wherever the policy of a region applies: in nested regions, in the steps of a coroutine, in
checkpoint recomputations and on the autograd engine's threads. Dynamo has to recompile under other tables. Policies
already do all of this. So a policy with tables encodes their number in the policies of a dummy op that is never called:
each of its overloads holds one digit per device type. A region whose `policy` argument replaces the policy around it
also replaces the number; a region with `overrides` keeps it.
A number identifies tables and the model that `my_autocast(model=...)` names, or only the tables if the model is None.
It is valid only in this process, and is never reused.

NOTE [ Numbers that are kept ]
A program may make new policies with tables at every step. Objects that need a number hold it: a `Binding`, which a
region with a model, the handle of `apply_to` and an open checkpoint have. Of the numbers that nothing holds, the last
`_MOST_KEPT` are kept, so that equal tables get one number, and Dynamo does not recompile. Under a number that was
dropped, no tables are in force.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.policy.module_tables import Tables
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy

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
#: The digits from 1 on (0 is the absence of a policy). None of them casts.
_DIGITS = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)
_BASE = len(_DIGITS) + 1
_OVERLOADS = tuple(f"{_OP}.digit_{place}" for place in range(6))
_MOST = _BASE ** (len(_OVERLOADS) * len(DEVICE_TYPES))
#: The maximum number of policies whose lookup results are cached.
_KEPT_LOOKUPS = 1024
#: How many numbers are kept that nothing holds.
_MOST_KEPT = 256
_drop_at = 2 * _MOST_KEPT

_lock = fork_safe_lock()
_last_number = 0
#: The tables of the numbers that are kept, and the dict below that they are in. The last that was used comes last.
_tables: OrderedDict[int, tuple[Tables, dict[Tables, int]]] = OrderedDict()
_of_any: dict[Tables, int] = {}
_of_model: weakref.WeakKeyDictionary[Any, dict[Tables, int]] = weakref.WeakKeyDictionary()
#: Objects that must live as long as a number may be in force, keyed by the number.
_kept: dict[int, weakref.WeakSet[Any]] = {}
#: The number of models to which the tables with a number are applied.
_applied: dict[int, int] = {}
_numbers: dict[int, int] = {0: 0}  # keyed by the id of the current policy


def number_of(tables: Tables, model: torch.nn.Module | None) -> int:
    """Returns the number of tables for a model, or for None of tables that follow `Policy.apply_to`."""
    with _lock:
        known = _of_any if model is None else _of_model.setdefault(model, {})
        if tables not in known:
            known[tables] = _next_number()
            _tables[known[tables]] = tables, known
            _drop_oldest()
        _tables.move_to_end(known[tables])
        return known[tables]


def _next_number() -> int:
    global _last_number
    if _last_number + 1 >= _MOST:
        raise PolicyError(
            f"this process has used {_last_number} different policies with module tables, the maximum. Create the "
            f"policies once, outside of the loop."
        )
    _last_number += 1
    return _last_number


def _drop_oldest() -> None:
    """Drops the oldest numbers that nothing holds, at every `_MOST_KEPT`-th new number."""
    global _drop_at
    if len(_tables) < _drop_at:
        return
    free = [number for number in _tables if not _applied.get(number) and not _kept.get(number)]
    for number in free[:-_MOST_KEPT]:
        tables, known = _tables.pop(number)
        del known[tables]
        _applied.pop(number, None)
        _kept.pop(number, None)
    _drop_at = len(_tables) + _MOST_KEPT


def note_applied(tables: Tables, change: int) -> None:
    """Records that tables are applied to one more model, or, for a change of -1, to one less."""
    number = number_of(tables, None)
    with _lock:
        _applied[number] = _applied.get(number, 0) + change


def applied_number(tables: Tables) -> int:
    """Returns the number of tables that are applied to at least one model, or 0."""
    number = number_of(tables, None)
    return number if _applied.get(number) else 0


def changes_for(number: int) -> Iterator[tuple[str, str, CastPolicy]]:
    """Yields the policy changes that encode a number."""
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
    return library  # destroying it would remove the overloads


def is_marker(overload: str) -> bool:
    """Whether an overload belongs to the dummy op whose policies encode a number."""
    return overload.startswith(_OP)


def number_in_force() -> int:
    """Returns the number that this thread's current policy carries, or 0."""
    policy_id = _C.current_policy_id()
    number = _numbers.get(policy_id)
    return _read(policy_id) if number is None else number


# Dynamo calls it during tracing, and guards on the fingerprint of the policy.
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
    """Returns the module tables that are in force in this thread."""
    kept = _tables.get(number_in_force())
    return () if kept is None else kept[0]


def keep(number: int, kept: Any) -> None:
    """Records a weak reference to an object that must live as long as the number may be in force."""
    with _lock:
        _kept.setdefault(number, weakref.WeakSet()).add(kept)


def kept_in_force() -> tuple[Any, ...]:
    """Returns the objects that must live as long as the current tables. Code that re-enters the tables holds them."""
    number = number_in_force()
    if not number:
        return ()
    with _lock:
        return tuple(_kept.get(number, ()))
