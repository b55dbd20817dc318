"""The cast policies that the schema of an op allows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from torch_promote.errors import PolicyError
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy, Row, rows_by_name, schema_of, spell_policy

#: Legal for every overload that takes a tensor, including one that writes to an argument.
_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)

#: The op for which the float8 policies are legal. What autocast does for a composite op, it does in place of the ops
#: inside, so `linear` stands for the mm or addmm that it would call.
_IN_FLOAT8 = "aten::linear"

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


#: Ops that write to lists of any dtype, and count steps or scale in float32 beside them.
_KEEPS_FLOAT32 = re.compile(r"aten::_(fused_(adam|adamw|adagrad|sgd)_?(\.|$)|amp_)")


def legal_policies(op: Row | str) -> tuple[CastPolicy, ...]:
    """Returns the cast policies that the schema of a row, or of an overload with a full name, allows.

    A floating dtype is legal wherever `CastPolicy.fp32` is. An overload that does not exist has none.
    """
    return tuple(policy for policy in CastPolicy if why_illegal(op, policy) is None)


def check_legal(op: Row | str, policy: CastPolicy | torch.dtype) -> None:
    """Raises PolicyError if a policy is not legal for an overload."""
    why = why_illegal(op, policy)
    if why is not None:
        name = op.name if isinstance(op, Row) else op
        raise PolicyError(f"{name} cannot use {spell_policy(policy)!r}: {why}.{legal_text(legal_policies(op))}")


def why_illegal(op: Row | str, policy: CastPolicy | torch.dtype) -> str | None:
    """Returns why a policy is not legal for an overload, or None if it is."""
    schema = schema_of(op)
    if schema is None:
        return f"torch {torch.__version__} has no such overload"
    arguments = schema.arguments
    if not any(_holds_tensors(argument.type) for argument in arguments):
        return "it takes no tensor, so autocast does not apply to it"
    if policy in _CASTING_NOTHING:
        return None
    if policy in FLOAT8_POLICIES:
        name = op.name if isinstance(op, Row) else op
        return None if name == _IN_FLOAT8 else f"only {_IN_FLOAT8} has a product in float8"
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    if policy is CastPolicy.match_self:
        if _KEEPS_FLOAT32.match(str(op)):
            return "it counts steps or scales in float32 beside tensors of any dtype"
        return None if writes else "it does not write to an argument, so there is no dtype to match"
    if writes:
        return "it writes to an argument, and autocast never casts that argument"
    if not isinstance(op, Row) and moves_data(op):
        return (
            "it returns its argument's data, or memory of the same dtype, and computes nothing, and the kernels of "
            "other ops call it and read the result in the dtype that they passed. Override the op that computes with "
            "the result"
        )
    if policy is CastPolicy.fp32_set_opt_dtype:
        if not any(str(argument.real_type) == "Optional[ScalarType]" for argument in arguments):
            return "its schema has no optional dtype argument"
        return None if arguments[0].type.kind() == "TensorType" else "its first argument is not a Tensor"
    row = op if isinstance(op, Row) else rows_by_name().get(op)
    if policy is CastPolicy.fp32_append_dtype and not (row is not None and row.redispatch_overload):
        return "the op table names no overload of it that takes an output dtype"
    return None


def moves_data(op: str) -> bool:
    """Whether an overload returns its argument's data, or memory of the same dtype, and computes nothing."""
    schema = schema_of(op)
    if schema is None or op in rows_by_name():
        return False
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return True
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    if namespace not in ("aten", "prims"):
        return False
    if _MOVES_DATA.fullmatch(name):
        return True
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
    return name.endswith("_copy") and torch.Tag.view_copy in getattr(found, "tags", ())


def legal_text(policies: Iterable[CastPolicy]) -> str:
    """Returns the sentence that ends an error text: the legal policies."""
    names = [policy.value for policy in policies]
    if not names:
        return ""
    return f" Legal: {', '.join(names)}{' or a floating dtype' if 'fp32' in names else ''}."


def _holds_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_holds_tensors, kind.containedTypes()))
