"""Ops and policies in overrides: the overloads that a key selects, and the policies that are legal for an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.library_for_policies import NAMESPACE
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.legality import check_legal, legal_policies
from torch_promote.policy.op_names import find_op, find_overloads, in_order, name_op
from torch_promote.policy.op_table import op_table, rows_by_name, schema_of
from torch_promote.policy.overrides import parse_overrides, select

aten, ours = torch.ops.aten, getattr(torch.ops, NAMESPACE)
NOTHING_CAST = ["fallthrough", "keep", "banned"]
FP64 = torch.float64
PLAIN = ["lower_precision_fp", "fp32", "promote", *NOTHING_CAST]


@torch.library.custom_op(f"{NAMESPACE}::made", mutates_args=())
def made(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


# --- what a key means


def ours_of(*names: str) -> tuple[str, ...]:
    return tuple(f"{NAMESPACE}::{name}" for name in names)


MANY = ours_of("many", "many.dtype", "many.out")
KEYS: list[tuple[Any, tuple[str, ...]]] = [
    ("softmax.int", ("aten::softmax.int",)),
    ("aten::softmax.int", ("aten::softmax.int",)),
    (aten.softmax.int, ("aten::softmax.int",)),
    ("mm.default", ("aten::mm",)),
    ("aten::mm.default", ("aten::mm",)),
    (aten.mm.default, ("aten::mm",)),
    (aten.mm.out, ("aten::mm.out",)),
    ("add_.Tensor", ("aten::add_.Tensor",)),
    (f"{NAMESPACE}::many", MANY),
    (ours.many, MANY),
    (f"{NAMESPACE}::many.default", MANY[:1]),
    (ours.many.default, MANY[:1]),
    (f"{NAMESPACE}::many.out", MANY[2:]),
    (f"{NAMESPACE}::m*y", MANY),
    (f"{NAMESPACE}::many.*", MANY),
    (f"{NAMESPACE}::*.o[tu]t", MANY[2:]),
    (f"{NAMESPACE}::write_[!.]*", ours_of("write_each_")),
    (f"{NAMESPACE}::*.default", ours_of(*sorted(
        ("join", "many", "made", "write_", "write_each_", "count", "packed", "optional", "several"))),
    ),
    ("*_tests::join", ours_of("join")),
    (made, ours_of("made")),
    (f"{NAMESPACE}::made", ours_of("made")),
]  # fmt: skip


@pytest.mark.parametrize(("key", "expected"), KEYS, ids=lambda value: str(value)[:40])
def test_a_key_means_these_overloads(key: Any, expected: tuple[str, ...]) -> None:
    assert find_overloads(key) == expected


def overloads_of(op: str) -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.partition(".")[0] == f"aten::{op}"}


@pytest.mark.parametrize("op", ["softmax", "mm", "sum", "add_"])
def test_a_name_without_overload_means_all_that_the_dispatcher_knows(op: str) -> None:
    for key in (op, f"aten::{op}", getattr(aten, op)):
        assert set(find_overloads(key)) == overloads_of(op)


def test_a_pattern_without_a_namespace_is_of_aten() -> None:
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    assert set(find_overloads("*")) == set(find_overloads("aten::*")) == set(every)
    named_so = {name for name in every if name.startswith("aten::linalg_")}
    assert set(find_overloads("linalg_*")) == named_so
    assert set(find_overloads("*.out")) == {name for name in every if name.endswith(".out")}


def test_rows_come_first_in_the_order_of_the_table() -> None:
    found = find_overloads("*")
    rows = [row.name for row in op_table() if schema_of(row) is not None]
    assert found[: len(rows)] == tuple(rows)
    assert list(found[len(rows) :]) == sorted(found[len(rows) :])
    assert in_order(reversed(found)) == found


@pytest.mark.parametrize("key", [aten.mm, aten.softmax.int, ours.many, ours.many.out, "mm", made], ids=str)
def test_a_key_can_be_written_down_and_found_again(key: Any) -> None:
    assert find_overloads(find_op(name_op(key))) == find_overloads(key)


# --- what is legal

LEGAL = {
    "join": PLAIN,
    "many": PLAIN,
    "many.dtype": ["lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote", *NOTHING_CAST],
    "many.out": ["match_self", *NOTHING_CAST],
    "write_": ["match_self", *NOTHING_CAST],
    "write_each_": ["match_self", *NOTHING_CAST],
    "count": [],
    "packed": PLAIN,
    "optional": PLAIN,
    "several": PLAIN,
}


@pytest.mark.parametrize(("op", "expected"), LEGAL.items())
def test_the_schema_says_what_is_legal(op: str, expected: list[str]) -> None:
    name = f"{NAMESPACE}::{op}"
    assert [policy.value for policy in legal_policies(name)] == expected
    for policy in CastPolicy:
        if policy.value in expected:
            check_legal(name, policy)
        else:
            with pytest.raises(PolicyError):
                check_legal(name, policy)
    if "fp32" in expected:
        check_legal(name, torch.float64)
    else:
        with pytest.raises(PolicyError):
            check_legal(name, torch.float64)


#: Ops that compute nothing, although their schemas and tags do not say so.
MOVES = [
    "_foreach_clone",
    "_lazy_clone",
    "clone",
    "copy",
    "copy_sparse_to_sparse",
    "lift",
    "_copy_from",
    "_copy_from_and_resize",
    "_pin_memory",
    "_cast_Byte",
    "_cast_Char",
    "_cast_Double",
    "_cast_Float",
    "_cast_Half",
    "_cast_Int",
    "_cast_Long",
    "_cast_Short",
    "_to_copy",
    "_to_cpu",
    "_to_dense",
    "_to_sparse",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
    "to_dense",
    "to_mkldnn",
    "to_sparse",
    "to_sparse_bsc",
    "to_sparse_bsr",
    "to_sparse_csc",
    "to_sparse_csr",
    "_mkldnn_reshape",
    "_reshape_copy",
    "_reshape_from_tensor",
    "_unsafe_view",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "_resize_output",
    "resize",
    "resize_as",
    "resize_as_sparse",
    "sparse_resize",
    "sparse_resize_and_clear",
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
]


def moves_data(name: str, schema: Any) -> bool:
    """Whether an op returns data of its argument, or memory of its kind, and computes nothing."""
    if name in rows_by_name():
        return False
    namespace, _, op = name.partition(".")[0].partition("::")
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return True
    if namespace == "prims":
        return op in ("clone", "copy_strided", "full_like", "reshape")
    copies_view = op.endswith("_copy") and op not in ("index_copy", "_foreach_copy", "_to_copy", "_reshape_copy")
    return namespace == "aten" and (op in MOVES or op == "_foreach_copy" or copies_view)


def test_every_op_that_writes_may_match_and_no_other() -> None:
    """For all ops of the dispatcher, checked by the schema's text."""
    seen = {True: 0, False: 0}
    for name in torch._C._dispatch_get_all_op_names():
        schema = schema_of(name)
        if schema is None:  # a kernel of an op that nobody has defined
            assert legal_policies(name) == ()
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        legal = legal_policies(name)
        assert (CastPolicy.banned in legal) == takes_tensors, name
        assert (CastPolicy.match_self in legal) == (takes_tensors and schema.is_mutable), name
        casts = takes_tensors and not schema.is_mutable and not moves_data(name, schema)
        assert (CastPolicy.fp32 in legal) == casts, name
        seen[schema.is_mutable] += 1
    assert min(seen.values()) > 500


