"""`find_nonfinite`: which call is at fault, which values are benign, its options, and the overrides to try."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import re
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.counted_collectives import counted_collective
from torch_promote import _C
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.errors import NonfiniteError, OptionError
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite
from torch_promote.numerics.nonfinite_finder import WatchedCall
from torch_promote.numerics.recent_calls import RecentCalls
from torch_promote.reading.trace import trace
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import installed

INF, NAN, HALF = float("inf"), float("nan"), torch.float16


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """Checks that a block leaves no observer, hook or policy."""

    def state() -> tuple[Any, ...]:
        modules = torch.nn.modules.module
        key = torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY)
        return (
            len(modules._global_forward_hooks),
            len(modules._global_forward_pre_hooks),
            torch._C._dispatch_tls_is_dispatch_key_included(key),
            default_policy(),
            installed(),
        )

    before = state()
    yield
    assert state() == before


def find(program: Callable[[], Any], **options: Any) -> NonfiniteReport:
    with find_nonfinite(**options) as report:
        program()
    return report


def origin_of(program: Callable[[], Any]) -> tuple[str, str, str] | None:
    origin = find(program).origin
    return None if origin is None else (origin.op, origin.inner, origin.kind)


def big(value: float, dtype: torch.dtype = torch.float32, width: int = 4) -> Tensor:
    return torch.full((width, width), value, dtype=dtype)


def in_half(function: Callable[[], Any]) -> Callable[[], Any]:
    def program() -> Any:
        with tp.my_autocast("cpu", HALF):
            return function()

    return program


# --- random programs with a planted fault


@dataclass(frozen=True)
class Fault:
    """A planted fault: what the module computes besides its result, the expected report, and its number of attempts."""

    run: Callable[[Tensor], Any]
    op: str
    kind: str
    phase: str = "forward"
    attempts: int = 0


def backward_of_mm(x: Tensor) -> None:
    weight = big(10.0, width=8).requires_grad_()
    torch.autograd.grad((torch.mm(weight, weight).float() * 1e4).sum(), weight)


OP, CAST, MATHS = "overflow in the op", "overflow in a cast", "mathematics"
FAULTS = {
    "log": Fault(lambda x: torch.log(x.float() * 0), "aten::log", MATHS),
    "div": Fault(lambda x: torch.div(torch.ones(2), torch.zeros(2)), "aten::div", MATHS),
    "masked rows": Fault(lambda x: torch.softmax(big(-INF), -1), "aten::softmax", MATHS),
    "inf - inf": Fault(lambda x: torch.sub(big(-INF), big(-INF)), "aten::sub", MATHS),
    "mm": Fault(lambda x: torch.mm(big(200.0), big(200.0)), "aten::mm", OP, attempts=2),
    "linear": Fault(lambda x: nn.functional.linear(big(200.0), big(200.0)), "aten::linear", OP, attempts=2),
    "conv": Fault(
        lambda x: nn.functional.conv1d(big(200.0)[None], big(200.0)[..., None]), "aten::conv1d", OP, attempts=2
    ),
    "exp": Fault(lambda x: torch.exp(big(12.0, HALF)), "aten::exp", OP, attempts=2),
    "mul_": Fault(lambda x: big(300.0, HALF).mul_(300.0), "aten::mul_", OP),
    "masked": Fault(
        lambda x: torch.mul(torch.where(torch.eye(4) > 0, -INF, big(300.0)).half(), big(300.0, HALF)).relu(),
        "aten::mul",
        OP,
        attempts=2,
    ),
    "cast of autocast": Fault(lambda x: torch.mm(big(1e6), big(1e-6)), "aten::mm", CAST, attempts=2),
    "to": Fault(lambda x: big(-1e6).to(HALF), "aten::to", CAST),
    "copy_": Fault(lambda x: big(0.0, HALF).copy_(big(1e6)), "aten::copy_", CAST),
    "backward of mm": Fault(backward_of_mm, "aten::mm", OP, "backward", attempts=2),
    "backward of root": Fault(
        lambda x: (torch.zeros(2, requires_grad=True).sqrt() * 0).sum().backward(), "aten::div", MATHS, "backward"
    ),
}


class Faulty(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.fault.run(x)
        return x


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


LAYERS = [lambda: nn.Linear(8, 8), nn.GELU, lambda: nn.LayerNorm(8), lambda: nn.Softmax(-1), lambda: nn.Dropout(0.2)]


def check_program(seed: int, name: str | None) -> None:
    """Runs a tree of modules with a fault at a random depth, under a region of ours or of PyTorch."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    fault = FAULTS[name or choose.choice(list(FAULTS))]
    planted = model = Faulty(fault)
    for _ in range(choose.randint(1, 4)):
        around: list[nn.Module] = [choose.choice(LAYERS)() for _ in range(choose.randint(0, 3))]  # type: ignore[operator]
        around.insert(choose.randint(0, len(around)), model)
        model = nn.Sequential(*around) if choose.random() < 0.7 else Residual(model)  # type: ignore[assignment]
    whole = nn.Sequential(nn.Linear(8, 8), model, nn.LayerNorm(8))
    path = next(name for name, module in whole.named_modules() if module is planted)
    x, region = torch.randn(2, 5, 8), choose.choice([tp.my_autocast, torch.autocast])
    dtype = HALF if fault.kind.startswith("overflow") or choose.random() < 0.5 else torch.bfloat16

    def step() -> Tensor:
        with region("cpu", dtype):
            loss: Tensor = whole(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    report = find(step, model=whole)
    origin = report.origin
    assert origin is not None
    assert (origin.op, origin.module, origin.phase, origin.kind) == (fault.op, path, fault.phase, fault.kind)
    assert "test_find_nonfinite.py:" in origin.line
    assert len(report.attempts) == fault.attempts, str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_the_origin_is_exact(name: str) -> None:
    check_program(list(FAULTS).index(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_the_origin_is_exact_in_random_programs(seed: int) -> None:
    check_program(seed, None)


# --- faults


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            in_half(lambda: nn.functional.linear(big(200.0), big(200.0), torch.ones(4))),
            ("aten::linear", "aten::addmm", OP),
        ),
        (in_half(lambda: torch.mm(big(1.0), big(1e6))), ("aten::mm", "aten::_to_copy", CAST)),
        (lambda: torch.tensor([1.0, NAN]) * 2, ("aten::mul", "aten::mul.Tensor", "data")),
        (lambda: torch.zeros(2, dtype=torch.complex64).log(), ("aten::log", "aten::log", MATHS)),
        (lambda: torch.tensor([-1.0, 1.0]).to_sparse().log1p(), ("aten::log1p", "aten::log1p", MATHS)),
        (lambda: torch.log(torch.zeros(2)).to_sparse(), ("aten::log", "aten::log", MATHS)),
        (lambda: torch.full((2,), NAN), ("aten::full", "aten::full", MATHS)),
        (lambda: big(1.0).masked_fill(torch.eye(4) > 0, NAN), ("aten::masked_fill", "aten::masked_fill.Scalar", MATHS)),
        (lambda: torch.empty(3).fill_(NAN), ("aten::fill_", "aten::fill_.Scalar", MATHS)),
    ],
)
def test_faults(program: Callable[[], Any], expected: tuple[str, str, str]) -> None:
    found = origin_of(program)
    assert found is not None
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert found[1].partition(".")[0] == expected[1].partition(".")[0]


