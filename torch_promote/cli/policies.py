"""The command `torch-promote policies`: the op table, a policy, and differences between them, devices and PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli.output import paint, show, table
from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.module_tables import KEY_OF_WHOLE, entries_of
from torch_promote.policy.named_policies import Value, stock_policy
from torch_promote.policy.op_names import HOW_TO_NAME, closest_ops, find_overloads, in_order, is_pattern, matches
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    LEFT_TO_STOCK,
    CastPolicy,
    Row,
    missing_rows,
    op_table,
    registered,
    rows_by_name,
    schema_of,
    spell_policy,
    unlisted_ops,
)
from torch_promote.policy.overrides import parse_overrides
from torch_promote.policy.policy import Policy
from torch_promote.reference.ops.infer import rule_table
from torch_promote.regions.defaults import default_policy, registered_policies
from torch_promote.regions.promotion_tables import BOOLEAN, FLOATS, OPAQUE, promoting_ops

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "no_match", "run"]

DESCRIPTION = """\
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


def _meanings() -> str:
    width = max(len(policy.value) for policy in CastPolicy) + 2
    sentences = (f"  {policy.value:<{width}}{policy.meaning}" for policy in CastPolicy)
    return "\n".join(textwrap.fill(text, 80, subsequent_indent=" " * (width + 2)) for text in sentences)


EPILOG = f"""\
policies:
{_meanings()}

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

#: With more ops without a row than this, each gets one line.
_IN_FULL = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
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


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status: 1 if PyTorch and the table, or two policies, differ."""
    for name in arguments.modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise OptionError(f"--import {name}: {type(error).__name__}: {text}") from error
    devices = [arguments.device] if arguments.device else DEVICE_TYPES
    pattern, compared, policy = arguments.op, arguments.diff, arguments.policy
    if policy is None and compared is not None and _are_policies(compared):
        policy, *compared = compared
    if policy is not None and compared is not None:
        if len(compared) != 1:
            got = repr(" ".join(compared)) if compared else "none"
            raise OptionError(f"with --policy, --diff takes one policy to compare with, a name or a file, got {got}.")
        data = _policies_compared((policy, compared[0]), devices, pattern)
        return show(data, _draw_policies_compared, arguments.json, int(bool(data["differences"])))
    if policy is not None:
        return show(_policy_listed(policy, devices, pattern), _draw_policy, arguments.json)
    if compared is None:
        return show(_table_listed(pattern, devices), _draw_table, arguments.json)
    if not compared:
        data = _pytorch_compared(devices, pattern)
        return show(data, _draw_pytorch_compared, arguments.json, int(bool(data["differences"])))
    if arguments.device:
        raise OptionError("--diff with two devices does not accept --device.")
    if len(compared) != 2 or compared[0] == compared[1]:
        raise OptionError(
            f"--diff takes nothing (compare PyTorch with the table), two different devices or two policies, got "
            f"{' '.join(compared)!r}. To compare one policy with PyTorch's: --diff {compared[0]} stock."
        )
    return show(_devices_compared(compared, pattern), _draw_devices_compared, arguments.json)


def _are_policies(compared: Sequence[str]) -> bool:
    """Whether --diff has two policies. `cpu cuda` are two columns of the table."""
    if len(compared) != 2 or all(name in DEVICE_TYPES for name in compared):
        return False
    return all(name in Policy.names() or name.endswith(".toml") or "/" in name or os.sep in name for name in compared)


# Choosing ops


def _find_ops(pattern: str) -> tuple[str, ...]:
    """Returns the overloads of all ops, with a row or without, that a name or a pattern selects."""
    try:
        return find_overloads(pattern)
    except PolicyError:
        return ()


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    return [name for name in names if pattern is None or matches(name, pattern)]


def no_match(pattern: str, others: Iterable[str] = ()) -> OptionError:
    """Returns the error for a value of --op that matches no op.

    Args:
        pattern: The value.
        others: The full names of ops that it could match besides the rows of the table.
    """
    try:
        find_overloads(pattern)
    except PolicyError as error:
        reason = str(error)
    else:
        return OptionError(
            f"--op {pattern!r}: these ops have no row in the op table, so there is nothing to compare. See "
            f"`torch-promote policies --op {pattern!r}`."
        )
    # The error for an unknown op is the command's own, which names --import.
    if "::" not in pattern and not is_pattern(pattern) and HOW_TO_NAME not in reason:
        return OptionError(f"--op {pattern!r}: {reason}")
    names = (*(row.name for row in op_table()), *others)
    ops = (name.partition("::")[2].partition(".")[0] for name in names)
    found = closest_ops(pattern.removeprefix("aten::").strip("*?").partition(".")[0], ops)
    close = f" Closest: {', '.join(found)}." if found else ""
    return OptionError(
        f"--op {pattern!r} matches no op.{close} `torch-promote policies` lists the op table. If a library defines the "
        f"op, import it: --import MODULE."
    )


