"""`NonfiniteReport.suggest`: the overrides that it finds, and the state that it restores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.errors import OptionError
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite
from torch_promote.numerics.nonfinite_suggestion import _of_called_ops, next_override
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import installed
from torch_promote.regions.module_forward import policy_of

HALF = torch.float16


@pytest.fixture(autouse=True)
def policies_are_restored() -> Any:
    before = default_policy(), installed()
    yield
    assert (default_policy(), installed()) == before


def find(program: Callable[[], Any], model: nn.Module | None = None) -> NonfiniteReport:
    with find_nonfinite(model) as report:
        program()
    return report


def big(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((4, 4), value, dtype=dtype)


def test_suggest_needs_a_function() -> None:
    with pytest.raises(OptionError, match="step"):
        find(lambda: None).suggest(3)  # type: ignore[arg-type]


def test_suggest_overrides_as_few_ops_as_it_takes_and_restores_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [weight.clone() for weight in model.parameters()]
    random = torch.get_rng_state()

    def step() -> Tensor:
        optimizer.zero_grad()
        with tp.my_autocast("cpu", HALF):
            product = torch.mm(big(200.0), big(200.0))
            loss = model(torch.matmul(product, big(1e-6))).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        torch.rand(1)
        return loss

    report = NonfiniteReport(model, ())
    policy = report.suggest(step)
    assert policy is not None
    assert sorted({difference.overload for difference in policy.diff("stock")}) == ["aten::matmul", "aten::mm"]
    assert [attempt.finite for attempt in report.tried].count(True) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    with tp.my_autocast("cpu", HALF, policy=policy):
        assert torch.mm(big(200.0), big(200.0)).isfinite().all()


def test_suggest_restores_what_the_step_refers_to() -> None:
    """NumPy's generator, an optimizer's state, and the identity of gradients."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    weight, gradient = model.weight.tolist(), torch.ones(4, 4)
    model.weight.grad = gradient
    seen = []

    def step() -> None:
        seen.append(numpy.random.rand())
        with tp.my_autocast("cpu", HALF):
            loss = (model(big(1.0)).float() + torch.mm(big(200.0), big(200.0))).sum()
        loss.backward()
        optimizer.step()

    before = numpy.random.get_state()[1].tolist()
    report = NonfiniteReport(model, ())
    assert report.suggest(step) is not None
    assert len(report.tried) == len(seen) == 2
    assert seen[0] == seen[1]
    assert numpy.random.get_state()[1].tolist() == before
    assert model.weight.tolist() == weight
    assert model.weight.grad is gradient
    assert gradient.tolist() == torch.ones(4, 4).tolist()
    assert not optimizer.state


def test_suggest_leaves_out_an_override_that_a_later_one_makes_needless() -> None:
    """The sum overflows first, but not if the product before it is not in float16."""

    def step() -> Tensor:
        with tp.my_autocast("cpu", HALF):
            product = torch.matmul(big(100.0), big(100.0))
            return torch.matmul(product + product, big(1.0))

    report = find(step)
    policy = report.suggest(step)
    assert policy is not None
    assert {one.overload for one in policy.diff("stock")} == {"aten::matmul"}
    ran = [tuple(attempt.overrides) for attempt in report.tried]
    add, matmul = "aten::add.Tensor", "aten::matmul.default"
    assert ran == [(), (add,), (add, matmul), (matmul,)]
    assert report.tried[-1].finite


def overflowing_product() -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model whose module "1" overflows, and a step of it in a region with a policy of its own."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x) * 1e-6

    model = nn.Sequential(nn.Identity(), Product())

    def step() -> Tensor:
        with tp.my_autocast("cpu", HALF, policy="stock"):
            return model(big(200.0))  # type: ignore[no-any-return]

    return model, step


def test_suggest_gives_a_module_a_policy_where_a_region_has_its_own() -> None:
    model, step = overflowing_product()
    report = find(step, model=model)
    policy = report.suggest(step)
    assert policy is not None
    assert {one.overload for one in policy.diff("stock")} == {"aten::mm"}
    assert dict(report.tried[-1].modules).keys() == {"1"}
    assert report.tried[-1].finite
    assert not step().isfinite().all()  # the policy of the module is gone


def test_suggest_returns_none_where_no_override_helps() -> None:
    report = find(lambda: torch.log(torch.zeros(1)))
    assert report.suggest(lambda: torch.log(torch.zeros(1))) is None
    assert len(report.tried) == 1
    assert report.suggest(lambda: torch.ones(1)) is None
    assert report.tried[0].finite
    outside = find(lambda: big(300.0, HALF) * 300)
    assert outside.suggest(lambda: big(300.0, HALF) * 300) is None


def test_suggest_passes_on_an_error_of_the_step() -> None:
    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        find(lambda: None).suggest(step)