def test_a_cast_from_before_the_block() -> None:
    weight = big(1e6).requires_grad_()
    with tp.my_autocast("cpu", HALF):
        torch.mm(big(0.0), weight)
        origin = find(lambda: torch.mm(big(1.0), weight)).origin
    assert origin is not None
    assert (origin.op, origin.kind, origin.argument) == ("aten::mm", CAST, "mat2")


# --- benign values


@pytest.mark.parametrize(
    "make",
    [
        lambda: big(0.0).masked_fill_(torch.eye(4) > 0, -INF),
        lambda: torch.where(torch.eye(4) > 0, -INF, 0.0),
        lambda: torch.full((2,), -INF).exp(),
        lambda: torch.full_like(torch.ones(2), INF).neg(),
        lambda: big(1.0).fill_(-INF).triu(1).add(1),
        lambda: nn.functional.pad(big(1.0), (1, 1), value=-INF).softmax(-1),
        lambda: big(1.0).clamp(max=INF),
        lambda: torch.full((2, 2), torch.finfo(torch.float32).min).triu(1).half().softmax(-1),
        lambda: (big(-100.0, HALF) + big(torch.finfo(HALF).min, HALF).triu(1)).softmax(-1),
        lambda: nn.Transformer.generate_square_subsequent_mask(3).softmax(-1),
        lambda: big(1.0).scatter(1, torch.zeros(4, 1, dtype=torch.int64), -INF),
        lambda: big(1.0).index_fill(0, torch.tensor([1]), -INF).amax(1),
        lambda: torch.tensor([1.0, NAN]).nan_to_num(),
        lambda: torch.fmax(torch.tensor([NAN, 1.0]), torch.tensor([INF, 2.0])),
        lambda: torch.zeros(2, 2).to_sparse().coalesce().log1p(),
        lambda: torch.empty(3).copy_(torch.ones(3)),
    ],
)
def test_masks_and_data_are_no_fault(make: Callable[[], Tensor]) -> None:
    report = find(make)
    assert not report.found, str(report)


def test_infinite_values_that_are_only_converted_to_integers() -> None:
    def bucket(position: Tensor) -> Tensor:
        large = (torch.log(position.float() / 8) / 2.77 * 8).to(torch.int64)
        return torch.where(position < 8, position, large.clamp(max=15))

    positions = torch.arange(20)
    report = find(lambda: (bucket(positions), bucket(positions)))
    assert not report.found, str(report)
    assert [(one.kind, one.op, one.count) for one in report.benign] == [("integers", "aten::log", 2)]
    # Only some of the values are converted.
    assert origin_of(lambda: [log := torch.log(torch.zeros(2)), log.long()][0].sum()) is not None
    assert origin_of(lambda: (bucket(positions), torch.zeros(2).log())) is not None
    assert origin_of(lambda: torch.log(torch.zeros(2)).relu()) is not None


def repaired_rows(y: Tensor) -> Tensor:
    """A softmax whose masked row becomes 0."""
    mask = torch.eye(4)[:1] == 0
    return y.masked_fill(mask.t() & (y == y), -INF).softmax(-1).nan_to_num()


def repaired_in_place(y: Tensor) -> Tensor:
    z = (y * 0).detach() / (y * 0).detach()
    z[z.isnan()] = 0
    return z + y


def where_twice(y: Tensor) -> Tensor:
    positive = y * 0 > 0
    return torch.where(positive, 1 / torch.where(positive, y * 0, 1.0), 0.0)


@pytest.mark.parametrize(
    "compute",
    [
        repaired_rows,
        repaired_in_place,
        where_twice,
        lambda y: y + torch.where(y > 9, 1 / (y.detach() * 0), 0.0),
        lambda y: y + (1 / (y.detach() * 0).abs()).clamp(max=1e4),
        lambda y: y + (y.detach() * 0 / 0).nan_to_num(),
        lambda y: (y - 9).relu() ** 0.5,
    ],
)
def test_what_the_program_replaces_is_benign(compute: Callable[[Tensor], Tensor]) -> None:
    for raises in (False, True) if compute is where_twice else (False,):
        report, gradient = backward_of(compute, raise_at_first=raises)
        assert gradient.isfinite().all()
        assert not report.found, str(report)


def marked(index: Any) -> Tensor:
    y = torch.arange(16.0).view(4, 4)
    y[index] = NAN
    return y


@pytest.mark.parametrize("index", [slice(None, None, 3), 1, torch.eye(4) > 0])
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda z, y: (z[~y.isnan()] - y[~y.isnan()]).square().mean(), False),
        (lambda z, y: z.sum() * torch.nanmean((z.detach() - y).square()), False),
        (lambda z, y: ((z - y.nan_to_num()) ** 2).mean(), False),
        (lambda z, y: torch.where(y.isnan(), 0.0, z.detach() - y).mean() + z.mean(), False),
        (lambda z, y: z.sum() * y[2, 0].item() + y[~y.isnan()].mean(), False),
        (lambda z, y: ((z - y) ** 2).mean(), True),
        (lambda z, y: (z[:, :1] - y[~y.isnan()][:4]).mean() + (z - y).mean(), True),
        (lambda z, y: torch.where(y.isnan(), 0.0, (z - y) ** 2).mean(), True),  # the backward multiplies 0 by NaN
    ],
)
def test_a_nan_that_the_program_writes(loss: Callable[[Tensor, Tensor], Tensor], found: bool, index: Any) -> None:
    """It marks what a selection leaves out. In data that the program loads, a NaN is an alarm."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], 0.1)

    def program() -> None:
        y = marked(index)
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(loss(weight * 2, y))
            losses[-1].backward()
            optimizer.step()

    losses: list[Tensor] = []
    report = find(program)
    assert report.found == found, str(report)
    assert bool(losses[-1].isfinite() and weight.isfinite().all()) != found
    if report.origin is not None:
        assert "The program itself passes NaN." in str(report)


def test_a_call_is_not_the_origin_and_benign() -> None:
    """The first division by 0 gets into a sum, those of later steps are replaced."""
    report = find(lambda: [f(torch.zeros(2) / torch.zeros(2)) for f in (torch.sum, torch.nan_to_num) for _ in range(2)])
    assert report.origin is not None
    assert report.origin.op == "aten::div"
    assert report.benign == []


def test_values_that_every_step_replaces_cost_few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(RecentCalls, "find_loss", lambda *args: looks.append(args) or ("told",))
    report = find(lambda: [(torch.zeros(2) / torch.zeros(2)).nan_to_num() for _ in range(420)])
    assert not report.found
    assert len(looks) == 3
    assert [(one.kind, one.count) for one in report.benign] == [("replaced", 420)]
    report = find(lambda: [torch.zeros(2) / torch.zeros(2) for _ in range(100)])
    assert report.found
    assert report.checked < 100  # it stops


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: [z := x / x, z.nan_to_num(), z * 2], ("aten::div", "forward")),
        (lambda x: (x / x).sum().item(), ("aten::div", "forward")),
        (lambda x: torch.where(x > 0, 1 / x, 0.0).sum().backward(), ("aten::reciprocal", "forward")),
        (lambda x: torch.where(x > 0, x / x, 0.0).sum().backward(), ("aten::div", "backward")),
        (lambda x: (x * 1).log().clamp(min=-100).sum().backward(), ("aten::div", "backward")),
    ],
)
def test_what_another_call_uses_is_found(program: Callable[[Tensor], Any], expected: tuple[str, str]) -> None:
    """torch.where around a division does not help: its backward multiplies the infinite derivative by 0."""
    origin = find(lambda: program(torch.zeros(3, requires_grad=True))).origin
    assert origin is not None
    assert (origin.op, origin.phase) == expected


LOWEST = torch.full((4, 4), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.matmul(LOWEST, torch.ones(4, 4)),
        lambda: nn.functional.linear(torch.ones(4, 4), torch.ones(4, 4), LOWEST[0]),
    ],
)
def test_autocast_casts_the_lowest_number(call: Callable[[], Any]) -> None:
    """It stands for -inf in masks. Other numbers of that size are a fault."""
    report = find(in_half(call))
    assert (report.origin, {one.kind for one in report.benign}) == (None, {"mask"})
    assert origin_of(in_half(lambda: torch.matmul(LOWEST / 4, torch.ones(4, 4)))) == (
        "aten::matmul",
        "aten::_to_copy",
        CAST,
    )


# --- GradScaler


def scaled(make: Callable[[Tensor], Tensor], x: Tensor) -> tuple[str, str] | None:
    """The phase and the kind of the origin in a backward of a loss that is scaled by 2."""

    def program() -> None:
        torch.amp.GradScaler("cpu", init_scale=2.0).scale(make(x.requires_grad_()).float().sum()).backward()

    origin = find(program).origin
    return None if origin is None else (origin.phase, origin.kind)


def test_what_the_scale_excuses() -> None:
    infinite = big(INF)
    for make, x, expected in (
        (lambda x: x * 6e4, big(0.0, HALF), None),  # fits without the scale
        (lambda x: x * 1e5, big(0.0, HALF), ("backward", OP)),
        (torch.sqrt, big(0.0), ("backward", MATHS)),
        (lambda x: torch.where(big(0.0) > 0, x * infinite, x), big(1.0), ("backward", MATHS)),
    ):
        assert scaled(make, x) == expected  # type: ignore[arg-type]


def test_a_fault_after_a_step_that_the_scaler_skipped() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with trace(), find_nonfinite() as report:
        scaler.scale((weight * 2.0**30).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [one.kind for one in report.benign] == ["GradScaler"]
        assert not report.found
        _ = big(INF) - big(INF)
    assert report.origin is not None
    assert report.origin.op == "aten::sub"


def test_collectives_are_not_repeated() -> None:
    """So it is unknown whether a gradient would fit without the scale."""

    class Gathers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return op(gradient)  # type: ignore[no-any-return]

    with counted_collective() as (op, calls):
        name = "_dtensor::counted_by_tests"
        assert origin_of(lambda: op(big(4e4, HALF))) == (name, name, OP)
        assert scaled(lambda x: Gathers.apply(x) * 3e4, big(0.0, HALF)) == ("backward", OP)  # type: ignore[no-untyped-call]
        assert calls == [HALF, HALF]


# --- whole models


class Masked(nn.Module):
    """A transformer with a causal mask of -inf, padding, and attention with masks of the lowest number."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        padding = torch.zeros(x.shape[:2]).masked_fill(torch.arange(length) == length - 1, -torch.inf)
        x = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        x = x + self.attention(x, x, x, attn_mask=causal, need_weights=True)[0]
        lowest = (1 - torch.ones(length, length).tril()) * torch.finfo(torch.float32).min
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=lowest)
        scores = (x @ x.transpose(1, 2)).masked_fill(causal < 0, torch.finfo(torch.float16).min) + causal
        return self.out(scores.softmax(-1).to(x.dtype) @ x)


