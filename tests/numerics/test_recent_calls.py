"""Calls that lose a number, and what `find_nonfinite` says if it cannot know: see recent_calls.py."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_promote as tp
from torch_promote.numerics import recent_calls
from torch_promote.numerics.find_nonfinite import NonfiniteReport

HALF, BFLOAT16 = torch.float16, torch.bfloat16
LOWEST = torch.finfo(HALF).min
LINEAR = nn.Linear(2, 2)
nn.init.constant_(LINEAR.weight, 0.5)
nn.init.zeros_(LINEAR.bias)


#: The mean of these numbers is no float16.
EXACT = torch.tensor([[1.0, 1 + 2**-10]])


def linear(value: float) -> torch.Tensor:
    """Returns [[value, value]] of `LINEAR`, which a region casts."""
    result: torch.Tensor = LINEAR(torch.full((1, 2), float(value)))
    return result


def min_max(x: torch.Tensor) -> torch.Tensor:
    return (x - x.amin()) / (x.amax() - x.amin() + 1e-8)


def in_place(x: torch.Tensor) -> torch.Tensor:
    width = x - x
    width += 1e-8
    return x.sub(x) / width


def two_masks(x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((1, 2), LOWEST, dtype=x.dtype)
    return (x + (mask + mask)).softmax(-1)


def square_root(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x * x).sum(-1).sqrt().float().sum(), x)[0]


def standardize(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(
        1e-9
    ).sqrt()


def own_softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x.to(HALF))
    return e / e.sum(-1, keepdim=True)


def near(value: float) -> torch.Tensor:
    a, b = linear(value), linear(value * (1 + 2.0**-14))
    return (a - b) / (a - b)


def kernel() -> torch.Tensor:
    """A cost of 0 is lost, too, but the sum of the other row is not finite for want of its own values."""
    k = torch.exp(-20 * torch.stack([1 - linear(1 - 2**-13)[0], 1 + linear(1)[0]]))
    return F.linear(k, torch.ones(1, 2)).reciprocal()


Case = tuple[str, torch.dtype, Callable[[], torch.Tensor], str, str, str, str]
#: The region's dtype, the program, the op that lost the number, how, what the text says, and the op that is not finite.
LOSSES: list[Case] = [
    ("epsilon", HALF, lambda: min_max(linear(1)), "aten::add", "underflow", "other 1e-08 is 0", "div"),
    ("clamp", HALF, lambda: linear(0) / linear(0).clamp_min(1e-9), "aten::clamp_min", "underflow", "1e-09", "div"),
    ("normalize", HALF, lambda: F.normalize(linear(0)), "aten::clamp_min", "underflow", "1e-12 is 0", "div"),
    ("max", BFLOAT16, lambda: (1 - linear(2).clamp(0, 0.9999)).log(), "aten::clamp", "rounding", "max 0.9999", "log"),
    ("sigmoid", HALF, lambda: (1 - linear(9).sigmoid()).log(), "aten::sigmoid", "rounding", "became 1", "log"),
    ("tanh", BFLOAT16, lambda: linear(7).tanh().atanh(), "aten::tanh", "rounding", "2 of 2 values became 1", "atanh"),
    ("masks", HALF, lambda: two_masks(linear(1)), "aten::add", "overflow in the op", "became -inf", "softmax"),
    ("in place", HALF, lambda: in_place(linear(1)), "aten::add_", "underflow", "other 1e-08 is 0", "div"),
    ("squares", HALF, lambda: square_root(linear(1e-4)), "aten::mul", "underflow", "became 0 in float16", "div"),
    ("variance", HALF, lambda: standardize(linear(3)), "aten::add", "underflow", "other 1e-09 is 0", "div"),
    ("cancellation", HALF, lambda: near(1.0), "aten::sub", "rounding", "of aten::linear", "div"),
    ("atan", HALF, lambda: 0 * linear(1e-5).pow(2).reciprocal(), "aten::pow", "underflow", "became 0", "reciprocal"),
    ("kernel", HALF, kernel, "aten::linear", "underflow", "1 of 2 values became 0 in float16", "reciprocal"),
]  # fmt: skip


def find(program: Callable[[], Any], dtype: torch.dtype, **options: Any) -> NonfiniteReport:
    with tp.find_nonfinite() as report, tp.my_autocast("cpu", dtype, **options):
        program()
    return report


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case[0])
def test_the_call_that_lost_a_number_and_its_cure(case: Case) -> None:
    _, dtype, program, op, kind, text, nonfinite = case
    report = find(program, dtype)
    origin = report.origin
    assert origin is not None
    assert origin.nonfinite is not None
    assert (origin.op, origin.kind, origin.nonfinite.op) == (op, kind, f"aten::{nonfinite}")
    assert text in str(origin)
    assert "does not help" not in str(report)
    [attempt] = report.attempts
    overrides = dict(one.split("=") for one in attempt.option.replace("--override ", "").split())
    cured = find(program, dtype, overrides=overrides)
    assert cured.origin is None, str(cured)
    assert not any(one.call.name == origin.call.name for one in report.benign)


@pytest.mark.parametrize(
    ("dtype", "program", "texts"),
    [
        (
            HALF,
            lambda: (1 - linear(9).sigmoid() + 1e-12).log(),
            ["Instead, float32 for aten::sigmoid, forward", "became 1 in"],
        ),
        (BFLOAT16, lambda: (1 - (-linear(2**-9)).exp()).log(), ["torch.log(-torch.expm1(x)) computes the same"]),
        (BFLOAT16, lambda: (linear(2**-9).exp() - 1).log(), ["torch.log(torch.expm1(x)) computes the same"]),
    ],
)
def test_what_else_cures(dtype: torch.dtype, program: Callable[[], Any], texts: list[str]) -> None:
    report = find(program, dtype)
    assert all(text in str(report) for text in texts), str(report)
    assert "logsumexp" not in str(report)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] += -1e6
    return x * 0


@pytest.mark.parametrize(
    ("program", "op", "text"),
    [
        (
            in_rows,
            "aten::add_",
            "other -1e+06 is -inf in float16. In a mask, write -1e4, or torch.finfo(torch.float16).min.",
        ),
        (lambda x: (x - 1_000_000) * 0, "aten::sub", "other 1e+06 is inf in float16. In a mask, write 1e4, or"),
        (
            lambda x: torch.where(x > 0, -1e6, x) * 0,
            "aten::where",
            "self -1e+06 is -inf in float16. In a mask, write -1e4",
        ),
    ],
)
def test_a_number_that_the_dtype_cannot_hold(program: Callable[[torch.Tensor], Any], op: str, text: str) -> None:
    report = find(lambda: program(linear(1)), HALF)
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == (op, "overflow in the op")
    assert text in str(report)


@pytest.mark.parametrize("program", [lambda x: x * 1e5, lambda x: x / 1e-5])
def test_a_number_with_which_the_kernel_computes_as_it_is(program: Callable[[torch.Tensor], Any]) -> None:
    report = find(lambda: program(linear(10)), HALF)
    assert report.origin is not None
    assert report.origin.kind == "overflow in the op"
    assert "in float16" not in " ".join(report.origin.text)


def test_a_mask_that_makes_more_values_infinite_than_in_float32() -> None:
    bias = torch.tensor([-INF, LOWEST, LOWEST, 0.0], dtype=HALF)
    report = find(lambda: (linear(-200)[:, :1] + bias)[:, :3].softmax(-1), HALF)
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == ("aten::add", "overflow in the op")
    assert "2 of 4 values became -inf in float16" in str(report)
    assert "clamp the sum: clamp(min=torch.finfo(dtype).min)" in str(report)
    assert "The inputs are finite" not in str(report)


def test_a_mask_with_infinite_values_is_benign_while_its_rows_have_others() -> None:
    """The sums of two masks, and of scores with them, are -inf in float16, and every row has a finite score."""
    masks = torch.tensor([0.0, LOWEST, LOWEST], dtype=HALF) + torch.tensor([0.0, 0.0, LOWEST], dtype=HALF)
    for lowest in (None, LOWEST):
        report = find(lambda: (linear(-200)[:1, :1] + masks).clamp(lowest, INF).softmax(-1), HALF)  # noqa: B023
        assert (report.origin, {one.kind for one in report.benign}) == (None, {"mask"}), str(report)
    report = find(lambda: (linear(-200)[:1, :1] + masks)[:, 1:].softmax(-1), HALF)
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == ("aten::add", "overflow in the op")
    assert "clamp the sum" in str(report)


def test_conversions_of_the_program_that_cure_together_are_named() -> None:
    """As of covariances that a renderer converts: the determinant of 2 x 2 is 0 in float16."""
    xx, xy, yy = (torch.tensor([1 + number * 2**-10]) for number in (1, 2, 3))
    with tp.find_nonfinite() as report:
        xx, xy, yy = xx.half(), xy.half(), yy.half()
        1 / (xx * yy - xy * xy)
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == ("aten::sub", "rounding")
    assert "to compute what was repeated in float32" in str(report)
    assert re.search(r"Without the program's 3 conversions to float16 \(.*\), that call is finite, too", str(report))


def test_values_that_the_call_does_not_read_are_not_the_reason() -> None:
    """The product of the first and the second is negative in float16 alone, and no angle is made of it."""
    ones = torch.tensor([[0.6, 0.8, 0.02], [0, 0, 0], [1, 0, 0]], requires_grad=True)
    others = torch.tensor([[0, 0, 0], [-0.8, 0.5998, 0.009], [0.99999, 0, 0]])
    report = find(lambda: (ones @ others.t()).diagonal().acos().sum().backward(), HALF)
    assert report.origin is not None
    assert "1 of 9 values became 1 in float16" in str(report), str(report)
    assert "outside of" not in str(report)


def test_without_a_region_the_code_is_to_change() -> None:
    with tp.find_nonfinite() as report:
        own_softmax(torch.full((1, 2), -20.0))
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind, report.attempts) == ("aten::exp", "underflow", [])
    assert "convert its arguments with .float()" in str(report)
    assert "torch.softmax computes the same" in str(report)
    own_softmax(torch.full((1, 2), -20.0).double())


@pytest.mark.parametrize("value", [0.0, 1e-4])
def test_a_backward_that_loses_a_number(value: float) -> None:
    """Its calls keep no results alive: what the call lost is known from its repetition."""
    x = torch.tensor([value], dtype=HALF, requires_grad=True)
    with tp.find_nonfinite() as report:
        x.norm(3).backward()
    if not value:  # PyTorch replaces 0 / 0
        assert not report.found
        return
    origin = report.origin
    assert origin is not None
    assert (origin.op, origin.kind, origin.phase) == ("aten::pow", "underflow", "backward")
    assert origin.why[0].startswith("1 of 1 values became 0 in float16;")
    assert origin.why[1].startswith("Therefore aten::div.Tensor, backward, ")
    assert [(one.min, one.max) for one in origin.outputs] == [(0, 0)]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_of_weights_in_half(foreach: bool) -> None:
    """Adam's eps of 1e-8 is 0 in float16, and so is the moment of a gradient of 0."""
    weight = torch.ones(2, dtype=HALF, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.Adam([weight], foreach=foreach)
    with tp.find_nonfinite() as report:
        optimizer.step()
    assert report.origin is not None
    assert (report.origin.kind, report.origin.phase) == ("underflow", "optimizer")
    assert "add_" in report.origin.op
    assert "1e-08 is 0 in float16." in str(report)
    assert "keep them in float32" in str(report)


def test_an_op_that_loses_a_number_inside() -> None:
    report = find(lambda: F.cosine_similarity(linear(0), linear(0)), HALF)
    assert report.origin is not None
    assert (report.origin.op, report.origin.nonfinite) == ("aten::cosine_similarity", None)
    assert [one.nans for one in report.origin.outputs] == [1]
    assert report.attempts[-1].option == "--override cosine_similarity=fp32"
    assert not find(
        lambda: F.cosine_similarity(linear(0), linear(0)), HALF, overrides={"cosine_similarity": "fp32"}
    ).found


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.ones(1, 2, dtype=torch.bool), -INF)