# The op table


def _table_listed(pattern: str | None, devices: Sequence[str]) -> dict[str, Any]:
    names = _matching(rows_by_name(), pattern) or [name for name in _find_ops(str(pattern)) if name in rows_by_name()]
    rows = [row for row in op_table() if row.name in names]
    others = [] if rows or pattern is None else _other_ops(pattern, devices)
    if not rows and not others:
        raise no_match(str(pattern))
    shown = [row for row in rows if any(row.policy(device) is not CastPolicy.fallthrough for device in devices)]
    one_op = rows and pattern is not None and not is_pattern(pattern)
    return {
        "torch": torch.__version__,
        "devices": list(devices),
        "rows": [
            {
                "op": row.name,
                **{device: row.policy(device).value for device in devices},
                "redispatch": f"aten::{row.op}.{row.redispatch_overload}" if row.redispatch_overload else None,
                "running_torch_differs": {
                    device: what for device in devices if (what := _difference(row, device)) is not None
                },
            }
            for row in shown
        ],
        "counts": {device: dict(Counter(row.policy(device).value for row in shown)) for device in devices},
        "without_policy": [row.name for row in rows if row not in shown],
        "other_overloads": [name for name in _find_ops(str(pattern)) if name not in rows_by_name()] if one_op else [],
        "other_ops": others,
    }


def _difference(row: Row, device: str) -> str | None:
    """Returns how the running PyTorch differs from the row on one device type, or None."""
    has_policy = row.policy(device) is not CastPolicy.fallthrough
    if has_policy == (row.name in registered(device)):
        return None
    if not has_policy:
        return "registered, left to stock"
    return "not registered" if schema_of(row) is not None else "no such op"


def _draw_table(data: Mapping[str, Any]) -> Iterator[Any]:
    devices, rows, version = data["devices"], data["rows"], data["torch"]
    if data["other_ops"]:
        yield from _draw_other_ops(data["other_ops"])
        return
    if not rows:
        names = _short(data["without_policy"])
        yield f"The table has no policy on {devices[0]}, where my_autocast leaves these to PyTorch: {names}"
        return
    listing = table("aten op", *devices, "notes")
    for row in rows:
        notes = [f"calls {_short([row['redispatch']])}"] if row["redispatch"] else []
        notes += [f"{device}: {what} in torch {version}" for device, what in row["running_torch_differs"].items()]
        listing.add_row(_short([row["op"]]), *(paint(row[device]) for device in devices), ", ".join(notes))
    counts = table("policy", *devices, "meaning")
    for policy in CastPolicy:
        numbers = [data["counts"][device].get(policy.value, 0) for device in devices]
        if any(numbers):
            counts.add_row(paint(policy.value), *map(str, numbers), policy.meaning)
    yield from (listing, "", counts, "")
    if data["other_overloads"]:
        yield f"overloads without a row, and so without a policy: {_short(data['other_overloads'])}\n"
    differing = sum(bool(row["running_torch_differs"]) for row in rows)
    verdict = f"differs for {differing} of them, see notes" if differing else "registers the ops as shown"
    yield f"rows: {len(rows)}. torch {version} {verdict}."


def _short(names: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("aten::") for name in names)


# A policy


def _policy_listed(asked: str, devices: Sequence[str], pattern: str | None) -> dict[str, Any]:
    policy = Policy.of(asked)
    ops = _ops_of((policy,), pattern)
    changed = {(overload, device): value for overload, device, value in policy.changes if device in devices}
    rows = []
    for op in ops:
        values = {device: changed.get((op, device), stock_policy(op, device)) for device in devices}
        stock = {device: _spell(stock_policy(op, device)) for device in devices if (op, device) in changed}
        if stock or any(value not in (None, CastPolicy.fallthrough) for value in values.values()):
            rows.append({"op": op, **{name: _spell(value) for name, value in values.items()}, "stock": stock})
    shown = {row["op"] for row in rows}
    modules: dict[str, dict[str, str | None]] = {}
    for name, entries in policy.modules:
        for op, value in [(KEY_OF_WHOLE, entries)] if isinstance(entries, str) else entries:
            # A whole module's policy is about every op.
            if pattern is None or op == KEY_OF_WHOLE or matches(op, pattern):
                modules.setdefault(name, {})[op] = _spell(value)
    is_shown = bool(shown or set(ops) & rows_by_name().keys() or (modules and is_pattern(str(pattern))))
    return {
        "torch": torch.__version__,
        "policy": asked,
        "devices": list(devices),
        "rows": rows,
        "counts": {device: dict(Counter(row[device] for row in rows if row[device])) for device in devices},
        "without_policy": [op for op in ops if op not in shown],
        "other_ops": [] if is_shown else _other_ops(str(pattern), devices, policy),
        "modules": modules,
    }


