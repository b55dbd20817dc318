"""The repr of a policy: calls that make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_promote.policy import files
from torch_promote.policy.module_tables import Table, Tables, spell_table
from torch_promote.policy.named import Change

__all__ = ["SHOWN", "spell_call"]

#: How many entries a repr or an error shows.
SHOWN = 4


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


def _override(section: str, entries: Mapping[str, str]) -> str:
    device = "" if section == files.ALL_DEVICE_TYPES else f", device={section!r}"
    return f".override({_mapping(entries)}{device})"


def _table(table: Table) -> str:
    return repr(table) if isinstance(table, str) else _mapping(spell_table(table))


def _mapping(entries: Mapping[str, Any], spell: Callable[[Any], str] = repr) -> str:
    shown = [f"{key!r}: {spell(value)}" for key, value in list(entries.items())[:SHOWN]]
    shown += [f"... {len(entries) - SHOWN} more"] if len(entries) > SHOWN else []
    return f"{{{', '.join(shown)}}}"
