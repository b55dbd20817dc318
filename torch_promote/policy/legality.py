"""The cast policies that the schema of an op allows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.errors import PolicyError
from torch_promote.policy.op_table import CastPolicy, Row, rows_by_name, schema_of, spell_policy

__all__ = ["check_legal", "legal_policies", "legal_text", "moves_data", "why_illegal"]


#: Legal for every overload that takes a tensor, including one that writes to an argument.
_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)

#: Ops that return their argument's data, or memory of its kind, and compute nothing. An op whose schema declares that a
#: result shares its argument's data, and the copying version of such an op (the tag `view_copy`), are recognized
#: without being listed.
_MOVES_DATA = re.compile(
    r"clone|copy|lift|\w+_clone|_foreach_copy|copy_sparse_to_sparse|copy_strided|_copy_from(_and_resize)?"
    r"|_?to_(copy|cpu|dense|mkldnn|sparse|sparse_csr|sparse_csc|sparse_bsr|sparse_bsc)|_cast_\w+|_pin_memory"
    r"|_unsafe_view|unsafe_(chunk|split|split_with_sizes)|reshape|_reshape_copy|_reshape_from_tensor|_mkldnn_reshape"
    r"|(empty|zeros|ones|full|rand|randn|randint)_like|new_\w+|resize(_as)?(_sparse)?|_resize_output"
    r"|sparse_resize(_and_clear)?"
)


def legal_policies(op: Row | str) -> tuple[CastPolicy, ...]:
    """Returns the cast policies that an overload's schema allows.

    A floating dtype is legal wherever `CastPolicy.fp32` is.

    Args:
        op: A row, or an overload's full name, such as "aten::mm.out".

    Returns:
        The policies, in the order of the enum. Empty for an overload that does not exist or takes no tensor.

    Example:
        >>> CastPolicy.fp32_set_opt_dtype in legal_policies(rows_by_name()["aten::mm"])
        False
        >>> [policy.value for policy in legal_policies("aten::add_.Tensor")]
        ['match_self', 'fallthrough', 'keep', 'banned']
    """
    facts = _facts(op)
    return tuple(policy for policy in CastPolicy if _why_illegal(facts, policy) is None)


def check_legal(op: Row | str, policy: CastPolicy | torch.dtype) -> None:
    """Raises if a policy is not legal for an overload.

    Args:
        op: A row, or an overload's full name.
        policy: A cast policy, or a floating dtype to run in.

    Raises:
        PolicyError: The policy is not legal. The text says why, and which policies are.

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
    """Returns why a policy is not legal for an overload, or None if it is.

    Example:
        >>> why_illegal("aten::mm", CastPolicy.match_self)
        'it does not write to an argument, so there is no dtype to match'
    """
    return _why_illegal(_facts(op), policy)


def moves_data(op: str) -> bool:
    """Whether an overload returns its argument's data, or memory of the same dtype, and computes nothing.

    Example:
        >>> moves_data("aten::view"), moves_data("aten::relu")
        (True, False)
    """
    return _facts(op).moves_data


def legal_text(policies: Iterable[CastPolicy]) -> str:
    """Returns the sentence that ends an error text: the legal policies.

    Example:
        >>> legal_text(legal_policies("aten::mm.out"))
        ' Legal: match_self, fallthrough, keep, banned.'
    """
    names = [policy.value for policy in policies]
    if not names:
        return ""
    return f" Legal: {', '.join(names)}{' or a floating dtype' if 'fp32' in names else ''}."


@dataclass(frozen=True, slots=True)
class _Facts:
    """The properties of an overload's schema that decide which policies are legal."""

    exists: bool = False
    takes_tensors: bool = False
    writes: bool = False
    starts_with_tensor: bool = False
    has_optional_dtype: bool = False
    has_form_with_dtype: bool = False
    moves_data: bool = False


def _facts(op: Row | str) -> _Facts:
    schema = schema_of(op)
    if schema is None:
        return _Facts()
    row = op if isinstance(op, Row) else rows_by_name().get(op)
    arguments = schema.arguments
    name = row.name if row is not None else str(op)
    return _Facts(
        exists=True,
        takes_tensors=any(_holds_tensors(argument.type) for argument in arguments),
        writes=any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments),
        starts_with_tensor=bool(arguments) and arguments[0].type.kind() == "TensorType",
        has_optional_dtype=any(str(argument.real_type) == "Optional[ScalarType]" for argument in arguments),
        has_form_with_dtype=row is not None and bool(row.redispatch_overload),
        moves_data=row is None and _moves_data(name, schema),
    )


def _moves_data(name: str, schema: Any) -> bool:
    """Whether an op returns data of its argument, or memory of its kind, and computes nothing."""
    op, _, overload = name.partition(".")
    namespace, _, op = op.partition("::")
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return True
    if namespace not in ("aten", "prims"):
        return False
    if _MOVES_DATA.fullmatch(op):
        return True
    found = getattr(getattr(getattr(torch.ops, namespace), op, None), overload or "default", None)
    return op.endswith("_copy") and torch.Tag.view_copy in getattr(found, "tags", ())


def _holds_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_holds_tensors, kind.containedTypes()))


def _why_illegal(facts: _Facts, policy: CastPolicy | torch.dtype) -> str | None:
    if not facts.exists:
        return f"torch {torch.__version__} has no such overload"
    if not facts.takes_tensors:
        return "it takes no tensor, so autocast does not apply to it"
    if policy in _CASTING_NOTHING:
        return None
    if policy is CastPolicy.match_self:
        return None if facts.writes else "it does not write to an argument, so there is no dtype to match"
    if facts.writes:
        return "it writes to an argument, and autocast never casts that argument"
    if facts.moves_data:
        return (
            "it returns its argument's data, or memory of the same dtype, and computes nothing, and the kernels of "
            "other ops call it and read the result in the dtype that they passed. Override the op that computes with "
            "the result"
        )
    if policy is CastPolicy.fp32_set_opt_dtype:
        if not facts.has_optional_dtype:
            return "its schema has no optional dtype argument"
        return None if facts.starts_with_tensor else "its first argument is not a Tensor"
    if policy is CastPolicy.fp32_append_dtype and not facts.has_form_with_dtype:
        return "the op table names no overload of it that takes an output dtype"
    return None
