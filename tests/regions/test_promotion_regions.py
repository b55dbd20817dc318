"""Regions of `promotion`: input, nesting, threads, autocast, autograd, transforms, and no effect outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.probes import in_thread
from helpers.subprocesses import plain_environment, run_python
from torch_promote.errors import DecoratorError, OptionError, PromotionRuleError, RuleDefinitionError

HALF = torch.ones(3, dtype=torch.float16)
BRAIN = torch.ones(3, dtype=torch.bfloat16)
INTS = torch.arange(3, dtype=torch.int32)
SINGLE = torch.ones(3)


def mixed() -> torch.dtype:
    """float32 under stock and jax, float64 under numpy."""
    return (INTS + SINGLE).dtype


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: tp.promotion("numpi"), RuleDefinitionError, "'numpi'. Legal: torch, jax, "),
    (lambda: tp.promotion(3), RuleDefinitionError, "3"),  # type: ignore[arg-type]
    (lambda: tp.promotion(mixed), RuleDefinitionError, "As a decorator, write it with a rule: @promotion("),  # type: ignore[arg-type]
    (lambda: tp.promotion("jax", matmul="yes"), OptionError, "matmul is True or False, got 'yes' of type str"),  # type: ignore[arg-type]
    (lambda: tp.promotion("jax")(3), DecoratorError, "decorates a callable, got int"),
]


@pytest.mark.parametrize(("ask", "kind", "text"), BAD)
def test_bad_input(ask: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        ask()
    assert text in str(error.value)


def test_the_innermost_counts_in_each_thread_and_step() -> None:
    @tp.promotion("jax")
    def steps() -> Any:
        yield mixed()
        yield mixed()

    with tp.promotion("numpy"):
        iterator = steps()
        assert [mixed(), next(iterator), mixed(), next(iterator)] == [torch.float64, torch.float32] * 2
        assert in_thread(mixed) is torch.float32
    assert mixed() is torch.float32


weight = torch.ones(3, 3)


def test_autocast_casts_before_the_rule_in_either_nesting() -> None:
    x = torch.ones(2, 3)
    with tp.my_autocast("cpu"), tp.promotion("numpy"):
        inner = (x @ weight) + torch.ones(3, dtype=torch.int32)
    with tp.promotion("numpy"), tp.my_autocast("cpu"):
        outer = (x @ weight) + torch.ones(3, dtype=torch.int32)
    with tp.promotion("numpy"), tp.stock_autocast("cpu"):
        stock = (x @ weight) + torch.ones(3, dtype=torch.int32)
    assert inner.dtype is outer.dtype is stock.dtype is torch.float64
    with tp.my_autocast("cpu"), tp.promotion("numpy"):
        assert (x @ weight).dtype is torch.bfloat16


def test_a_policy_in_the_region_keeps_the_rule() -> None:
    with tp.promotion("numpy"), tp.my_autocast("cpu", policy="off"):
        assert mixed() is torch.float64
    with tp.promotion("numpy"), tp.my_autocast("cpu", overrides={"add": "fp32"}):
        assert mixed() is torch.float64


def test_overridden_ops_are_promoted() -> None:
    with tp.my_autocast("cpu", overrides={"aten::add.Tensor": "fp32"}), tp.promotion("numpy"):
        assert (BRAIN + INTS).dtype is torch.float64
    with tp.my_autocast("cpu", overrides={"aten::add.Tensor": "fp32"}):
        assert (BRAIN + INTS).dtype is torch.float32


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_have_the_operands_dtypes(inside: bool) -> None:
    a = torch.full((3,), 1.5, dtype=torch.float16, requires_grad=True)
    b = torch.full((3,), 2.5, dtype=torch.bfloat16, requires_grad=True)
    with tp.promotion("jax"):
        total = (a * b).sum()
        assert total.dtype is torch.float32
        if inside:
            total.backward()
    if not inside:
        total.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.dtype, b.grad.dtype) == (torch.float16, torch.bfloat16)
    assert torch.equal(a.grad, b.detach().half())


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_again_as_before(reentrant: bool, inside: bool) -> None:
    dtypes = []

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a * b
        dtypes.append(product.dtype)
        return product.sin()

    x = torch.ones(3, requires_grad=True)
    with tp.promotion("numpy"):
        y = checkpoint(function, x, INTS, use_reentrant=reentrant)
        if inside:
            y.sum().backward()
    if not inside:
        y.sum().backward()
    assert dtypes == [torch.float64, torch.float64]


def test_vmap() -> None:
    with tp.promotion("jax"):
        result = torch.vmap(lambda x, y: x + y)(torch.ones(2, 3).half(), torch.ones(2, 3).bfloat16())
    assert result.dtype is torch.float32
    with tp.promotion("numpy"):
        assert torch.vmap(torch.add, (0, None))(torch.ones(2, 3), INTS).dtype is torch.float64
    with tp.promotion("strict"), pytest.raises(PromotionRuleError):
        torch.vmap(torch.add)(torch.ones(2, 3), torch.ones(2, 3).half())


def test_fake_tensors() -> None:
    with FakeTensorMode(), tp.promotion("numpy"):
        assert (torch.ones(3) + torch.ones(3, dtype=torch.int32)).dtype is torch.float64
        x = torch.ones(3)
        x += torch.ones((), dtype=torch.float64)
        assert x.dtype is torch.float32
    with tp.promotion("numpy"):
        assert (torch.empty(3, device="meta") + torch.empty(3, dtype=torch.int8, device="meta")).dtype is torch.float32


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_casts(mode: str) -> None:
    with tp.promotion("numpy"):
        traced = make_fx(torch.add, tracing_mode=mode)(INTS, SINGLE)
    assert traced.code.count("torch.float64") == 2
    assert traced(INTS, SINGLE).dtype is torch.float64


def test_export_says_that_it_cannot() -> None:
    class Adds(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with tp.promotion("numpy"):
                return x + y

    with pytest.raises(Exception, match="a promotion rule cannot be exported"):
        torch.export.export(Adds(), (INTS, SINGLE))


NOTHING_BEFORE_THE_FIRST_USE = """
import sys, torch, torch_promote as tp
def ours(op):
    return next(l for l in torch._C._dispatch_dump_table(op).splitlines() if l.startswith("AutocastPrivateUse1"))
