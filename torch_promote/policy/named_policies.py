"""The named policies, derived from the rows of the op table that the running PyTorch registers.

Those of PyTorch's versions are the op table's, but for the ops whose policy is not the same in every version:
`torch_versions.toml`, which `make torch-policies` writes from installations of the versions.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from torch_promote.errors import did_you_mean
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, rows_by_name, schema_of
from torch_promote.policy.overrides import why_illegal

#: The policy of an op: a cast policy, or a floating dtype to run in.
Value = CastPolicy | torch.dtype
#: An overload's full name, a device type, and the overload's policy there.
Change = tuple[str, str, Value]

#: The versions of PyTorch whose policies have names.
_VERSIONS = [f"2.{minor}" for minor in range(8, 16)]
_OF_VERSION = "torch-"

PolicyName = Literal[
    "stock",
    "cpu",
    "cuda",
    "xpu",
    "mps",
    "fp32_safe",
    "fp32",
    "off",
    "torch-2.8",
    "torch-2.9",
    "torch-2.10",
    "torch-2.11",
    "torch-2.12",
    "torch-2.13",
    "torch-2.14",
    "torch-2.15",
]

#: What each named policy does, in a sentence.
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "stock": "What PyTorch's autocast does.",
        "cpu": "What PyTorch's autocast does on the CPU, on every device type.",
        "cuda": "What PyTorch's autocast does on CUDA, on every device type.",
        "xpu": "What PyTorch's autocast does on XPU, on every device type.",
        "mps": "What PyTorch's autocast does on MPS, on every device type.",
        "fp32_safe": "Stock, but an op that runs in float32 on one device type does so on every device type.",
        "fp32": "Runs every op of the table in float32, and every op that was added with `register_policy`.",
        "off": "Casts in no op of the table, and in none that was added with `register_policy`.",
        **{f"{_OF_VERSION}{version}": f"What the autocast of PyTorch {version} does." for version in _VERSIONS},
    }
)
#: The named policies that give every op one policy, also those that were added with `register_policy`.
EVERY_OP: Mapping[str, CastPolicy] = MappingProxyType({"fp32": CastPolicy.fp32, "off": CastPolicy.fallthrough})

#: The names by which a report calls an equal policy. Versions often have the same one, or one with a single entry.
RECOGNIZED: tuple[PolicyName, ...] = tuple(name for name in get_args(PolicyName) if not name.startswith(_OF_VERSION))
#: The names, for errors.
LEGAL_POLICIES = f"{', '.join(RECOGNIZED)}, {_OF_VERSION}{_VERSIONS[0]} to {_OF_VERSION}{_VERSIONS[-1]}"

#: The policies with float32 results.
_SAFE = (CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype)
#: Ops outside the table that "fp32" names: their kernels need one dtype, or PyTorch casts inside them, where
#: only its own policies act.
_FP32_TOO = (
    "aten::_cudnn_rnn",
    "aten::_grouped_mm",
    "aten::_sparse_mm",
    "aten::_transformer_encoder_layer_fwd",
    "aten::embedding_bag",
    "aten::embedding_bag.padding_idx",
)


def stock_policy(overload: str, device_type: str) -> CastPolicy | None:
    """Returns the stock policy of an overload in the running PyTorch on a device type; None if the table has none."""
    # `fallthrough`: the row has no policy for the device type, or PyTorch does not register it. None: no row, or
    # PyTorch or a library registers the overload on a device type for which its row has no policy.
    return _column(device_type).get(overload)


@functools.cache
def _column(device_type: str) -> Mapping[str, CastPolicy | None]:
    """The stock policy of each row that exists in the running PyTorch."""
    key = f"Autocast{device_type.upper()}"
    column: dict[str, CastPolicy | None] = {}
    for row in op_table():
        if schema_of(row) is None:
            continue
        listed = row.policy(device_type) is not CastPolicy.fallthrough
        is_registered = torch._C._dispatch_has_kernel_for_dispatch_key(row.name, key)
        column[row.name] = row.policy(device_type) if listed and is_registered else CastPolicy.fallthrough
        if is_registered and not listed:
            column[row.name] = None
    return MappingProxyType(column)


def closest_policy(name: str) -> str:
    """Returns a hint with the names that a misspelt name of a policy is likely to mean, or ""."""
    version = re.match(r"(?:(?:py)?torch)?\W*v?(\d+)\W(\d+)\b", name, re.IGNORECASE)
    if version is None:
        return did_you_mean(name, RECOGNIZED) or did_you_mean(name, MEANINGS, 1)
    meant = f"{_OF_VERSION}{version[1]}.{version[2]}"
    return f" Closest: {meant}." if meant in MEANINGS else ""


def named_changes(name: str, registered: Iterable[tuple[str, str]] = ()) -> Iterator[Change]:
    """Yields the entries of a named policy, some equal to stock's; those in EVERY_OP need `registered_ops`."""
    if name.startswith(_OF_VERSION):
        yield from (change for change in _version_changes(name) if schema_of(change[0]) is not None)
        return
    every = EVERY_OP.get(name)
    for op in _column(DEVICE_TYPES[0]):
        stock = {device_type: stock_policy(op, device_type) for device_type in DEVICE_TYPES}
        safe = next((policy for policy in stock.values() if policy in _SAFE), None)
        for device_type in DEVICE_TYPES:
            if every is not None:
                yield op, device_type, every
            elif name in DEVICE_TYPES and device_type != name:
                yield op, device_type, stock[name] or CastPolicy.fallthrough
            elif name == "fp32_safe" and safe is not None and stock[device_type] not in _SAFE:
                yield op, device_type, safe
    if every is not None:
        others = itertools.chain(registered, itertools.product(_FP32_TOO, DEVICE_TYPES) if name == "fp32" else ())
        yield from ((op, device_type, every) for op, device_type in others if why_illegal(op, every) is None)