def _ops_of(policies: Iterable[Policy], pattern: str | None) -> tuple[str, ...]:
    """Returns the rows that exist in the running PyTorch and the other ops of the policies, if they match."""
    names = {row.name for row in op_table() if schema_of(row) is not None}
    for policy in policies:
        names.update(overload for overload, _, _ in policy.changes)
        names.update(key for key, _ in entries_of(policy.modules) if key != KEY_OF_WHOLE)
    chosen = in_order(_matching(names, pattern))
    if not chosen and pattern is not None:
        chosen = _find_ops(pattern)
    if not chosen:
        raise no_match(str(pattern), names - rows_by_name().keys())
    return chosen


def _spell(value: Value | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else spell_policy(value)


def _draw_policy(data: Mapping[str, Any]) -> Iterator[Any]:
    devices, rows, modules = data["devices"], data["rows"], data["modules"]
    if not (rows or modules or data["other_ops"]):
        yield f"The policy {data['policy']} does nothing on {', '.join(devices)} for: {_short(data['without_policy'])}"
        return
    if data["other_ops"]:
        yield from (*_draw_other_ops(data["other_ops"]), "")
    elif rows:
        listing = table("aten op", *devices, "notes")
        for row in rows:
            notes = [f"{device}: stock {policy or 'has no entry'}" for device, policy in row["stock"].items()]
            listing.add_row(_short([row["op"]]), *(paint(row[device]) for device in devices), ", ".join(notes))
        yield from (listing, "")
    if modules:
        listing = table("modules", "aten op", "policy")
        for name, entries in modules.items():
            for op, policy in entries.items():
                listing.add_row(name or "(the model)", _op_or_whole(op), paint(policy))
        yield from (listing, "")
    differing = sum(bool(row["stock"]) for row in rows)
    verdict = f"ops: {len(rows)}, different from stock: {differing}."
    yield f"policy {data['policy']} in torch {data['torch']}. {verdict}"


def _op_or_whole(key: str) -> str:
    return "(whole module)" if key == KEY_OF_WHOLE else key.removeprefix("aten::")


def _policies_compared(names: tuple[str, str], devices: Sequence[str], pattern: str | None) -> dict[str, Any]:
    first, second = Policy.of(names[0]), Policy.of(names[1])
    order = {op: position for position, op in enumerate(_ops_of((first, second), pattern))}
    all_found = first.diff(second)
    found = [each for each in all_found if each.overload in order and each.device in devices]
    found.sort(key=lambda each: order[each.overload])
    found += [  # of modules
        each
        for each in all_found
        if each.device not in DEVICE_TYPES and (each.overload in order or each.overload == KEY_OF_WHOLE)
    ]
    return {
        "torch": torch.__version__,
        "policies": list(names),
        "devices": list(devices),
        "op": pattern,
        "differences": [
            {"op": each.overload, "device": each.device, "policies": [_spell(each.mine), _spell(each.theirs)]}
            for each in found
        ],
    }


def _draw_policies_compared(data: Mapping[str, Any]) -> Iterator[Any]:
    first, second = data["policies"]
    of = ", ".join([*data["devices"], *([f"--op {data['op']}"] if data["op"] else [])])
    differences = data["differences"]
    if not differences:
        yield f"{first} and {second} are equal ({of})."
        return
    listing = table("aten op", "device", first, second)
    for row in differences:
        listing.add_row(_op_or_whole(row["op"]), row["device"], *map(paint, row["policies"]))
    ops = len({row["op"] for row in differences} - {KEY_OF_WHOLE})
    yield from (listing, "")
    yield f"{first} compared with {second} ({of}). differences: {len(differences)}, ops: {ops}."


# The running PyTorch, and two device types. The dispatcher knows which ops have a kernel, not what the kernel does.


def _pytorch_compared(columns: Sequence[str], pattern: str | None) -> dict[str, Any]:
    unlisted = {device: [op for op in unlisted_ops(device) if op not in LEFT_TO_STOCK] for device in columns}
    every = [name for device in columns for name in unlisted_ops(device)]
    if not _matching([*rows_by_name(), *every], pattern):
        raise no_match(str(pattern), every)
    devices: dict[str, dict[str, list[Any]]] = {
        device: {
            "missing": [
                {
                    "op": row.name,
                    "policy": row.policy(device).value,
                    "why": "not registered" if schema_of(row) is not None else "no such op",
                }
                for row in missing_rows(device)
                if _matching([row.name], pattern)
            ],
            "unlisted": _matching(unlisted[device], pattern),
        }
        for device in columns
    }
    return {
        "torch": torch.__version__,
        "rows": len(op_table()),
        "op": pattern,
        "devices": devices,
        "differences": sum(len(found) for device in devices.values() for found in device.values()),
    }


def _draw_pytorch_compared(data: Mapping[str, Any]) -> Iterator[Any]:
    if not data["differences"]:
        of = ", ".join([*data["devices"], *([f"--op {data['op']}"] if data["op"] else [])])
        yield f"torch {data['torch']} registers exactly the ops that the table lists ({of})."
        return
    listing = table("op", "device", "the table", "this PyTorch")
    for name, device in data["devices"].items():
        for row in device["missing"]:
            listing.add_row(_short([row["op"]]), name, paint(row["policy"]), row["why"])
        for op in device["unlisted"]:
            listing.add_row(_short([op]), name, "left to stock", "registered")
    yield from (listing, "")
    yield f"differences: {data['differences']}. torch {data['torch']} compared with {data['rows']} rows."


def _devices_compared(devices: Sequence[str], pattern: str | None) -> dict[str, Any]:
    """Compares two columns of the table; if one is not a column, the ops that PyTorch registers."""
    from_table = all(device in DEVICE_TYPES for device in devices)

    def column(device: str) -> dict[str, str]:
        policies = {row.name: row.policy(device).value for row in op_table()} if device in DEVICE_TYPES else {}
        if from_table:
            return policies
        known = {op: policy for op, policy in policies.items() if policy != CastPolicy.fallthrough.value}
        return {op: known.get(op, "registered") for op in registered(device)}

    first, second = map(column, devices)
    every = first.keys() | second.keys()
    listed = [name for name in rows_by_name() if name in every]
    ops = _matching([*listed, *sorted(every - set(listed))], pattern)
    if not ops:
        raise no_match(str(pattern))
    differing = [
        op for op in ops if (first.get(op) != second.get(op) if from_table else (op in first) != (op in second))
    ]
    return {
        "torch": torch.__version__,
        "devices": list(devices),
        "of": "policies in the table" if from_table else f"registrations of torch {torch.__version__}",
        "alike": len(ops) - len(differing),
        "differences": [
            {"op": op, "policies": {devices[0]: first.get(op), devices[1]: second.get(op)}} for op in differing
        ],
    }


def _draw_devices_compared(data: Mapping[str, Any]) -> Iterator[Any]:
    devices, differences = data["devices"], data["differences"]
    if differences:
        listing = table("aten op", *devices)
        for row in differences:
            listing.add_row(_short([row["op"]]), *(paint(row["policies"][device]) for device in devices))
        yield from (listing, "")
    yield f"{devices[0]} and {devices[1]}: {len(differences)} differ, {data['alike']} alike. Compared: {data['of']}."


# Ops without a row


def _other_ops(pattern: str, devices: Sequence[str], policy: Policy | None = None) -> list[dict[str, Any]]:
    """Returns what a region does with the ops that a name or pattern selects, none of which has a row.

    Args:
        pattern: The value of --op.
        devices: The device types.
        policy: The policy of the region. None: the default policy.
    """
    ops: dict[str, list[str]] = {}
    for overload in _find_ops(pattern):
        if overload not in rows_by_name():
            ops.setdefault(overload.partition(".")[0], []).append(overload)
    return [
        {
            "op": op,
            "overloads": overloads,
            "region": " ".join(_in_a_region(overloads, devices, policy)),
            "promotion": _promotion(overloads),
            "override": _override(op, overloads) if _takes_tensors(overloads) else None,
        }
        for op, overloads in ops.items()
    ]


def _in_a_region(overloads: Sequence[str], devices: Sequence[str], policy: Policy | None) -> Iterator[str]:
    if not _takes_tensors(overloads):
        yield "It takes no tensor, so autocast never acts on it."
        return
    known = [sentence for device in devices if (sentence := _policy_of_other(overloads, device, policy))]
    yield from known
    if len(known) < len(devices):
        none = "Elsewhere, it has no policy" if known else "It has no policy"
        composite = any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") for name in overloads
        )
        yield (
            f"{none}. PyTorch runs it as other ops, and their policies apply."
            if composite
            else f"{none}: it runs in the dtypes of its inputs."
        )


