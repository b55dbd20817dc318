"""`why`: the words of derivations, errors of expressions, and the names of dtypes."""

from __future__ import annotations

import importlib

import pytest
import torch
from expecttest import assert_expected_inline

import torch_promote as tp
from torch_promote.reference import ExpressionError
from torch_promote.reference import promotion as promotion_table

#: A module whose name its function has too.
INFER = importlib.import_module("torch_promote.reference.ops.infer")

pytestmark = pytest.mark.filterwarnings("ignore")


class TestWords:
    def test_a_condition_takes_no_part(self) -> None:
        assert_expected_inline(
            str(tp.why("where(bool[2], int8[2], float16[2])")),
            """\
where(bool[2], int8[2], float16[2])
1. condition (bool[2]) takes no part in the promotion.
2. int8[2] is a tensor with dimensions: state dim, int8.
3. float16[2] is a tensor with dimensions: state dim, float16.
4. Both are in state dim, so the two are promoted. The table has float16 for them (row i1, column
   f2).
5. aten::where.self computes in float16 and returns float16.
Result: float16 of shape [2]""",
        )

    def test_more_than_two_operands_of_all_states(self) -> None:
        assert_expected_inline(
            str(tp.why("addcmul(int8[2], uint8[2], f4[]) + lerp(f4[2], f4[2], f4[2])", default_dtype="float32")),
            """\
addcmul(int8[2], uint8[2], float32[]) + lerp(float32[2], float32[2], float32[2])
1. int8[2] is a tensor with dimensions: state dim, int8.
2. uint8[2] is a tensor with dimensions: state dim, uint8.
3. float32[] is a 0-dim tensor: state zero, float32.
4. In state dim, int8 and uint8 are promoted. The table has int16 for them (row i1, column u1).
5. dim int16 with zero float32: float32 is floating, a higher kind than integral, so the two are
   promoted. The table has float32 for them (row i2, column f4).
6. aten::addcmul computes in float32 and returns float32.
7. float32[2] is a tensor with dimensions: state dim, float32.
8. float32[2] is a tensor with dimensions: state dim, float32.
9. float32[2] is a tensor with dimensions: state dim, float32.
10. All are float32 in state dim: nothing is promoted.
11. aten::lerp.Tensor computes in float32 and returns float32.
12. addcmul(int8[2], uint8[2], float32[]) is a tensor with dimensions: state dim, float32.
13. lerp(float32[2], float32[2], float32[2]) is a tensor with dimensions: state dim, float32.
14. Both are float32 in state dim: nothing is promoted.
15. + computes in float32 and returns float32.
Result: float32 of shape [2]""",
        )

    def test_an_op_without_a_rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rules = {name: entry for name, entry in INFER.rule_table().items() if name != "aten::sin"}
        monkeypatch.setattr(INFER, "rule_table", lambda: rules)
        assert_expected_inline(
            str(tp.why("sin(int8[2])", default_dtype="float32")),
            """\
sin(int8[2])
1. The reference has no rule for aten::sin. PyTorch returns float32.
Result: float32 of shape [2]""",
        )

    def test_a_composite_op_of_views(self) -> None:
        assert_expected_inline(
            str(tp.why("flatten(f2[2, 3])")),
            """\
flatten(float16[2, 3])
1. aten::flatten.using_ints returns float16.
Result: float16 of shape [6]""",
        )

    def test_another_rule(self) -> None:
        derivation = tp.why("cat([i4[2], f4[2]])", rule="numpy")
        assert (derivation.dtype, derivation.rule) == (torch.float64, "numpy")
        refused = tp.why("cat([i4[2], f4[2]])", rule="strict")
        assert refused.by_rule
        assert "aten::cat" in str(refused.error)

    def test_errors_end_with_one_full_stop(self) -> None:
        for expression in ("mean(int8[3])", "bf16[2, 2] @ f2[2, 2]", "where(bool[2], u1[2], 1000)", "f4[2] + f4[3]"):
            text = str(tp.why(expression))
            assert text.endswith(".")
            assert ".." not in text

    def test_several_results(self) -> None:
        assert str(tp.why("sort(f2[3])")).endswith("\nResults: float16 of shape [3]; int64 of shape [3]")

    def test_a_dtype_that_jax_has_not_with_a_number(self) -> None:
        why = tp.why("complex32[3] + 1", rule="jax")
        assert why.dtype is torch.complex32
        assert "A Python int is not of a higher kind than complex32, so complex32 stays." in why.steps[2]

    def test_a_custom_op_is_explained_by_its_fake(self) -> None:
        @torch.library.custom_op("why_tests::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(lambda x: torch.empty_like(x))
        why = tp.why("torch.ops.why_tests.twice(f2[3])")
        assert why.dtype is torch.float16
        assert why.steps == ("The registered fake of why_tests::twice returns float16.",)

    def test_a_reference_that_is_wrong_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.int16), torch.int32)
        why = tp.why("torch.add(i1[3], i2[3])")
        assert why.dtype is torch.int16
        assert why.steps[-1] == "PyTorch itself returns int16: the reference is wrong here. Report it."

    def test_a_view_as_another_dtype_is_no_plain_view(self) -> None:
        why = tp.why("f4[2].view(int32)")
        assert why.dtype is torch.int32
        assert why.steps == ("aten::view.dtype of float32[2] returns int32. Its dtype argument says so.",)

    def test_a_region_that_pytorchs_settings_disable(self) -> None:
        torch.set_autocast_dtype("cpu", torch.float32)
        try:
            text = str(tp.why("torch.mm(f4[2, 2], f4[2, 2])", autocast="cpu"))
        finally:
            torch.set_autocast_dtype("cpu", torch.bfloat16)
        assert text.startswith("torch.mm(float32[2, 2], float32[2, 2]), without autocast\n")

    def test_nothing_is_left_behind(self) -> None:
        before = torch.get_rng_state(), torch.get_default_dtype()
        tp.why("F.dropout(f4[3]) + 2.5", default_dtype="float64", autocast="cpu")
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.get_default_dtype() is before[1]
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("sofmax(f4[2])", "no function of PyTorch is called 'sofmax'. Closest: softmax"),
        ("F.sofmax(f4[2])", "no function of PyTorch is called 'F.sofmax'. Closest: softmax"),
        ("torch.load('x')", "no function of PyTorch is called 'torch.load'."),
        ("torch.ops.aten.nothing(f4[2])", "no function of PyTorch is called 'torch.ops.aten.nothing'."),
        ("torch.classes.nothing.at_all(f4[2])", "no function of PyTorch is called 'torch.classes.nothing.at_all'."),
        ("numpy.add(f4[2], 1)", "no function of PyTorch is called 'numpy.add'."),
        ("f4[2].sofmax(0)", "tensors have no method 'sofmax'. Closest: softmax"),
        ("cumsum(f4[2])", "PyTorch does not take these arguments: cumsum() "),
        ("torch.save(f4[2], 'x')", "no function of PyTorch is called 'torch.save'."),
        ("f4[2] + None", "'None' in 'f4[2] + None' is neither an operand nor a supported operator."),
        ("f4[2] + sort(f4[2])", "+ takes a tensor or a number"),
        ("sort(f4[2])[5]", "sort(float32[2]) has no result number 5."),
        ("cat(*f4[2])", "neither an operand nor a supported operator"),
        ("sum(f4[2], **f4[2])", "write the arguments of sum one by one"),
        ("is_floating_point(f4[2])", "has no operator or function with a tensor operand"),
        ("f33[2] + 1", "'f33' in 'f33[2] + 1' is not a dtype of this PyTorch."),
    ],
)
def test_an_expression_that_cannot_be_explained(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        tp.why(expression)
    assert message in str(raised.value)
    assert ".." not in str(raised.value)


def test_the_reference_alone_explains_operators() -> None:
    with pytest.raises(ExpressionError, match=r"torch_promote.why and `torch-promote why` explain calls"):
        tp.reference.why("cat([int8[2], f2[2]])")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("bf16", "bfloat16"), ("fp16", "float16"), ("f2", "float16"), ("i4", "int32"), ("f4", "float32")),
        *(("half", "float16"), ("double", "float64"), ("long", "int64"), ("c4", "complex64"), ("b1", "bool")),
        ("torch.cfloat", "complex64"),
    ],
)
def test_names_of_dtypes(name: str, dtype: str) -> None:
    assert tp.why(f"{name}[2] * {name}[2]").dtype is getattr(torch, dtype)
    assert f"{dtype}[2]" in str(tp.why(f"{name}[2] * {name}[2]"))


def test_an_op_that_is_kept_runs_with_autocast_off() -> None:
    policy = tp.Policy.stock().override({"mm": "keep"})
    text = str(tp.why("torch.mm(float32[2, 2], float32[2, 2])", autocast="cpu", policy=policy))
    assert "it runs as it is, with autocast off" in text
