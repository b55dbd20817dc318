"""The command `torch-promote policies`: the op table."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli import policies_one_policy, policies_table_diff
from torch_promote.cli.op_filter import find_ops, no_match
from torch_promote.cli.policies_other_ops import draw_other_ops, import_modules, other_ops, other_overloads
from torch_promote.cli.terminal import Table, paint, show
from torch_promote.errors import OptionError
from torch_promote.policy.op_names import matches
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, Row, op_table, registered, schema_of
from torch_promote.policy.policy import Policy

__all__ = ["add_parser"]

_DESCRIPTION = """\
Shows the op table: the cast policy of each op on each device type, and the rows
for which the running PyTorch differs. PATTERN is a shell pattern that matches
the op (softmax), the overload (softmax.int) or the full name
(aten::softmax.int). For an op outside the table (gelu, add, a custom op), it
says what a region does with it, and how to override that.

--diff shows only differences. Without names, it compares the ops that the
running PyTorch registers for autocast with the table. With two devices, it
compares their columns. For a device type without a column (xpu, mps), it
compares the ops that PyTorch registers. With two policies, it compares these.

The dispatcher knows which ops have a kernel, not what the kernel does. To
measure that, run `torch-promote parity --stock-only`.

--policy shows a policy of the running PyTorch instead of the table: a named one
(stock, cpu, cuda, fp32_safe, off) or a policy file, with its tables for
modules. With --policy, --diff takes one other policy: `--policy cuda --diff
cpu` compares two policies on each device type, `--diff cuda cpu` two columns of
the table.
"""

_EXAMPLES = """
examples:
  torch-promote policies --op 'linalg_*'    the rows of some ops
  torch-promote policies --op gelu          an op outside the table
  torch-promote policies --import mylib --op mylib::op
  torch-promote policies --diff             compare PyTorch with the table
  torch-promote policies --diff cpu cuda    compare two columns of the table
  torch-promote policies --diff xpu cuda    compare the ops of two backends
  torch-promote policies --diff fp32_safe stock
  torch-promote policies --policy ./mine.toml --op softmax

