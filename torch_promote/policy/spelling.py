"""The repr of a policy: calls that make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_promote.policy import files
from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.module_tables import Table, Tables, spell_table
from torch_promote.policy.named import Change, Value

__all__ = ["spell_call", "spell_policies"]

#: How many entries a repr or an error shows.
_SHOWN = 4


def spell_call(name: str | None, changes: Iterable[Change], modules: Tables) -> str:
    """Returns an expression whose value is a policy, unless entries are left out.

    Args:
        name: The name of the policy without its tables for modules; None: it has none.
        changes: Its changes.
        modules: Its tables for modules.
    """
    text = "Policy.stock()" if name in (None, "stock") else f"Policy.named({name!r})"
    if name is None:
        sections = ((key, each) for key, each in files.to_data(changes).items() if isinstance(each, dict))
        text += "".join(_override(section, entries) for section, entries in sections)
    return text + (f".override_modules({_mapping(dict(modules), _table)})" if modules else "")


def spell_policies(values: Mapping[str, Value | None]) -> str:
    """Returns the policies of overloads for an error: "fp32 (aten::mm), no entry (aten::mm.out)".

    Args:
        values: The policies, by the overloads' full names. None: there is no entry.
    """
    spelt = [f"{'no entry' if value is None else spell_policy(value)} ({name})" for name, value in values.items()]
    return ", ".join(spelt[:_SHOWN]) + (f" and {len(spelt) - _SHOWN} more" if len(spelt) > _SHOWN else "")


def _override(section: str, entries: Mapping[str, str]) -> str:
    device = "" if section == files.ALL_DEVICE_TYPES else f", device_type={section!r}"
    return f".override({_mapping(entries)}{device})"


def _table(table: Table) -> str:
    return repr(table) if isinstance(table, str) else _mapping(spell_table(table))


def _mapping(entries: Mapping[str, Any], spell: Callable[[Any], str] = repr) -> str:
    shown = [f"{key!r}: {spell(value)}" for key, value in list(entries.items())[:_SHOWN]]
    shown += [f"... {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return f"{{{', '.join(shown)}}}"
