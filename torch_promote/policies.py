"""The cast policies, the op table as Python reads it, and what a user may write in `overrides`.

The table itself is `op_policies.def`, which the C++ side expands; this module parses the same file. What an op's schema
tells (is there an optional dtype argument? does it start with a tensor?) is asked of the schema.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError, did_you_mean

__all__ = ["DEVICE_TYPES", "CastPolicy", "OpKey", "PolicyValue", "Row", "legal_policies", "op_table", "parse_overrides"]

#: The device types that have a column in the table, in the order of the columns.
DEVICE_TYPES = ("cpu", "cuda")

#: How an op can be named in `overrides`.
OpKey = "str | torch._ops.OpOverload | torch._ops.OpOverloadPacket"
#: What an op can be given in `overrides`.
PolicyValue = "str | CastPolicy | torch.dtype"

_DEF_FILE = Path(__file__).with_name("op_policies.def")
_ROW = re.compile(r"^ROW\(\s*(\w+)\s*,\s*(\w*)\s*,\s*(\w+)\s*,\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)$")


class CastPolicy(enum.Enum):
    """What autocast does with a call of an op. The names are PyTorch's.

    Source: aten/src/ATen/autocast_mode.h, enum class CastPolicy (v2.13), for the first five.

    Example:
        >>> CastPolicy("fp32")
        <CastPolicy.fp32: 'fp32'>
        >>> CastPolicy("fp16") is CastPolicy.lower_precision_fp
        True
        >>> CastPolicy.fp32.meaning
        'Cast every eligible argument to float32.'
    """

    _value_: str
    #: What the policy does, in a sentence.
    meaning: str

    lower_precision_fp = (
        "lower_precision_fp",
        "Cast every eligible argument to the region's autocast dtype. Alias: fp16.",
    )
    fp32 = "fp32", "Cast every eligible argument to float32."
    fp32_set_opt_dtype = (
        "fp32_set_opt_dtype",
        "Cast nothing; an optional dtype argument that the caller left out becomes float32.",
    )
    fp32_append_dtype = (
        "fp32_append_dtype",
        "Cast nothing; call the overload that takes an output dtype, with float32.",
    )
    promote = (
        "promote",
        "Cast every eligible argument to the widest dtype among the eligible tensors and tensor lists.",
    )
    fallthrough = "fallthrough", "Do nothing; ops inside a composite op still see autocast."
    keep = "keep", "Cast nothing, and run the op and what is inside it with autocast off."
    banned = "banned", "Raise: the op's results are unsafe under autocast."

    def __new__(cls, value: str, meaning: str = "") -> CastPolicy:
        member = object.__new__(cls)
        member._value_ = value
        member.meaning = meaning
        return member

    @classmethod
    def _missing_(cls, value: object) -> CastPolicy | None:
        return cls.lower_precision_fp if value == "fp16" else None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the op table: an overload and its stock policy on each device type.

    Attributes:
        index: Position in the table; the C++ side uses the same.
        op: The op's name without its namespace, such as `softmax`.
        overload: The overload's name, `""` for the default one.
        cpu: Policy on the CPU in PyTorch 2.13.
        cuda: Policy on CUDA in PyTorch 2.13.
        redispatch_overload: What `fp32_append_dtype` calls; `""` where the op has no such form.
    """

    index: int
    op: str
    overload: str
    cpu: CastPolicy
    cuda: CastPolicy
    redispatch_overload: str = ""

    @property
    def name(self) -> str:
        """The qualified name: `aten::mm`, `aten::softmax.int`."""
        return f"aten::{self.op}" + (f".{self.overload}" if self.overload else "")

    def policy(self, device_type: str) -> CastPolicy:
        """The row's policy for a device type, "cpu" or "cuda"."""
        return self.cuda if device_type == "cuda" else self.cpu


@functools.cache
def op_table() -> tuple[Row, ...]:
    """Returns the rows of `op_policies.def`, in its order.

    Raises:
        PolicyError: The file has a line that is neither a comment nor a row.

    Example:
        >>> next(row for row in op_table() if row.name == "aten::softmax.int").cuda
        <CastPolicy.fp32_set_opt_dtype: 'fp32_set_opt_dtype'>
    """
    return parse_table(_DEF_FILE.read_text(encoding="utf-8"), str(_DEF_FILE))


def parse_table(text: str, where: str) -> tuple[Row, ...]:
    """Parses the text of a table file; `where` is named in errors."""
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("//"):
            continue
        match = _ROW.match(line)
        if match is None:
            raise PolicyError(
                f"{where}:{number}: not a row: {line!r}. Expected ROW(op, overload, cpu, cuda[, overload])."
            )
        op, overload, cpu, cuda, redispatch = match.groups()
        rows.append(Row(len(rows), op, overload, CastPolicy(cpu), CastPolicy(cuda), redispatch or ""))
    return tuple(rows)