exit status: 0 success; 1 --diff found a difference between PyTorch and the
table, or between two policies; 2 invalid command line.
"""


def add_parser(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "policies",
        help="show what autocast does with each op",
        description=_DESCRIPTION,
        epilog=_meanings() + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=DEVICE_TYPES, help="show only this device type, and ops with a policy on it"
    )
    parser.add_argument("--op", metavar="PATTERN", help="show only ops that match a shell pattern")
    parser.add_argument(
        "--diff",
        nargs="*",
        metavar="WITH",
        help="show only differences: of PyTorch from the table, of two devices or policies, or of --policy from one",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module first, which defines custom ops; repeatable",
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="show a policy instead of the table")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _meanings() -> str:
    width = max(len(policy.value) for policy in CastPolicy) + 2
    indent = " " * (width + 2)
    sentences = (f"  {policy.value:<{width}}{policy.meaning}" for policy in CastPolicy)
    return "policies:\n" + "\n".join(textwrap.fill(text, 80, subsequent_indent=indent) for text in sentences)


def _run(arguments: argparse.Namespace) -> int:
    import_modules(arguments.modules)
    devices = [arguments.device] if arguments.device else DEVICE_TYPES
    if arguments.policy is not None:
        return policies_one_policy.run(arguments.policy, arguments.diff, devices, arguments.op, arguments.json)
    if _are_policies(arguments.diff):
        return policies_one_policy.run(arguments.diff[0], arguments.diff[1:], devices, arguments.op, arguments.json)
    if arguments.diff is None:
        return show(_listing(arguments.op, devices), _draw, arguments.json)
    if arguments.diff and arguments.device:
        raise OptionError("--diff with two devices does not accept --device.")
    return policies_table_diff.run(arguments.diff, devices, arguments.op, arguments.json)


def _are_policies(compared: Sequence[str] | None) -> bool:
    """Whether --diff has two policies. `cpu cuda` are two columns of the table."""
    if compared is None or len(compared) != 2 or all(name in DEVICE_TYPES for name in compared):
        return False
    return all(name in Policy.names() or name.endswith(".toml") or "/" in name or os.sep in name for name in compared)


def _listing(pattern: str | None, devices: Sequence[str]) -> dict[str, Any]:
    rows = [row for row in op_table() if pattern is None or matches(row.name, pattern)]
    if not rows and pattern is not None:  # another way to name an op
        named = find_ops(pattern)
        rows = [row for row in op_table() if row.name in named]
    others = [] if rows or pattern is None else other_ops(pattern, devices)
    if not rows and not others:
        raise no_match(str(pattern))
    stock = {device: registered(device) for device in devices}
    shown = [row for row in rows if any(row.policy(device) is not CastPolicy.fallthrough for device in devices)]
    return {
        "torch": torch.__version__,
        "devices": list(devices),
        "rows": [_row_data(row, stock) for row in shown],
        "counts": {
            device: {policy.value: count for policy, count in Counter(row.policy(device) for row in shown).items()}
            for device in devices
        },
        "without_policy": [row.name for row in rows if row not in shown],
        "other_overloads": other_overloads(pattern) if rows else [],
        "other_ops": others,
    }


def _row_data(row: Row, stock: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    differences = {device: _difference(row, device, names) for device, names in stock.items()}
    return {
        "op": row.name,
        **{device: row.policy(device).value for device in stock},
        "redispatch": f"aten::{row.op}.{row.redispatch_overload}" if row.redispatch_overload else None,
        "running_torch_differs": {device: what for device, what in differences.items() if what},
    }


def _difference(row: Row, device: str, registered_ops: frozenset[str]) -> str | None:
    """Returns how the running PyTorch differs from the row on one device type, or None."""
    has_policy = row.policy(device) is not CastPolicy.fallthrough
    if has_policy == (row.name in registered_ops):
        return None
    if not has_policy:
        return "registered, left to stock"
    return "not registered" if schema_of(row) is not None else "no such op"


def _draw(data: Mapping[str, Any]) -> list[Any]:
    devices, rows, version = data["devices"], data["rows"], data["torch"]
    if data["other_ops"]:
        return draw_other_ops(data["other_ops"])
    if not rows:
        names = ", ".join(name.removeprefix("aten::") for name in data["without_policy"])
        return [f"The table has no policy on {devices[0]}, where my_autocast leaves these to PyTorch: {names}"]
    listing = Table("aten op", *devices, "notes", note="notes")
    for row in rows:
        notes = [f"calls {row['redispatch'].removeprefix('aten::')}"] if row["redispatch"] else []
        notes += [f"{device}: {what} in torch {version}" for device, what in row["running_torch_differs"].items()]
        cells = (paint(row[device]) for device in devices)
        listing.add_row(row["op"].removeprefix("aten::"), *cells, ", ".join(notes))
    differing = sum(bool(row["running_torch_differs"]) for row in rows)
    verdict = f"differs for {differing} of them, see notes" if differing else "registers the ops as shown"
    without = ", ".join(name.removeprefix("aten::") for name in data["other_overloads"])
    more = [f"overloads without a row, and so without a policy: {without}", ""] if without else []
    return [listing, "", _draw_counts(data), "", *more, f"rows: {len(rows)}. torch {version} {verdict}."]


def _draw_counts(data: Mapping[str, Any]) -> Any:
    devices, counts = data["devices"], data["counts"]
    summary = Table("policy", *devices, "meaning", prose=["meaning"])
    for policy in CastPolicy:
        numbers = [counts[device].get(policy.value, 0) for device in devices]
        if any(numbers):
            summary.add_row(paint(policy.value), *map(str, numbers), policy.meaning)
    return summary