def left_out(name: str) -> tuple[Change, ...]:
    """Returns the entries that a named policy would have if the running PyTorch had their ops."""
    changes = _version_changes(name) if name in MEANINGS and name.startswith(_OF_VERSION) else ()
    return tuple(change for change in changes if schema_of(change[0]) is None)


def _version_changes(name: str) -> Iterator[Change]:
    """Yields where a version of PyTorch differs from the running one, also of ops that one of the two lacks."""
    running = ".".join(torch.__version__.split(".")[:2])
    for device_type in DEVICE_TYPES:
        for op in sorted({*rows_by_name(), *_histories()[device_type]}):
            policy = _policy_in(name.removeprefix(_OF_VERSION), op, device_type)
            if policy is not (stock_policy(op, device_type) or _policy_in(running, op, device_type)):
                yield op, device_type, policy


def _policy_in(version: str, op: str, device_type: str) -> CastPolicy:
    """The policy of an op of the table or of the histories in a version; in a newer one, that of the last version."""
    history = _histories()[device_type].get(op)
    if history is None:
        return rows_by_name()[op].policy(device_type)
    known = (since for since in history if release(since) <= release(version))
    return CastPolicy(history[max(known, key=release)])


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers at the start of a version; () without any."""
    match = re.match(r"\d+(\.\d+)*", version)
    parts = match[0].split(".") if match else []
    # Python refuses to convert very long numbers.
    return tuple(map(int, parts)) if all(len(part) < 10 for part in parts) else ()


@functools.cache
def _histories() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """The policies of ops on device types, from a version on."""
    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("torch_versions.toml").read_text(encoding="utf-8"))
    return data


_ops: tuple[tuple[str, str], ...] = ()


def registered_ops() -> tuple[tuple[str, str], ...]:
    """Returns the ops that were given a policy, as pairs of an overload's full name and a device type, sorted."""
    return _ops


def replace_registered_ops(ops: Iterable[tuple[str, str]]) -> None:
    """Replaces what `registered_ops` returns."""
    global _ops
    _ops = tuple(sorted(ops))