@functools.cache
def _rows_by_op() -> dict[str, tuple[Row, ...]]:
    by_op: dict[str, tuple[Row, ...]] = {}
    for row in op_table():
        by_op[row.op] = (*by_op.get(row.op, ()), row)
    return by_op


def schema_of(row: Row) -> torch._C.FunctionSchema | None:
    """Returns the op's schema in the running PyTorch, or None if that has no such overload."""
    try:
        return torch._C._get_schema(f"aten::{row.op}", row.overload)
    except RuntimeError:
        return None


def _has_optional_dtype(row: Row) -> bool:
    schema = schema_of(row)
    return schema is not None and any(str(a.real_type) == "Optional[ScalarType]" for a in schema.arguments)


def legal_policies(row: Row) -> tuple[CastPolicy, ...]:
    """Returns the cast policies that the row's schema allows; a floating dtype is legal for every row besides.

    Example:
        >>> mm = next(row for row in op_table() if row.name == "aten::mm")
        >>> CastPolicy.fp32_set_opt_dtype in legal_policies(mm)
        False
    """
    return tuple(policy for policy in CastPolicy if _why_illegal(row, policy) is None)


def _why_illegal(row: Row, policy: CastPolicy) -> str | None:
    if policy is CastPolicy.fp32_set_opt_dtype and not _has_optional_dtype(row):
        return "its schema has no optional dtype argument"
    if policy is CastPolicy.fp32_append_dtype and not row.redispatch_overload:
        return "no overload of it that takes an output dtype is known for it"
    return None


def _check_legal(row: Row, policy: CastPolicy) -> None:
    why = _why_illegal(row, policy)
    if why is not None:
        legal = ", ".join(p.value for p in legal_policies(row))
        raise PolicyError(f"{row.name} cannot use {policy.value!r}: {why}. Legal: {legal} or a floating dtype.")


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
    names = [policy.value for policy in CastPolicy]
    raise PolicyError(f"{op}: no cast policy is called {value!r}.{did_you_mean(value, names)} Legal: {_LEGAL_VALUES}.")


_LEGAL_VALUES = ", ".join([*(p.value for p in CastPolicy), "fp16"]) + " or a floating dtype"


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


def parse_overrides(overrides: Mapping[object, object]) -> int:
    """Checks a region's overrides and returns their number on the C++ side; 0 means none.

    Args:
        overrides: Maps ops, named as in `find_rows`, to policies: the name of a cast policy, a `CastPolicy`, a floating
            `torch.dtype` or its name. They apply on every device type.

    Returns:
        The number to put into a region's spec. The same overrides get the same number.

    Raises:
        PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two keys give one overload
            different policies. Nothing has been registered then.

    Example:
        >>> parse_overrides({})
        0
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides is a mapping of ops to policies, got {type(overrides).__name__}.")
    items = tuple(overrides.items())
    try:
        return _register(items)
    except TypeError:  # a value that has no hash, and so is no policy either: to be told without the cache
        return _register.__wrapped__(items)


# Dynamo calls it while it traces, and keeps the number.
parse_overrides._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register(overrides: tuple[tuple[object, object], ...]) -> int:
    chosen: dict[Row, tuple[CastPolicy | torch.dtype, object]] = {}
    for key, value in overrides:
        rows = find_rows(key)
        for row in rows:
            policy = _parse_policy(value, row.name)
            if isinstance(policy, CastPolicy):
                _check_legal(row, policy)
            known = chosen.setdefault(row, (policy, key))
            if known[0] != policy:
                raise PolicyError(
                    f"{row.name} gets two policies, {_spell(known[0])!r} from {known[1]!r} and {_spell(policy)!r} from "
                    f"{key!r}. Name each overload once."
                )
    if not chosen:
        return 0
    changes = [
        (row.index, device, policy_byte(policy))
        for row, (policy, _) in sorted(chosen.items(), key=lambda item: item[0].index)
        for device in range(len(DEVICE_TYPES))
    ]
    return _C.register_overrides(changes)


def policy_byte(policy: CastPolicy | torch.dtype) -> int:
    """Returns the byte that stands for a policy in the C++ table."""
    if isinstance(policy, CastPolicy):
        return _C.POLICY_BYTES[policy.value]
    return _C.POLICY_BYTES["run_in"] + _C.scalar_type(policy)


def _spell(policy: CastPolicy | torch.dtype) -> str:
    return policy.value if isinstance(policy, CastPolicy) else str(policy).removeprefix("torch.")