def gpt() -> tuple[nn.Module, Tensor]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        from gpt.model import GPT, Config
    finally:
        sys.path.pop(0)
    return GPT(Config(symbols=20, context=16, width=32)), torch.randint(0, 20, (4, 16))


#: What the everyday run leaves out of `test_training_is_clean_and_has_the_same_bits`.
OTHERS = ((HALF, None), (torch.bfloat16, 2.0**30))


def conv() -> tuple[nn.Module, Tensor]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 5))
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(HALF, 2.0**30), (torch.bfloat16, None), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
)
@pytest.mark.parametrize("make", [gpt, conv, lambda: (Masked(), torch.randn(3, 6, 16))])
def test_training_is_clean_and_has_the_same_bits(
    make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype, scale: float | None
) -> None:
    """Gradients that are infinite only because of the scale are benign."""

    def train() -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(1)
        model, x = make()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with tp.my_autocast("cpu", dtype):
                y = checkpoint(model, x, use_reentrant=False).flatten(0, -2)
                loss = nn.functional.cross_entropy(y, torch.arange(len(y)) % y.shape[-1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return model, [*losses, *model.parameters()]

    with find_nonfinite() as report:
        results = train()[1]
    assert not report.found, str(report)
    assert report.checked > 50
    skipped = [one for one in report.benign if one.kind == "GradScaler"]
    assert bool(skipped) == (scale is not None and dtype is HALF)
    assert all(one.scaled == one.unscaled * one.scale for one in skipped if one.unscaled)
    assert all(torch.equal(a, b) for a, b in zip(results, train()[1], strict=True))


def test_tensors_of_every_kind_can_be_checked() -> None:
    def program() -> None:
        torch.ones(3, dtype=torch.complex64).exp()
        torch.eye(3).to_sparse().mul(2)
        torch.ones(0).exp()
        torch.ones(2, device="meta").exp_()
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).exp()
        torch.vmap(torch.exp)(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="size"):
            torch.vmap(lambda x: torch.mm(x, x))(torch.ones(2, 3, 4))
        torch.func.grad(lambda x: x.exp().sum())(torch.ones(2))
        with torch.inference_mode():
            torch.ones(2).exp_()

    report = find(program)
    assert not report.found
    assert report.checked


# --- options, and the report


def test_raise_at_first() -> None:
    after = []

    def program() -> None:
        torch.log(torch.zeros(2))
        after.append(1)

    with pytest.raises(NonfiniteError, match=r"mathematics: aten::log") as caught:
        find(program, raise_at_first=True)
    assert not after
    assert caught.value.origin.line.endswith(f":{program.__code__.co_firstlineno + 1}")
    assert isinstance(caught.value, ArithmeticError)
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(NonfiniteError, match="backward") as caught:
        find(lambda: (x.sqrt() * 0).sum().backward(), raise_at_first=True)
    assert caught.value.origin.node == "SqrtBackward0"


@pytest.mark.parametrize("name", ["log", "aten::log", "0", "test_find_nonfinite.py:{line}"])
def test_allow(name: str) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    model = nn.Sequential(Log())
    line = Log.forward.__code__.co_firstlineno + 1
    report = find(lambda: model(torch.zeros(2)).exp(), model=model, allow=(name.format(line=line),))
    assert not report.found, str(report)
    assert [one.kind for one in report.benign] == ["allowed"]
    assert find(lambda: model(torch.zeros(2)), model=model, allow=("exp", "1", "test_find_nonfinite.py:1")).found


@pytest.mark.parametrize(
    "options", [{"allow": "log"}, {"allow": [1]}, {"allow": 3}, {"allow": [""]}, {"model": "model"}], ids=str
)
def test_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        find(lambda: None, **options)


def test_errors_in_the_block_and_references() -> None:
    def program() -> None:
        x, y = torch.ones(4).mul_(3), torch.mm(big(300.0, HALF), big(300.0, HALF))
        references = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [reference() for reference in references] == [None, None]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        find(program)


def test_random_numbers_are_those_of_the_program() -> None:
    def program() -> Tensor:
        torch.manual_seed(0)
        with tp.my_autocast("cpu", HALF):
            nn.functional.dropout(big(60000.0, HALF), 0.5)
        return torch.rand(2)

    with find_nonfinite() as report:
        found = program()
    assert report.found
    assert torch.equal(found, program())


def test_other_observers_and_other_threads() -> None:
    with trace(values=True) as outer:
        assert origin_of(lambda: torch.log(torch.zeros(1))) == ("aten::log", "aten::log", MATHS)
    assert [outer.values_of(call)[0].infs for call in outer.calls.where(op="log")] == [1.0]
    with find_nonfinite() as report:
        with trace() as inner, crosscheck():
            torch.log(torch.zeros(1))
        assert report.found
    assert len(inner.calls.where(op="log")) == 1
    with find_nonfinite() as report:
        thread = threading.Thread(target=lambda: torch.log(torch.zeros(1)))
        thread.start()
        thread.join()
    assert not report.found
    assert "Threads started in the block: 1" in " ".join(str(report).split())
    assert report.content().verdict.endswith("; threads that were not checked: 1")
    unused = find(lambda: nn.Linear(2, 2)(torch.ones(1, 2)), model=nn.Linear(2, 2))
    assert unused.not_seen[0].startswith("The given model was not called in the block")


def test_lists_with_float8() -> None:
    copies = [torch.zeros(2, dtype=HALF), torch.zeros(2).to(torch.float8_e4m3fn)]
    with find_nonfinite() as report:
        torch._foreach_copy_(copies, [torch.full((2,), INF, dtype=HALF), torch.ones(2, dtype=HALF)])
    assert copies[1].float().tolist() == [1, 1]
    assert not report.found


def test_files_pickles_and_copies(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def program() -> None:
        model(torch.ones(1, 2)).masked_fill(torch.ones(1, 2, dtype=torch.bool), -INF)
        torch.mm(big(300.0), big(300.0))

    report = find(in_half(program), model=model)
    report.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["origin"]["op"] == "aten::mm"
    assert data["origin"]["inputs"][0]["max"] == 300.0
    assert [one["kind"] for one in data["benign"]] == ["mask"]
    with pytest.raises(OptionError, match=r"cannot save the .*nowhere"):
        report.save(tmp_path / "nowhere" / "nan.json")
    with pytest.raises(OptionError, match=r"json.load reads .*report.json"):
        NonfiniteReport.load(tmp_path / "report.json")
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again.to_dict() == report.to_dict()
        assert (str(again), again.text()) == (str(report), report.text())
        assert again.attempts == report.attempts
        assert report.attempts
    assert "no inf or nan" in str(find(lambda: torch.ones(2).exp())).lower()


# --- what to try


class Body(nn.Module):
    """Two linear layers; the weights of `head` are so large that its result does not fit into float16."""

    def __init__(self, *, head: float = 2e4, body: float = 1.0) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.body.weight, body)
        nn.init.constant_(self.head.weight, head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


HEAD = 'tp.set_module_policy(model, {"head": {"linear": "fp32"}})'
EVERYWHERE = 'tp.my_autocast(..., overrides={"linear": "fp32"})'


def test_the_attempts_run_and_the_narrowest_comes_first() -> None:
    model = Body()

    def step(**options: Any) -> None:
        with tp.my_autocast("cpu", HALF, **options):
            model(torch.ones(1, 4))

    report = find(step, model=model)
    module, region = report.attempts
    ops = ("aten::linear.default",)
    assert (module.code, module.option, module.ops) == (HEAD, "", ops)
    assert (region.code, region.option, region.ops) == (EVERYWHERE, "--override linear=fp32", ops)
    assert str(report).endswith(f"to try: {HEAD}\nto try: {EVERYWHERE}")
    assert f"  {HEAD}\n  {EVERYWHERE}" in report.text()
    assert [one["code"] for one in report.to_dict()["attempts"]] == [HEAD, EVERYWHERE]
    assert not find(lambda: step(overrides={"linear": "fp32"})).found
    exec(module.code, {"tp": tp, "model": model})
    assert not find(step).found
    tp.remove_module_policy(model)


@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_in_a_region_has_policies_of_its_own(inside: bool) -> None:
    model = Body(head=400.0)

    def step(**options: Any) -> None:
        x = torch.full((1, 4), 2.0**-8, requires_grad=True)
        with tp.my_autocast("cpu", HALF, **options):
            loss = model(x).sum() * 400
            if inside:
                torch.autograd.grad(loss, x)
        if not inside:
            loss.backward()

    report = find(step, model=model)
    assert report.origin is not None
    assert (report.origin.op, report.origin.phase) == ("aten::mm", "backward")
    both = {"mm.default": "fp32", "linear": "fp32"} if inside else {"linear": "fp32"}
    options = " ".join(f"--override {name}=fp32" for name in both)
    assert report.attempts[-1].option == options
    assert len(report.attempts) == 2 - inside  # a module's policy ends with its forward
    assert find(lambda: step(overrides={"linear": "fp32"}), model=model).found == inside
    assert not find(lambda: step(overrides=both), model=model).found


@pytest.mark.parametrize("is_backward", [False, True])
def test_no_override_is_advised_for_a_call_outside_of_regions(is_backward: bool) -> None:
    x = big(6e4, HALF).requires_grad_()

    def step() -> None:
        if is_backward:
            (x[0, 0] * 2**-10 * 1e3).backward(torch.tensor(60000.0, dtype=HALF))
        else:
            x * 2

    report = find(step)
    assert report.origin is not None
    assert report.attempts == []
    assert "to try" not in str(report)
    assert ("convert the arguments of the op there" in report.origin.why[-2]) == is_backward
    assert report.origin.why[-2].startswith("No region was open")
    assert report.origin.why[-1].endswith("it is too large for float16.")


def test_advice_for_a_module_outside_of_the_model() -> None:
    """Its path is that of no module of the model: only the override everywhere is one to try."""

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    model = nn.Linear(4, 4)
    report = find(in_half(lambda: Loss()(model(big(1.0)) + 200)))
    assert report.origin is not None
    assert (report.origin.module, len(report.attempts)) == ("Loss", 1)
    assert "No region was open" not in str(report)
    assert "No region was open" in str(find(lambda: big(200.0, HALF) @ big(200.0, HALF)))


# --- steps that GradScaler skips


def scaled_training(model: nn.Module, **options: Any) -> Callable[[], None]:
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-6), torch.amp.GradScaler("cpu", **options)

    def step() -> None:
        optimizer.zero_grad()
        with tp.my_autocast("cpu", HALF):
            loss = model(torch.ones(1, 4)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def test_steps_that_the_scaler_skips() -> None:
    step = scaled_training(Body(head=100.0), init_scale=2.0**16)
    report = find(lambda: [step() for _ in range(3)])
    scaler = report.scaler
    assert (scaler.count, scaler.skipped, scaler.last_skipped) == (3, 3, 2)
    assert (scaler.first_scale, scaler.scale) == (2.0**16, 2.0**13)
    first, what, *rest = str(report).splitlines()
    assert first.startswith("GradScaler skipped all 3 steps, which changed no weight; otherwise no inf or NaN")
    assert what.startswith("skipped steps: ")
    assert not any("skipped steps" in one for one in rest)  # one paragraph
    assert "and lowered the scale, which was 65,536 at first and is 8,192 now." in what
    assert "In the last of them, the first overflow was in aten::mm, backward, head, " in what
    assert (
        "is 100 without the scale, so it fits with 512 or less. The scale is that low after 4 more skipped steps: run "
        "longer, or start there: GradScaler(init_scale=512)." in what
    )
    assert what.endswith(f"To keep a high scale, try the op in float32: {HEAD}.")
    assert "Steps that GradScaler skipped" in report.text()
    assert "to try: " not in str(report)  # there is no origin


@pytest.mark.parametrize("overrides", [{}, {"linear": "fp32"}])
def test_the_advice_for_a_skipped_step_is_no_policy_in_force(overrides: dict[str, Any]) -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(4, 3))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**30), torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with tp.my_autocast("cpu", HALF, overrides=overrides):
            loss = nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    report = find(step)
    if overrides:  # nothing runs in float16
        assert (report.scaler.skipped, report.attempts) == (0, [])
        return
    assert report.scaler.never_stepped
    assert report.attempts[0].code == HEAD
    assert not any("cross_entropy" in one.code for one in report.attempts)


