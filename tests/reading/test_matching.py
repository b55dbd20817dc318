"""`diff(match=True)`: two implementations of one model, paired by value."""

from __future__ import annotations

import copy
import gzip
import json
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import port_gpt
import torch_promote as tp
from helpers.ports import BUGS, PORTS, D, H, T, guilty_lines, normal
from torch_promote.cli.program import main
from torch_promote.errors import OptionError
from torch_promote.observe.call import Call
from torch_promote.types import Match, NearMiss


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(model: Callable[..., Tensor], *inputs: Tensor, backward: bool = False) -> Any:
    """Records a forward, perhaps with a backward, from equal random numbers."""
    with tp.trace(values=True) as report:
        torch.manual_seed(3)
        result = model(*inputs)
        if backward:
            result.float().square().mean().backward()
    return report


def compared(one: Callable[..., Tensor], other: Callable[..., Tensor], *inputs: Tensor, **options: bool) -> Match:
    """Pairs the results of two programs."""
    found = record(one, *inputs, **options).diff(record(other, *inputs, **options), match=True)
    assert isinstance(found, Match)
    return found


def matched(model: str, bug: str, backward: bool = False) -> Match:
    return compared(*PORTS[model].models(bug), *PORTS[model].inputs(), backward=backward)


def first_of(found: Match) -> tuple[Call, Call, float]:
    """The two calls of the first difference, and the error between them."""
    first = found.first
    assert first is not None
    assert first.a is not None
    assert first.b is not None
    return first.a, first.b, math.inf if first.relative_l2 is None else first.relative_l2


def is_named(found: NearMiss | None, bug: str) -> bool:
    """Whether one of the two calls is in a line that computes what the bug changes, or in the next one."""
    calls = [] if found is None else [call for call in (found.a, found.b) if call is not None]
    lines = [(Path(file).name, int(line)) for file, _, line in (call.line.rpartition(":") for call in calls)]
    return any((file, line + off) in guilty_lines(bug) for file, line in lines for off in (-1, 0, 1))


# --- the twelve models

CASES = [(model, bug) for model, port in PORTS.items() for bug in port.bugs]
EVERYDAY = [("gpt", "mask"), ("llama", "eps"), ("llama", "base"), ("bert", "norm_order"), ("moe", "transposed")]


@pytest.mark.parametrize("model", PORTS)
def test_equal_ports_are_equal(model: str) -> None:
    found = matched(model, "")
    assert found.outputs_match, str(found)
    assert (found.first, found.near, bool(found)) == (None, [], False)
    assert found.matched > 0.2
    marked = {rows[i][0] for rows, wrong in zip(found.sides.rows, found.sides.wrong, strict=True) for i in wrong}
    assert "new_zeros" not in marked  # the first state of a loop, which a right call reads
    assert "(running_mean, running_var), as B has none of their size." in found.evidence[0] or model != "conv"
    assert [name for name, other in found.weights.items() if other is None and "running" not in name] == []


@pytest.mark.parametrize(("model", "bug"), EVERYDAY)
def test_the_call_that_differs_is_named(model: str, bug: str) -> None:
    found = matched(model, bug)
    assert not found.outputs_match
    assert is_named(found.first, bug), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_nine_in_ten_planted_bugs_are_named(backward: bool) -> None:
    assert {bug for _, bug in CASES} >= set(BUGS)
    assert len(CASES) > 110
    unnamed = []
    for model, bug in CASES:
        found = matched(model, bug, backward)
        if found.outputs_match or not is_named(found.first, bug):
            unnamed.append((model, bug, found.answer))
    assert len(unnamed) <= 0.1 * len(CASES), unnamed


