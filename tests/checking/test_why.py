"""`why`: results compared with PyTorch's, casts of autocast, values that overflow, rules, and texts.

The random expressions are PyTorch's samples of its ops with other dtypes, and the losses, operators, in-place and out=
calls of a small grammar; under promotion rules and default dtypes, and in regions.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db

import torch_promote as tp
from torch_promote.checking.expression import parse
from torch_promote.checking.why import Derivation
from torch_promote.errors import DtypeError, ExpressionError, OptionError
from torch_promote.parity.model import pretend_cuda
from torch_promote.reference import promotion as promotion_module
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, named_dtype
from torch_promote.reference.promotion_rules import RULE_NAMES

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, of what an expression does


COMMON = "bool uint8 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex32 complex64 complex128"
ODD = "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
NUMBERS = ("2", "2.5", "True", "1j", "1000", "-3", "0")
SYMBOLS = ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=")
BINARY = (
    "add sub mul div maximum fmax atan2 matmul floor_divide bitwise_and remainder pow float_power ldexp copysign eq lt "
    "hypot nextafter logaddexp logical_and xlogy heaviside gcd bitwise_left_shift dot mv mm bmm outer cross igamma"
)
UNARY = "abs exp sqrt sum mean sign neg sigmoid reciprocal floor logical_not bitwise_not isnan angle relu"
LOSSES = (
    "l1_loss mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy poisson_nll_loss kl_div "
    "binary_cross_entropy_with_logits hinge_embedding_loss multilabel_soft_margin_loss cross_entropy pairwise_distance"
)
LOSSES_OF_THREE = "gaussian_nll_loss triplet_margin_loss margin_ranking_loss cosine_embedding_loss"


class Expressions:
    """Makes random expressions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.samples: dict[str, list[Any]] = {}

    def dtype(self) -> str:
        return self.random.choice((COMMON if self.random.random() < 0.93 else ODD).split())

    def tensor(self, shape: str = "") -> str:
        return f"{self.dtype()}[{shape or self.random.choice(['2, 2', '2, 2', '2', '1, 2', ''])}]"

    def operand(self) -> str:
        return self.tensor() if self.random.random() < 0.8 else self.random.choice(NUMBERS)

    def made(self) -> str:
        return self.of_a_sample() if self.random.random() < 0.5 else self.of_the_grammar()

    def of_the_grammar(self) -> str:
        pick = self.random.choice
        a, b, c, x = self.tensor(), self.tensor(), self.tensor(), self.operand()
        if self.random.random() < 0.2:
            b = pick(
                [f"({b} {pick(SYMBOLS)} {self.operand()})", f"torch.{pick(UNARY.split())}({b})", f"(-{b})", f"(~{b})"]
            )
        square = [self.tensor("2, 2") for _ in range(3)]
        forms = [
            f"{a} {pick(SYMBOLS)} {x}",
            f"{x} {pick(SYMBOLS)} {a}",
            f"({a} {pick(SYMBOLS)} {x}) {pick(SYMBOLS)} {b}",
            f"torch.{pick(BINARY.split())}({a}, {x})",
            f"{a}.{pick(BINARY.split())}_({x})",
            f"torch.{pick(BINARY.split())}({a}, {x}, out={c})",
            f"torch.{pick(UNARY.split())}({a}, out={c})",
            f"F.{pick(LOSSES.split())}({', '.join(square[:2])})",
            f"F.{pick(LOSSES_OF_THREE.split())}({', '.join(square[:2])}, {self.tensor(pick(['2, 2', '2']))})",
            f"where({pick(['bool[2, 2]', a])}, {b}, {x})",
            f"clamp({a}, {x}, {b})",
            f"{a}.lerp_({b}, {x})",
            f"{a}.addcmul_({b}, {c})",
            f"cat([{a}, {b}])",
            f"addmm({', '.join(square)})",
            f"F.linear({', '.join(square[:2])}, {self.tensor('2')})",
            f"{a}.copy_({b})",
            f"cumsum({a}, 0, dtype={self.dtype()})",
            f"{b}.sum(dtype={self.dtype()})",
            f"sort({b}.flatten())[{pick('01')}]",
            f"softmax({b}, -1)",
            f"stack([{', '.join(square)}])",
        ]
        return pick(forms)

    def of_a_sample(self) -> str:
        while True:
            op = self.random.choice(op_db)
            name = re.sub(r"^nn\.functional\.", "F.", op.name)
            if name.startswith(("masked.", "_refs", "signal.", "jiterator")) or "._" in name or name[0] == "_":
                continue
            samples = self._samples_of(op)
            if not samples:
                continue
            sample = self.random.choice(samples)
            name = name if "." in name else f"torch.{name}"
            chance = self.random.choice([0.0, 0.2, 0.5, 1.0])
            try:
                first = self._spell(sample.input, chance)
                rest = [self._spell(one, chance) for one in sample.args]
                named = [f"{name}={self._spell(one, chance)}" for name, one in sample.kwargs.items()]
            except TypeError:
                continue
            if not re.match(r"\w+\[", first):
                continue
            draw = self.random.random()
            if draw < 0.15 and op.inplace_variant is not None and hasattr(torch.Tensor, f"{op.name}_"):
                return f"{first}.{op.name}_({', '.join([*rest, *named])})"
            if draw < 0.3 and op.supports_out:
                named.append(f"out={self.dtype()}[{first.partition('[')[2]}")
            return f"{name}({', '.join([first, *rest, *named])})"

    def _samples_of(self, op: Any) -> list[Any]:
        if op.full_name not in self.samples:
            dtype = next((one for one in (torch.float32, torch.int64, torch.bool) if one in op.dtypes), torch.complex64)
            samples = op.sample_inputs("cpu", dtype)
            self.samples[op.full_name] = [one for one, _ in zip(samples, range(8), strict=False)]
        return self.samples[op.full_name]

    def _spell(self, value: Any, chance: float) -> str:
        match value:
            case torch.Tensor() if value.layout is torch.strided and value.numel() <= 200:
                own = str(value.dtype).removeprefix("torch.")
                shape = list(value.shape) if self.random.random() < 0.9 else []
                return f"{self.dtype() if self.random.random() < chance else own}{shape}"
            case list():
                return f"[{', '.join(self._spell(one, chance) for one in value)}]"
            case tuple():
                return f"({''.join(f'{self._spell(one, chance)}, ' for one in value)})"
            case bool() | int() | str() | None | torch.dtype():
                return str(value) if isinstance(value, torch.dtype) else repr(value)
            case float() if math.isfinite(value):
                return repr(value)
        raise TypeError(f"{value!r} has no place in an expression")