def padded(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x, dtype=torch.float32).masked_fill_(torch.ones(1, 2, dtype=torch.bool), -INF)
    return (x + mask).softmax(-1)


def gradient(x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x.requires_grad_()
    return torch.autograd.grad(compute(x).sum(), x)[0]


INF, MASK, ROW = float("inf"), torch.zeros(2), "1 of 1 rows are -inf throughout: a mask leaves nothing of them."
TRIED = "in float32: autocast is not the cause"
NOTHING = "no call that its arguments come from ran in a lower dtype: autocast is not the cause"


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (lambda: torch.zeros(2).log(), [NOTHING]),
        (lambda: (linear(1) * 0).log(), [TRIED, "made by aten::mul.Tensor"]),
        (
            lambda: (linear(0) + torch.tensor([0.0, 300.0])).softmax(-1).to(HALF).log(),
            [TRIED, "made by aten::softmax.int", "F.log_softmax computes the same"],
        ),
        (lambda: (F.dropout(linear(1), 1.0) * 0).log(), ["is not known: they cannot all be repeated"]),
        (
            lambda: (2 * torch.full((2,), torch.finfo(BFLOAT16).min, dtype=BFLOAT16)).softmax(-1),
            ["Therefore aten::softmax.int", TRIED],
        ),
        (
            lambda: torch.full((2,), torch.finfo(BFLOAT16).min, dtype=BFLOAT16).mul(1).add(-3e38).softmax(-1),
            ["Therefore aten::softmax.int", "clamp the sum: clamp(min=torch.finfo(dtype).min)"],
        ),
        (lambda: masked(linear(1)).softmax(-1), [ROW, "values were made by aten::masked_fill.Scalar"]),
        (
            lambda: linear(1).index_put_((torch.ones(1, 2) > 0,), torch.tensor(-INF, dtype=HALF)) * 0,
            ["Its infinite values were made by aten::index_put_, forward"],
        ),
        (lambda: padded(linear(1)), [ROW, "Its infinite values were made by aten::masked_fill_.Scalar"]),
        (
            lambda: (linear(1) + MASK.masked_fill(MASK == 0, -INF)[None].mul(2)).softmax(-1),
            [ROW, TRIED, "Its infinite values were made by aten::masked_fill.Scalar"],
        ),
        (
            lambda: MASK.masked_fill(MASK == 0, -INF).softmax(0),
            [NOTHING, "Its infinite values were made by aten::masked_fill.Scalar"],
        ),
        (
            lambda: F.layer_norm(linear(1) + torch.tensor([-INF, 1]), (2,)),
            ["Before it, self of aten::lift_fresh", "check the data"],
        ),
        (lambda: linear(1) * torch.tensor([[0.0, 1.0]]) * -INF, ["It multiplies 0 by inf in 1 places"]),
        (lambda: linear(1) / torch.tensor([0.0, 1.0]), ["The divisor is 0 in 1 of 2 places."]),
        (lambda: 1 / (linear(1) * torch.tensor([0.0, 1.0])), ["The divisor is 0 in 1 of 2 places."]),
        (lambda: linear(1) / torch.zeros(1), ["The divisor is 0 in 1 of 1 places.", NOTHING]),
        (
            lambda: (linear(-1000).float().exp() * torch.ones(2)).sum(-1).log(),
            ["It sums results of exp: torch.logsumexp does not compute that sum."],
        ),
        (  # in float32, the two are equal, too; that one of them alone is not rounded to float16 would hide it
            lambda: (LINEAR(EXACT) - LINEAR(EXACT).to(HALF)) / (LINEAR(EXACT) - LINEAR(EXACT).to(HALF)),
            ["0 is divided by 0 in 2", TRIED],
        ),
        (lambda: (linear(1) * 0) / 0, ["The divisor is 0 in 1 of 1 places, and 0 is divided by 0 in 2"]),
        (lambda: masked(linear(1)) - masked(linear(1)), ["It subtracts inf from inf of the same sign in 2"]),
        (lambda: (linear(1) * 0).pow(-0.5), ["2 numbers are 0, and the exponent is below 0."]),
        (lambda: linear(99).float().exp(), ["exp is inf above 88.72 in float32."]),
        (
            lambda: (linear(1) * 0).log(),
            ["2 of 2 values are on the border of 0 to inf: clamp them, x.clamp(min=eps) with", ", or add a"],
        ),
        (lambda: linear(-1).sqrt(), ["2 of 2 values are outside of 0 to inf: clamp them, x.clamp(min=eps) with"]),
        (lambda: linear(-999).float().exp().log(), ["x, in place of log(exp(x)), computes the same"]),
        (
            lambda: torch._weight_norm(torch.zeros(2, 3), torch.ones(2, 1)) * linear(1)[0, 0],
            ["It divides v by its norm, which is 0 in 2 of 2 places: initialize v otherwise.", NOTHING],
        ),
        (lambda: linear(1)[:, 0].std(), ["It is taken of one value", "correction=0"]),
        (lambda: linear(-1) ** 0.5, ["2 numbers below 0 have no power"]),
        (lambda: linear(1)[:0].mean(), ["An argument has no elements"]),
        (lambda: F.cross_entropy(linear(1), torch.tensor([-100])), ["All 1 targets are -100, which is ignore_index"]),
        (
            lambda: F.cross_entropy(linear(1), torch.tensor([0]), weight=torch.tensor([0.0, 1.0])),
            ["The weights of all 1 targets are 0"],
        ),
        (
            lambda: F.ctc_loss(linear(1).log_softmax(-1), torch.tensor([1, 1]), torch.tensor(1), torch.tensor(2)),
            ["1 of 1 targets, with a blank between equal labels, are longer", "zero_infinity=True"],
        ),
        (lambda: gradient(torch.zeros(2), torch.sqrt), ["The derivative of sqrt is infinite at 0."]),
        (lambda: gradient(torch.ones(2), torch.acos), ["The derivative of acos is infinite at -1 and 1"]),
        (lambda: gradient(torch.zeros(2), lambda x: x**0.5), ["The derivative of pow is infinite at 0"]),
    ],
)
def test_what_is_said_of_mathematics(program: Callable[[], Any], texts: list[str]) -> None:
    report = find(program, HALF)
    assert report.origin is not None
    assert report.origin.kind == ("overflow in the op" if "overflow in the op" in texts else "mathematics")
    assert report.attempts == []
    for text in texts:
        assert text in str(report)
    if {TRIED, NOTHING}.intersection(texts) or "is not known: they" in texts[0]:
        assert all((said in str(report)) == (said in texts) for said in (TRIED, NOTHING))
    assert "another dtype" not in str(report)
    made = re.findall(r"made by (.+)", str(report))
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
@pytest.mark.parametrize(
    ("op", "value"),
    [
        *((op, value) for op in (torch.acos, torch.asin, torch.atanh) for value in (-1.0, 1.0, 2.0)),
        *((torch.acosh, 1.0), (torch.log1p, -1.0), (torch.log, 0.0), (torch.log, -1.0), (torch.sqrt, -1.0)),
    ],
)
def test_the_clamp_that_is_advised_makes_an_op_and_its_derivative_finite(
    op: Callable[[torch.Tensor], torch.Tensor], value: float, dtype: torch.dtype
) -> None:
    x = torch.full((2,), value, dtype=dtype, requires_grad=True)
    said = str(find(lambda: op(x).sum().backward(), BFLOAT16))
    code = re.search(r"(x\.clamp\(.+?\)) with eps = (torch\.finfo\(x\.dtype\)\.eps)", said)
    assert code is not None, said
    assert ("add a small number" in said) == (value == 0)  # beyond 1, acos has no values
    x.grad, names = None, {"x": x, "torch": torch}
    result = op(eval(code[1], names | {"eps": eval(code[2], names)}))
    result.sum().backward()
    assert result.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("batches", [1, 2])  # autograd adds the second one's gradients without a call
