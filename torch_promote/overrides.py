"""What a user may write in `overrides`: ops by name, and the policies that they are to get."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from torch_promote.errors import PolicyError, did_you_mean
from torch_promote.policies import CastPolicy, Row, check_legal, op_table

__all__ = ["find_op", "find_rows", "name_op", "parse_overrides"]

_LEGAL_VALUES = ", ".join([*(p.value for p in CastPolicy), "fp16"]) + " or a floating dtype"


def parse_overrides(overrides: Mapping[object, object]) -> tuple[tuple[Row, CastPolicy | torch.dtype], ...]:
    """Checks a region's overrides and returns the policy of each row that they name.

    Args:
        overrides: Maps ops, named as in `find_rows`, to policies: the name of a cast policy, a `CastPolicy`, a floating
            `torch.dtype` or its name.

    Returns:
        Pairs of a row and its policy, in the table's order.

    Raises:
        PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two keys give one overload
            different policies.

    Example:
        >>> [(row.name, policy.value) for row, policy in parse_overrides({"softmax": "fp16"})]
        [('aten::softmax.int', 'lower_precision_fp')]
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides is a mapping of ops to policies, got {type(overrides).__name__}.")
    chosen: dict[Row, tuple[CastPolicy | torch.dtype, object]] = {}
    for key, value in overrides.items():
        for row in find_rows(key):
            policy = _parse_policy(value, row.name)
            if isinstance(policy, CastPolicy):
                check_legal(row, policy)
            known = chosen.setdefault(row, (policy, key))
            if known[0] != policy:
                raise PolicyError(
                    f"{row.name} gets two policies, {_spell(known[0])!r} from {known[1]!r} and {_spell(policy)!r} from "
                    f"{key!r}. Name each overload once."
                )
    return tuple((row, chosen[row][0]) for row in sorted(chosen, key=lambda row: row.index))


def find_rows(key: object) -> tuple[Row, ...]:
    """Returns the rows that an op's name, overload or packet means.

    Args:
        key: "softmax" or "aten::softmax" (every overload in the table), "softmax.int", "aten::softmax.int",
            `torch.ops.aten.softmax` or `torch.ops.aten.softmax.int`. "aten::mm" is one overload and one row either way.

    Returns:
        One row or more.

    Raises:
        PolicyError: Nothing in the table has that name.

    Example:
        >>> [row.name for row in find_rows("softmax")]
        ['aten::softmax.int']
        >>> find_rows(torch.ops.aten.mm.default) == find_rows("mm")
        True
    """
    overload: str | None
    if isinstance(key, torch._ops.OpOverload):
        op, overload = key._schema.name, key._schema.overload_name
    elif isinstance(key, torch._ops.OpOverloadPacket):
        op, overload = key._qualified_op_name, None
    elif isinstance(key, str):
        op, dot, rest = key.partition(".")
        overload = ("" if rest == "default" else rest) if dot else None
    else:
        raise PolicyError(f"an op is named by a str, an OpOverload or an OpOverloadPacket, got {key!r}.")
    rows = _rows_by_op().get(op.removeprefix("aten::"), ())
    if overload is not None:
        rows = tuple(row for row in rows if row.overload == overload)
    if rows:
        return rows
    known = [name for row in op_table() for name in (row.op, row.name.removeprefix("aten::"))]
    asked = key if isinstance(key, str) else str(key)
    raise PolicyError(
        f"{asked!r} has no row in the op table.{did_you_mean(asked.removeprefix('aten::'), dict.fromkeys(known))} "
        f"`torch-promote policies` lists its {len(op_table())} overloads; only they can be overridden."
    )


def name_op(op: object) -> object:
    """Returns an op as something that can be pickled: a name as it is, an op as its name and that of its overload."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name, op._overloadname
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name, None
    return op


def find_op(name: object) -> object:
    """Returns the op that `name_op` named."""
    if not isinstance(name, tuple):
        return name
    qualified, overload = name
    packet = functools.reduce(getattr, qualified.split("::"), torch.ops)
    return packet if overload is None else getattr(packet, overload)


@functools.cache
def _rows_by_op() -> dict[str, tuple[Row, ...]]:
    by_op: dict[str, tuple[Row, ...]] = {}
    for row in op_table():
        by_op[row.op] = (*by_op.get(row.op, ()), row)
    return by_op


def _parse_policy(value: object, op: str) -> CastPolicy | torch.dtype:
    if isinstance(value, CastPolicy):
        return value
    if isinstance(value, torch.dtype):
        if value.is_floating_point:
            return value
        raise PolicyError(
            f"{op}: {value} is not a floating dtype, so nothing can be run in it. Legal: {_LEGAL_VALUES}."
        )
    if not isinstance(value, str):
        raise PolicyError(
            f"{op}: a policy is a str, a CastPolicy or a torch.dtype, got {value!r}. Legal: {_LEGAL_VALUES}."
        )
    try:
        return CastPolicy(value)
    except ValueError:
        pass
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return _parse_policy(dtype, op)
    names = [*(policy.value for policy in CastPolicy), "fp16"]
    raise PolicyError(f"{op}: no cast policy is called {value!r}.{did_you_mean(value, names)} Legal: {_LEGAL_VALUES}.")


def _spell(policy: CastPolicy | torch.dtype) -> str:
    return policy.value if isinstance(policy, CastPolicy) else str(policy).removeprefix("torch.")
