"""How ops and policies are written in overrides: what a key means, what is legal for an op, and every error's text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.library_for_policies import NAMESPACE
from helpers.policy_errors import LEGAL_WRITING, NAMED, NO_DTYPE, POLICIES, WRITES
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
    """Over all that the dispatcher has, asked of the schema as PyTorch spells it."""
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


# --- errors

LEGAL_PLAIN = "Legal: lower_precision_fp, fp32, promote, fallthrough, keep, banned or a floating dtype."
NO_FORM = "the op table names no overload of it that takes an output dtype"
NO_TENSOR = "it takes no tensor, so autocast does not apply to it"

ERRORS: dict[str, tuple[Any, str]] = {
    # ops
    "a misspelt op": ({"sofmax": "fp16"}, f"no op is called 'sofmax'. Closest: softmax, _softmax, fmax. {NAMED}"),
    "a misspelt op of aten, in full": (
        {"aten::bernouli": "fp16"},
        f"no op is called 'aten::bernouli'. Closest: bernoulli, bernoulli_. {NAMED}",
    ),
    "a misspelt op of a library": (
        {f"{NAMESPACE}::jion": "fp16"},
        f"no op is called 'policy_tests::jion'. Closest: join. {NAMED}",
    ),
    "nothing close": ({"qqqqqq": "fp16"}, f"no op is called 'qqqqqq'. {NAMED}"),
    "no name": ({"": "fp16"}, f"no op is called ''. {NAMED}"),
    "a name with a blank": (
        {f"{NAMESPACE}:: join": "fp16"},
        f"no op is called 'policy_tests:: join'. Closest: join. {NAMED}",
    ),
    "a namespace that is not there": (
        {"zzz::op": "fp16"},
        "no op is registered in namespace 'zzz'. Import the library that defines 'zzz::op' first.",
    ),
    "a misspelt namespace": (
        {"policytests::join": "fp16"},
        "no op is registered in namespace 'policytests'. Import the library that defines 'policytests::join' first. "
        "Closest: policy_tests.",
    ),
    "an overload that is not there": (
        {f"{NAMESPACE}::many.int": "fp16"},
        "policy_tests::many has no overload 'int'. Legal: policy_tests::many.default, policy_tests::many.dtype, "
        "policy_tests::many.out.",
    ),
    "no default overload": (
        {"add_.default": "match_self"},
        "aten::add_ has no overload 'default'. Legal: aten::add_.Scalar, aten::add_.Tensor.",
    ),
    "an op as PyTorch prints it": ({"aten.mm": "fp16"}, "no op is called 'aten.mm'. Write 'aten::mm'."),
    "an overload as PyTorch prints it": (
        {f"{NAMESPACE}.many.out": "fp16"},
        "no op is called 'policy_tests.many.out'. Write 'policy_tests::many.out'.",
    ),
    "an overload without a name": (
        {"add_.": "match_self"},
        "aten::add_ has no overload ''. Legal: aten::add_.Scalar, aten::add_.Tensor.",
    ),
    "an overload twice": (
        {"add_.Tensor.Tensor": "match_self"},
        "aten::add_ has no overload 'Tensor.Tensor'. Legal: aten::add_.Scalar, aten::add_.Tensor.",
    ),
    "letters that no op has": ({"é.é": "fp16"}, f"no op is called 'é.é'. {NAMED}"),
    "a pattern that matches nothing": (
        {f"{NAMESPACE}::jion*": "fp16"},
        f"the pattern 'policy_tests::jion*' matches no op. Closest: join. {NAMED}",
    ),
    "a pattern in no namespace": ({"qq*::q": "fp16"}, f"the pattern 'qq*::q' matches no op. {NAMED}"),
    "a number for an op": ({3: "fp16"}, "expected the name of an op, an OpOverload or an OpOverloadPacket, got 3."),
    "a tuple for an op": (
        {("aten::mm", None): "fp16"},
        "expected the name of an op, an OpOverload or an OpOverloadPacket, got ('aten::mm', None).",
    ),
    "a function for an op": (
        {len: "fp16"},
        "expected the name of an op, an OpOverload or an OpOverloadPacket, got <built-in function len>.",
    ),
    # policies
    "a misspelt policy": (
        {"mm.default": "fp61"},
        f"aten::mm: no cast policy is called 'fp61'. Closest: fp16. {POLICIES}",
    ),
    "a misspelt policy of a packet": (
        {f"{NAMESPACE}::many": "promot"},
        f"'policy_tests::many': no cast policy is called 'promot'. Closest: promote. {POLICIES}",
    ),
    "a policy in capitals": ({"mm.default": "FP32"}, f"aten::mm: no cast policy is called 'FP32'. {POLICIES}"),
    "a number for a policy": (
        {"mm.default": 32},
        f"aten::mm: a policy is a str, a CastPolicy or a torch.dtype, got 32. {POLICIES}",
    ),
    "no policy": (
        {"mm.default": None},
        f"aten::mm: a policy is a str, a CastPolicy or a torch.dtype, got None. {POLICIES}",
    ),
    "a dtype that is not floating": (
        {"mm.default": torch.int32},
        f"aten::mm: torch.int32 is not a floating dtype. {POLICIES}",
    ),
    "a complex dtype by name": (
        {"mm.default": "complex64"},
        f"aten::mm: torch.complex64 is not a floating dtype. {POLICIES}",
    ),
    # policies that are not for this op
    "no dtype argument": (
        {"mm.default": "fp32_set_opt_dtype"},
        f"aten::mm cannot use 'fp32_set_opt_dtype': {NO_DTYPE}. {LEGAL_PLAIN}",
    ),
    "a dtype argument after a list": (
        {f"{NAMESPACE}::several": "fp32_set_opt_dtype"},
        f"policy_tests::several cannot use 'fp32_set_opt_dtype': its first argument is not a Tensor. {LEGAL_PLAIN}",
    ),
    "no form with a dtype": (
        {"mm.default": CastPolicy.fp32_append_dtype},
        f"aten::mm cannot use 'fp32_append_dtype': {NO_FORM}. {LEGAL_PLAIN}",
    ),
    "nothing to match": (
        {"mm.default": "match_self"},
        "aten::mm cannot use 'match_self': it does not write to an argument, so there is no dtype to match. "
        + LEGAL_PLAIN,
    ),
    "a cast of what is written": ({"mm.out": "fp32"}, f"aten::mm.out cannot use 'fp32': {WRITES}. {LEGAL_WRITING}"),
    "a dtype for what is written": (
        {f"{NAMESPACE}::write_": "bfloat16"},
        f"policy_tests::write_ cannot use 'bfloat16': {WRITES}. {LEGAL_WRITING}",
    ),
    "promote in place": (
        {aten.index_put_.default: "promote"},
        f"aten::index_put_ cannot use 'promote': {WRITES}. {LEGAL_WRITING}",
    ),
    "an op without tensors": (
        {f"{NAMESPACE}::count.float": "keep"},
        f"policy_tests::count.float cannot use 'keep': {NO_TENSOR}.",
    ),
    "a packet without tensors": (
        {f"{NAMESPACE}::count": "fp32"},
        f"none of the 2 overloads of 'policy_tests::count' can use 'fp32': {NO_TENSOR} (policy_tests::count, "
        "policy_tests::count.float).",
    ),
    "a packet of which none will do": (
        {ours.many: "fp32_append_dtype"},
        f"none of the 3 overloads of 'policy_tests::many' can use 'fp32_append_dtype': {NO_FORM} (policy_tests::many, "
        f"policy_tests::many.dtype); {WRITES} (policy_tests::many.out). Legal for some: lower_precision_fp, fp32, "
        "fp32_set_opt_dtype, promote, match_self, fallthrough, keep, banned or a floating dtype.",
    ),
    "a pattern of which none will do": (
        {f"{NAMESPACE}::[jpos]*": "match_self"},
        "none of the 4 overloads of 'policy_tests::[jpos]*' can use 'match_self': it does not write to an argument, so "
        "there is no dtype to match (policy_tests::join, policy_tests::optional, policy_tests::packed and 1 more). "
        "Legal for some: lower_precision_fp, fp32, promote, fallthrough, keep, banned or a floating dtype.",
    ),
    "a good one before a bad one": (
        {"exp.default": "fp16", "mm.out": torch.float64},
        f"aten::mm.out cannot use 'float64': {WRITES}. {LEGAL_WRITING}",
    ),
    # conflicts
    "a packet and its overload": (
        {f"{NAMESPACE}::many": "fp16", f"{NAMESPACE}::many.dtype": "fp32"},
        "policy_tests::many.dtype gets two policies, 'lower_precision_fp' from 'policy_tests::many' and 'fp32' from "
        "'policy_tests::many.dtype'. Name each overload once.",
    ),
    "a pattern and a name": (
        {f"{NAMESPACE}::j*": "fp16", f"{NAMESPACE}::join": "float16"},
        "policy_tests::join gets two policies, 'lower_precision_fp' from 'policy_tests::j*' and 'float16' from "
        "'policy_tests::join'. Name each overload once.",
    ),
    "a policy and a dtype": (
        {"mm.default": "fp32", aten.mm.default: torch.float32},
        "aten::mm gets two policies, 'fp32' from 'mm.default' and 'float32' from <OpOverload(op='aten.mm', "
        "overload='default')>. Name each overload once.",
    ),
    # not a mapping
    "a list": (["mm"], "overrides must be a mapping of ops to policies, got list."),
    "a str": ("mm", "overrides must be a mapping of ops to policies, got str."),
    "nothing": (None, "overrides must be a mapping of ops to policies, got NoneType."),
}


@pytest.mark.parametrize(("overrides", "text"), ERRORS.values(), ids=ERRORS)
def test_bad_overrides(overrides: Any, text: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse_overrides(overrides)
    assert str(error.value) == text
    assert type(error.value) is PolicyError


def test_a_row_that_this_pytorch_has_no_op_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if not name.startswith("aten::cholesky")]
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: names)
    with pytest.raises(PolicyError) as error:
        parse_overrides({"cholesky": "fp32"})
    assert str(error.value) == (
        f"aten::cholesky has a row in the op table, but torch {torch.__version__} has no such op."
    )