@pytest.mark.parametrize(("scale", "dtype", "zeros"), [(1e-9, HALF, 4), (1.0, HALF, 0), (1e-9, torch.bfloat16, 0)])
def test_gradients_that_become_zero(scale: float, dtype: torch.dtype, zeros: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with tp.my_autocast("cpu", dtype):
            loss = model(torch.ones(2, 4)).float().sum() * scale
        loss.backward()
        optimizer.step()

    report = find(step)
    data = report.to_dict()
    assert not report.found
    if not zeros:
        assert (data["vanished"], data["zero_gradients"]) == ([], None)
        return
    assert data["zero_gradients"] == [0, zeros, 4]
    first, *rest = str(report).splitlines()
    assert first.startswith(
        "gradients of 4 of 4 parameters are all 0 in step 0, because values became 0 in float16; no inf or NaN"
    )
    assert any(one.startswith("zeros: aten::_to_copy, backward, (model), ") for one in rest)
    assert any("GradScaler" in one for one in rest)


@pytest.mark.parametrize("skips", [True, False])
def test_an_optimizer_that_steps_with_gradients_that_the_scaler_refused(skips: bool) -> None:
    body = Body(head=100.0)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**16), torch.optim.AdamW(body.parameters(), 0.1)

    def step() -> None:
        with tp.my_autocast("cpu", HALF):
            loss = body(torch.ones(1, 4)).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(body.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not skips:
            optimizer.step()
        optimizer.zero_grad()

    report = find(lambda: [step() for _ in range(3)])
    assert report.found is not skips
    if report.origin is not None:
        assert (report.origin.kind, report.origin.phase, report.attempts) == ("optimizer step", "optimizer", [])
        assert "scaler.step(optimizer) skips such a step" in str(report)


@pytest.mark.parametrize(
    ("unscale", "found"),
    [
        (lambda gradient, scale: gradient, True),
        (lambda gradient, scale: gradient.abs() * 2, True),
        (lambda gradient, scale: gradient / scale, False),
        (lambda gradient, scale: gradient * (1 / scale), False),
    ],
)
def test_a_penalty_on_scaled_gradients(unscale: Callable[[Tensor, float], Tensor], found: bool) -> None:
    """If it is divided by the scale, GradScaler skips the step, as after any overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)

    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        out = (weight * x).half().float().sum()
        (gradient,) = torch.autograd.grad(scaler.scale(out), x, create_graph=True)
        loss = (unscale(gradient, scaler.get_scale()).norm() - 1) ** 2 + out
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    report = find(lambda: [step() for _ in range(2)])
    assert report.found == found, str(report)
    assert report.attempts == []
    if report.origin is None:
        assert (report.scaler.skipped, report.scaler.count) == (1, 2)
        return
    assert (report.origin.op, report.origin.kind, report.origin.phase) == (
        "aten::_to_copy",
        "scaled gradient",
        "backward",
    )
    assert "6.554e+04 with the scale 65536, 1 without." in str(report)
    assert "Divide such gradients by scaler.get_scale()" in str(report)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("unscales", "enabled"), [(False, True), (True, True), (False, False)])
def test_clipping_of_scaled_gradients(unscales: bool, enabled: bool, foreach: bool) -> None:
    body = Body(head=1.0)
    scaler, optimizer = torch.amp.GradScaler("cpu", enabled=enabled), torch.optim.SGD(body.parameters(), 0.1)

    def step() -> None:
        scaler.scale(body(torch.ones(1, 4)).mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(body.parameters(), 1.0, foreach=foreach)
        scaler.step(optimizer)
        scaler.update()

    report = find(lambda: [step() for _ in range(2)])
    assert not report.found
    is_wrong = enabled and not unscales
    assert str(report).startswith("Gradients were clipped while they were scaled, ") == is_wrong
    assert ("call scaler.unscale_(optimizer) before; otherwise" in report.content().verdict) == is_wrong
    assert (report.to_dict()["clipped"] is not None) == is_wrong


@pytest.mark.parametrize(
    ("steps", "options", "counts", "verdict", "advice"),
    [
        (0, {}, (0, 0, 0), "no inf or NaN", ""),
        (2, {"enabled": False}, (0, 0, 0), "no inf or NaN", ""),
        (2, {"init_scale": 2.0}, (2, 0, 0), "no inf or NaN", ""),
        (
            1,
            {"init_scale": 2.0**16},
            (1, 1, 0),
            "GradScaler skipped the only step, which",
            "after 6 more skipped steps",
        ),
        (9, {"init_scale": 2.0**16}, (9, 7, 0), "GradScaler skipped 7 of 9 steps; ", "this is normal until the scale"),
        (
            20,
            {"init_scale": 2.0**9, "growth_interval": 3},
            (20, 5, 5),
            "GradScaler skipped 5 of 20 steps; ",
            "5 of these steps came after the scale had grown, as it does after 3 good steps.",
        ),
    ],
)
def test_counts_and_advice_of_skipped_steps(
    steps: int, options: dict[str, Any], counts: tuple[int, ...], verdict: str, advice: str
) -> None:
    step = scaled_training(Body(head=100.0), **options)
    report = find(lambda: [step() for _ in range(steps)])
    assert (report.scaler.count, report.scaler.skipped, report.scaler.after_growth) == counts
    assert report.content().verdict.startswith(verdict)
    assert advice in str(report)
    assert ("skipped steps: " in str(report)) == bool(advice)


def backward_of(
    compute: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> tuple[NonfiniteReport, torch.Tensor]:
    """What `find_nonfinite` says of a forward and a backward, and the gradient of a weight."""
    layer = nn.Linear(4, 4)
    with find_nonfinite(**options) as report:
        with tp.my_autocast("cpu", torch.bfloat16):
            result = compute(layer(torch.ones(4, 4)))
        result.float().sum().backward()
    assert layer.weight.grad is not None
    return report, layer.weight.grad


@pytest.mark.parametrize(
    "compute",
    [
        lambda y: (y - y).norm(dim=1),
        lambda y: (y - y).norm(p=3),
        lambda y: y.std(0),
        lambda y: nn.functional.normalize(y - y),
        lambda y: nn.functional.cosine_similarity(y - y, y),
        lambda y: torch.sinc(y - y),
        lambda y: torch.atan2(y - y, y - y),
        lambda y: torch.xlogy(y - y, (y - y).detach()),
    ],
)
def test_what_a_backward_replaces_itself_is_benign(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    report, gradient = backward_of(compute, raise_at_first=True)
    assert gradient.isfinite().all()
    assert not report.found, str(report)
    assert "replaced" in {one.kind for one in report.benign}


@pytest.mark.parametrize(
    "compute", [lambda y: torch.hypot(y - y, y - y), lambda y: (y - y).sqrt(), lambda y: (y - y).abs().pow(0.5)]
)
def test_what_a_backward_does_not_replace_is_found(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    report, gradient = backward_of(compute)
    assert not gradient.isfinite().all()
    assert report.origin is not None
    assert report.origin.phase == "backward"


# --- gradients in which GradScaler's scale still is, and backwards that the program computes with


def critic(last: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    with torch.no_grad():
        for one in (model[0], model[2]):
            one.weight.mul_(last)
    return model


def gradient_of(model: Callable[[Tensor], Tensor], scale: Callable[[Tensor], Tensor] = lambda one: one) -> Tensor:
    x = torch.randn(8, 16).requires_grad_()
    out = model(x)
    (found,) = torch.autograd.grad(scale(out.float().sum()), x, create_graph=True)
    return found


@pytest.mark.parametrize(("inside", "options"), [(True, " --override mm.default=fp32"), (False, "")])
def test_a_number_that_the_inner_backward_of_a_penalty_lost(inside: bool, options: str) -> None:
    """What a backward with `create_graph` computes in float16 is followed, although the penalty is in float32."""

    def step() -> None:
        with tp.my_autocast("cpu", HALF, enabled=inside):
            of = model if inside else tp.my_autocast("cpu", HALF)(model)
            norm = gradient_of(of).square().sum(1).sqrt()
        (norm - 1).square().mean().backward()

    model = critic(last=1e-4)
    report = find(step)
    assert report.origin is not None, str(report)
    assert (report.origin.kind, report.origin.op, report.origin.phase) == ("underflow", "aten::mm", "backward")
    assert report.origin.nonfinite is not None
    assert report.origin.nonfinite.op == "aten::div"
    assert report.attempts[-1].option == f"--override linear=fp32{options}"  # that of mm acts in a region
    with tp.my_autocast("cpu", HALF, overrides={"linear": "fp32", "mm": "fp32"}):  # which cures it
        assert bool((gradient_of(model).square().sum(1).sqrt() > 0).all())


@pytest.mark.parametrize("how", ["divided", "of a loss without a scale", "scaled"])
def test_a_penalty_of_gradients_that_are_scaled(how: str) -> None:
    def step() -> None:
        scaler.scale(model(torch.ones(2, 16)).mean()).backward()  # whose gradients the penalty does not use
        with tp.my_autocast("cpu", HALF):
            gradient = gradient_of(model, *[scaler.scale] * (how != "of a loss without a scale"))
            if how == "divided":
                gradient = gradient * (1.0 / scaler.get_scale())
            loss = (gradient.norm(dim=1) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = critic()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(model.parameters(), 1e-3)
    report = find(step)
    data = report.to_dict()
    if how != "scaled":
        assert data["undivided"] is None, str(report)
        return
    assert data["undivided"]["op"] == "aten::linalg_vector_norm", str(report)
    said = " computes with gradients of a loss that GradScaler has scaled: divide them by scaler.get_scale() before"
    assert said in report.content().verdict
    assert report.attempts == []
    assert NonfiniteReport.from_dict(json.loads(json.dumps(data))).to_dict() == data


@pytest.mark.parametrize("unscales", [True, False])
def test_gradients_that_are_clipped_by_value_while_they_are_scaled(unscales: bool) -> None:
    model = critic()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(model.parameters(), 1e-3)

    def step(foreach: bool) -> None:
        with tp.my_autocast("cpu", HALF):
            loss = model(torch.ones(4, 16)).square().mean()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5, foreach=foreach)
        scaler.step(optimizer)
        scaler.update()

    for foreach in (False, True):
        report = find(functools.partial(step, foreach))
        assert (report.to_dict()["clipped"] is None) == unscales, str(report)


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_with_gradients_of_a_loss_that_is_not_scaled(clips: bool) -> None:
    """The second of two optimizers steps between the scaled backward and the step of the first."""
    models = critic(), critic()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizers = [torch.optim.SGD(one.parameters(), 1e-3) for one in models]

    def step() -> None:
        scaler.scale(models[0](torch.ones(4, 16)).square().mean()).backward()
        models[1](torch.ones(4, 16)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        optimizers[1].step()
        scaler.step(optimizers[0])
        scaler.update()

    data = find(lambda: [step() for _ in range(2)]).to_dict()
    assert (data["stepped_scaled"], data["clipped"]) == (None, None)


@pytest.mark.parametrize("how", ["bare", "scaler", "fused", "disabled", "unscaled"])
def test_a_step_with_gradients_that_are_scaled(how: str) -> None:
    model = critic()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=how != "disabled")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=how == "fused")

    def step() -> None:
        with tp.my_autocast("cpu", HALF):
            loss = model(torch.ones(4, 16)).square().mean()
        scaler.scale(loss).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        if how in ("scaler", "fused"):
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    report = find(step)
    found = report.to_dict()["stepped_scaled"]
    if how != "bare":
        assert found is None, str(report)
        return
    name, line, scale = found
    assert (name, scale) == ("SGD", 64.0)
    assert line.startswith(__file__)
    said = report.content().verdict
    assert said.startswith("SGD stepped with gradients that GradScaler had multiplied by 64, ")
    assert "in place of optimizer.step(); otherwise no inf or NaN" in said


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["cleared", "zeros", "added", "updated", "divided", "another"])
def test_a_scaled_backward_after_unscale(how: str, fused: bool) -> None:
    """Each gradient is 1 or their sum is 2, without a scale; a step of a rate of 1 subtracts it."""
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step() -> None:
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if how == "updated":
            scaler.update()
        if how not in ("added", "another"):
            optimizer.zero_grad(set_to_none=how != "zeros")
        scaler.scale((other if how == "another" else weight).sum()).backward()
        if how == "divided":
            weight.grad.div_(scaler.get_scale())  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()

    def run(tool: Callable[[], Any]) -> tuple[Any, bool]:
        with torch.no_grad():
            weight.fill_(1.0)
        optimizer.zero_grad()
        with tool() as report:
            step()
        return report, float((1 - weight.detach()).max()) > 2

    found, is_wrong = run(find_nonfinite)
    traced, _ = run(tp.trace)
    said = "SGD stepped with gradients that GradScaler had multiplied by 64, "
    assert is_wrong == (how in ("cleared", "zeros", "added"))
    for report in (found, traced):
        assert report.content().verdict.startswith(said) == is_wrong, str(report)
        assert ("Call scaler.update() before a backward that makes new gradients" in str(report.content())) == is_wrong
    assert NonfiniteReport.from_dict(json.loads(json.dumps(found.to_dict()))).to_dict() == found.to_dict()
    assert found.to_dict()["stepped_scaled"] is None


def own_clip(parameters: list[nn.Parameter], reads: bool) -> None:
    norm = torch.stack([one.grad.norm() for one in parameters if one.grad is not None]).norm()
    factor = 1e-3 / (norm.item() + 1e-6) if reads else (1e-3 / norm).clamp(max=1.0)
    for one in parameters:
        one.grad *= factor  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("how", "clipped"),
    [
        ("nothing", False),
        ("unscaled", False),
        ("divided", False),
        ("mask", False),
        ("a number", False),  # nothing tells where a number comes from
        ("tensor", True),
    ],
)
def test_gradients_that_a_program_clips_itself(how: str, clipped: bool) -> None:
    parameters = [*critic().parameters()]
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(parameters, 1e-3)

    def step() -> None:
        scaler.scale(sum(one.square().mean() for one in parameters)).backward()  # type: ignore[arg-type]
        gradients = [one.grad for one in parameters if one.grad is not None]
        if how == "unscaled":
            scaler.unscale_(optimizer)
        for gradient in gradients:
            gradient.mul_(0.37 if how == "nothing" else (gradient != 0).float() if how == "mask" else 1.0)
            gradient.div_(scaler.get_scale() if how == "divided" else 2)
        if how not in ("nothing", "mask"):
            own_clip(parameters, how != "tensor")
        else:
            torch.stack([one.norm() for one in gradients]).sum().item()
        optimizer.step() if how == "divided" else scaler.step(optimizer)
        None if how == "divided" else scaler.update()

    report = find(step)
    said = "Gradients were multiplied by a factor that is computed from them while they were scaled, "
    assert report.content().verdict.startswith(said) == clipped, str(report)
    assert report.to_dict()["stepped_scaled"] is None


def sum_of(*losses: Tensor) -> Tensor:
    return torch.stack(losses).sum()


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        (lambda scaler, a, b: sum_of(a, b), 2),
        (lambda scaler, a, b: sum_of(100 * a, scaler.scale(b)), 0),  # not known of both
        (lambda scaler, a, b: scaler.scale(sum_of(a, b)), 0),
        (lambda scaler, a, b: scaler.scale(a) + scaler.scale(b), 0),
        (lambda scaler, a, b: scaler.scale(sum_of(a, b)) / 4, 0),
        (lambda scaler, a, b: sum_of(a, b) * scaler.get_scale(), 0),
        (lambda scaler, a, b: [scaler.scale(a).backward(), b][1], 1),
    ],
)
def test_gradients_of_a_loss_that_no_scale_has_multiplied(loss: Callable[..., Tensor], plain: int) -> None:
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(parameters, 1e-3)
    scaler.scale(torch.ones(()))

    def step() -> None:
        optimizer.zero_grad()
        loss(scaler, *(one.square().mean() for one in parameters)).backward()
        scaler.step(optimizer)
        scaler.update()

    report = find(lambda: [step() for _ in range(2)])
    data = report.to_dict()
    said = f"GradScaler divides {plain} of 2 gradients"
    assert report.content().verdict.startswith(f"{said} by 64, ") == bool(plain), str(report)
    assert NonfiniteReport.from_dict(json.loads(json.dumps(data))).to_dict() == data


class TruncatedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x.clamp(-15, 5))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.exp(x.clamp(-15, 15))


def test_a_call_of_a_backward_that_overflows_whatever_the_scale() -> None:
    """What it reads comes from the forward: a lower scale does not help."""
    linear = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step() -> None:
        with tp.my_autocast("cpu", HALF):
            loss = TruncatedExp.apply(linear(torch.ones(2, 4)) + 13.0).float().mean()
        scaler.scale(loss).backward()

    report = find(step)
    assert report.origin is not None, str(report)
    assert (report.origin.kind, report.origin.op, report.origin.phase) == (
        "overflow in the op",
        "aten::exp",
        "backward",
    )
    assert "autograd.Function TruncatedExp" in report.origin.why[-1]
    assert "torch.amp.custom_bwd" in report.origin.why[-1]
    assert not report.benign


def test_the_step_of_an_origin_in_an_optimizer_is_the_one_that_runs() -> None:
    weight = nn.Parameter(torch.full((4,), 0.5, dtype=HALF))
    optimizer = torch.optim.Adam([weight], 1e-2, foreach=False)

    def step() -> None:
        (weight.float() * 1e-5).sum().backward()
        optimizer.step()

    report = find(step)
    assert report.origin is not None
    assert (report.origin.phase, report.origin.step) == ("optimizer", 0)
    assert "An optimizer computes in the dtype of the weights: keep them in float32." in report.origin.why


def test_the_calls_of_a_closure_are_of_the_step_that_calls_it() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([weight], max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (weight * (0 if len(steps) > 1 else 1)).log().sum()
        loss.backward()
        return loss

    def train() -> None:
        for number in range(3):
            steps.append(number)
            optimizer.step(closure)

    steps: list[int] = []
    report = find(train)
    assert report.origin is not None
    assert (report.origin.op, report.origin.step) == ("aten::log", 1)


@pytest.mark.parametrize("left", [0, 1])
def test_memory_that_is_filled_with_nan_until_the_program_writes_to_all_of_it(left: int) -> None:
    net = nn.Linear(3, 2)

    def program() -> None:
        buffer = torch.full((4, 3), NAN)
        for row in range(4 - left):
            buffer[row] = row
        net(buffer)[: 4 - left].sum().backward()

    report = find(program)
    assert report.found == bool(left)
    if report.origin is not None:
        assert report.origin.why[0] == "The program itself passes NaN."
        assert "They are read by aten::addmm, forward" in report.origin.why[1]


def test_memory_that_nothing_has_written_is_no_gradient_that_became_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: WatchedCall, dtype: torch.dtype | None) -> list[Tensor] | None:
        repeated.append(self.call.op)
        return once_more(self, dtype)

    repeated: list[str] = []
    once_more = WatchedCall.again
    monkeypatch.setattr(WatchedCall, "again", again)
    x = big(1.0, HALF).requires_grad_()
    with tp.trace() as report:
        x.sum().backward()
    assert any("empty" in call.op for call in report.calls.where(phase="backward"))  # for a gradient with strides of 0
    x.grad = None
    find(lambda: x.sum().backward())
    assert repeated
    assert not any("empty" in op for op in repeated)


# --- what a mask, an op inside of another, and equal numbers have to do with it


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_infinite_number_of_a_mask_in_a_loss(smoothing: float) -> None:
    """With label smoothing, a class that is masked has a weight in the loss; without, it has none."""
    weight = nn.Parameter(torch.ones(4, 4))
    mask, target = torch.tensor([False, False, True, False]), torch.tensor([0, 1])

    def step() -> None:
        logits = (torch.ones(2, 4) @ weight).masked_fill(mask, -INF)
        nn.functional.cross_entropy(logits, target, label_smoothing=smoothing).backward()

    report = find(step)
    assert [one.kind for one in report.benign][:1] == ["mask"]
    if not smoothing:
        assert report.origin is None, str(report)
        return
    assert report.origin is not None
    assert (report.origin.kind, report.attempts) == ("mathematics", [])
    assert "aten::masked_fill.Scalar, forward, " in report.origin.why[0]
    assert find(step, allow=["masked_fill"]).origin is None


def test_equal_numbers_that_one_repeated_call_makes_unequal() -> None:
    """The root of the distance of two equal images: float32 for one of the two calls alone is no cure."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3)
    x = torch.randn(1, 1, 8, 8)

    def step() -> None:
        with tp.my_autocast("cpu", torch.bfloat16):
            one, other = conv(x), conv(x)
        (one.float() - other.float()).square().mean().sqrt().backward()

    report = find(step)
    assert report.origin is not None
    assert (report.origin.kind, report.attempts) == ("mathematics", []), str(report)
    assert "The derivative of sqrt is infinite at 0." in str(report)


def test_an_op_inside_of_which_autocast_casts() -> None:
    """Squared distances by products: aten::einsum has no policy, and the product inside of it has one."""
    torch.manual_seed(0)
    codes = 3 + torch.randn(16, 8)
    x = codes[:8].clone().requires_grad_()

    def distances(overrides: dict[str, str]) -> Tensor:
        with tp.my_autocast("cpu", torch.bfloat16, overrides=overrides):
            products = torch.einsum("id,jd->ij", x, codes)
        return (x.square().sum(1)[:, None] + codes.square().sum(1) - 2 * products + 1e-2).sqrt()

    report = find(lambda: distances({}))
    assert report.origin is not None
    assert (report.origin.kind, report.origin.op) == ("rounding", "aten::einsum"), str(report)
    assert [one.option for one in report.attempts] == ["--override einsum=fp32"]
    assert bool(distances({"einsum": "fp32"}).isfinite().all())


def test_what_a_cast_inside_of_a_call_has_saved_for_a_backward_comes_from_the_calls_before() -> None:
    """kl_div casts its target to float32, and the target comes from products in bfloat16."""
    torch.manual_seed(0)
    student = nn.Linear(4, 8)

    def step() -> None:
        with tp.my_autocast("cpu", torch.bfloat16):
            p = nn.functional.softmax(student(torch.randn(4, 4) * 400), -1)
            q = torch.full((4, 8), 0.125).log()
            nn.functional.kl_div(q, p, reduction="batchmean").backward()

    report = find(step)
    assert report.origin is not None
    assert report.origin.kind == "mathematics", str(report)
    assert "no call before it ran in a lower dtype" not in str(report)
    assert "log_target=True" in str(report)


def test_a_step_that_the_scaler_skipped_is_a_step_of_an_origin() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**14), torch.optim.SGD([weight], 0.1)

    def run() -> None:
        for step in range(3):
            loss = (weight.to(HALF) * 100.0).sum() / (1.0 if step < 2 else 0.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    report = find(run)
    assert report.origin is not None
    assert (report.origin.op, report.origin.step) == ("aten::div", 2), str(report)
    assert report.scaler.skipped == 2


def two_optimizers(init_scale: float = 2.0**16) -> Callable[[], None]:
    """A step of a GAN: the critic's gradients fit with a scale of 2 ** 13, the generator's with one of 2 ** 15."""
    critic, generator = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    of_critic, of_generator = torch.optim.SGD([critic], 1e-6), torch.optim.SGD([generator], 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def step() -> None:
        of_critic.zero_grad()
        scaler.scale((critic * generator.detach()).to(HALF).float().sum() * 4).backward()
        scaler.unscale_(of_critic)
        nn.utils.clip_grad_norm_([critic], 1.0)
        scaler.step(of_critic)
        of_generator.zero_grad()
        scaler.scale((critic * generator).to(HALF).float().sum()).backward()
        scaler.step(of_generator)
        scaler.update()

    return step


def test_running_statistics_that_are_nan_at_the_end_are_named() -> None:
    """GradScaler skips the step of a bad batch, and not what its forward has written."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0)
    with tp.find_nonfinite(model) as report:
        for factor in (1.0, 1e6, 1.0):
            with tp.my_autocast("cpu", HALF):
                loss = model(factor * torch.ones(5, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert report.origin is not None
    assert (report.origin.kind, report.origin.step) == ("overflow in a cast", 1)
    told = "NaN was in these buffers at the end: 1.running_mean, 1.running_var."
    assert told in report.text(None)
    assert f"also: {told}" in str(report)
    assert str(NonfiniteReport.from_dict(report.to_dict())) == str(report)


class Unusual(nn.Module):
    """Its method has another signature, its first buffer is None, and its second is not finite from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", None)
        self.register_buffer("table", torch.tensor([1.0, float("nan")]))

    def named_buffers(self) -> Any:  # type: ignore[override]
        raise AssertionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_buffers_of_unusual_modules_end_no_program() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 3), "lazy": nn.LazyBatchNorm1d(), "unusual": Unusual()})
    with tp.find_nonfinite(model) as report, tp.my_autocast("cpu", HALF):
        model["unusual"](model["linear"](1e6 * torch.ones(5, 4)))
    assert report.origin is not None
    assert "NaN was in these buffers at the end: unusual.table." in report.text(None)


