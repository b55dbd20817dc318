"""`torch-promote policies --policy`: shows a policy in the running PyTorch, or compares it with another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli.op_filter import find_ops, no_match
from torch_promote.cli.policies_other_ops import draw_other_ops, other_ops
from torch_promote.cli.terminal import Table, paint, show
from torch_promote.errors import OptionError
from torch_promote.policy.module_tables import KEY_OF_WHOLE, entries_of
from torch_promote.policy.module_tables import Table as ModuleTable
from torch_promote.policy.named_policies import Value, stock_policy
from torch_promote.policy.op_names import in_order, is_pattern, matches
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, rows_by_name, schema_of, spell_policy
from torch_promote.policy.policy import Difference, Policy

__all__ = ["run"]

_FOUND = 1
_NOTHING = "-"
_MODEL = "(the model)"
_WHOLE = "(whole module)"


def run(asked: str, compared: Sequence[str] | None, devices: Sequence[str], pattern: str | None, as_json: bool) -> int:
    """Shows a policy, or compares it with another.

    Args:
        asked: The policy's name, or the path of its file.
        compared: One other policy to compare with. None: show the policy.
        devices: The device types to show.
        pattern: A shell pattern that selects ops, or None.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 1 if two policies differ, else 0.

    Raises:
        OptionError: `compared` does not have exactly one policy, or no op matches the pattern.
        PolicyError: There is no such policy, or its file is invalid.
    """
    policy = Policy.of(asked)
    if compared is None:
        return show(_listing(asked, policy, devices, pattern), _draw, as_json)
    if len(compared) != 1:
        got = repr(" ".join(compared)) if compared else "none"
        raise OptionError(f"with --policy, --diff takes one policy to compare with, a name or a file, got {got}.")
    data = _differences((asked, compared[0]), (policy, Policy.of(compared[0])), devices, pattern)
    return show(data, _draw_differences, as_json, _FOUND if data["differences"] else 0)


def _ops(policies: Iterable[Policy], pattern: str | None) -> tuple[str, ...]:
    """The rows that exist in the running PyTorch and the other ops of the policies, if they match the pattern."""
    names = {row.name for row in op_table() if schema_of(row) is not None}
    names.update(overload for policy in policies for overload, _, _ in policy.changes)
    names.update(key for policy in policies for key, _ in entries_of(policy.modules) if key != KEY_OF_WHOLE)
    chosen = in_order(name for name in names if pattern is None or matches(name, pattern))
    if not chosen and pattern is not None:
        chosen = find_ops(pattern)
    if not chosen:
        raise no_match(str(pattern), names - rows_by_name().keys())
    return chosen


def _listing(asked: str, policy: Policy, devices: Sequence[str], pattern: str | None) -> dict[str, Any]:
    ops = _ops((policy,), pattern)
    changed = {(overload, device): value for overload, device, value in policy.changes if device in devices}
    rows = []
    for op in ops:
        values = {device: changed.get((op, device), stock_policy(op, device)) for device in devices}
        stock = {device: _spell(stock_policy(op, device)) for device in devices if (op, device) in changed}
        if stock or any(value not in (None, CastPolicy.fallthrough) for value in values.values()):
            rows.append({"op": op, **{name: _spell(value) for name, value in values.items()}, "stock": stock})
    shown = {row["op"] for row in rows}
    modules = {name: chosen for name, table in policy.modules if (chosen := _chosen(table, pattern))}
    is_shown = bool(shown or set(ops) & rows_by_name().keys() or (modules and is_pattern(str(pattern))))
    return {
        "torch": torch.__version__,
        "policy": asked,
        "devices": list(devices),
        "rows": rows,
        "counts": {device: dict(Counter(row[device] for row in rows if row[device])) for device in devices},
        "without_policy": [op for op in ops if op not in shown],
        "other_ops": [] if is_shown else other_ops(str(pattern), devices, policy),
        "modules": modules,
    }


def _chosen(table: ModuleTable, pattern: str | None) -> dict[str, str]:
    """The entries of a table for modules whose ops match. A whole module's policy is about every op."""
    entries = {KEY_OF_WHOLE: table} if isinstance(table, str) else {op: spell_policy(value) for op, value in table}
    return {op: value for op, value in entries.items() if pattern is None or op == KEY_OF_WHOLE or matches(op, pattern)}


