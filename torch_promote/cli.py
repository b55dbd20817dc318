"""The command `torch-promote`: what this installation is, and the op table as people read it.

A command gathers plain data first; `--json` prints that, and the text is drawn from the same. Drawing is
torch_promote/_terminal.py's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import torch_promote
from torch_promote import _C, cli_bench, cli_why
from torch_promote._extension import OUR_KEY, built_with
from torch_promote._terminal import check_rich, paint, render, table
from torch_promote.errors import TorchPromoteError, did_you_mean
from torch_promote.policies import DEVICE_TYPES, CastPolicy, Row, op_table, schema_of
from torch_promote.registrations import missing_rows, registered, unlisted_ops

__all__ = ["main"]

_OK, _WRONG_COMMAND_LINE = 0, 2  # 1 is for commands that find something


class _CommandError(TorchPromoteError):
    """A command line that parses, and that cannot be carried out."""


# --- info


def _info() -> dict[str, Any]:
    counting = _C.stock_policy_bytes()
    unlisted_byte = _C.POLICY_BYTES["unlisted"]
    devices = {}
    for index, device in enumerate(DEVICE_TYPES):
        devices[device] = {
            "available": device == "cpu" or torch.cuda.is_available(),
            "default_dtype": _dtype_name(torch.get_autocast_dtype(device)),
            "rows_with_policy": sum(row.policy(device) is not CastPolicy.fallthrough for row in op_table()),
            "rows_that_count": sum(byte != unlisted_byte for byte in counting[index]),
            "missing_rows": [row.name for row in missing_rows(device)],
            "unlisted_ops": list(unlisted_ops(device)),
        }
    return {
        "torch_promote": torch_promote.__version__,
        "torch": torch.__version__,
        "built_with_torch": built_with(),
        "python": platform.python_version(),
        "dispatch_key": OUR_KEY,
        "rows": len(op_table()),
        "devices": devices,
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _draw_info(info: Mapping[str, Any]) -> list[Any]:
    facts = table(show_header=False)
    facts.add_row("torch_promote", info["torch_promote"])
    facts.add_row("torch", f"{info['torch']}, built with {info['built_with_torch']}")
    facts.add_row("python", info["python"])
    facts.add_row("dispatch key", info["dispatch_key"])
    facts.add_row("op table", f"{info['rows']} rows")

    devices = table("device", "available", "default dtype", "rows that count", "missing rows", "unlisted ops")
    lists: list[str] = []
    for name, device in info["devices"].items():
        missing, unlisted = device["missing_rows"], device["unlisted_ops"]
        devices.add_row(
            name,
            "yes" if device["available"] else "no",
            device["default_dtype"],
            f"{device['rows_that_count']} of {device['rows_with_policy']}",
            str(len(missing)),
            str(len(unlisted)),
        )
        if missing:
            lists += ["", f"missing on {name} (in the table, not registered by this PyTorch: falls through):", *missing]
        if unlisted:
            lists += [
                "",
                f"unlisted on {name} (registered by this PyTorch, no policy in the table: stock decides):",
                *unlisted,
            ]
    return [facts, "", devices, *(lists or ["", "This PyTorch registers what the table lists, and nothing else."])]


# --- policies


def _policies(pattern: str | None, devices: Sequence[str]) -> dict[str, Any]:
    rows = [row for row in op_table() if pattern is None or _matches(row, pattern)]
    if not rows:
        raise _no_match(str(pattern))
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


def _matches(row: Row, pattern: str) -> bool:
    names = (row.op, row.name.removeprefix("aten::"), row.name)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _no_match(pattern: str) -> _CommandError:
    known = [name for row in op_table() for name in (row.op, row.name.removeprefix("aten::"))]
    close = did_you_mean(pattern.removeprefix("aten::").strip("*?"), dict.fromkeys(known))
    return _CommandError(
        f"--op {pattern!r} matches none of the table's {len(op_table())} rows.{close} "
        f"`torch-promote policies` lists them all."
    )


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


def _draw_policies(data: Mapping[str, Any]) -> list[Any]:
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


def _show(data: Mapping[str, Any], draw: Callable[[Mapping[str, Any]], list[Any]], as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return _OK
    check_rich()
    sys.stdout.write(render(draw(data)))
    return _OK


# --- the command line


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="torch-promote",
        description="Autocast with open policies: what is installed, and what happens to each op.",
        epilog=_EPILOG,
        formatter_class=plain,
    )
    version = f"torch-promote {torch_promote.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    info = commands.add_parser(
        "info",
        help="versions, devices, and the op table against the running PyTorch",
        description=_INFO,
        formatter_class=plain,
    )
    info.set_defaults(run=lambda arguments: _show(_info(), _draw_info, arguments.json))

    policies = commands.add_parser(
        "policies",
        help="what autocast does with each op",
        description=_POLICIES,
        epilog=_meanings(),
        formatter_class=plain,
    )
    policies.add_argument("--device", choices=DEVICE_TYPES, help="only this device type, and ops with a policy there")
    policies.add_argument("--op", metavar="PATTERN", help="only these ops, by a shell pattern")
    policies.set_defaults(
        run=lambda arguments: _show(
            _policies(arguments.op, [arguments.device] if arguments.device else DEVICE_TYPES),
            _draw_policies,
            arguments.json,
        )
    )
    cli_bench.add_parser(commands)
    cli_why.add_parser(commands)
    for command in (info, policies):
        command.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


_EPILOG = """\
examples:
  torch-promote info                             versions, devices, table size
  torch-promote policies                         the whole op table
  torch-promote policies --device cpu            what has a policy on the CPU
  torch-promote policies --op softmax            one op, with all its overloads
  torch-promote policies --op 'linalg_*' --json  a pattern; JSON for programs
  torch-promote bench --suite region             timings against stock
  torch-promote why "int32[3] + 5.5"             how a result dtype comes about

exit status: 0 done, 2 wrong command line; 1 is kept for commands with findings.
`torch-promote policies --help` explains each policy.
"""

_INFO = """\
Shows the versions, the dispatch key and the device types, and holds the op
table against the PyTorch that is running.

  rows that count  have a policy on the device; PyTorch registers the op there
  missing rows     have one; PyTorch does not register the op: falls through
  unlisted ops     PyTorch registers them; no policy in the table: left to stock
"""

_POLICIES = """\
Shows the op table: the cast policy of each op on each device type, and the rows
on which the PyTorch that is running differs. PATTERN is a shell pattern, held
against the op (softmax), the overload (softmax.int) and the full name
(aten::softmax.int).
"""


def _meanings() -> str:
    width = max(len(policy.value) for policy in CastPolicy) + 2
    indent = " " * (width + 2)
    sentences = (f"  {policy.value:<{width}}{policy.meaning}" for policy in CastPolicy)
    return "policies:\n" + "\n".join(textwrap.fill(text, 80, subsequent_indent=indent) for text in sentences)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, without the program's name. None: those of this process.

    Returns:
        The exit status: 0 done, 1 something was found, 2 the command line asks for what cannot be done.

    Raises:
        SystemExit: From argparse, with 2 for a wrong command line and 0 after `--help` and `--version`.

    Example:
        >>> main(["policies", "--op", "sofmax", "--json"])
        2
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has read enough (head, less). Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except TorchPromoteError as error:
        print(f"torch-promote: error: {error}", file=sys.stderr)
        return _WRONG_COMMAND_LINE
    return status
