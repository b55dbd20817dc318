"""The text of every error for an invalid op or policy in overrides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.library_for_policies import NAMESPACE
from helpers.policy_errors import LEGAL_WRITING, NAMED, NO_DTYPE, NOT_AN_OP, POLICIES, WRITES
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.overrides import parse_overrides

aten, ours = torch.ops.aten, getattr(torch.ops, NAMESPACE)

LEGAL_PLAIN = "Legal: lower_precision_fp, fp32, promote, fallthrough, keep, banned or a floating dtype."
NO_FORM = "the op table names no overload of it that takes an output dtype"
NO_TENSOR = "it takes no tensor, so autocast does not apply to it"

ERRORS: dict[str, tuple[Any, str]] = {
    # ops
    "a misspelt op": ({"sofmax": "fp16"}, f"no op is called 'sofmax'. Closest: softmax. {NAMED}"),
    "a misspelt op of aten, in full": (
        {"aten::bernouli": "fp16"},
        f"no op is called 'aten::bernouli'. Closest: bernoulli. {NAMED}",
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
    "a number for an op": ({3: "fp16"}, f"{NOT_AN_OP}3. {NAMED}"),
    "a tuple for an op": (
        {("aten::mm", None): "fp16"},
        f"{NOT_AN_OP}('aten::mm', None). {NAMED}",
    ),
    "a function for an op": (
        {len: "fp16"},
        f"{NOT_AN_OP}<built-in function len>. {NAMED}",
    ),
    # policies
    "a misspelt policy": (
        {"mm.default": "fp61"},
        f"aten::mm: no cast policy is called 'fp61'. Closest: fp16 (the region's dtype). {POLICIES}",
    ),
    "a misspelt policy of a packet": (
        {f"{NAMESPACE}::many": "promot"},
        f"'policy_tests::many': no cast policy is called 'promot'. Closest: promote. {POLICIES}",
    ),
    "a policy in capitals": (
        {"mm.default": "FP32"},
        f"aten::mm: no cast policy is called 'FP32'. Closest: fp32. {POLICIES}",
    ),
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
    "two patterns": (
        {f"{NAMESPACE}::j*": "fp16", f"{NAMESPACE}::*in": "float16"},
        "policy_tests::join gets two policies, 'lower_precision_fp' from 'policy_tests::j*' and 'float16' from "
        "'policy_tests::*in'. Name the op itself as well, which takes precedence over patterns, or change a pattern.",
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