def test_a_backward_that_adds_to_gradients_of_a_skipped_step_which_the_program_then_clears() -> None:
    step = two_optimizers()
    report = find(lambda: [step() for _ in range(5)])
    assert not report.found, str(report)
    assert not report.scaler.never_stepped
    assert "not cleared" not in str(report)
    assert [(one.name, one.skipped, one.count) for one in report.scaler.optimizers] == [("SGD", 3, 5), ("SGD", 1, 5)]
    first, second = (f"SGD ({Path(__file__).name}:{one.line.rpartition(':')[2]})" for one in report.scaler.optimizers)
    said = re.sub(r"\((?:[^ ()]*/)?(\w+\.py:\d+)\)", r"(\1)", str(report))
    assert said.startswith(f"GradScaler skipped 3 of 5 steps of {first} and 1 of 5 steps of {second}; otherwise no inf")
    assert "skipped steps: In 3 of 5 updates, the last of them update 2 (from 0), a scaled gradient was not fin" in said
    again = NonfiniteReport.from_dict(report.to_dict())
    assert again.scaler == report.scaler


def test_an_optimizer_that_steps_each_time_that_another_one_is_skipped() -> None:
    step = two_optimizers(init_scale=2.0**15)
    report = find(lambda: [step() for _ in range(2)])
    assert (report.scaler.skipped, report.scaler.count, report.scaler.never_stepped) == (2, 2, False)
    assert "changed no weight" not in str(report)


