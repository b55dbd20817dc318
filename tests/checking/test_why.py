"""`why`: results compared with PyTorch's, casts of autocast, values that overflow, rules, and texts."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_promote as tp
from torch_promote.checking.expression import parse
from torch_promote.checking.why import Derivation
from torch_promote.errors import DtypeError, ExpressionError, OptionError
from torch_promote.observe.autocast_state import pretend_cuda
from torch_promote.reference import promotion as promotion_module
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, named_dtype
from torch_promote.reference.promotion_rules import RULE_NAMES, PromotionRuleError, promotion_rule

DTYPES = ("bool", "u1", "i1", "int32", "i8", "bf16", "half", "f4", "double", "c4")
_TENSOR = re.compile(r"\b(?!math)([a-z]+\d*\w*)\[([\d, ]*)\](?!\()")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(expression: str, **names: Any) -> Any:
    """What PyTorch gives for an expression on tensors of ones, or the error."""

    def tensor(match: re.Match[str]) -> str:
        return f"ones(({match[2]}{',' if match[2] else ''}), '{match[1]}')"

    def ones(shape: tuple[int, ...], name: str) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.uint8).to(named_dtype(name))

    places = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")}
    functional = vars(torch.nn.functional)
    try:
        return eval(
            _TENSOR.sub(tensor, expression),
            {
                **functional,
                **places,
                **{name: named_dtype(name) for name in ("f4", *DTYPES)},
                "torch": torch,
                "F": torch.nn.functional,
                "ones": ones,
            },
        )
    except (RuntimeError, TypeError, IndexError) as error:
        return str(error)


def agree(derivation: Derivation, result: Any) -> bool:
    if isinstance(result, str):
        return derivation.error is not None
    results = result if isinstance(result, tuple | list) else (result,)
    described = derivation.results or ((derivation.dtype, derivation.shape),)
    return described == tuple((one.dtype, tuple(one.shape)) for one in results)


CALLS = (
    "cat([int8[2], float16[2]])",
    "torch.cat((int8[2], f4[2], f2[3]), dim=0)",
    "F.linear(f4[2, 3], f4[4, 3], f4[4])",
    "softmax(bf16[2, 3], -1)",
    "torch.nn.functional.softmax(f2[2, 3], dim=-1, dtype=torch.double)",
    "f2[2, 3].sum(1, dtype=f4)",
    "-(int8[3] + f2[3])",
    "bf16[2, 3] @ bf16[3, 4]",
    "bf16[2, 3] @ f2[3, 4]",
    "max(f2[2, 3], 1)",
    "sort(f2[3])[1] + int8[3]",
    "lerp(f4[2], f2[2], 0.5)",
    "clamp(u1[3], max=1000)",
    "F.layer_norm(f2[2, 3], [3])",
    "F.cross_entropy(f4[2, 3], i8[2])",
    "einsum('ij,jk->ik', f4[2, 3], f4[3, 2])",
    "linalg.norm(c4[3])",
    "bincount(i4[3], f2[3])",
    "nonzero(f4[3])",
    "f4[2, 3].t().half().softmax(0)",
    "arange(3) * f2[3]",
    "masked_fill(u1[2], bool[2], 1000)",
    "div(i4[2], i4[2], rounding_mode='floor')",
)


@pytest.mark.parametrize("expression", CALLS)
def test_calls_give_what_pytorch_gives(expression: str) -> None:
    derivation = tp.why(expression)
    assert agree(derivation, run(expression)), (str(derivation), run(expression))
    assert derivation.steps or derivation.error


OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=")


@pytest.mark.parametrize(
    ("symbol", "default_dtype"),  # the everyday run has each operator with one default dtype
    [
        pytest.param(symbol, dtype, id=f"{symbol}-{dtype_name(dtype)}", marks=pytest.mark.slow if (i + j) % 3 else ())
        for i, symbol in enumerate(OPERATORS)
        for j, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16))
    ],
)
def test_operators_give_what_pytorch_gives(symbol: str, default_dtype: torch.dtype) -> None:
    draw = random.Random(f"{symbol} {default_dtype}")
    tensors = [
        f"{dtype_name(dtype)}{shape}" for dtype in ALL_DTYPES for shape in ("[2]", "[]") if "bits" not in str(dtype)
    ]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        for _ in range(40):
            sides = [draw.choice(tensors), draw.choice([*tensors, "True", "3", "2.5", "1j", "1000", "0", "(-1)"])]
            expression = f" {symbol} ".join(draw.sample(sides, 2))
            result = run(expression)
            # A conversion to or from a dtype that is not implemented says nothing about the operator.
            if not (isinstance(result, str) and "copy_" in result):
                derivation = tp.why(expression)
                assert agree(derivation, result), (str(derivation), result)
                assert "Report it" not in str(derivation)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.slow)])  # every other pair and symbol
@pytest.mark.parametrize("name", RULE_NAMES[1:])
def test_operators_under_a_rule_compute_in_its_common_dtype(name: str, share: int) -> None:
    rule = promotion_rule(name)
    dtypes = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32]
    for a, b, symbol in itertools.islice(itertools.product(dtypes, dtypes, ("+", "/", "<")), 0, None, share):
        derivation = tp.why(f"{dtype_name(a)}[2] {symbol} {dtype_name(b)}[2]", rule=name)
        try:
            common = rule.common([a, b], floats=symbol == "/")
        except PromotionRuleError:
            assert derivation.by_rule, str(derivation)
        else:
            result = torch.ones(2, dtype=torch.bool if symbol == "<" else common)
            assert agree(derivation, result), str(derivation)


@pytest.mark.parametrize("rule", ["strict", "numpy"])
@pytest.mark.parametrize(
    "expression",
    [
        "F.cross_entropy(f4[4, 5], int64[4], label_smoothing=0.1)",
        "F.rms_norm(half[4, 5], [5])",
        "F.cosine_similarity(half[4, 5], half[4, 5])",
        "F.normalize(c4[4, 5])",
    ],
)
def test_a_rule_does_not_act_where_pytorch_mixes_dtypes(expression: str, rule: str) -> None:
    derivation = tp.why(expression, rule=rule)
    assert agree(derivation, run(expression)), str(derivation)
    assert "NumPy's table" not in str(derivation)


def test_a_rule_acts_on_integers_that_are_operands_of_a_composite() -> None:
    assert tp.why("kron(half[3], int64[3])", rule="numpy").dtype is torch.float64
    assert tp.why("kron(half[3], int64[3])", rule="strict").by_rule


#: What PyTorch does with real tensors, where fake tensors, or the calls inside of the call, suggest something else.
REAL = {
    "ldexp(int64[3], float16[])": ({}, "float16"),
    "ldexp(int64[3000000], float16[])": ({}, "float16"),
    "F.huber_loss(float32[3], float64[3])": ({}, "float32"),
    "F.huber_loss(int32[2], complex64[2])": (
        {},
        "result type ComplexFloat can't be cast to the desired output type Int.",
    ),
    "F.soft_margin_loss(int8[2], uint8[2])": ({}, "result type Float can't be cast to the desired output type Char."),
    "int8[2].addcmul_(complex64[2], f4[2])": (
        {},
        "result type ComplexFloat can't be cast to the desired output type Char.",
    ),
    "int64[2].ldexp_(half[])": ({}, "ldexp can't be cast to the desired output type Long."),
    "int32[1].add_(int32[2])": ({}, "output with shape [1] doesn't match the broadcast shape [2]."),
    "i4[2].eq_(float8_e5m2[2])": (
        {},
        "Promotion for Float8 Types is not supported, attempted to promote Int and Float8_e5m2.",
    ),
    "f4[].addr_(f4[2], f4[3])": ({}, "2D tensor expected, got 0D tensor for input."),
    "split(f4[], 2)": ({}, "split expects at least a 1-dimensional tensor."),
    "linalg.cholesky(f4[2, 2])": ({}, "float32"),
    "index_select(f4[1], 0, int64[1])": ({}, "float32"),
    "block_diag(f4[2, 2], i8[1, 1])": ({}, "float32"),
    "bool[3] - int32[3]": ({"rule": "jax"}, "int32"),
    "bool[2] - uint8[2]": ({"rule": "numpy"}, "uint8"),
    "F.pairwise_distance(half[2, 2], f8[2, 2])": ({"rule": "strict"}, "aten::sub.Tensor: the promotion rule"),
    "float_power(half[2, 2], f4[2, 2])": ({"rule": "strict"}, "float64"),
    "F.cross_entropy(f8[2, 2], f4[2, 2])": ({"rule": "strict", "autocast": "cpu"}, "float64"),
    "ldexp(int64[2], float16[])": ({"autocast": "cuda"}, "float16"),
    "linalg.pinv(float32[3, 2])": ({"autocast": "cuda"}, "float16"),
    "F.binary_cross_entropy(f4[2], f4[2])": (
        {"autocast": "cuda"},
        "aten::binary_cross_entropy is banned under autocast on cuda",
    ),
}


@pytest.mark.parametrize(("expression", "expected"), REAL.items())
def test_pytorch_is_asked_on_real_tensors(expression: str, expected: tuple[dict[str, Any], str]) -> None:
    derivation = tp.why(expression, **expected[0])
    if named_dtype(expected[1]) is None:
        assert (derivation.error or "").startswith(expected[1]), str(derivation)
    else:
        assert derivation.dtype is named_dtype(expected[1]), str(derivation)
    assert "Report it" not in str(derivation)
    on_fakes_of_cuda = expected[0].get("autocast") == "cuda" and not torch.cuda.is_available()
    assert (derivation.inferred is not None) is (on_fakes_of_cuda or "3000000" in expression)


def test_an_answer_that_is_inferred_says_so() -> None:
    assert "Inferred: the tensors are too large to run on, so it ran on fake tensors, which have no data." in str(
        tp.why("f4[100000, 100000] + 1").text(None)
    )
    with pytest.raises(ExpressionError, match=r"depend on values, and the tensors are too large to run on\."):
        tp.why("nonzero(f4[3000000])")
    if not torch.cuda.is_available():
        derivation = tp.why("F.linear(f4[2, 3], f4[4, 3])", autocast="cuda")
        assert derivation.inferred == "there is no GPU here, so the CPU ran it under the policies of CUDA"
        assert derivation.steps[0].startswith("Autocast has the policy lower_precision_fp for aten::linear: ")
        own = tp.why("mm(f4[2, 2], f4[2, 2])", autocast="cuda", policy=tp.Policy.stock().override({"mm": "fp32"}))
        assert own.dtype is torch.float32
        assert own.steps[0].startswith("Autocast has the policy fp32 for aten::mm (an override): ")


def test_the_steps_go_on_after_a_value_is_read() -> None:
    assert "aten::mean" in tp.why("F.gaussian_nll_loss(f4[2], f4[2], f4[2])").steps[-1]


def test_large_tensors_are_not_allocated() -> None:
    assert tp.why("f4[100000, 100000] @ f4[100000, 100000] + f8[]").shape == (100000, 100000)


def test_a_list_may_be_left_out() -> None:
    assert tp.why("cat(int8[2], float16[2])").steps == tp.why("cat([int8[2], float16[2]])").steps
    assert tp.why("stack(int8[2], float16[2], dim=1)").shape == (2, 2)


UNARY = ("abs", "exp", "sqrt", "sum", "mean", "amax", "sign", "square")
BINARY = ("maximum", "atan2", "mul", "matmul", "floor_divide", "bitwise_and")
SYMBOLS = ("+", "-", "*", "/", "**", "%", "//", "<", "==", "&", "|", "@")
NUMBERS = ("2", "2.5", "True", "1j", "1000", "-3", "1e6")


class Grammar:
    """Random expressions. All tensors with dimensions have the shape [2, 2], so most of them run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tensor(self) -> str:
        return f"{self.random.choice(DTYPES)}[{self.random.choice(['2, 2', '2, 2', ''])}]"

    def operand(self, depth: int) -> str:
        return self.expression(depth - 1) if depth and self.random.random() < 0.4 else self.tensor()

    def expression(self, depth: int = 2) -> str:
        one, two, three = (self.operand(depth) for _ in range(3))
        number, sign = self.random.choice(NUMBERS), self.random.choice(("+", "-", "*", "/"))
        calls = [
            f"({one} {self.random.choice(SYMBOLS)} {two})",
            f"({one} {sign} ({number}))",
            f"({one} < ({number}))",
            f"(({number}) {sign} {one})",
            f"(-{one})",
            f"(~{one})",
            f"where(bool[2, 2], {one}, {two})",
            f"where({one} > 0, {two}, {number})",
            f"cat([{one}, {two}])",
            f"stack([{one}, {two}, {three}])",
            f"addcmul({one}, {two}, {three})",
            f"{self.random.choice(UNARY)}({one})",
            f"{self.random.choice(BINARY)}({one}, {two})",
            f"cumsum({one}, 0)",
            f"clamp({one}, {number})",
            f"{one}.sum(dtype={self.random.choice(DTYPES)})",
            f"sort({one}.flatten())[{self.random.choice('01')}]",
            f"softmax({one}, -1)",
        ]
        return self.random.choice(calls)