TENSOR = re.compile(r"\b(?!math)([a-z]+\d*\w*)\[([\d, ]*)\](?!\()")
NAMES = {
    **vars(torch.nn.functional),
    **{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")},
    **{name: named_dtype(name) for name in f"f4 u1 i1 i8 bf16 half f4 double c4 f2 f8 {COMMON} {ODD}".split()},
    "torch": torch,
    "F": torch.nn.functional,
}


def run(expression: str, fill: float = 1.0) -> Any:
    """What PyTorch returns, or the exception that it raises."""

    def full(shape: tuple[int, ...], name: str) -> torch.Tensor:
        return torch.full(shape, fill).to(named_dtype(name))

    text = TENSOR.sub(lambda match: f"full(({match[2]}{',' * bool(match[2])}), '{match[1]}')", expression)
    try:
        return eval(text, {**NAMES, "full": full})
    except Exception as error:
        return error


def described(result: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    if isinstance(result, torch.Tensor):
        return [(result.dtype, tuple(result.shape))]
    return [pair for one in result for pair in described(one)] if isinstance(result, tuple | list) else []


def one_line(error: Exception) -> str:
    text = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return text.partition(" - got")[0].rstrip(". ")


@contextlib.contextmanager
def regions(options: dict[str, Any]) -> Iterator[None]:
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(options.get("default_dtype", before))
        stack.enter_context(torch.no_grad())
        if "autocast" in options:  # the CPU stands in for CUDA
            on_cuda = options["autocast"] == "cuda"
            dtype = options.get("dtype") or (torch.float16 if on_cuda else torch.bfloat16)
            stack.enter_context(tp.my_autocast("cpu", dtype, policy="cuda" if on_cuda else None))
        stack.enter_context(tp.promotion(options.get("rule", "torch")))
        yield


def drawn(kind: str, draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if kind in ("cpu", "cuda"):
        options["autocast"] = kind
        options |= {"dtype": draw.choice([torch.bfloat16, torch.float16])} if draw.random() < 0.5 else {}
    if kind == "rule" or draw.random() < 0.1:
        options["rule"] = draw.choice(RULE_NAMES)
    if draw.random() < 0.3:
        options["default_dtype"] = draw.choice([torch.float64, torch.bfloat16, torch.float16])
    return options


def wrong(derivation: Derivation, results: list[Any]) -> str | None:
    """What a derivation says that is not so; None if all of it is. `results` has those of several fills."""
    text = " ".join(derivation.text(None).split())
    if "Report it" in text or re.search(r"\(\+|\ba (int|uint8 of)\b", text):
        return "words"
    given = [result for result in results if not isinstance(result, Exception)]
    if given:
        found = derivation.results or ((derivation.dtype, derivation.shape),)
        return None if list(found) == described(given[0]) else f"PyTorch returns {described(given[0])}"
    errors = [one_line(error) for error in results]
    # Others than the fills may be taken, as indices are, or a matrix that has an inverse.
    if derivation.error is None and (len(set(errors)) > 1 or "is singular" in errors[0]):
        return None
    said = str(derivation.error).rstrip(".").replace("autocast on cuda", "autocast on cpu")
    return None if said in errors else f"PyTorch raises {errors[0]}"


def agree(derivation: Derivation, result: Any) -> bool:
    if isinstance(result, Exception):
        return derivation.error is not None
    return list(derivation.results or ((derivation.dtype, derivation.shape),)) == described(result)


#: What the random expressions lack.
CALLS = (
    "torch.cat((int8[2], f4[2], f2[3]), dim=0)",
    "torch.nn.functional.softmax(f2[2, 3], dim=-1, dtype=torch.double)",
    "sort(f2[3])[1] + int8[3]",
    "clamp(u1[3], max=1000)",
    "einsum('ij,jk->ik', f4[2, 3], f4[3, 2])",
    "f4[2, 3].t().half().softmax(0)",
    "arange(3) * f2[3]",
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
            if not (isinstance(result, Exception) and "copy_" in str(result)):
                derivation = tp.why(expression)
                assert agree(derivation, result), (str(derivation), result)
                assert "Report it" not in str(derivation)
    finally:
        torch.set_default_dtype(before)


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


@pytest.mark.parametrize("kind", ["plain", "rule", "cpu", "cuda"])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1500), marks=pytest.mark.slow)], ids=len)
def test_random_expressions(seeds: range, kind: str) -> None:
    checked = raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expressions = Expressions(seeds.start)
        for seed in seeds:
            expression, options = expressions.made(), drawn(kind, random.Random(seed))
            with regions(options), torch.random.fork_rng():
                results = [run(expression, fill) for fill in (1.0, 0.0, 2.0)]
            refusals = " ".join(str(one) for one in results if isinstance(one, Exception))
            if options.get("autocast") == "cuda" and "not implemented for '" in refusals:
                continue  # the CPU has no kernel, which says nothing of CUDA
            try:
                derivation = tp.why(expression, **options)
            except ExpressionError:
                assert all(isinstance(result, Exception) or not described(result) for result in results), expression
                continue
            problem = wrong(derivation, results)
            assert problem is None, f"{expression} {options}: {problem}\n{derivation}"
            named = re.findall(r"returns (\w+)", " ".join(derivation.steps))
            assert derivation.dtype is None or not named or named[-1] == dtype_name(derivation.dtype), str(derivation)
            checked += 1
            raised += derivation.error is not None
    assert checked > len(seeds) / 2
    assert raised > len(seeds) / 10


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
            "F.normalize(f2[2, 3])",
            "einsum('ij,jk->ik', f4[2, 3], f4[3, 2])",
            "F.scaled_dot_product_attention(f4[1, 1, 2, 2], f4[1, 1, 2, 2], f4[1, 1, 2, 2])",
        ],
    )
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_as_in_a_region(self, expression: str, dtype: str) -> None:
        with tp.my_autocast("cpu", dtype=getattr(torch, dtype)):
            result = run(expression)
        assert agree(tp.why(expression, autocast="cpu", dtype=dtype), result)
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            assert agree(tp.why(expression, autocast="cpu", dtype=dtype), run(expression))
        with pretend_cuda(), torch.autocast("cuda", getattr(torch, dtype)), FakeTensorMode(), torch.device("cuda"):
            result = run(expression)
        assert agree(tp.why(expression, autocast="cuda", dtype=dtype), result)

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
