"""Regions of `promotion`: input, nesting, threads, autocast, autograd, transforms, and no effect outside."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.subprocesses import plain_environment, run_python
from torch_promote.errors import DecoratorError, OptionError, PromotionRuleError, RuleDefinitionError

HALF = torch.ones(3, dtype=torch.float16)
BRAIN = torch.ones(3, dtype=torch.bfloat16)
INTS = torch.arange(3, dtype=torch.int32)
SINGLE = torch.ones(3)


def mixed() -> torch.dtype:
    """float32 under stock and jax, float64 under numpy."""
    return (INTS + SINGLE).dtype


class TestBadInput:
    def test_rules(self) -> None:
        with pytest.raises(RuleDefinitionError, match=r"'numpi'. Legal: torch, jax, .*Closest: numpy"):
            tp.promotion("numpi")
        with pytest.raises(RuleDefinitionError, match="3"):
            tp.promotion(3)  # type: ignore[arg-type]
        with pytest.raises(RuleDefinitionError, match=r"As a decorator, write it with a rule: @promotion\(\"torch\"\)"):
            tp.promotion(mixed)  # type: ignore[arg-type]

    def test_matmul(self) -> None:
        with pytest.raises(OptionError, match="matmul is True or False, got 'yes' of type str"):
            tp.promotion("jax", matmul="yes")  # type: ignore[arg-type]

    def test_what_is_no_callable_cannot_be_decorated(self) -> None:
        with pytest.raises(DecoratorError, match="decorates a callable, got int"):
            tp.promotion("jax")(3)


class TestRegions:
    def test_the_innermost_counts(self) -> None:
        with tp.promotion("numpy"):
            assert mixed() is torch.float64
            with tp.promotion("jax"):
                assert mixed() is torch.float32
            assert mixed() is torch.float64
        assert mixed() is torch.float32

    def test_threads_have_their_own(self) -> None:
        found: list[torch.dtype] = []
        with tp.promotion("numpy"):
            thread = threading.Thread(target=lambda: found.append(mixed()))
            thread.start()
            thread.join()
            found.append(mixed())
        assert found == [torch.float32, torch.float64]

    def test_decorators(self) -> None:
        @tp.promotion("numpy")
        def function() -> torch.dtype:
            return mixed()

        @tp.promotion("numpy")
        def steps() -> Any:
            yield mixed()
            yield mixed()

        @tp.promotion("numpy")
        async def coroutine() -> tuple[torch.dtype, torch.dtype]:
            before = mixed()
            await asyncio.sleep(0)
            return before, mixed()

        assert function() is torch.float64
        iterator = steps()
        assert next(iterator) is torch.float64
        assert mixed() is torch.float32
        assert next(iterator) is torch.float64
        assert asyncio.run(coroutine()) == (torch.float64, torch.float64)


class TestWithAutocast:
    weight = torch.ones(3, 3)

    def test_autocast_casts_before_the_rule_in_either_nesting(self) -> None:
        x = torch.ones(2, 3)
        with tp.my_autocast("cpu"), tp.promotion("numpy"):
            inner = (x @ self.weight) + torch.ones(3, dtype=torch.int32)
        with tp.promotion("numpy"), tp.my_autocast("cpu"):
            outer = (x @ self.weight) + torch.ones(3, dtype=torch.int32)
        with tp.promotion("numpy"), tp.stock_autocast("cpu"):
            stock = (x @ self.weight) + torch.ones(3, dtype=torch.int32)
        assert inner.dtype is outer.dtype is stock.dtype is torch.float64
        with tp.my_autocast("cpu"), tp.promotion("numpy"):
            assert (x @ self.weight).dtype is torch.bfloat16

    def test_a_policy_in_the_region_keeps_the_rule(self) -> None:
        with tp.promotion("numpy"), tp.my_autocast("cpu", policy="off"):
            assert mixed() is torch.float64
        with tp.promotion("numpy"), tp.my_autocast("cpu", overrides={"add": "fp32"}):
            assert mixed() is torch.float64

    def test_overridden_ops_are_promoted(self) -> None:
        with tp.my_autocast("cpu", overrides={"aten::add.Tensor": "fp32"}), tp.promotion("numpy"):
            assert (BRAIN + INTS).dtype is torch.float64
        with tp.my_autocast("cpu", overrides={"aten::add.Tensor": "fp32"}):
            assert (BRAIN + INTS).dtype is torch.float32


class TestAutograd:
    @pytest.mark.parametrize("inside", [True, False])
    def test_gradients_have_the_operands_dtypes(self, inside: bool) -> None:
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
    def test_checkpointing_computes_again_as_before(self, reentrant: bool, inside: bool) -> None:
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


class TestTransforms:
    def test_vmap(self) -> None:
        with tp.promotion("jax"):
            result = torch.vmap(lambda x, y: x + y)(torch.ones(2, 3).half(), torch.ones(2, 3).bfloat16())
        assert result.dtype is torch.float32
        with tp.promotion("numpy"):
            assert torch.vmap(torch.add, (0, None))(torch.ones(2, 3), INTS).dtype is torch.float64
        with tp.promotion("strict"), pytest.raises(PromotionRuleError):
            torch.vmap(torch.add)(torch.ones(2, 3), torch.ones(2, 3).half())

    def test_fake_tensors(self) -> None:
        with FakeTensorMode(), tp.promotion("numpy"):
            assert (torch.ones(3) + torch.ones(3, dtype=torch.int32)).dtype is torch.float64
            x = torch.ones(3)
            x += torch.ones((), dtype=torch.float64)
            assert x.dtype is torch.float32
        with tp.promotion("numpy"):
            assert (
                torch.empty(3, device="meta") + torch.empty(3, dtype=torch.int8, device="meta")
            ).dtype is torch.float32

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_make_fx_records_the_casts(self, mode: str) -> None:
        with tp.promotion("numpy"):
            traced = make_fx(torch.add, tracing_mode=mode)(INTS, SINGLE)
        assert traced.code.count("torch.float64") == 2
        assert traced(INTS, SINGLE).dtype is torch.float64

    def test_export_says_that_it_cannot(self) -> None:
        class Adds(torch.nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                with tp.promotion("numpy"):
                    return x + y

        with pytest.raises(Exception, match="a promotion rule cannot be exported"):
            torch.export.export(Adds(), (INTS, SINGLE))


class TestOff:
    def test_nothing_is_registered_until_the_first_use(self) -> None:
        code = """
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
        done = run_python(code, env=plain_environment())
        assert done.returncode == 0, done.stderr


