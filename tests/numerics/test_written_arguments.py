"""`find_nonfinite` and `compare` look at what calls write, not only at what they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from helpers.writing_ops import scale, store, two_of_three
from torch_promote.numerics.call_observers import hidden_from_observers
from torch_promote.numerics.comparison import Site
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite

HALF, NAN = torch.float16, math.nan
OP, CAST, MATHS = "overflow in the op", "overflow in a cast", "mathematics"


def full(value: float, dtype: torch.dtype = HALF) -> Tensor:
    return torch.full((4, 4), value, dtype=dtype)


def find(program: Callable[[], Any]) -> NonfiniteReport:
    with find_nonfinite() as report:
        program()
    return report


# --- find_nonfinite


@dataclass(frozen=True)
class Fault:
    """A program, and the op, the kind, the outputs that are not finite, and the cast argument that it has to report."""

    run: Callable[[], Any]
    op: str
    kind: str
    outputs: tuple[str, ...]
    argument: str = ""


def foreach_mul() -> None:
    tensors = [full(1.0), full(300.0)]
    torch._foreach_mul_(tensors, 300.0)
    nn.functional.linear(tensors[1].float(), torch.ones(4, 4))  # gets the blame if nobody looks at what was written


def optimizer(kind: type[torch.optim.Optimizer], grad: float, **options: Any) -> None:
    weights = [nn.Parameter(full(1.0)) for _ in range(12)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    weights[5].grad = full(grad)
    kind(weights, **options).step()  # type: ignore[call-arg]


def unscale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-20)
    weight = nn.Parameter(full(1.0, torch.float32))
    scaler.scale(weight.sum())
    weight.grad = full(1e36, torch.float32)
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


def clip_after_an_overflow(norm: float) -> None:
    weights = [nn.Parameter(full(1.0)) for _ in range(2)]
    weights[0].grad, weights[1].grad = full(1.0), full(3e4)
    torch.nn.utils.clip_grad_norm_(weights, norm, norm_type=math.inf, foreach=True)
    torch._foreach_mul_([weight.grad for weight in weights], 3.0)


def in_a_region() -> None:
    with tp.my_autocast("cpu", HALF):
        product, copy = torch.empty(4, 4, dtype=HALF), torch.empty(4, 4, dtype=HALF)
        two_of_three(torch.mm(full(5.0), full(5.0)), product, copy, 1e3)


def with_a_policy() -> None:
    with tp.my_autocast("cpu", HALF, overrides={"writes::two_of_three": "match_self"}):
        two_of_three(full(1e6, torch.float32), full(0.0), full(0.0), 1.0)


def compiled() -> None:
    function = torch.compile(lambda x, rows: store(x * 300.0, rows, 1), backend="aot_eager")
    function(torch.full((4,), 300.0, dtype=torch.float32), full(0.0))


def garbage(value: float = NAN, dtype: torch.dtype = HALF) -> Tensor:
    """Memory with a content that no observed call has made."""
    with hidden_from_observers():
        return full(value, dtype)


FAULTS = {
    "foreach": Fault(foreach_mul, "aten::_foreach_mul_", OP, ("self[1]",)),
    "foreach in float32": Fault(
        lambda: torch._foreach_mul_([full(1e38, torch.float32)], 10.0), "aten::_foreach_mul_", MATHS, ("self[0]",)
    ),
    "foreach copy": Fault(
        lambda: torch._foreach_copy_([full(0.0), full(0.0)], [full(1.0), full(1e6, torch.float32)]),
        "aten::_foreach_copy_",
        CAST,
        ("self[1]",),
        "src[1]",
    ),
    "second moment, foreach": Fault(
        lambda: optimizer(torch.optim.Adam, 2e4, foreach=True), "aten::_foreach_addcmul_", OP, ("self[5]",)
    ),
    "second moment, fused": Fault(
        lambda: optimizer(torch.optim.Adam, 2e4, fused=True, eps=0.01), "aten::_fused_adam_", OP, ("exp_avg_sqs[5]",)
    ),
    "unscale": Fault(unscale, "aten::_amp_foreach_non_finite_check_and_unscale_", MATHS, ("self[0]",)),
    "clipped gradients": Fault(lambda: clip_after_an_overflow(6e4), "aten::_foreach_mul_", OP, ("self[1]",)),
    "out": Fault(
        lambda: torch.mul(full(300.0, torch.float32), full(300.0, torch.float32), out=garbage()),
        "aten::mul",
        OP,
        ("0",),
    ),
    "index_put_": Fault(
        lambda: full(6e4).index_put_((torch.tensor([0]),), full(6e4)[0], accumulate=True),
        "aten::index_put_",
        OP,
        ("0",),
    ),
    "running statistics": Fault(
        lambda: nn.BatchNorm1d(4)(torch.eye(4) * 1e30), "aten::batch_norm", MATHS, ("running_var",)
    ),
    "custom": Fault(in_a_region, "writes::two_of_three", OP, ("product",)),
    "custom, cast by autocast": Fault(with_a_policy, "writes::two_of_three", CAST, ("product", "copy"), "x"),
    "custom, into garbage": Fault(
        lambda: two_of_three(full(300.0), garbage(), full(0.0), 300.0), "writes::two_of_three", OP, ("product",)
    ),
    "custom, into garbage of float32": Fault(
        lambda: two_of_three(
            full(1e38, torch.float32), garbage(math.inf, torch.float32), full(0.0, torch.float32), 1e38
        ),
        "writes::two_of_three",
        MATHS,
        ("product",),
    ),
    "custom, beside garbage": Fault(
        lambda: store(torch.full((4,), 1e6), garbage(), 1), "writes::store", OP, ("cache",)
    ),
    "custom, compiled": Fault(compiled, "writes::store", OP, ("cache",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_op_that_wrote_the_first_nonfinite_value_is_the_origin(name: str) -> None:
    fault = FAULTS[name]
    origin = find(fault.run).origin
    assert origin is not None
    assert (origin.op, origin.kind, origin.argument) == (fault.op, fault.kind, fault.argument)
    assert tuple(one.name for one in origin.outputs if one.infs or one.nans) == fault.outputs
    assert "test_written_arguments.py:" in origin.line
    assert all(f"output {name}: " in str(origin) for name in fault.outputs)


def test_the_text_names_the_places_of_long_lists() -> None:
    origin = find(lambda: optimizer(torch.optim.Adam, 2e4, fused=True, eps=0.01)).origin
    assert origin is not None
    assert origin.phase == "optimizer"
    assert ", optimizer, " in str(origin)
    assert [line.partition(": ")[0].strip() for line in str(origin).splitlines()[2:]] == [
        "input self[5]",
        "input grads[5]",
        "input exp_avgs[5]",
        "input exp_avg_sqs[5]",
        "input state_steps[5]",
        "inputs not shown",
        "output self[5]",
        "output grads[5]",
        "output exp_avgs[5]",
        "output exp_avg_sqs[5]",
        "outputs not shown",
    ]


def test_inputs_are_those_from_before_the_write() -> None:
    origin = find(lambda: torch._foreach_mul_([full(300.0)], 300.0)).origin
    assert origin is not None
    assert [(one.min, one.max, one.infs) for one in origin.inputs] == [(300.0, 300.0, 0)]


def skipped_step() -> None:
    weight, scaler = nn.Parameter(full(1.0, torch.float32)), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with tp.my_autocast("cpu", HALF):
        loss = torch.mm(weight, weight).float().sum()
    scaler.scale(loss).backward()
    optimizer = torch.optim.Adam([weight], fused=True)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.state[weight]["exp_avg"].any()


def steps_of_a_fused_optimizer_that_unscales() -> None:
    weight, scaler = nn.Parameter(full(1.0, torch.float32)), torch.amp.GradScaler("cpu", init_scale=2.0**17)
    optimizer = torch.optim.Adam([weight], fused=True)
    for _ in range(3):  # the first one is skipped
        with tp.my_autocast("cpu", HALF):
            loss = torch.mm(weight, weight).float().sum() / 8
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[weight]["exp_avg"].any()


@pytest.mark.parametrize(
    "program",
    [
        lambda: store(torch.ones(4), garbage(), 1),
        lambda: two_of_three(full(1.0), garbage(), garbage(), 2.0),
        lambda: torch._foreach_copy_([garbage()], [full(1.0)]),
        lambda: torch._foreach_zero_([garbage()]),
        lambda: garbage().index_put_((torch.tensor([1]),), full(1.0)[0]),
        lambda: torch._foreach_add_([full(0.0)], [-math.inf]),  # a mask
        lambda: nn.BatchNorm1d(4).eval()(torch.eye(4) * 1e30),
        skipped_step,
        steps_of_a_fused_optimizer_that_unscales,
    ],
)
def test_what_was_there_before_and_what_the_program_asked_for_is_no_fault(program: Callable[[], Any]) -> None:
    report = find(program)
    assert not report.found, str(report)


# --- compare


class Writing(nn.Module):
    """Writes to the tensors of a list, to two tensors of a custom op, to an out and to running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.norm(hidden)
        with torch.no_grad():
            product, copy, out = (torch.zeros_like(hidden) for _ in range(3))
            two_of_three(hidden, product, copy, 3.0)
            scaled = [hidden.clone(), hidden.clone()]
            torch._foreach_mul_(scaled, 1.1)
            scale([copy], torch.ones(()), 1.3)
            torch.mul(hidden, 3.3, out=out)
        return hidden + product + copy + scaled[1] + out