def test_a_form_with_a_dtype_is_known_of_rows_only() -> None:
    with_form = {name for name, row in rows_by_name().items() if row.redispatch_overload}
    names = torch._C._dispatch_get_all_op_names()
    assert {name for name in names if CastPolicy.fp32_append_dtype in legal_policies(name)} == with_form


@pytest.mark.parametrize(
    ("key", "policy", "expected"),
    [
        (f"{NAMESPACE}::many", "fp32", MANY[:2]),
        (f"{NAMESPACE}::many", torch.float64, MANY[:2]),
        (f"{NAMESPACE}::many", "fp32_set_opt_dtype", MANY[1:2]),
        (f"{NAMESPACE}::many", "match_self", MANY[2:]),
        (f"{NAMESPACE}::many", "banned", MANY),
        (f"{NAMESPACE}::[cjm]*", "promote", ours_of("join", "made", "many", "many.dtype")),
        (f"{NAMESPACE}::*_", "match_self", ours_of("write_", "write_each_")),
        ("norm", "fp32_append_dtype", ("aten::norm.Scalar", "aten::norm.ScalarOpt_dim")),
    ],
    ids=str,
)
def test_of_several_overloads_those_are_chosen_for_which_the_policy_is_legal(
    key: str, policy: Any, expected: tuple[str, ...]
) -> None:
    assert select(key, policy)[1] == expected
    assert tuple(name for name, _ in parse_overrides({key: policy})) == expected


def test_overrides_are_in_order_and_may_say_a_thing_twice() -> None:
    overrides: dict[Any, Any] = {f"{NAMESPACE}::join": FP64, "mm.out": "match_self", "mm.default": "fp32"}
    overrides |= {aten.mm.default: CastPolicy.fp32, "bmm.default": "torch.bfloat16"}
    assert parse_overrides(overrides) == (
        ("aten::bmm", torch.bfloat16),
        ("aten::mm", CastPolicy.fp32),
        ("aten::mm.out", CastPolicy.match_self),
        (f"{NAMESPACE}::join", FP64),
    )