class TestCrosscheck:
    def test_another_rule_is_compared_with_its_own_tables(self) -> None:
        x, scalar = SINGLE.clone(), torch.tensor(2.5, dtype=torch.float64)
        with tp.crosscheck() as report, tp.promotion("numpy"):
            _ = INTS + SINGLE, INTS / INTS, SINGLE * scalar, torch.cat([HALF, INTS]), torch.where(x > 0, HALF, BRAIN)
            _ = INTS + 5.5, torch._foreach_mul([HALF, INTS], [BRAIN, INTS]), torch.sqrt(INTS), INTS > SINGLE
            x += scalar
            torch.add(INTS, SINGLE, out=torch.empty(3))
        report.raise_for_mismatches()
        assert report.checked["aten.add.Tensor"] >= 2
        assert report.checked["aten._foreach_mul.List"] == 1

    def test_the_rule_torch_matches_stock_bit_for_bit(self) -> None:
        with tp.crosscheck(level="bits") as report, tp.promotion("torch"), tp.my_autocast("cpu"):
            y = (torch.ones(2, 3) @ torch.ones(3, 3)) + INTS
            _ = torch.cat([y, HALF.expand(2, 3)]), y * torch.tensor(1e6), y**2.5
        report.raise_for_mismatches()
        assert report.with_stock["aten.add.Tensor"] >= 1