@pytest.mark.parametrize("how", ["never", "after a step", "sets to none", "zeros"])
def test_gradients_of_a_skipped_step_that_are_not_cleared(how: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**17), torch.optim.SGD([weight], 1e-6)

    def run() -> None:
        for _ in range(5):
            scaler.scale(((weight * 2).to(HALF).float() * torch.tensor([1.0, -1.0, 0.0, 1.0])).sum()).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if how in ("sets to none", "zeros") or (how == "after a step" and scaler.get_scale() >= scale):
                optimizer.zero_grad(set_to_none=how != "zeros")

    report = find(run)
    assert not report.found, str(report)
    is_wrong = how in ("never", "after a step")
    assert report.scaler.skipped == (5 if is_wrong else 2)
    verdict = report.content().verdict
    if is_wrong:
        assert "The gradients of step 0, which GradScaler skipped, were not cleared before the backward at " in verdict
        assert f"{Path(__file__).name}:" in verdict
        assert (
            "added to them: clear them (optimizer.zero_grad()) after a skipped step, too; GradScaler skipped all 5 "
            in verdict
        )
        for said in ("GradScaler(init_scale", "without the scale, so it fits", "not observed", "first overflow"):
            assert said not in str(report)
        assert report.attempts == []
        assert NonfiniteReport.from_dict(report.to_dict()).content().verdict == verdict
    else:
        assert "not cleared" not in str(report)