def _spell(value: Value | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else spell_policy(value)


def _draw(data: Mapping[str, Any]) -> list[Any]:
    devices, rows = data["devices"], data["rows"]
    tables = _draw_tables(data["modules"])
    if data["other_ops"]:
        return [*draw_other_ops(data["other_ops"]), *(["", *tables[:-1]] if tables else [])]
    if not rows and not tables:
        names = ", ".join(name.removeprefix("aten::") for name in data["without_policy"])
        return [f"The policy {data['policy']} does nothing on {', '.join(devices)} for: {names}"]
    listing = Table("aten op", *devices, "notes", note="notes")
    for row in rows:
        notes = [f"{device}: stock {policy or 'has no entry'}" for device, policy in row["stock"].items()]
        cells = (_cell(row[device]) for device in devices)
        listing.add_row(row["op"].removeprefix("aten::"), *cells, ", ".join(notes))
    differing = sum(bool(row["stock"]) for row in rows)
    verdict = f"ops: {len(rows)}, different from stock: {differing}."
    return [*([listing, ""] if rows else []), *tables, f"policy {data['policy']} in torch {data['torch']}. {verdict}"]


def _draw_tables(modules: Mapping[str, Mapping[str, str]]) -> list[Any]:
    if not modules:
        return []
    listing = Table("modules", "aten op", "policy")
    for name, entries in modules.items():
        for op, policy in entries.items():
            listing.add_row(name or _MODEL, _op_of_table(op), paint(policy))
    return [listing, ""]


def _op_of_table(key: str) -> str:
    return _WHOLE if key == KEY_OF_WHOLE else key.removeprefix("aten::")


def _cell(policy: str | None) -> Any:
    return _NOTHING if policy is None else paint(policy)


def _differences(
    names: tuple[str, str], policies: tuple[Policy, Policy], devices: Sequence[str], pattern: str | None
) -> dict[str, Any]:
    ops = _ops(policies, pattern)
    modules = []
    found: dict[str, list[Difference]] = {op: [] for op in ops}
    for difference in policies[0].diff(policies[1]):
        if difference.overload in found and difference.device in devices:
            found[difference.overload].append(difference)
        elif difference.device not in DEVICE_TYPES and (found.keys() | {KEY_OF_WHOLE}) >= {difference.overload}:
            modules.append(difference)
    return {
        "torch": torch.__version__,
        "policies": list(names),
        "devices": list(devices),
        "op": pattern,
        "differences": [
            {"op": op, "device": each.device, "policies": [_spell(each.mine), _spell(each.theirs)]}
            for op in ops
            for each in found[op]
        ]
        + [
            {"op": each.overload, "device": each.device, "policies": [_spell(each.mine), _spell(each.theirs)]}
            for each in modules
        ],
    }


def _draw_differences(data: Mapping[str, Any]) -> list[Any]:
    first, second = data["policies"]
    of = ", ".join([*data["devices"], *([f"--op {data['op']}"] if data["op"] else [])])
    differences = data["differences"]
    if not differences:
        return [f"{first} and {second} are equal ({of})."]
    listing = Table("aten op", "device", first, second)
    for row in differences:
        listing.add_row(_op_of_table(row["op"]), row["device"], *map(_cell, row["policies"]))
    ops = len({row["op"] for row in differences} - {KEY_OF_WHOLE})
    return [listing, "", f"{first} compared with {second} ({of}). differences: {len(differences)}, ops: {ops}."]