def _takes_tensors(overloads: Sequence[str]) -> bool:
    """Whether an overload takes a tensor, beside those that out= overloads write to."""
    with_results = [name for name in overloads if not name.endswith("out")]
    return any(legal_policies(overload) for overload in with_results or overloads)


def _policy_of_other(overloads: Sequence[str], device: str, policy: Policy | None) -> str | None:
    """Returns a sentence if an overload has a policy on a device type, or a kernel for it."""
    in_force = policy or default_policy()
    changed = {name: value for name, each, value in ([] if in_force is None else in_force.changes) if each == device}
    given = {name: value for (name, each), value in registered_policies().items() if each == device}
    for source, values in (("The policy", changed), ("register_policy", given)):
        found = sorted({spell_policy(values[name]) for name in overloads if name in values})
        if found:
            return f"{source} gives it {' or '.join(found)} on {device}."
    if any(name in registered(device) for name in overloads):
        return f"PyTorch or a library registers an autocast kernel for it on {device}, which stays in force."
    return None


def _promotion(overloads: Sequence[str]) -> str:
    """Returns how the op promotes, outside of regions and in them."""
    promoting = {op.name: op for op in promoting_ops()}
    for op in (promoting[name] for name in overloads if name in promoting):
        if op.matmul:
            return "A matrix product: its operands need one dtype, which it returns."
        if op.computes == FLOATS and len(op.participants) == 1:
            return "Pointwise: it keeps a floating dtype, and returns the default dtype for integers and bool."
        if op.computes in _PROMOTING:
            return _PROMOTING[op.computes]
        if op.computes != OPAQUE:
            return "Promoting: it computes in the common dtype of its operands, and returns it."
    entry = next((rule_table()[name] for name in overloads if name in rule_table()), None)
    if entry is None:
        return "The reference has no rule for its dtypes."
    kind = "Pointwise" if entry.family == "elementwise" else "It does not promote"
    return _RULES.get(entry.terms[0].rule, f"{kind}; the reference's rule for its result: {entry}.")


