"""The command `torch-promote info`: versions, devices, and how the running PyTorch differs from the op table."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch_promote
from torch_promote.cli.output import Part, show
from torch_promote.cli.user_program import why_not_loaded
from torch_promote.policy.cast_policy import DEVICE_TYPES, CastPolicy

if TYPE_CHECKING:
    import torch

DESCRIPTION = """\
Shows versions, policies, the device types and what runs the regions of
torch.autocast, and compares the op table with the running PyTorch.

  default policy   the policy of regions that name none, if it is not PyTorch's
  environment      the variables of this package that are set
  autoloading      whether `import torch` loads this package, which does nothing
                   unless TORCH_PROMOTE_AUTOCAST=1 (or `torch-promote run`)
  float8           the op that multiplies under the policy float8, by device
  rows that count  rows with a policy whose op PyTorch registers for autocast
  missing rows     rows with a policy whose op PyTorch does not register: the
                   op falls through
  unlisted ops     ops that PyTorch registers and the table has no policy for:
                   left to stock

It fits a screen: long values and lists are shortened, unless you pass --all.
"""
EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--all", action="store_true", help="shorten nothing, and list missing rows and unlisted ops")
    parser.add_argument("--json", action="store_true", help="print JSON, which is always complete")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    info = _info()
    return show(info, _parts(info, arguments.all), arguments.json)


def _info() -> dict[str, Any]:
    import torch

    from torch_promote import _C
    from torch_promote.loader import AUTOCAST_KEY
    from torch_promote.policy.op_table import missing_rows, op_table, spell_policy, unlisted_ops
    from torch_promote.reference.dtypes import dtype_name
    from torch_promote.regions.defaults import registered_policies, spell_default_policy
    from torch_promote.regions.installation import VARIABLES

    counting = _C.stock_policy_bytes()
    unlisted_byte = _C.POLICY_BYTES["unlisted"]
    devices = {}
    for index, device in enumerate(DEVICE_TYPES):
        devices[device] = {
            "available": torch.get_device_module(device).is_available(),
            "default_dtype": dtype_name(torch.get_autocast_dtype(device)),
            "rows_with_policy": sum(row.policy(device) is not CastPolicy.fallthrough for row in op_table()),
            "rows_that_count": sum(policies[index] != unlisted_byte for policies in counting),
            "missing_rows": [row.name for row in missing_rows(device)],
            "unlisted_ops": list(unlisted_ops(device)),
            "float8": _float8_on(torch.device(device, 0)),
        }
    installation = torch_promote.installed()
    return {
        "torch_promote": torch_promote.__version__,
        "torch": torch.__version__,
        "built_with_torch": _C.TORCH_VERSION,
        "extension": _C.__file__,
        "python": platform.python_version(),
        "dispatch_key": AUTOCAST_KEY,
        "rows": len(op_table()),
        "installed": None if installation is None else installation.info,
        "default_policy": spell_default_policy(),
        "registered_policies": [
            {"op": op, "device": device, "policy": spell_policy(policy)}
            for (op, device), policy in registered_policies().items()
        ],
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "autoloading": why_not_loaded() or "works",
        "devices": devices,
    }


def _float8_on(device: torch.device) -> str | None:
    import torch

    from torch_promote.regions.float8 import product_on, what_lacks

    if not torch.get_device_module(device).is_available():
        return None
    lacking = what_lacks(device)
    return f"none, linear runs as under lower_precision_fp: {lacking}" if lacking else product_on(device)


#: The length of a value, in characters, and of a list, that info shows without --all.
_LENGTH, _LINES = 90, 3


def _parts(info: Mapping[str, Any], in_full: bool) -> Iterator[Part]:
    from torch_promote.regions.installation import VARIABLES

    def value(text: str) -> str:
        return text if in_full or len(text) <= _LENGTH else f"{text[:_LENGTH]}... (--all)"

    def lines(found: Sequence[str]) -> str:
        more = [] if in_full or len(found) <= _LINES else [f"and {len(found) - _LINES + 1} others (--all)"]
        return "\n".join([*(found[: _LINES - 1] if more else found), *more])

    given = [f"{one['op']} on {one['device']}: {one['policy']}" for one in info["registered_policies"]]
    variables = (value(f"{name}={text}") for name, text in info["environment"].items())
    yield {
        "torch_promote": info["torch_promote"],
        "torch": f"{info['torch']}, built with {info['built_with_torch']}",
        "python": info["python"],
        "dispatch key": info["dispatch_key"],
        "op table": f"{info['rows']} rows",
        "torch.autocast": value(info["installed"] or "PyTorch's own"),
        "default policy": value(info["default_policy"] or "PyTorch's own"),
        "registered policies": lines(given) or "none",
        "environment": "\n".join(variables) or f"none of {', '.join(VARIABLES)}",
        "autoloading": value(info["autoloading"]),
        "float8": "\n".join(
            f"{name}: {device['float8']}" for name, device in info["devices"].items() if device["available"]
        ),
    }
    yield [
        {
            "device": name,
            "available": "yes" if device["available"] else "no",
            "default dtype": device["default_dtype"],
            "rows that count": f"{device['rows_that_count']}/{device['rows_with_policy']}",
            "missing rows": len(device["missing_rows"]),
            "unlisted ops": len(device["unlisted_ops"]),
        }
        for name, device in info["devices"].items()
    ]
    differing = {
        f"{what.replace('_', ' ')} on {name}": "\n".join(device[what])
        for name, device in info["devices"].items()
        for what in ("missing_rows", "unlisted_ops")
        if device[what]
    }
    if in_full:
        yield differing
    lists = "" if in_full else "`torch-promote info --all` lists the missing rows and the unlisted ops."
    yield lists if differing else "This PyTorch registers exactly the ops that the table lists."