@pytest.mark.parametrize("autocast", [None, "cpu"])
@pytest.mark.parametrize("seeds", [range(70), pytest.param(range(70, 3000), marks=pytest.mark.slow)], ids=len)
def test_random_expressions_give_what_pytorch_gives(seeds: range, autocast: str | None) -> None:
    checked = raised = 0
    for seed in seeds:
        expression = Grammar(seed).expression()
        with tp.my_autocast("cpu", enabled=autocast is not None):
            result = run(expression)
        if result == "ZeroDivisionError":  # depends on values that an earlier op computed
            continue
        try:
            derivation = tp.why(expression, autocast=autocast)
        except ExpressionError:
            assert isinstance(result, str), expression
            continue
        assert agree(derivation, result), (expression, str(derivation), result)
        checked += not isinstance(result, str)
        raised += isinstance(result, str)
    assert checked > len(seeds) / 3
    assert raised > len(seeds) / 6


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_steps_end_with_the_dtype(count: int) -> None:
    """The reference names the dtype in the steps; the result comes from PyTorch's fake tensors."""
    checked = 0
    for seed in range(2000, 2000 + count):
        expression = Grammar(seed).expression(1)
        derivation = tp.why(expression)
        if derivation.dtype is None or "sort" in expression:
            continue
        named = re.findall(r"returns (\w+)", " ".join(derivation.steps))
        assert named[-1] == str(derivation.dtype).removeprefix("torch."), str(derivation)
        assert "Report it" not in str(derivation)
        checked += 1
    assert checked > count / 2