@pytest.mark.slow
@pytest.mark.parametrize("model", PORTS)
def test_a_training_of_an_equal_port_is_equal(model: str) -> None:
    inputs, reports = PORTS[model].inputs(), []
    for implementation in PORTS[model].models(""):
        optimizer = torch.optim.AdamW(implementation.parameters(), 1e-3)
        with tp.trace(values=True) as report:
            for _ in range(3):
                torch.manual_seed(3)
                implementation(*inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                implementation(*inputs)
        reports.append(report)
    found = reports[0].diff(reports[1], match=True)
    assert found.outputs_match, str(found)
    assert sum(line.startswith("Loss") for line in found.evidence) == 3
    assert any("gradient" in line for line in found.evidence)


@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_a_port_in_bfloat16_is_compared_by_its_rounding(model: str) -> None:
    one, other = PORTS[model].models("")
    inputs = PORTS[model].inputs()
    with torch.autocast("cpu", torch.bfloat16):
        low = record(other, *inputs)
    found = record(one, *inputs).diff(low, match=True)
    assert found.outputs_match, str(found)
    assert found.tolerance >= 0.05
    assert "The rounding of bfloat16 may hide a difference that float32 shows." in found.answer
    assert not record(one, *inputs).diff(low, match=True, tolerance=1e-5).outputs_match


def test_a_gradient_that_differs_alone_is_told() -> None:
    x, weight, head = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8)

    class Model(nn.Module):
        def __init__(self, detaches: bool) -> None:
            super().__init__()
            self.weight, self.head, self.detaches = nn.Parameter(weight.clone()), nn.Parameter(head.clone()), detaches

        def forward(self, x: Tensor) -> Tensor:
            h = (x @ self.weight).tanh()
            return (h * (h.detach() if self.detaches else h)) @ self.head

    assert compared(Model(False), Model(False), x, backward=True).outputs_match
    found = compared(Model(False), Model(True), x, backward=True)
    assert not found.outputs_match
    assert "gradient of weight in step 0" in " ".join(found.evidence)


# --- pairs

Program: TypeAlias = Callable[[Tensor], Tensor]
IDS = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(0))
X, TABLE, BASE, WIDE = normal(30, D), normal(50, D, seed=3), normal(D, D, seed=4), normal(D, 3 * D, seed=5)
DOWN, UP = normal(D, 4, seed=6), normal(4, D, seed=7)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x).relu(), self.k(x).tanh(), self.v(x).sigmoid()], -1)


