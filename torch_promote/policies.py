"""The cast policies, the op table as Python reads it, and which policies an op's schema allows.

The table itself is `op_policies.def`, which the C++ side expands; this module parses the same file. What an op's schema
tells (is there an optional dtype argument? does it start with a tensor?) is asked of the schema.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_promote.errors import PolicyError

__all__ = [
    "DEVICE_TYPES",
    "LEFT_TO_STOCK",
    "TABLE_VERSION",
    "CastPolicy",
    "Row",
    "check_legal",
    "legal_policies",
    "op_table",
    "parse_table",
    "schema_of",
]

#: The device types that have a column in the table, in the order of the columns.
DEVICE_TYPES = ("cpu", "cuda")

#: The PyTorch whose registrations the table describes. Other versions register other sets.
TABLE_VERSION = "2.13"
#: What PyTorch registers, and the table leaves to stock on purpose: a wrapper of its own, which flattens weights anew.
LEFT_TO_STOCK = frozenset({"aten::_cudnn_rnn"})

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
        """Makes a member whose value is the name alone."""
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
        for policy in (cpu, cuda):
            if policy not in CastPolicy.__members__:
                legal = ", ".join(CastPolicy.__members__)
                raise PolicyError(f"{where}:{number}: no cast policy is called {policy!r}. Legal: {legal}.")
        rows.append(Row(len(rows), op, overload, CastPolicy(cpu), CastPolicy(cuda), redispatch or ""))
    return tuple(rows)


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


def check_legal(row: Row, policy: CastPolicy) -> None:
    """Raises a PolicyError that says what is legal, unless the policy is legal for the row."""
    why = _why_illegal(row, policy)
    if why is not None:
        legal = ", ".join(p.value for p in legal_policies(row))
        raise PolicyError(f"{row.name} cannot use {policy.value!r}: {why}. Legal: {legal} or a floating dtype.")
