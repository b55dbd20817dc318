"""The cast policies, the op table as Python reads it, and which policies an op's schema allows.

The table itself is `op_policies.def`, which the C++ side expands; this module parses the same file. What an op's schema
tells (is there an optional dtype argument? does it start with a tensor?) is asked of the schema.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    "legal_text",
    "op_table",
    "parse_table",
    "rows_by_name",
    "schema_of",
    "spell_policy",
    "why_illegal",
]

#: The device types that have a column in the table, in the order of the columns.
DEVICE_TYPES = ("cpu", "cuda")

#: The PyTorch whose registrations the table describes. Other versions register other sets.
TABLE_VERSION = "2.13"
#: What PyTorch registers, and the table leaves to stock on purpose: a wrapper of its own, which flattens weights anew.
LEFT_TO_STOCK = frozenset({"aten::_cudnn_rnn"})

_DEF_FILE = Path(__file__).parent / "policy" / "op_policies.def"
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
    match_self = (
        "match_self",
        "Of an op that writes to an argument: cast the other floating arguments to the dtype of what is written.",
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


#: What is legal for every overload that takes a tensor, also for one that writes.
_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)


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


@functools.cache
def rows_by_name() -> Mapping[str, Row]:
    """Returns the rows of `op_table`, by their full names.

    Example:
        >>> rows_by_name()["aten::mm"].cpu
        <CastPolicy.lower_precision_fp: 'lower_precision_fp'>
    """
    return MappingProxyType({row.name: row for row in op_table()})


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


def schema_of(op: Row | str) -> torch._C.FunctionSchema | None:
    """Returns the schema of a row or of an overload's full name, or None if the running PyTorch has no such overload.

    Example:
        >>> schema_of("aten::softmax.int").arguments[0].name
        'self'
        >>> schema_of("aten::softmax.out") is None
        True
    """
    name, _, overload = (op.name if isinstance(op, Row) else op).partition(".")
    try:
        return torch._C._get_schema(name, overload)
    except RuntimeError:
        return None


def legal_policies(op: Row | str) -> tuple[CastPolicy, ...]:
    """Returns the cast policies that an overload's schema allows.

    A floating dtype to run in is legal wherever `CastPolicy.fp32` is.

    Args:
        op: A row, or an overload's full name, such as "aten::mm.out".

    Returns:
        The policies in the order of the enum; none for an overload that does not exist or takes no tensor.

    Example:
        >>> mm = next(row for row in op_table() if row.name == "aten::mm")
        >>> CastPolicy.fp32_set_opt_dtype in legal_policies(mm)
        False
        >>> [policy.value for policy in legal_policies("aten::add_.Tensor")]
        ['match_self', 'fallthrough', 'keep', 'banned']
    """
    facts = _facts(op)
    return tuple(policy for policy in CastPolicy if _why_illegal(facts, policy) is None)


def check_legal(op: Row | str, policy: CastPolicy | torch.dtype) -> None:
    """Makes sure that an overload may be given a policy.

    Args:
        op: A row, or an overload's full name.
        policy: A cast policy or a floating dtype to run in.

    Raises:
        PolicyError: The policy is not legal; the text says why, and what is.

    Example:
        >>> check_legal("aten::mm", torch.float64)
        >>> try:
        ...     check_legal("aten::mm.out", CastPolicy.fp32)
        ... except PolicyError as error:
        ...     print(str(error).partition(". ")[2])
        Legal: match_self, fallthrough, keep, banned.
    """
    why = why_illegal(op, policy)
    if why is not None:
        name = op.name if isinstance(op, Row) else op
        raise PolicyError(f"{name} cannot use {spell_policy(policy)!r}: {why}.{legal_text(legal_policies(op))}")


def why_illegal(op: Row | str, policy: CastPolicy | torch.dtype) -> str | None:
    """Returns the reason why an overload may not be given a policy, or None if it may.

    Example:
        >>> why_illegal("aten::mm", CastPolicy.match_self)
        'it writes to no argument, so there is no dtype to match'
    """
    return _why_illegal(_facts(op), policy)


def legal_text(policies: Iterable[CastPolicy]) -> str:
    """Returns legal policies as the end of an error text.

    Example:
        >>> legal_text(legal_policies("aten::mm.out"))
        ' Legal: match_self, fallthrough, keep, banned.'
    """
    names = [policy.value for policy in policies]
    if not names:
        return ""
    return f" Legal: {', '.join(names)}{' or a floating dtype' if 'fp32' in names else ''}."


def spell_policy(policy: CastPolicy | torch.dtype) -> str:
    """Returns a policy's name as people write it: `fp32`, `float64`."""
    return policy.value if isinstance(policy, CastPolicy) else str(policy).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What an overload's schema says about the policies that it may have."""

    exists: bool = False
    takes_tensors: bool = False
    writes: bool = False
    starts_with_tensor: bool = False
    has_optional_dtype: bool = False
    has_form_with_dtype: bool = False


def _facts(op: Row | str) -> _Facts:
    schema = schema_of(op)
    if schema is None:
        return _Facts()
    row = op if isinstance(op, Row) else rows_by_name().get(op)
    arguments = schema.arguments
    return _Facts(
        exists=True,
        takes_tensors=any(_holds_tensors(argument.type) for argument in arguments),
        writes=any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments),
        starts_with_tensor=bool(arguments) and arguments[0].type.kind() == "TensorType",
        has_optional_dtype=any(str(argument.real_type) == "Optional[ScalarType]" for argument in arguments),
        has_form_with_dtype=row is not None and bool(row.redispatch_overload),
    )


def _holds_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_holds_tensors, kind.containedTypes()))


def _why_illegal(facts: _Facts, policy: CastPolicy | torch.dtype) -> str | None:
    if not facts.exists:
        return f"torch {torch.__version__} has no such overload"
    if not facts.takes_tensors:
        return "it takes no tensor, so autocast never sees its device"
    if policy in _CASTING_NOTHING:
        return None
    if policy is CastPolicy.match_self:
        return None if facts.writes else "it writes to no argument, so there is no dtype to match"
    if facts.writes:
        return "it writes to an argument, and what is written to is never cast"
    if policy is CastPolicy.fp32_set_opt_dtype:
        if not facts.has_optional_dtype:
            return "its schema has no optional dtype argument"
        return None if facts.starts_with_tensor else "its first argument, which decides, is no tensor"
    if policy is CastPolicy.fp32_append_dtype and not facts.has_form_with_dtype:
        return "no overload of it that takes an output dtype is known for it"
    return None