@pytest.mark.parametrize("lower", [True, False])
def test_what_a_backward_before_it_has_lost_is_not_known(batches: int, lower: bool) -> None:
    model = nn.Linear(4, 4)
    with tp.find_nonfinite(model) as report:
        for _ in range(batches):
            with torch.autocast("cpu", HALF, enabled=lower):
                loss = model(torch.ones(2, 4)).float().sum() * (1e-9 if lower else 0.0)
            loss.backward()
        assert model.weight.grad is not None
        model.weight.grad.div_(model.weight.grad.norm())
    text = " ".join(str(report).split())
    assert report.origin is not None
    assert report.origin.call.op == "aten::div_"
    assert ("its calls are not repeated here" in text) is lower, text
    assert ("autocast is not the cause" in text) is not lower, text
    assert ("values became 0 in float16" in text) is lower, text


def test_what_was_written_to_since_is_not_repeated() -> None:
    eps = torch.full((2,), 1e-3, dtype=HALF)

    def program() -> None:
        x = linear(1e-5) * eps
        eps.zero_()
        linear(0) / x

    report = find(program, HALF)
    assert "is not known" in str(report)
    assert "does not help" not in str(report)


def test_an_error_while_calls_are_repeated_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(recent_calls.RecentCalls, "find_loss", fails)
    report = find(lambda: min_max(linear(1)), HALF)
    assert report.origin is not None
    assert "The calls before it could not be repeated: 'a bug of ours'." in str(report)