class TestAutocast:
    @pytest.mark.parametrize(
        "expression",
        [
            "F.linear(f4[2, 3], f4[4, 3], f4[4]) + f4[4]",
            "f4[2, 3] @ f4[3, 2]",
            "softmax(f4[2, 3], -1)",
            "F.layer_norm(bf16[2, 3], [3])",
            "F.cross_entropy(bf16[2, 3], i8[2])",
            "F.conv2d(f4[1, 1, 4, 4], f4[2, 1, 3, 3])",
            "cat([f4[2], bf16[2]])",
            "2 ** bf16[3]",
            "einsum('ij,jk->ik', f4[2, 3], f4[3, 2])",
            "F.scaled_dot_product_attention(f4[1, 1, 2, 2], f4[1, 1, 2, 2], f4[1, 1, 2, 2])",
        ],
    )
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_on_the_cpu_as_in_a_region(self, expression: str, dtype: str) -> None:
        with tp.my_autocast("cpu", dtype=getattr(torch, dtype)):
            result = run(expression)
        assert agree(tp.why(expression, autocast="cpu", dtype=dtype), result)
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            assert agree(tp.why(expression, autocast="cpu", dtype=dtype), run(expression))

    @pytest.mark.parametrize(
        "expression",
        [
            "F.linear(f4[2, 3], f4[4, 3], f4[4]) + f4[4]",
            "softmax(f2[2, 3], -1)",
            "F.layer_norm(f2[2, 3], [3])",
            "F.cross_entropy(f2[2, 3], i8[2])",
            "cat([f4[2], f2[2]])",
            "2 ** f2[3]",
            "F.normalize(f2[2, 3])",
        ],
    )
    def test_cuda_as_in_a_region_of_pytorchs(self, expression: str) -> None:
        with pretend_cuda(), torch.autocast("cuda"), FakeTensorMode(), torch.device("cuda"):
            result = run(expression)
        assert agree(tp.why(expression, autocast="cuda"), result)

    def test_the_casts(self) -> None:
        assert_expected_inline(
            str(tp.why("linear(f4[2, 3], f4[4, 3]) + f4[4]", autocast="cpu")),
            """\
linear(float32[2, 3], float32[4, 3]) + float32[4], under autocast on cpu with bfloat16
1. Autocast has the policy lower_precision_fp for aten::linear: input (float32[2, 3]) and weight
   (float32[4, 3]) are cast from float32 to bfloat16.
2. aten::linear is a composite op: it calls aten::mm.
3. aten::mm of bfloat16[2, 3] and bfloat16[3, 4] returns bfloat16. It takes operands of one dtype,
   and keeps it.
4. Autocast has no policy for aten::add.Tensor. It runs in the dtypes of its operands.
5. linear(float32[2, 3], float32[4, 3]) is a tensor with dimensions: state dim, bfloat16.
6. float32[4] is a tensor with dimensions: state dim, float32.
7. Both are in state dim, so the two are promoted. The table has float32 for them (row bf, column
   f4).
8. aten::add.Tensor computes in float32 and returns float32.
Result: float32 of shape [2, 4]""",
        )

    def test_a_policy(self) -> None:
        policy = tp.Policy.stock().override({"mm": "fp32", "add": "lower_precision_fp", "matmul": torch.float32})
        derivation = tp.why("f4[2, 2] @ f4[2, 2] + f4[2]", autocast="cpu", policy=policy)
        assert derivation.dtype is torch.bfloat16
        assert "Autocast has the policy lower_precision_fp for aten::add.Tensor (an override)" in str(derivation)

    def test_options_need_a_region(self) -> None:
        with pytest.raises(OptionError, match='pass autocast="cpu"'):
            tp.why("int8[3] + 1", dtype="bf16")
        with pytest.raises(OptionError, match="autocast is a device type or None, got 'tpu'"):
            tp.why("int8[3] + 1", autocast="tpu")


