"""The command `torch-promote policies`: the op table, a policy, and differences between two policies."""

from __future__ import annotations

import argparse
import importlib
import textwrap

from torch_promote.cli.output import show
from torch_promote.errors import OptionError
from torch_promote.policy.cast_policy import DEVICE_TYPES, CastPolicy

DESCRIPTION = """\
Shows the op table: the cast policy of each op on each device type, and the rows
for which the running PyTorch differs. PATTERN is a shell pattern that matches
the op (softmax), the overload (softmax.int) or the full name
(aten::softmax.int). For an op outside the table (gelu, add, a custom op), it
says what a region does with it, and how to override that.

--policy shows a policy instead of the table: a named one (stock, cpu, cuda,
xpu, mps, fp32_safe, fp32, off, torch-2.8 to torch-2.15) or a policy file, with
its tables for modules. torch-2.11 is what the autocast of PyTorch 2.11 does;
ops that the running PyTorch lacks are left out of it, and listed.

--diff compares two policies. How the running PyTorch differs from the table,
`torch-promote info --all` lists; what its kernels do, `torch-promote parity
--stock-only` measures.
"""


def _meanings() -> str:
    width = max(len(policy.value) for policy in CastPolicy) + 2
    sentences = (f"  {policy.value:<{width}}{policy.meaning}" for policy in CastPolicy)
    return "\n".join(textwrap.fill(text, 80, subsequent_indent=" " * (width + 2)) for text in sentences)


EPILOG = f"""\
policies:
{_meanings()}

examples:
  torch-promote policies softmax
  torch-promote policies 'linalg_*'
  torch-promote policies --import mylib mylib::op
  torch-promote policies --diff fp32_safe stock
  torch-promote policies --diff torch-2.11 mine.toml

exit status: 0 success; 1 --diff found a difference; 2 invalid command line.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--device", choices=DEVICE_TYPES, help="show only this device type, and ops with a policy on it"
    )
    parser.add_argument(
        "op", metavar="PATTERN", nargs="?", default=argparse.SUPPRESS, help="show only ops that match a shell pattern"
    )
    parser.add_argument("--op", help=argparse.SUPPRESS)
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module first, which defines custom ops; repeatable",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--policy", metavar="NAME|FILE", help="show a policy instead of the table")
    shown.add_argument("--diff", nargs=2, metavar="NAME|FILE", help="show the differences of two policies")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status: 1 if two policies differ."""
    from torch_promote.cli.op_listing import compared, listed

    for name in arguments.modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise OptionError(f"--import {name}: {type(error).__name__}: {text}") from error
    devices = [arguments.device] if arguments.device else list(DEVICE_TYPES)
    if arguments.diff is None:
        data, parts = listed(arguments.policy, devices, arguments.op)
        return show(data, parts, arguments.json)
    data, parts = compared(arguments.diff, devices, arguments.op)
    return show(data, parts, arguments.json, int(bool(data["differences"])))