@pytest.fixture
def compared() -> dict[str, Site]:
    torch.manual_seed(0)
    model, x = Writing(), torch.randn(4, 8)

    def step() -> Tensor:
        with tp.my_autocast("cpu"):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    assert comparison.notes == comparison.not_aligned == comparison.not_seen == []
    return {site.op: site for site in comparison.sites}


WRITING = ("aten::_foreach_mul_", "writes::two_of_three", "writes::scale", "aten::mul", "aten::batch_norm")


@pytest.mark.parametrize("op", WRITING)
def test_a_call_that_writes_has_a_site_with_its_errors(op: str, compared: dict[str, Site]) -> None:
    site = compared[op]
    assert site.accumulated is not None
    assert 1e-4 < site.local < 1e-2
    assert 1e-4 < site.accumulated < 1e-2
    assert "bfloat16" in site.dtypes


def test_local_errors_are_those_of_the_op_alone() -> None:
    """The candidate writes 3 * x in bfloat16, and x as it is. The product before it has rounded x."""
    x = torch.linspace(1.0, 2.0, 101)

    def step() -> Tensor:
        with tp.my_autocast("cpu"):
            rounded = torch.matmul(x[:, None], torch.ones(1, 1))  # bfloat16 in the candidate only
            product, copy = torch.zeros_like(rounded), torch.zeros_like(rounded)
            two_of_three(rounded, product, copy, 3.0)
            return product.float().sum() + copy.float().sum()

    comparison = tp.compare(step, model=nn.Identity())
    [site] = [site for site in comparison.sites if site.op == "writes::two_of_three"]
    rounded = x.bfloat16()
    ours = torch.cat([rounded * 3.0, rounded]).double()
    reference = torch.cat([rounded.float() * 3.0, rounded.float()]).double()
    assert site.local == pytest.approx(float((ours - reference).norm() / reference.norm()))
    assert site.bytes == 2 * 101 * 4