def test_suggest_gives_a_module_only_the_overrides_that_it_needs() -> None:
    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.linear.weight, 100.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(self.linear(x), torch.eye(4) * 1e-3)

    model = nn.Sequential(Cubed(), nn.Linear(4, 4))

    def step() -> None:
        with tp.my_autocast("cpu", HALF, policy="stock"):
            torch.matmul(model(big(10.0)).float(), big(1.0))
            total = model(big(10.0)).float().sum()
        model.zero_grad()
        (total * 1e8).backward()

    report = find(step, model=model)
    policy = report.suggest(step)
    assert policy is not None
    assert {one.overload for one in policy.diff("stock")} <= {"aten::linear", "aten::mm"}
    last = report.tried[-1]
    assert last.finite
    assert list(last.modules.values()) == [repr(policy)]
    ((path, _),) = last.modules.items()
    assert str(last) == f"set_module_policy(model, {{{path!r}: {policy!r}}}): finite"
    tp.set_module_policy(model, {path: policy})
    assert find(step, model=model).origin is None


def test_a_module_gets_its_own_policy_back() -> None:
    model, step = overflowing_product()
    tp.set_module_policy(model, {"1": {"tanh": "fp32"}})
    before = policy_of(model[1])
    assert find(step, model=model).suggest(step) is not None
    assert policy_of(model[1]) == before is not None


def test_a_step_that_raises_under_an_override() -> None:
    """It needs a lower dtype, and bfloat16 has the range."""

    def step() -> Tensor:
        with tp.my_autocast("cpu", HALF):
            product = torch.mm(big(200.0), big(200.0))
        if product.dtype is torch.float32:
            raise TypeError("expected a lower dtype")
        return product

    report = find(step)
    policy = report.suggest(step)
    assert policy is not None
    assert {one.overload for one in policy.diff("stock")} == {"aten::mm"}
    assert [attempt.to_dict() for attempt in report.tried] == [
        {"overrides": {}, "modules": {}, "finite": False, "result": "overflow in the op in aten::mm, no module"},
        {
            "overrides": {"aten::mm.default": "fp32"},
            "modules": {},
            "finite": False,
            "result": "raises TypeError: expected a lower dtype",
        },
        {"overrides": {"aten::mm.default": "bfloat16"}, "modules": {}, "finite": True, "result": "finite"},
    ]


def test_overrides_come_on_top_of_those_that_are_installed() -> None:
    seen = []

    def step() -> Tensor:
        with torch.autocast("cpu", HALF):
            seen.append((torch.exp(big(1.0, HALF)).dtype, tp.installed().cache))
            return torch.mm(big(200.0), big(200.0))

    with tp.installed_as(overrides={"exp": "fp32"}, cache="none"):
        report = find(step)
        policy = report.suggest(step)
    assert policy is not None
    assert [attempt.finite for attempt in report.tried] == [False, True]
    assert seen == [(torch.float32, "none")] * 3


def test_a_module_keeps_overrides_of_ops_that_its_calls_do_not_name() -> None:
    """An op that the module calls may call others, which overflow without the override."""
    ran = []

    class Runs:
        devices = ("cpu",)

        def run(self, module: tuple[str, tp.Policy]) -> NonfiniteReport:
            ran.append(module)
            report = NonfiniteReport(None, ())
            report.origin = None if module[1] == whole else origin
            return report

    origin = find(lambda: torch.log(torch.zeros(1))).origin
    result = find(lambda: torch.mm(big(1.0), big(1.0)))
    whole = tp.Policy.stock().override({"mm": "fp32", "bmm": "fp32"}, "cpu")
    assert _of_called_ops(Runs(), "", whole, result) == whole  # type: ignore[arg-type]
    assert ran == [("", tp.Policy.stock().override({"mm.default": "fp32"}, "cpu")), ("", whole)]


def test_no_override_for_a_backward_that_is_not_of_an_op() -> None:
    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 1e5

    x = big(1.0, HALF).requires_grad_()
    report = find(lambda: Overflows.apply(x).sum().backward())
    assert report.origin is not None
    assert report.origin.phase == "backward"
    assert next_override(report) is None


def test_suggest_keeps_to_the_device_types_of_the_program() -> None:
    def step() -> Tensor:
        with tp.my_autocast("cpu", HALF):
            return torch.mm(big(200.0), big(200.0))

    policy = find(step).suggest(step)
    assert policy is not None
    assert {(one.overload, one.device) for one in policy.diff("stock")} == {("aten::mm", "cpu")}


def test_the_override_to_try_next() -> None:
    def overflow(operation: Callable[[], Any]) -> NonfiniteReport:
        def program() -> None:
            with tp.my_autocast("cpu", HALF):
                operation()

        return find(program)

    assert next_override(overflow(lambda: torch.mm(big(200.0), big(200.0)))) == "aten::mm.default"
    assert next_override(overflow(lambda: torch.mm(big(1e6), big(1.0)))) is not None
    assert next_override(overflow(lambda: torch.log(torch.zeros(1)))) is None
    assert next_override(overflow(lambda: None)) is None
    assert next_override(overflow(lambda: big(1e6).half())) is None, "a cast of the program's own"
