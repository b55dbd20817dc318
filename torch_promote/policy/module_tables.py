"""Tables of a policy for modules: which modules of a model run under which overrides, or in float32, as a value.

A policy has tables; which model they are for is said where the policy is used: `my_autocast(policy=..., model=...)` or
`Policy.apply_to(model)`. torch_promote/regions/module_policies.py finds the modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch_promote.errors import PolicyError, did_you_mean, shown
from torch_promote.policy.named_policies import Value
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import spell_policy
from torch_promote.policy.overrides import parse_overrides

#: The policies of a whole module, as in `set_module_policy`.
WHOLE = ("fp32", "off")
#: The key of a table in a file whose value is one of these.
KEY_OF_WHOLE = "policy"
#: The section of a file that holds the tables.
MODULES = "modules"
#: The start of a name that selects the modules of a class: "class:RMSNorm".
OF_CLASS = "class:"

#: What holds for a module: one of `WHOLE`, or overloads' full names and their policies, sorted.
Table = str | tuple[tuple[str, Value], ...]
#: The names, patterns of names, or classes of modules, sorted, and their tables.
Tables = tuple[tuple[str, Table], ...]


def parse_tables(tables: Mapping[Any, Any]) -> dict[str, Table]:
    """Checks tables as a user writes them: names or patterns of modules, with "fp32", "off" or overrides."""
    if not isinstance(tables, Mapping):
        raise PolicyError(
            f"tables of modules are a mapping of names to overrides, 'fp32' or 'off', got {type(tables).__name__}."
        )
    return {name: _parse(name, table) for name, table in tables.items()}


def _parse(name: object, table: object) -> Table:
    if not isinstance(name, str):
        raise PolicyError(
            f"a policy names modules by a str, such as 'blocks.*.attn' or 'class:RMSNorm', got {shown(name)}. The "
            f"classes themselves are for set_module_policy."
        )
    section = section_of(name)
    if isinstance(table, str):
        if table in WHOLE:
            return table
        raise PolicyError(
            f"{section}: the policy of a whole module is {' or '.join(map(repr, WHOLE))}, got "
            f"{shown(table)}.{did_you_mean(table, WHOLE)} For single ops, write overrides: the op and its policy."
        )
    if not isinstance(table, Mapping):
        raise PolicyError(f"{section}: a table is a mapping of overrides, 'fp32' or 'off', got {shown(table)}.")
    if not table:
        raise PolicyError(f"{section}: the table is empty. Add an op and its policy, or leave it out.")
    try:
        return _fixed(dict(parse_overrides(table)))
    except PolicyError as error:
        raise PolicyError(f"{section}: {error}") from None


def _fixed(table: Mapping[str, Value]) -> Table:
    return tuple(sorted(table.items(), key=lambda item: item[0]))


def merged(tables: Tables, added: Mapping[str, Table]) -> Tables:
    """Returns tables with others on top: op by op where both have overrides for the same name."""
    result = dict(tables)
    for name, table in added.items():
        known = result.get(name, ())
        one_is_whole = isinstance(known, str) or isinstance(table, str)
        result[name] = table if one_is_whole else _fixed({**dict(known), **dict(table)})  # type: ignore[arg-type]
    return tuple(sorted(result.items(), key=lambda item: item[0]))


def spell_table(table: Table) -> dict[str, str]:
    """Returns a table as a file holds it."""
    if isinstance(table, str):
        return {KEY_OF_WHOLE: table}
    return {exact_key(overload): spell_policy(value) for overload, value in table}


def entries_of(tables: Tables) -> dict[tuple[str, str], Value | str]:
    """Returns what tables contain, by the overload, or `KEY_OF_WHOLE`, and the section."""
    return {
        (key, section_of(name)): value
        for name, table in tables
        for key, value in ([(KEY_OF_WHOLE, table)] if isinstance(table, str) else table)
    }


def section_of(name: str) -> str:
    """Returns the section of a table in a file."""
    return f"[{MODULES}.{quoted(name)}]"


def quoted(text: str) -> str:
    """Returns text as a basic string of TOML, in which what a terminal would not print is escaped."""

    def spelled(one: str) -> str:
        is_half_a_pair = "\ud800" <= one < "\ue000"  # for which TOML has no code
        return one if one.isprintable() or is_half_a_pair else rf"\U{ord(one):08x}"

    return "".join(map(spelled, json.dumps(text, ensure_ascii=False)))


_registered: list[Callable[[], Any]] = []


def register_module_finder(load: Callable[[], Any]) -> None:
    """For torch_promote/regions, which says how to get `module_policies`: this folder may not import it."""
    _registered[:] = [load]


def module_finder() -> Any:
    """Returns that module, whose `apply` and `bind` find the modules of a model."""
    return _registered[0]()