OVERFLOWS = {
    "float16[3] * 1e6": "1000000.0 does not fit float16, whose largest value is 65504, and may become inf.",
    "float32[3] + 1e39": "1e+39 does not fit float32, whose largest value is 3.40282e+38, and becomes inf.",
    "float16[3] < 1e6": "1000000.0 does not fit float16, whose largest value is 65504, and is compared as inf.",
    "float16[3] + 100000": "100000 does not fit float16, whose largest value is 65504, and becomes inf.",
    "float16[3] * float64[]": "A value of float64[] beyond 65504 does not fit float16, and may become inf.",
    "float16[3] - int64[]": "A value of int64[] beyond 65504 does not fit float16, and becomes inf.",
    "uint8[3] + 1000": "1000 does not fit uint8 and wraps to 232.",
    "maximum(uint8[3], int64[])": "A value of int64[] that does not fit uint8 wraps around.",
    **dict.fromkeys(("float16[3] * 65519.0", "bf16[3] * f4[]", "float32[3] * i8[]", "int8[3] + 100"), ""),
}


@pytest.mark.parametrize(("expression", "sentence"), OVERFLOWS.items())
def test_values_that_overflow(expression: str, sentence: str) -> None:
    step = tp.why(expression).steps[-1]
    assert step.endswith(sentence)
    assert sentence or "fit" not in step


