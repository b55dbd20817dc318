"""`torch-promote policies --op` for ops without a row in the op table: what a region does with them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_promote.cli.op_filter import find_ops
from torch_promote.cli.terminal import Table
from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_names import is_pattern
from torch_promote.policy.op_table import registered, rows_by_name, spell_policy
from torch_promote.policy.overrides import parse_overrides
from torch_promote.policy.policy import Policy
from torch_promote.reference.ops.infer import rule_table
from torch_promote.regions.defaults import default_policy, registered_policies
from torch_promote.regions.promotion_tables import BOOLEAN, FLOATS, OPAQUE, PromotingOp, promoting_ops

__all__ = ["draw_other_ops", "import_modules", "other_ops", "other_overloads"]

#: With more ops than this, each gets one line.
_IN_FULL = 4
#: The policies that an example of an override tries, in this order. The last is legal for every op with a tensor.
_EXAMPLES = ("fp32", "fp16", "match_self", "keep")


def import_modules(names: Iterable[str]) -> None:
    """Imports the modules of --import, which may define custom ops.

    Raises:
        OptionError: A module cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise OptionError(f"--import {name}: {type(error).__name__}: {text}") from error


def other_overloads(pattern: str | None) -> list[str]:
    """Returns the overloads without a row that a name selects. Empty for a pattern with wildcards."""
    if pattern is None or is_pattern(pattern):
        return []
    return [name for name in find_ops(pattern) if name not in rows_by_name()]


def other_ops(pattern: str, devices: Sequence[str], policy: Policy | None = None) -> list[dict[str, Any]]:
    """Returns what a region does with the ops that a name or pattern selects, none of which has a row.

    Args:
        pattern: The value of --op.
        devices: The device types.
        policy: The policy of the region. None: the default policy.

    Returns:
        Plain data for each op. Empty if there is no such op.
    """
    ops: dict[str, list[str]] = {}
    for overload in find_ops(pattern):
        if overload not in rows_by_name():
            ops.setdefault(overload.partition(".")[0], []).append(overload)
    return [_describe(op, overloads, devices, policy) for op, overloads in ops.items()]


def _describe(op: str, overloads: Sequence[str], devices: Sequence[str], policy: Policy | None) -> dict[str, Any]:
    return {
        "op": op,
        "overloads": list(overloads),
        "region": " ".join(_in_a_region(overloads, devices, policy)),
        "promotion": _promotion(overloads),
        "override": _override(op, overloads) if _takes_tensors(overloads) else None,
    }


# --- in a region


def _in_a_region(overloads: Sequence[str], devices: Sequence[str], policy: Policy | None) -> Iterable[str]:
    if not _takes_tensors(overloads):
        return ["It takes no tensor, so autocast never acts on it."]
    told = [sentence for device in devices for sentence in _who_decides(overloads, device, policy)]
    if len(told) == len(devices):
        return told
    composite = any(_has_kernel(name, "CompositeImplicitAutograd") for name in overloads)
    rest = (
        "It has no policy. PyTorch runs it as other ops, and their policies apply."
        if composite
        else "It has no policy: it runs in the dtypes of its inputs."
    )
    return [*told, rest if not told else rest.replace("It has no policy", "Elsewhere, it has no policy")]


def _takes_tensors(overloads: Sequence[str]) -> bool:
    """Whether an overload takes a tensor, beside those that out= overloads write to."""
    with_results = [name for name in overloads if not name.endswith("out")]
    return any(legal_policies(overload) for overload in with_results or overloads)


def _who_decides(overloads: Sequence[str], device: str, policy: Policy | None) -> Iterable[str]:
    """Returns a sentence if somebody has given an overload a policy on a device type."""
    in_force = policy or default_policy()
    changed = {name: value for name, each, value in ([] if in_force is None else in_force.changes) if each == device}
    given = {name: value for (name, each), value in registered_policies().items() if each == device}
    for source, values in (("The policy", changed), ("register_policy", given)):
        found = sorted({spell_policy(values[name]) for name in overloads if name in values})
        if found:
            return [f"{source} gives it {' or '.join(found)} on {device}."]
    if any(name in registered(device) for name in overloads):
        return [f"PyTorch or a library registers an autocast kernel for it on {device}, which stays in force."]
    return []


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


# --- promotion


@functools.cache
def _promoting() -> Mapping[str, PromotingOp]:
    return {op.name: op for op in promoting_ops()}


def _promotion(overloads: Sequence[str]) -> str:
    """Returns how the op promotes, outside of regions and in them."""
    for name in overloads:
        found = _promoting().get(name)
        if found is not None and found.computes != OPAQUE:
            return _of_promoting(found)
    for name in overloads:
        entry = rule_table().get(name)
        if entry is not None:
            return _of_rule(entry.terms[0].rule, entry.family, str(entry))
    return "The reference has no rule for its dtypes."


def _of_promoting(op: PromotingOp) -> str:
    if op.matmul:
        return "A matrix product: its operands need one dtype, which it returns."
    if op.computes == FLOATS and len(op.participants) == 1:
        return "Pointwise: it keeps a floating dtype, and returns the default dtype for integers and bool."
    if op.computes == FLOATS:
        return (
            "Promoting: it computes in the common dtype of its operands, or in the default dtype if that is integral."
        )
    if op.computes == BOOLEAN:
        return "Promoting: it compares in the common dtype of its operands, and returns bool."
    return "Promoting: it computes in the common dtype of its operands, and returns it."


def _of_rule(rule: str, family: str, spelled: str) -> str:
    sentences = {
        "unary": "Pointwise: it returns the dtype of its input.",
        "same": "It returns the dtype of its first tensor.",
        "one_dtype": "Its operands need one dtype, which it returns.",
        "binary": "Its operands need one dtype, which it returns.",
    }
    kind = "Pointwise" if family == "elementwise" else "It does not promote"
    return sentences.get(rule, f"{kind}; the reference's rule for its result: {spelled}.")


# --- the line that overrides it


def _override(op: str, overloads: Sequence[str]) -> str:
    """Returns a call of my_autocast that overrides the op. An overload has to take a tensor."""
    name = op.removeprefix("aten::")
    exact = [overload.removeprefix("aten::") for overload in overloads]
    keys = dict.fromkeys([name, *(overload if "." in overload else f"{overload}.default" for overload in exact)])
    key, policy = next((key, policy) for key in keys for policy in _EXAMPLES if _is_legal(key, policy))
    return f'my_autocast(overrides={{"{key}": "{policy}"}})'


def _is_legal(key: str, policy: str) -> bool:
    try:
        parse_overrides({key: policy})
    except PolicyError:
        return False
    return True


# --- text output


def draw_other_ops(found: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the drawings for what `other_ops` returned."""
    if len(found) > _IN_FULL:
        listing = Table("op", "promotion", prose=["promotion"])
        for op in found:
            listing.add_row(op["op"], op["promotion"])
        verdict = (
            f"ops: {len(found)}, none with a row in the op table. To see more of one, name it: --op {found[0]['op']}"
        )
        return [listing, "", verdict]
    drawn: list[Any] = []
    for op in found:
        facts = Table("fact", "value", prose=["value"], show_header=False)
        facts.add_row(op["op"])
        facts.add_row("  in a region", op["region"])
        facts.add_row("  promotion", op["promotion"])
        facts.add_row("  override", op["override"] or "No policy that casts is legal for it.")
        facts.add_row("  overloads", ", ".join(name.removeprefix("aten::") for name in op["overloads"]))
        drawn += [*([""] if drawn else []), facts]
    return drawn