def test_gradients_that_are_not_finite_when_the_block_begins() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), NAN)
    report = find(lambda: (weight * 2).sum().backward())
    assert report.origin is not None
    assert report.origin.kind == "data"
    assert [one.nans for one in report.origin.inputs] == [4, 0]


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_gradient_that_is_too_large_for_float16_without_a_scale(scale: float | None) -> None:
    """The report says with which factor of the loss it fits; a loss with that factor has finite gradients."""
    x = torch.ones(2, dtype=HALF, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

    def backward(factor: float) -> NonfiniteReport:
        x.grad = None
        return find(lambda: scaler.scale((x.float() * 2e5).sum() * factor).backward())

    report = backward(1.0)
    assert report.origin is not None
    assert report.origin.kind == "overflow in a cast"
    size = "2e+05" if scale is None else "1e+05"
    assert f"A finite value of self became infinite when it was cast: {size} is too large for float16" in str(report)
    assert "This gradient is 2e+05 without a scale, and fits if the loss is multiplied by 0.25 or less." in str(report)
    assert "It is not known what fits of the results that are computed from it." in str(report)
    assert not backward(0.25 / (scale or 1.0)).found
    assert "This gradient is" not in str(find(lambda: big(1e5).to(HALF)))
    assert "1e+05 is too large for float16" in str(find(lambda: big(1e5).to(HALF)))