@pytest.mark.parametrize("right", ["100000", "float64[]"])
@pytest.mark.parametrize(
    ("op", "left"),
    [("add", -65504.0), ("sub", 65504.0), ("mul", 1e-3), ("true_divide", 65504.0), ("pow", 1.0), ("minimum", 1.0)],
)
def test_an_op_that_overflows_does_as_said(op: str, left: float, right: str) -> None:
    if right == "100000" and op in ("pow", "minimum"):
        return  # raises, or takes no numbers
    said = tp.why(f"{op}(float16[3], {right})").steps[-1]
    other = 100000 if right == "100000" else torch.tensor(1e6, dtype=torch.float64)
    result = getattr(torch, op)(torch.full((3,), left, dtype=torch.float16), other)
    assert ("becomes inf" in said and bool(result.isinf().all())) or "may become inf" in said


class TestWords:
    def test_a_custom_op_is_explained_by_its_fake(self) -> None:
        @torch.library.custom_op("why_tests::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(lambda x: torch.empty_like(x))
        why = tp.why("torch.ops.why_tests.twice(f2[3])")
        assert why.dtype is torch.float16
        assert why.steps == ("The registered fake of why_tests::twice returns float16.",)

    def test_a_reference_that_is_wrong_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(promotion_module._TABLE, (torch.int8, torch.int16), torch.int32)
        why = tp.why("torch.add(i1[3], i2[3])")
        assert why.dtype is torch.int16
        assert why.steps[-1] == "PyTorch itself returns int16: the reference is wrong here. Report it."

    def test_fake_tensors_that_are_wrong_are_not_asked(self) -> None:
        """The kernels decide, as for ldexp, and for `int8[] & 1j` under a default dtype of bfloat16 in 2.15."""
        why = tp.why("ldexp(i8[3], f2[])")
        assert why.dtype is torch.ldexp(torch.ones(3, dtype=torch.int64), torch.ones((), dtype=torch.float16)).dtype
        assert "Report it" not in str(why)

    def test_a_view_as_another_dtype_is_no_plain_view(self) -> None:
        why = tp.why("f4[2].view(int32)")
        assert why.dtype is torch.int32
        assert why.steps == ("aten::view.dtype of float32[2] returns int32. Its dtype argument says so.",)

    def test_a_region_that_is_disabled(self) -> None:
        derivation = tp.why("mm(f4[2,2], f4[2,2])", autocast="cpu", dtype="float32")
        assert derivation.autocast == "under autocast on cpu, which does not support float32: the region is disabled"
        assert derivation.dtype is torch.float32

    def test_a_default_dtype_that_is_none(self) -> None:
        with pytest.raises(DtypeError, match=r"^default_dtype is the dtype of Python floats, got int8\."):
            tp.why("int8[3] + 1", default_dtype="int8")

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
        ("torch.classes.nothing.at_all(f4[2])", "no function of PyTorch is called 'torch.classes.nothing.at_all'."),
        ("f4[2].sofmax(0)", "tensors have no method 'sofmax'. Closest: softmax"),
        ("cumsum(f4[2])", "PyTorch does not take these arguments: cumsum() "),
        ("f4[2] + None", "'None' in 'f4[2] + None' is neither an operand nor a supported operator."),
        ("f4[2] + sort(f4[2])", "+ takes a tensor or a number"),
        ("sort(f4[2])[5]", "sort(float32[2]) has no result number 5."),
        ("cat(*f4[2])", "neither an operand nor a supported operator"),
        ("sum(f4[2], **f4[2])", "write the arguments of sum one by one"),
        ("is_floating_point(f4[2])", "has no operator or function with a tensor operand"),
        ("f33[2] + 1", "'f33' in 'f33[2] + 1' is not a dtype of this PyTorch."),
        ("int32[3] +", "'int32[3] +' is not a valid expression: invalid syntax."),
        ("int32 + 1", "int32 in 'int32 + 1' has no sizes. Write int32[3], or int32[] for a 0-dim tensor."),
        ("int32[-1] + 1", "'-1' in 'int32[-1] + 1' is not a size. Sizes are integers, 0 or more."),
        ("int32[3] < 1 < 2", "chains comparisons, which tensors do not support. Use parentheses and &."),
        ("int8[3] << 2", "is neither an operand nor a supported operator."),
        ("int32[3]", "'int32[3]' has no operator or function with a tensor operand, so nothing is promoted."),
        ("1 / 0 + int8[1]", "Python cannot compute 1 / 0: division by zero."),
        ("9 ** 9 ** 9 + int8[1]", "is too large a number to compute."),
        ("f2[2](1)", "'f2[2]' in 'f2[2](1)' is not the name of a function."),
    ],
)
def test_an_expression_that_cannot_be_explained(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        tp.why(expression)
    assert message in str(raised.value)
    assert ".." not in str(raised.value)


def test_the_parsed_expression_has_pythons_precedence_and_full_names() -> None:
    for written, parsed in (
        ("int8[3]+int64[ ]*2.5**2", "int8[3] + int64[] * 2.5 ** 2"),
        ("-(1+half[2])<(-1)**i1[]", "-(1 + float16[2]) < (-1) ** int8[]"),
        ("cat((torch.double[2],),dim=0).sum(dtype=f2)", "cat((torch.float64[2],), dim=0).sum(dtype=float16)"),
        ("sort(i1[3])[1]", "sort(int8[3])[1]"),
    ):
        assert parse(written).text == parsed


def test_a_derivation_of_two_operators() -> None:
    assert_expected_inline(
        str(tp.why("int8[3] * (uint8[] + int8[]) + 2 * 1.5", default_dtype=torch.float32)),
        """\
int8[3] * (uint8[] + int8[]) + 2 * 1.5
1. uint8[] is a 0-dim tensor: state zero, uint8.
2. int8[] is a 0-dim tensor: state zero, int8.
3. Both are in state zero, so the two are promoted. The table has int16 for them (row u1, column
   i1).
4. + computes in int16 and returns int16.
5. int8[3] is a tensor with dimensions: state dim, int8.
6. (uint8[] + int8[]) is a 0-dim tensor: state zero, int16.
7. dim int8 with zero int16: int16 is not of a higher kind than int8, so int8 stays: a weaker state
   does not widen.
8. * computes in int8 and returns int8. A value of (uint8[] + int8[]) that does not fit int8 wraps
   around.
9. 2 * 1.5 contains no tensor: Python computes 3.0 before PyTorch is called.
10. (int8[3] * (uint8[] + int8[])) is a tensor with dimensions: state dim, int8.
11. 3.0 is a Python float: state wrapped. It counts as the default dtype, float32.
12. dim int8 with wrapped float32: float32 is floating, a higher kind than integral, so the two are
    promoted. The table has float32 for them (row i1, column f4).
13. + computes in float32 and returns float32.
Result: float32 of shape [3]""",
    )


#: The dtype by each rule, of calls for which PyTorch has overloads that take numbers; None: the rule raises.
OF_NUMBERS = {
    "where(bool[3], int32[3], 2.5)": ("float32", "float32", "float64", None, None),
    "where(bool[3], 2.5, int32[3])": ("float32", "float32", "float64", None, None),
    "float16[3].where(bool[3], 1j)": ("complex32", "complex64", "complex64", None, None),
    "where(bool[3], 2.5, 1)": ("float32", "float32", "float64", "float32", "float32"),
    "special.hermite_polynomial_h(2.5, int32[3])": ("float32", "float32", "float64", None, None),
    "special.hermite_polynomial_h(int32[3], 2)": ("float32", "float32", "float64", None, "float32"),
    "dist(int32[3], float32[3])": ("float32", "float32", "float64", None, None),
    "1 - bool[3]": (None, "int64", "int64", None, None),
}


@pytest.mark.parametrize("expression", OF_NUMBERS)
def test_overloads_of_numbers_by_each_rule(expression: str) -> None:
    for rule, dtype in zip(RULE_NAMES, OF_NUMBERS[expression], strict=True):
        derivation = tp.why(expression, rule=rule)
        assert derivation.dtype is (None if dtype is None else getattr(torch, dtype)), (rule, str(derivation))
        assert derivation.by_rule is (dtype is None and rule != "torch")
        assert "wrong" not in str(derivation)


def test_a_derivation_by_jaxs_rule() -> None:
    derivation = tp.why("uint8[3] * (uint64[] + int64[2, 1]) / 3", default_dtype="float64", rule="jax")
    join = "float* is the least node above uint64 and int64 and stands for the default dtype, float64."
    assert derivation.steps[2] == f"In JAX's lattice, {join}"
    assert derivation.steps[3] == "uint64[] and int64[2, 1] are cast to float64."