ops = ("aten::add.Tensor", "aten::where.self", "aten::_foreach_add.List", "aten::mm", "aten::quantile")
before = [ours(op) for op in ops]
assert "fallthrough" in before[0] and "fallthrough" in before[2], before
assert not any(name.startswith("torch_promote.reference") for name in sys.modules)
with tp.my_autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
assert [ours(op) for op in ops] == before
tp.promotion("jax")
after = [ours(op) for op in ops]
assert "fallthrough" not in after[0] and "fallthrough" not in after[2], after
"""


def test_nothing_is_registered_until_the_first_use() -> None:
    done = run_python(NOTHING_BEFORE_THE_FIRST_USE, env=plain_environment())
    assert done.returncode == 0, done.stderr


def test_another_rule_is_compared_with_its_own_tables() -> None:
    x, scalar = SINGLE.clone(), torch.tensor(2.5, dtype=torch.float64)
    with tp.crosscheck() as report, tp.promotion("numpy"):
        _ = INTS + SINGLE, INTS / INTS, SINGLE * scalar, torch.cat([HALF, INTS]), torch.where(x > 0, HALF, BRAIN)
        _ = INTS + 5.5, torch._foreach_mul([HALF, INTS], [BRAIN, INTS]), torch.sqrt(INTS), INTS > SINGLE
        x += scalar
        torch.add(INTS, SINGLE, out=torch.empty(3))
    report.raise_for_mismatches()
    assert report.checked["aten.add.Tensor"] >= 2
    assert report.checked["aten._foreach_mul.List"] == 1


def test_the_rule_torch_matches_stock_bit_for_bit() -> None:
    with tp.crosscheck(level="bits") as report, tp.promotion("torch"), tp.my_autocast("cpu"):
        y = (torch.ones(2, 3) @ torch.ones(3, 3)) + INTS
        _ = torch.cat([y, HALF.expand(2, 3)]), y * torch.tensor(1e6), y**2.5
    report.raise_for_mismatches()
    assert report.with_stock["aten.add.Tensor"] >= 1