def test_an_overflow_that_is_written_is_counted() -> None:
    def step() -> Tensor:
        with tp.my_autocast("cpu", HALF):
            x = [torch.matmul(torch.ones(4, 4), torch.full((4, 1), 100.0))]
            torch._foreach_mul_(x, 300.0)
            return x[0].float().sum() * 0 + 1

    comparison = tp.compare(step, model=nn.Identity())
    [site] = [site for site in comparison.sites if site.op == "aten::_foreach_mul_"]
    assert (site.nonfinite, site.local) == (4, math.inf)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_optimizers_inside_of_a_region_have_sites_and_nothing_is_left(options: dict[str, Any]) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def step(batch: int) -> Tensor:
        with tp.my_autocast("cpu"):
            loss = model(x + batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_sub_(average, list(model.parameters()))
        return loss.detach()  # type: ignore[no-any-return]

    before = [one.clone() for one in (*model.parameters(), *average)]
    comparison = tp.compare(step, model=model, restore=(average,), batches=3)
    sites = {site.op: site for site in comparison.sites}
    for op in ("aten::_fused_adam_" if "fused" in options else "aten::_foreach_addcdiv_", "aten::_foreach_sub_"):
        assert (sites[op].local, sites[op].calls) == (0.0, 3)
        assert sites[op].accumulated
    assert sites["aten::linear"].impact
    assert all(map(torch.equal, (*model.parameters(), *average), before))
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_written_tensors_that_cannot_be_compared_are_named() -> None:
    def step() -> Tensor:
        with tp.my_autocast("cpu"):
            sparse = torch.eye(4).to_sparse()
            torch._foreach_mul_([sparse], 3.0)
            return torch.mm(sparse.to_dense(), torch.ones(4, 4)).float().sum()

    comparison = tp.compare(step, model=nn.Identity())
    [text] = [text for text in comparison.not_seen if "_foreach_mul_" in text]
    assert text == "The outputs of aten::_foreach_mul_.Scalar were not compared: a tensor is sparse_coo."