_PROMOTING = {
    FLOATS: "Promoting: it computes in the common dtype of its operands, or in the default dtype if that is integral.",
    BOOLEAN: "Promoting: it compares in the common dtype of its operands, and returns bool.",
}
_RULES = {
    "unary": "Pointwise: it returns the dtype of its input.",
    "same": "It returns the dtype of its first tensor.",
    "one_dtype": "Its operands need one dtype, which it returns.",
    "binary": "Its operands need one dtype, which it returns.",
}


def _override(op: str, overloads: Sequence[str]) -> str:
    """Returns a call of my_autocast that overrides the op. An overload has to take a tensor."""
    name = op.removeprefix("aten::")
    exact = [overload.removeprefix("aten::") for overload in overloads]
    keys = dict.fromkeys([name, *(overload if "." in overload else f"{overload}.default" for overload in exact)])
    # The last policy is legal for every op with a tensor.
    for key, policy in itertools.product(keys, ("fp32", "fp16", "match_self", "keep")):
        with contextlib.suppress(PolicyError):
            parse_overrides({key: policy})
            return f'my_autocast(overrides={{"{key}": "{policy}"}})'
    raise AssertionError(overloads)


def _draw_other_ops(found: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    if len(found) > _IN_FULL:
        listing = table("op", "promotion")
        for op in found:
            listing.add_row(op["op"], op["promotion"])
        yield from (listing, "")
        yield f"ops: {len(found)}, none with a row in the op table. To see more of one, name it: --op {found[0]['op']}"
        return
    for number, op in enumerate(found):
        facts = table("fact", "value", header=False)
        facts.add_row("  in a region", op["region"])
        facts.add_row("  promotion", op["promotion"])
        facts.add_row("  override", op["override"] or "No policy that casts is legal for it.")
        facts.add_row("  overloads", _short(op["overloads"]))
        yield from ([""] if number else [])
        yield from (op["op"], facts)