class Fused(nn.Module):
    def __init__(self, split: Split, how: str) -> None:
        super().__init__()
        self.how = how
        weights = [getattr(split, name).weight for name in "qkv"]
        biases = [getattr(split, name).bias for name in "qkv"]
        weight, bias = torch.cat(weights).detach().clone(), torch.cat(biases).detach().clone()
        if how == "interleaved":
            weight = torch.stack([one.view(H, -1, D) for one in weights], 1).flatten(0, 2).detach().clone()
            bias = torch.stack([one.view(H, -1) for one in biases], 1).flatten().detach().clone()
        self.weight = nn.Parameter(weight.t().contiguous() if how == "transposed" else weight)
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.how == "transposed" else self.weight.t()
        y = x @ weight + self.bias
        cuts: dict[str, Callable[[], Iterable[Tensor]]] = {
            "slices": lambda: (y[..., :D], y[..., D : 2 * D], y[..., 2 * D :]),
            "interleaved": lambda: y.view(*x.shape[:2], H, 3, D // H).permute(3, 0, 1, 2, 4).flatten(-2),
            "chunk": lambda: y.chunk(3, -1),
            "transposed": lambda: y.tensor_split(3, -1),
        }
        q, k, v = cuts.get(self.how, lambda: y.split(D, -1))()
        return torch.cat([q.relu(), k.tanh(), v.sigmoid()], -1)


@pytest.mark.parametrize(
    ("how", "k"),
    [
        ("split", "weight[32:64]"),
        ("chunk", "weight[32:64]"),
        ("slices", "weight[32:64]"),
        ("transposed", "weight.T[32:64]"),
        ("interleaved", "weight[8:16, 32:40, 56:64, 80:88]"),  # by head, as in GPT-NeoX
    ],
)
def test_parts_and_the_map_of_weights(how: str, k: str) -> None:
    torch.manual_seed(0)
    split = Split()
    fused = Fused(split, how)
    x = torch.randn(2, T, D)
    found = compared(split, fused, x)
    assert found.outputs_match
    assert found.matched == 1.0, str(found)
    assert found.weights["k.weight"] == k
    assert found.weights["k.bias"] == k.replace(".T", "").replace("weight", "bias")
    assert found.alone == []
    back = compared(fused, split, x)
    assert back.outputs_match
    if how == "split":
        assert back.weights["weight"] == "[0:32] = q.weight, [32:64] = k.weight, [64:96] = v.weight"


def test_weights_in_bfloat16_are_told_by_their_rounding() -> None:
    torch.manual_seed(0)
    split, x = Split(), torch.randn(2, T, D)
    found = record(split, x).diff(record(Fused(split, "split").bfloat16(), x.bfloat16()), match=True)
    assert found.outputs_match, str(found)
    assert (found.weights["k.weight"], found.weights["v.bias"]) == ("weight[32:64]", "bias[64:96]")


def test_weights_without_a_counterpart_are_told() -> None:
    torch.manual_seed(0)
    one, other = nn.Sequential(nn.Linear(D, D)), nn.Sequential(nn.Linear(D, D))
    found = compared(one, other, torch.ones(2, D))
    assert found.weights == {"0.weight": None, "0.bias": None}
    assert found.alone == ["0.weight", "0.bias"]


def merged(scale: float) -> Program:
    weight = BASE + scale * DOWN @ UP
    return lambda x: (x.sin() @ weight).relu()


def adapted(x: Tensor) -> Tensor:
    h = x.sin()
    return (h @ BASE + 2.0 * (h @ DOWN @ UP)).relu()


def by_head(x: Tensor) -> Tensor:
    q, k, v = (x.sin() @ WIDE).view(30, H, 3, -1).unbind(2)
    return q.relu() + k.tanh() * v


def by_thirds(x: Tensor) -> Tensor:
    h = x.sin()
    q, k, v = ((h @ part).view(30, H, -1) for part in WIDE.chunk(3, -1))
    return q.relu() + k.tanh() * v


def normed(scale: bool, eps: float) -> Program:
    def run(ids: Tensor) -> Tensor:
        x = F.embedding(ids, 0.1 * TABLE)
        x = (x * D**0.5 if scale else x).float()
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return y.type_as(x) @ BASE  # a view of y, not of x

    return run


def after_cat(*functions: Program) -> Program:
    return lambda x: (torch.cat([one(x) for one in functions], -1) @ WIDE.view(-1, 48)[:64]).tanh()


def repeated(how: Program) -> Program:
    return lambda x: (how(x[:8, :12].exp().view(2, 4, 12)).transpose(1, 2) @ BASE[:4]).tanh()


def by_hand(x: Tensor) -> Tensor:
    q, k, v = x.view(5, 6, 4, 8).unbind()[:3]
    return (q.sin() @ k.exp().transpose(-1, -2) * 8**-0.5).softmax(-1) @ v.exp()


def at_once(scale: float | None) -> Program:
    def run(x: Tensor) -> Tensor:
        q, k, v = x.view(5, 6, 4, 8).unbind()[:3]
        return F.scaled_dot_product_attention(q.sin(), k.exp(), v.exp(), scale=scale)

    return run


IN_ORDER = lambda x: x.view(2, 1, 4, 12).expand(2, 2, 4, 12).reshape(4, 4, 12)  # noqa: E731
ANOTHER_ORDER = "no counterpart, input reordered"
#: Two programs that differ, their input, the first calls that do, the range of the error, and texts that are said.
DIFFERENT: dict[str, tuple[Program, Program, Tensor, str, str, tuple[float, float], str]] = {
    # A layer and its adapter, against a merged layer: the call that joins both differs, and not the layer.
    "adapter": (adapted, merged(0.8), X, "add", "matmul", (0.5, 0.7), ""),
    "merged": (merged(0.8), adapted, X, "matmul", "add", (0.5, 0.7), ""),
    # The norm takes away most of the scale that B lacks: the norms of both are near, and are no counterpart of `mul`.
    "scale": (
        *(normed(True, 1e-6), normed(False, 1e-6), IDS, "mul", "pow", (0.5, math.inf)),
        "the first call of B without one: pow in (model)|It reads the result of embedding in (model)|"
        "where pow in (model)|reads that of mul.",
    ),
    "eps": (normed(True, 1e-6), normed(True, 1e-2), IDS, "rsqrt", "rsqrt", (0.0, 0.5), "nearest: rsqrt in"),
    # Inputs in another order are no right inputs.
    "cat": (
        *(after_cat(torch.cos, torch.sin), after_cat(torch.sin, torch.cos), X, "matmul", "matmul", (0.0, math.inf)),
        f"{ANOTHER_ORDER}| A reads the result of cat in (model)|"
        ", B the same numbers in another order, from cat in (model)",
    ),
    "repeat": (
        *(repeated(IN_ORDER), repeated(lambda x: x.repeat(2, 1, 1)), X, "matmul", "matmul", (0.0, math.inf)),
        f"{ANOTHER_ORDER}| A reads the result of reshape in (model)|"
        ", B the same numbers in another order, from repeat in (model)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_first_difference_and_what_is_said_of_it(what: str) -> None:
    one, other, inputs, op, op_of_b, (least, most), texts = DIFFERENT[what]
    found = compared(one, other, inputs)
    a, b, error = first_of(found)
    assert (a.op, b.op) == (f"aten::{op}", f"aten::{op_of_b}")
    assert least < error <= most
    said = f"{found.first and found.first.text}; {found.answer}"
    assert [text for text in texts.split("|") if text not in said] == []
    assert "It reads" not in said or what == "scale"


def test_programs_that_compute_the_same_in_other_ways() -> None:
    assert compared(adapted, merged(2.0), X).outputs_match
    # A transpose that one program alone reads is no other order.
    assert compared(by_hand, at_once(None), X).outputs_match
    found = compared(by_hand, at_once(0.5), X)
    assert found.first is not None
    assert "on right inputs" in found.first.text
    # Parts that the other program cuts in another way are told.
    found = compared(by_head, by_thirds, X)
    for text in ("up to matmul in", "B has the elements of matmul in (model)"):
        assert text in found.answer
    assert "but not the part and order of them that is read here." in found.answer


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda table, ids: table[ids],
    "index_select": lambda table, ids: table.index_select(0, ids),
    "gather": lambda table, ids: table.gather(0, ids[:, None].expand(-1, table.shape[1])),
    "take": lambda table, ids: table.take(ids[:, None] * table.shape[1] + torch.arange(table.shape[1])),
}


@pytest.mark.parametrize("pick", PICKS)
def test_a_call_that_picks_rows_is_compared_as_an_embedding_is(pick: str) -> None:
    table, x, ids = nn.Parameter(TABLE[:9].clone()), X[:T], IDS[0] % 9

    def program(pick: Callable[[Tensor, Tensor], Tensor], off: int) -> Program:
        return lambda x: (pick(table, (ids + off) % 9) + x.sin() @ x.cos().t() @ x).tanh()

    one = program(lambda table, ids: F.embedding(ids, table), 2)
    assert compared(one, program(PICKS[pick], 2), x).outputs_match
    for found in (compared(one, program(PICKS[pick], 1), x), compared(program(PICKS[pick], 1), one, x)):
        a, b, error = first_of(found)
        assert {a.op, b.op} == {"aten::embedding", f"aten::{pick}"}
        assert 0.5 < error < math.inf
        assert found.first is not None
        assert found.first.text == "no counterpart"  # it reads other indices


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().sin().transpose(1, 2),
    "NHWC": lambda x: x.movedim(1, -1).contiguous().sin(),
    "heads split": lambda x: x.view(2, 4, 6, 2, 5).permute(3, 0, 1, 2, 4).contiguous().sin(),
    "padded": lambda x: F.pad(x, (0, 0, 0, 3)).sin(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_in_another_layout_are_paired_and_marked(layout: str) -> None:
    x = torch.randn(2, 4, 6, 10, generator=torch.Generator().manual_seed(0))
    found = compared(torch.sin, LAYOUTS[layout], x)
    assert found.outputs_match, str(found)
    if layout != "transposed":
        assert found.reordered > 0
        assert "in another order" in str(found)
    wrong = compared(torch.sin, lambda x: LAYOUTS[layout](x * 1.001), x)
    assert not wrong.outputs_match


def test_rows_in_another_order_are_paired() -> None:
    one, other = nn.Linear(D, D), nn.Linear(D, D)
    order = torch.arange(D).view(2, -1).t().flatten()  # as of a rotary embedding of another convention
    other.load_state_dict({name: values[order] for name, values in one.state_dict().items()})
    x = torch.randn(2, D)
    found = compared(one, lambda x: other(x).index_select(-1, order.argsort()), x)
    assert found.outputs_match
    assert found.weights["weight"] == "weight[rows in another order]"
    assert found.alone == []


@pytest.mark.parametrize("at", ["", "activation", "product"])
def test_a_loop_is_paired_with_what_the_other_program_computes_at_once(at: str) -> None:
    def loop(x: Tensor) -> Tensor:
        parts = []
        for one in x.unbind(1):  # such as token by token
            h = F.gelu(one @ WIDE, approximate="tanh" if at == "activation" else "none")
            parts.append(h @ (WIDE.t() + 0.01 if at == "product" else WIDE.t()))
        return torch.stack(parts, 1)

    programs = [lambda x: F.gelu(x @ WIDE) @ WIDE.t(), loop]
    for one, other in (programs, programs[::-1]):
        found = compared(one, other, 0.5 * X.view(6, 5, D))
        assert found.outputs_match == (at == "")
        ops = {"activation": {"aten::gelu"}, "product": {"aten::matmul", "aten::add"}}.get(at, set())
        assert {call.op for call in first_of(found)[:2]} <= ops if found.first else not at


def test_constants_coincidences_negatives_and_magnitudes_do_not_pair() -> None:
    found = compared(
        lambda x: x.cos() * torch.ones(8, 8) + torch.zeros(8),
        lambda x: (x.exp() - torch.ones(8, 8)) / torch.full((8, 8), 2.0) + torch.zeros(8),
        X[:8, :8],
    )
    assert (found.outputs_match, found.matched) == (False, 0.0)
    for function in (torch.neg, torch.abs):
        found = compared(torch.sin, lambda x, function=function: function(x.sin()) * 1.5, X)
        assert [pair for pair in found.sides.links if pair[2] == "reordered"] == [], function


def test_a_repeated_forward_is_paired_in_its_order() -> None:
    def three(x: Tensor) -> Tensor:
        for _ in range(3):
            y = x.sin().exp()
        return y

    found = compared(three, three, X)
    assert found.matched == 1.0
    assert [link[:2] for link in found.sides.links] == [(i, i) for i in range(6)]


def test_complex_numbers_are_paired() -> None:
    assert compared(lambda x: torch.fft.fft(x) * 2.0, lambda x: torch.fft.fft(2.0 * x), X).outputs_match
    assert not compared(torch.fft.fft, lambda x: torch.fft.fft(x).conj_physical(), X).outputs_match


def test_compiled_code_is_compared_by_what_it_returns(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    for approximate in ("none", "tanh"):
        other = nn.Sequential(model[0], nn.GELU(approximate), model[2])
        compiled = torch.compile(other, backend="aot_eager")
        compiled(x)
        found = compared(model, compiled, x)
        assert found.outputs_match == (approximate == "none"), str(found)


@pytest.mark.parametrize("make", [lambda: torch.randn(4, 8), lambda: torch.linspace(-1, 1, 32).view(4, 8)])
def test_a_program_may_make_its_inputs(make: Callable[[], Tensor]) -> None:
    one = record(lambda: F.layer_norm(make(), (8,)).exp())
    assert one.diff(record(lambda: F.layer_norm(make(), (8,)).exp()), match=True).outputs_match
    found = one.diff(record(lambda: F.layer_norm(make(), (8,), eps=0.1).exp()), match=True)
    assert (found.outputs_match, first_of(found)[0].op) == (False, "aten::layer_norm")
    assert found.first is not None
    assert "no counterpart, on right inputs" in found.first.text


# --- what leaves a program


def loss_of(z: Tensor, y: Tensor) -> float:
    return F.cross_entropy(z, y).item()


def whole_program(
    end: Callable[[Tensor, Tensor], object] = loss_of,
    prepare: Callable[[Tensor], object] = lambda weight: None,
    momentum: float = 0.1,
    decay: float = 0.9,
) -> Any:
    """Records a program that makes a model, loads its weights, trains it with an average, and evaluates the average."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24, momentum=momentum), nn.Tanh(), nn.Linear(24, 5))

    torch.manual_seed(0)
    weights, data = model().state_dict(), [torch.randn(32, 8) for _ in range(3)]
    with tp.trace(values=True) as report:
        net, y = model(), torch.arange(32) % 5
        with torch.no_grad():
            prepare(net[0].weight)
        net.load_state_dict(weights)
        average, optimizer = copy.deepcopy(net), torch.optim.SGD(net.parameters(), 0.1)
        for x in data[:2]:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
                    mine.lerp_(theirs, 1 - decay)
        with torch.no_grad():
            end(average.eval()(data[2]), y)
    return report


@pytest.mark.parametrize(
    "end",
    [
        loss_of,
        lambda z, y: (z.argmax(1) == y).sum().item(),
        lambda z, y: (z.argmax(1) == y).float().mean().item(),
        lambda z, y: z.argmax(1).tolist(),
        lambda z, y: z.double().numpy(),
        lambda z, y: f"{z.square().mean():.3f}",
        lambda z, y: z.bfloat16().float().amax(1).topk(3),
    ],
)
def test_what_leaves_a_program_is_compared(end: Callable[[Tensor, Tensor], object]) -> None:
    one = whole_program(end)
    assert one.diff(whole_program(end), match=True).outputs_match
    found = one.diff(whole_program(lambda z, y: end(z.flip(1) * 1.5, y)), match=True)
    assert not found.outputs_match
    assert "has no counterpart" in found.answer


@pytest.mark.parametrize("change", [{"momentum": 0.9}, {"decay": 0.8}])
@pytest.mark.parametrize("end", [loss_of, lambda z, y: None])
def test_running_statistics_and_averages_are_compared(change: dict[str, float], end: Any) -> None:
    found = whole_program(end).diff(whole_program(end, **change), match=True)
    assert not found.outputs_match


def test_a_token_may_come_from_another_op() -> None:
    one = whole_program(lambda z, y: z.argmax(1).tolist())
    assert one.diff(whole_program(lambda z, y: z.topk(1)[1][:, 0].tolist()), match=True).outputs_match


PREPARATIONS: dict[str, Callable[[Tensor], object]] = {
    "normal": nn.init.normal_,
    "truncated": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "data": lambda weight: weight.data.normal_().mul_(0.02),
    "scaled": lambda weight: weight.mul_(0.5),
    "part": lambda weight: weight[2:5].zero_(),
    "copied": lambda weight: weight.copy_(torch.randn(24, 8) @ torch.randn(8, 8)),
    "unused": lambda weight: nn.init.kaiming_uniform_(nn.Parameter(torch.empty(40, 8))).clamp_(-1, 1),
}


@pytest.mark.parametrize("how", PREPARATIONS)
def test_preparations_are_no_results(how: str) -> None:
    one, other = whole_program(prepare=PREPARATIONS[how]), whole_program()
    for found in (one.diff(other, match=True), other.diff(one, match=True)):
        assert (found.outputs_match, found.matched) == (True, 1.0), str(found)
    found = one.diff(whole_program(lambda z, y: loss_of(z.exp(), y)), match=True)
    first = found.to_dict()["first"]
    assert (first["a"]["op"], first["b"]["op"]) == ("aten::cross_entropy_loss", "aten::exp")
    assert "up to linear in Sequential.3" in found.answer
    assert "This is after 2 optimizer steps." in found.answer


# --- the answer


def test_the_answer_names_both_calls_and_the_error() -> None:
    found = matched("gpt", "activation")
    a, b, error = first_of(found)
    assert (a.op, a.module, b.module) == ("aten::gelu", "blocks.1.mlp.1", "layers.1")
    assert 1e-5 < error < 1e-2
    for text in ("up to linear in blocks.1.mlp.0", "nearest: gelu in layers.1", "(relative L2)"):
        assert text in found.answer
    assert found.modules["blocks.1.mlp.0"] == "layers.1.up"
    assert found.modules["blocks.0"] == "layers.0"
    assert found.weights["blocks.1.attention.query.weight"] == "layers.1.qkv.weight[0:64]"
    assert found.near[0] == found.first


def test_a_difference_that_the_tolerance_hides_is_told_first() -> None:
    found = port_gpt.compare("activation")
    assert found.outputs_match
    assert found.near[0].a is not None
    assert found.near[0].a.op == "aten::gelu"
    assert found.answer.startswith(
        "All outputs match within 1.2e-5 (relative L2), but not to rounding. gelu in blocks.1"
    )


def test_where_errors_begin_is_told_once_for_all_steps() -> None:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

    def normed(eps: float) -> Callable[[Tensor], Tensor]:
        def two(x: Tensor) -> Tensor:
            for scale in (1, 2):
                y = x * scale
                y = y / (y.square().mean(-1, keepdim=True) + eps * scale**2)
            return y

        return two

    found = compared(normed(0.0), normed(2e-6), x)
    assert found.outputs_match
    assert len(found.near) > 1
    assert {one.text for one in found.near} == {"errors begin to exceed rounding"}
    assert found.answer.startswith("All outputs match within 1.2e-5 (relative L2), but not to rounding. In div in")
    assert str(found.content()).replace(found.answer, "").count("errors begin to exceed rounding") == 1


def test_the_json_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for bug in ("", "eps"):
        for name, model in zip("ab", PORTS["gpt"].models(bug), strict=True):
            files.append(str(tmp_path / f"{name}{bug}.jsonl.gz"))
            record(model, *PORTS["gpt"].inputs()).save(files[-1])
    assert main(["diff", "--match", *files[:2], "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["outputs_match", "matched", "first", "modules", "weights", "near"]
    assert (data["outputs_match"], data["first"], data["near"]) == (True, None, [])
    page = tmp_path / "match.html"
    assert main(["diff", "--match", *files[2:], "--html", str(page), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["outputs_match"] is False
    assert data["first"]["a"].keys() == {"op", "module", "line"} == data["first"]["b"].keys()
    assert 1e-5 < data["first"]["relative_l2"] < 1e-2
    text = page.read_text()
    assert text.count("<path") > 10
    assert 'path class="wrong"' in text
    assert main(["diff", "--match", *files[2:], "--tolerance", "0.1"]) == 0


def test_errors() -> None:
    with tp.trace() as report:
        torch.ones(2).exp()
    with pytest.raises(OptionError, match="A has no values"):
        report.diff(report, match=True)
    other = record(torch.sin, torch.ones(2))
    with pytest.raises(OptionError, match="finite number"):
        other.diff(other, match=True, tolerance=-1.0)
    with pytest.raises(OptionError, match="match=True"):
        tp.diff(other, other, tolerance=0.1)
    with pytest.raises(OptionError, match="cannot be read"):
        Match.load("x.json")


def test_a_recording_of_an_older_version_has_no_parts_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    record(nn.Linear(4, 4), torch.ones(2, 4)).save(path)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    changed = []
    for line in map(json.loads, lines):
        if isinstance(line, list) and line[0] == "source":
            assert line[1].pop("projections") is not None
        changed.append(json.dumps(line))
    path.write_bytes(gzip.compress(("\n".join(changed) + "\n").encode()))
    assert {source.projections for source in tp.load(path).sources} == {("", "")}


@pytest.mark.slow
def test_ten_thousand_results_take_less_than_a_minute_and_two_gigabytes() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(5_000):
            x = torch.sin(x * 1.01 + 0.1)
        return x

    x = torch.randn(64, 16)
    one, other = record(program, x), record(program, x)
    assert len(one.calls) >= 10_000
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = one.diff(other, match=True)
    assert found.matched > 0.99
    assert time.process_time() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB


def test_weights_of_a_port_without_modules_are_not_compared() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    weights = [one.detach().clone() for one in model.parameters()]
    match = compared(lambda x: model(x).tanh(), lambda x: F.linear(x, *weights).tanh(), x)
    assert match.outputs_match
    assert match.weights == {}
    assert "Weights were not compared: B reads none that is a module's." in match.evidence
