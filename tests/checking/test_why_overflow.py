"""`why`: values that overflow, compared with PyTorch's results, and what is asked of PyTorch."""

from __future__ import annotations

import pytest
import torch

import torch_promote as tp
from torch_promote.reference import ExpressionError

pytestmark = pytest.mark.filterwarnings("ignore")


class TestOverflow:
    @pytest.mark.parametrize(
        ("expression", "sentence"),
        [
            ("float16[3] * 1e6", "1000000.0 does not fit float16, whose largest value is 65504. PyTorch computes with"),
            ("float16[3] + 100000", "100000 does not fit float16"),
            ("torch.mul(bf16[3], 3.4e38)", "does not fit bfloat16, whose largest value is 3.38953e+38"),
            ("float32[3] + 1e39", "1e+39 does not fit float32, whose largest value is 3.40282e+38, and becomes inf."),
            (
                "float16[3] < 1e6",
                "1000000.0 does not fit float16, whose largest value is 65504, and is compared as inf.",
            ),
            ("uint8[3] + 1000", "1000 does not fit uint8 and wraps to 232."),
            ("maximum(uint8[3], int64[])", "A value of int64[] that does not fit uint8 wraps around."),
            ("float16[3] * float64[]", "A value of float64[] beyond 65504 does not fit float16, and may become inf."),
            ("float16[3] / int64[]", "PyTorch may compute with it in float32: then only a result beyond 65504 is inf."),
            ("float16[3] + int64[]", "A value of int64[] beyond 65504 does not fit float16, and becomes inf."),
            ("float16[3] + 100000", "100000 does not fit float16, whose largest value is 65504, and becomes inf."),
            ("torch.sub(float16[3], 100000)", "and becomes inf."),
            ("minimum(float16[3], float64[])", "and may become inf."),
            ("where(bool[3], float16[3], float64[])", "and may become inf."),
            ("float64[] ** float16[3]", "and may become inf."),
        ],
    )
    def test_is_said(self, expression: str, sentence: str) -> None:
        assert sentence in tp.why(expression).steps[-1]

    @pytest.mark.parametrize(
        "expression",
        [
            "float16[3] * 65519.0",
            "float16[3] * 1e4",
            "bf16[3] * f4[]",
            "float32[3] * i8[]",
            "int8[3] + 100",
            "f8[2] * 1e300",
        ],
    )
    def test_is_not_said_of_what_fits(self, expression: str) -> None:
        assert "fit" not in str(tp.why(expression))

    def test_is_not_said_of_a_call_that_raises(self) -> None:
        derivation = tp.why("clamp(float16[3], max=1e6)")
        assert "without overflow" in str(derivation.error)
        assert "fit" not in str(derivation)

    def test_of_the_bound_of_a_clamp(self) -> None:
        """Later releases than 2.13 take bounds that have no effect."""
        derivation = tp.why("clamp(int8[3], max=300)")
        raised = ""
        try:
            torch.clamp(torch.tensor([100], dtype=torch.int8), max=300)
        except RuntimeError as error:
            raised = str(error)
        says = derivation.steps[-1].endswith("300 does not fit int8, so it bounds nothing.")
        assert (raised in str(derivation.error), says) == (True, not raised)

    @pytest.mark.parametrize("right", ["100000", "float64[]"])
    @pytest.mark.parametrize(
        ("op", "left"),
        [
            ("+", -65504.0),
            ("-", 65504.0),
            ("*", 1e-3),
            ("/", 65504.0),
            ("**", 1.0),
            ("minimum", 1.0),
            ("maximum", 1.0),
            ("where", 1.0),
            ("<", 1.0),
        ],
    )
    def test_an_op_does_as_said(self, op: str, left: float, right: str) -> None:
        if right == "100000" and op in ("**", "minimum", "maximum", "where"):
            return  # raises, or takes no numbers
        call = f"where(bool[3], float16[3], {right})" if op == "where" else f"{op}(float16[3], {right})"
        said = tp.why(f"float16[3] {op} {right}" if not op.isalpha() else call).steps[-1]
        half = torch.full((3,), left, dtype=torch.float16)
        other = 100000 if right == "100000" else torch.tensor(1e6, dtype=torch.float64)
        by_name = {"+": "add", "-": "sub", "*": "mul", "/": "true_divide", "**": "pow", "<": "lt"}
        function = getattr(torch, by_name.get(op, op))
        result = torch.where(half > 0, half, other) if op == "where" else function(half, other)
        if "becomes inf" in said:
            assert result.isinf().all()
        elif op != "maximum":
            assert result.isfinite().all()
            assert "is inf" in said or "may become inf" in said or op == "<"

    def test_the_values_are_as_said(self) -> None:
        half, bytes_ = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.uint8)
        assert (half * 1e6).isinf().all()
        assert (half * 65519.0).item() == 65504
        assert ((half * 1e-3) * 1e6).isfinite().all()  # computes with the number in float32
        assert (torch.ones(1) * 1e-5 * 1e39).isinf().all()  # becomes inf
        assert (half * float("inf") == 1e6).all()  # is compared as inf
        assert (torch.full((1,), float("inf")) == 1e39).all()
        assert not (half == 1e6).any()
        assert (bytes_ + 1000).item() == 233
        assert (half * torch.tensor(1e6, dtype=torch.float64)).isinf().all()


class TestWhatIsAsked:
    def test_the_cache_of_fake_tensors_is_not_in_the_steps(self) -> None:
        assert tp.why("full([2], 1.0, dtype=half)").steps == (
            "aten::full returns float16. Its dtype argument says so.",
        )

    def test_a_region_with_an_unsupported_dtype_is_disabled(self) -> None:
        said = str(tp.why("mm(f4[2,2], f4[2,2])", autocast="cpu", dtype="float32"))
        assert "autocast on cpu, which does not support float32: the region warns and is disabled" in " ".join(
            said.split()
        )

    @pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
    def test_inf_and_nan_are_numbers(self, number: str) -> None:
        assert tp.why(f"half[3] * {number}").dtype is torch.float16
        assert tp.why(f"clamp(float32[3], max={number})").dtype is torch.float32
        assert "fit" not in str(tp.why(f"half[3] * {number}"))

    def test_an_unknown_operator(self) -> None:
        with pytest.raises(ExpressionError, match=r"Operators are \+ - \* /"):
            tp.why("int8[3] << 2")
