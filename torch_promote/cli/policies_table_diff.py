"""`torch-promote policies --diff`: compares the running PyTorch with the op table, or one device type with another.

The dispatcher knows which ops have a kernel on an autocast key, but not what the kernel does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli.op_filter import no_match
from torch_promote.cli.terminal import Table, paint, show
from torch_promote.errors import OptionError
from torch_promote.policy.op_names import matches
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    LEFT_TO_STOCK,
    CastPolicy,
    missing_rows,
    op_table,
    registered,
    schema_of,
    unlisted_ops,
)

__all__ = ["run"]

_FOUND = 1
_REGISTERED, _NOTHING = "registered", "-"
_NO_POLICY = CastPolicy.fallthrough.value


def run(compared: Sequence[str], columns: Sequence[str], pattern: str | None, as_json: bool) -> int:
    """Runs the comparison.

    Args:
        compared: Two device types to compare. Empty: compare the running PyTorch with the table.
        columns: The columns of the table to compare with PyTorch.
        pattern: A shell pattern that selects ops, or None.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 1 if the running PyTorch differs from the table, else 0.

    Raises:
        OptionError: `compared` does not have two different devices, or no op matches the pattern.
        UnsupportedDeviceError: The running PyTorch registers no op for autocast on a device type.
    """
    if not compared:
        data = _pytorch_and_table(columns, pattern)
        return show(data, _draw_pytorch_and_table, as_json, _FOUND if data["differences"] else 0)
    if len(compared) != 2 or compared[0] == compared[1]:
        raise OptionError(
            f"--diff takes nothing (compare PyTorch with the table), two different devices or two policies, got "
            f"{' '.join(compared)!r}. To compare one policy with PyTorch's: --diff {compared[0]} stock."
        )
    return show(_two_devices(compared, pattern), _draw_two_devices, as_json)


# --- PyTorch and the table


def _pytorch_and_table(columns: Sequence[str], pattern: str | None) -> dict[str, Any]:
    unlisted = [name for device in columns for name in unlisted_ops(device)]
    if not _chosen([*(row.name for row in op_table()), *unlisted], pattern):
        raise no_match(str(pattern), unlisted)
    devices = {device: _differences(device, pattern) for device in columns}
    return {
        "torch": torch.__version__,
        "rows": len(op_table()),
        "op": pattern,
        "devices": devices,
        "differences": sum(len(found) for device in devices.values() for found in device.values()),
    }


def _differences(device: str, pattern: str | None) -> dict[str, list[Any]]:
    missing = {row.name: row for row in missing_rows(device)}
    return {
        "missing": [
            {
                "op": row.name,
                "policy": row.policy(device).value,
                "why": "not registered" if schema_of(row) is not None else "no such op",
            }
            for row in (missing[name] for name in _chosen(missing, pattern))
        ],
        "unlisted": _chosen((op for op in unlisted_ops(device) if op not in LEFT_TO_STOCK), pattern),
    }


def _chosen(names: Iterable[str], pattern: str | None) -> list[str]:
    return [name for name in names if pattern is None or matches(name, pattern)]


def _draw_pytorch_and_table(data: Mapping[str, Any]) -> list[Any]:
    if not data["differences"]:
        of = ", ".join([*data["devices"], *([f"--op {data['op']}"] if data["op"] else [])])
        return [f"torch {data['torch']} registers exactly the ops that the table lists ({of})."]
    listing = Table("op", "device", "the table", "this PyTorch")
    for name, device in data["devices"].items():
        for row in device["missing"]:
            listing.add_row(row["op"].removeprefix("aten::"), name, paint(row["policy"]), row["why"])
        for op in device["unlisted"]:
            listing.add_row(op.removeprefix("aten::"), name, "left to stock", "registered")
    return [
        listing,
        "",
        f"differences: {data['differences']}. torch {data['torch']} compared with {data['rows']} rows.",
    ]


# --- two device types


def _two_devices(devices: Sequence[str], pattern: str | None) -> dict[str, Any]:
    from_table = all(device in DEVICE_TYPES for device in devices)
    first, second = (_policies(device) if from_table else _registrations(device) for device in devices)
    ops = _chosen(_in_order(first, second), pattern)
    if not ops:
        raise no_match(str(pattern))
    return {
        "torch": torch.__version__,
        "devices": list(devices),
        "of": "policies in the table" if from_table else f"registrations of torch {torch.__version__}",
        "alike": sum(_alike(first.get(op), second.get(op), from_table) for op in ops),
        "differences": [
            {
                "op": op,
                "policies": {device: column.get(op) for device, column in zip(devices, (first, second), strict=True)},
            }
            for op in ops
            if not _alike(first.get(op), second.get(op), from_table)
        ],
    }


def _policies(device: str) -> dict[str, str]:
    return {row.name: row.policy(device).value for row in op_table()}


def _registrations(device: str) -> dict[str, str]:
    """The ops registered on a device type, with their policies if the table has a column for it."""
    known = _policies(device) if device in DEVICE_TYPES else {}
    known = {op: policy for op, policy in known.items() if policy != _NO_POLICY}
    return {op: known.get(op, _REGISTERED) for op in registered(device)}


def _alike(first: str | None, second: str | None, compare_policies: bool) -> bool:
    return first == second if compare_policies else (first is None) == (second is None)


def _in_order(*columns: Iterable[str]) -> list[str]:
    """The ops of some columns: the rows of the table in its order, then the others."""
    ops: Collection[str] = {op for column in columns for op in column}
    listed = [row.name for row in op_table() if row.name in ops]
    return listed + sorted(set(ops) - set(listed))


def _draw_two_devices(data: Mapping[str, Any]) -> list[Any]:
    devices, differences = data["devices"], data["differences"]
    verdict = (
        f"{devices[0]} and {devices[1]}: {len(differences)} differ, {data['alike']} alike. Compared: {data['of']}."
    )
    if not differences:
        return [verdict]
    listing = Table("aten op", *devices)
    for row in differences:
        cells = [_cell(row["policies"][device]) for device in devices]
        listing.add_row(row["op"].removeprefix("aten::"), *cells)
    return [listing, "", verdict]


def _cell(policy: str | None) -> Any:
    if policy is None:
        return _NOTHING
    return policy if policy == _REGISTERED else paint(policy)
