"""The command `torch-promote policies`: the op table as people read it."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli import policies_diff as cli_policies_diff
from torch_promote.cli import policies_given as cli_policies_given
from torch_promote.cli.op_filter import no_match
from torch_promote.cli.terminal import paint, show, table
from torch_promote.errors import OptionError
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_names import matches
from torch_promote.policy.op_table import DEVICE_TYPES, Row, op_table, schema_of
from torch_promote.policy.registered import registered

__all__ = ["add_parser"]

_DESCRIPTION = """\
Shows the op table: the cast policy of each op on each device type, and the rows
on which the PyTorch that is running differs. PATTERN is a shell pattern, held
against the op (softmax), the overload (softmax.int) and the full name
(aten::softmax.int).

--diff shows only what differs: without devices, where the set of ops that the
running PyTorch registers for autocast is not that of the table; with two
devices, where one does otherwise than the other. A device without a column in
the table (xpu, mps) is known by the ops that PyTorch registers for it.

The dispatcher tells which ops are registered, and not what their kernels do.
`torch-promote parity --stock-only` runs them, and measures that.

--policy shows a policy instead of the table, as it is in the running PyTorch: a
named one (stock, cpu, cuda, fp32_safe, off) or a policy file. With it, --diff
takes another policy, and not devices: `--policy cuda --diff cpu` is about what
two policies do on each device type, `--diff cuda cpu` about two columns of the
table.
"""

_EXAMPLES = """
examples:
  torch-promote policies --op 'linalg_*'    the rows of some ops
  torch-promote policies --diff             is this PyTorch the one of the table?
  torch-promote policies --diff cpu cuda    where the two columns differ
  torch-promote policies --diff xpu cuda    what a backend registers, and CUDA
  torch-promote policies --policy fp32_safe --diff stock
  torch-promote policies --policy ./mine.toml --op softmax

exit status: 0 done; 1 --diff found a difference of PyTorch from the table, or
of a policy from another; 2 wrong command line.
"""


def add_parser(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "policies",
        help="what autocast does with each op",
        description=_DESCRIPTION,
        epilog=_meanings() + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=DEVICE_TYPES, help="only this device type, and ops with a policy there")
    parser.add_argument("--op", metavar="PATTERN", help="only these ops, by a shell pattern")
    parser.add_argument(
        "--diff",
        nargs="*",
        metavar="WITH",
        help="only what differs: PyTorch from the table, two devices, or --policy from another policy",
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="a policy instead of the table")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_run)


def _meanings() -> str:
    width = max(len(policy.value) for policy in CastPolicy) + 2
    indent = " " * (width + 2)
    sentences = (f"  {policy.value:<{width}}{policy.meaning}" for policy in CastPolicy)
    return "policies:\n" + "\n".join(textwrap.fill(text, 80, subsequent_indent=indent) for text in sentences)


def _run(arguments: argparse.Namespace) -> int:
    devices = [arguments.device] if arguments.device else DEVICE_TYPES
    if arguments.policy is not None:
        return cli_policies_given.run(arguments.policy, arguments.diff, devices, arguments.op, arguments.json)
    if arguments.diff is None:
        return show(_listing(arguments.op, devices), _draw, arguments.json)
    if arguments.diff and arguments.device:
        raise OptionError("--diff with two devices takes no --device.")
    return cli_policies_diff.run(arguments.diff, devices, arguments.op, arguments.json)


def _listing(pattern: str | None, devices: Sequence[str]) -> dict[str, Any]:
    rows = [row for row in op_table() if pattern is None or matches(row.name, pattern)]
    if not rows:
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
    """Says how the running PyTorch's set of ops differs from the row, for one device."""
    has_policy = row.policy(device) is not CastPolicy.fallthrough
    if has_policy == (row.name in registered_ops):
        return None
    if not has_policy:
        return "registered, left to stock"
    return "not registered" if schema_of(row) is not None else "no such op"


def _draw(data: Mapping[str, Any]) -> list[Any]:
    devices, rows, version = data["devices"], data["rows"], data["torch"]
    if not rows:
        names = ", ".join(name.removeprefix("aten::") for name in data["without_policy"])
        return [f"The table has no policy on {devices[0]}, and my_autocast leaves it to PyTorch there: {names}"]
    longest = max(len(row["op"].removeprefix("aten::")) for row in rows)
    listing = table("aten op", *devices, "notes", unbroken=devices, first_width=min(longest, 28))
    for row in rows:
        notes = [f"calls {row['redispatch'].removeprefix('aten::')}"] if row["redispatch"] else []
        notes += [f"{device}: {what} in torch {version}" for device, what in row["running_torch_differs"].items()]
        cells = (paint(row[device]) for device in devices)
        listing.add_row(row["op"].removeprefix("aten::"), *cells, ", ".join(notes))
    differing = sum(bool(row["running_torch_differs"]) for row in rows)
    verdict = f"differs on {differing} of them, see notes" if differing else "registers the ops as shown"
    return [listing, "", _draw_counts(data), "", f"rows: {len(rows)}. torch {version} {verdict}."]


def _draw_counts(data: Mapping[str, Any]) -> Any:
    devices, counts = data["devices"], data["counts"]
    summary = table("policy", *devices, "meaning")
    for policy in CastPolicy:
        numbers = [counts[device].get(policy.value, 0) for device in devices]
        if any(numbers):
            summary.add_row(paint(policy.value), *map(str, numbers), policy.meaning)
    return summary