def test_results_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_calls, "MOST_BYTES", 4 * 1000)

    def held() -> int:
        gc.collect()
        return sum(not one.expired() for one in references)

    references: list[StorageWeakRef] = []
    with tp.find_nonfinite() as report:
        for _ in range(20):
            result = torch.ones(100) + 1
            references.append(StorageWeakRef(result.untyped_storage()))
            del result
        assert held() < 12
        torch.zeros(2) / torch.zeros(2)
        assert report.found
        assert held() == 0
    assert held() == 0


#: 1.0078125 squared, less 1.0078125: both are bfloat16 numbers, the square is none.
EPS = 2**-7 + 2**-14


@pytest.mark.parametrize(
    ("compute", "op", "domain"),
    [
        (lambda x: (x * x - x - EPS).sqrt(), "aten::sub", "0 to inf"),
        (lambda x: (1 - (x * x - x - EPS) * 1000).acos(), "aten::rsub", "-1 to 1"),
    ],
)
def test_values_for_which_an_op_is_not_defined_are_named(
    compute: Callable[[torch.Tensor], torch.Tensor], op: str, domain: str
) -> None:
    """A variance below 0 and a cosine above 1: the origin is the first call that made such a number."""
    x = torch.tensor([1.0078125, 1.0078125], dtype=torch.bfloat16)
    with tp.find_nonfinite() as report, tp.my_autocast("cpu", torch.bfloat16):
        compute(x)
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == (op, "rounding")
    assert any(f" of 2 values are outside of {domain} in bfloat16: from " in line for line in report.origin.why)
    assert report.attempts
