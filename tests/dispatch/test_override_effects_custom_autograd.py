"""A custom op with an autograd formula, a fake kernel and a vmap rule under overrides, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.override_effects import Policy, check_effect
from helpers.recording_ops import got, seen, t
from torch_promote.parity.entry_run import Bound
from torch_promote.policy.op_table import CastPolicy

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASTING: tuple[Policy, ...] = (CastPolicy.lower_precision_fp, CastPolicy.fp32, CastPolicy.promote, F16, F64)
POLICIES: tuple[Policy, ...] = (*CASTING, CastPolicy.keep, CastPolicy.fallthrough, CastPolicy.banned)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


@pytest.fixture
def scaled() -> Iterator[Any]:
    @torch.library.custom_op("effects_custom::scaled", mutates_args=())
    def scaled(x: Tensor, w: Tensor, b: Tensor | None, others: list[Tensor], *, by: float = 2.0) -> Tensor:
        return seen(x * w * by, w, b, others)

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.by, ctx.has_bias, ctx.count = keyword_only_inputs["by"], inputs[2] is not None, len(inputs[3])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        grads = grad * w * ctx.by, grad * x * ctx.by + 0.3 * grad
        return *grads, grad * 0.3 if ctx.has_bias else None, [grad * 0.3] * ctx.count

    scaled.register_autograd(backward, setup_context=setup)
    scaled.register_vmap(lambda info, dims, x, w, b, others, *, by: (scaled(x, w, b, others, by=by), 0))
    scaled.register_fake(lambda x, w, b, others, *, by=2.0: torch.empty_like(x))
    got.clear()
    with torch.library._scoped_library("effects_custom", "FRAGMENT") as library:
        library.define("two(Tensor x, Tensor y) -> Tensor")
        library.impl("two", lambda x, y: seen(x, y), "CompositeExplicitAutograd")
        yield scaled
    scaled._lib._destroy()


def scaled_calls() -> Iterator[Bound]:
    overload = torch.ops.effects_custom.scaled.default
    yield overload, (grad(F32), grad(BF16, 1), grad(F32, 2), [grad(F16), grad(F32, 3)]), {"by": 0.5}
    yield overload, (grad(BF16), grad(F32, 1), None, []), {}
    weight = grad(F32, 1)
    yield overload, (weight, weight, None, [weight]), {}


def grad(dtype: torch.dtype, seed: int = 0) -> Tensor:
    return t(dtype, seed).requires_grad_()


@pytest.mark.usefixtures("scaled")
@each_policy
def test_gradients_flow_through_an_autograd_formula(policy: Policy) -> None:
    cast = 0
    for bound in scaled_calls():
        plan, outcome = check_effect("grad", bound, policy)
        cast += len(plan.casts)
        if policy is not CastPolicy.banned:
            assert outcome.gradients
            assert all(gradient is not None and gradient.any() for gradient in outcome.gradients)
            leaves = [leaf for leaf in tree_leaves(bound[1]) if isinstance(leaf, Tensor)]
            assert [g.dtype for g in outcome.gradients] == [leaf.dtype for leaf in leaves]
    assert (cast > 0) is (policy in CASTING)


@pytest.mark.usefixtures("scaled")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("policy", "wanted"), [("fp32", F32), ("fp16", BF16), ("float64", F64), ("promote", F32)])
def test_under_vmap_with_a_rule_and_without(policy: str, wanted: torch.dtype) -> None:
    scaled, two = torch.ops.effects_custom.scaled.default, torch.ops.effects_custom.two.default
    x, w = torch.rand(4, 6).bfloat16(), torch.rand(4, 6)

    def call(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return scaled(x, w, None, [], by=0.5), two(w, x) if policy != "promote" else two(w.to(wanted), x.to(wanted))

    with tp.my_autocast("cpu", overrides={scaled: policy, two: policy}):
        ours = torch.vmap(call)(x, w)
    assert set(got) == {wanted}
    assert_same(ours, torch.vmap(call)(x.to(wanted), w.to(wanted)))


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("inside", [True, False])
def test_under_torch_compile(inside: bool) -> None:
    overload = torch.ops.effects_custom.scaled.default
    torch._dynamo.reset()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return overload(x, w, None, [], by=0.5) * 2

    def region(policy: Any) -> Any:
        return tp.my_autocast("cpu", overrides={overload: policy})

    def call_inside(x: Tensor, w: Tensor) -> Tensor:
        with region("fp32"):
            return call(x, w)

    x, w = t(BF16), grad(F32, 1)
    if inside:
        compiled = torch.compile(call_inside, backend="aot_eager")
        ours, eager = compiled(x, w), call_inside(x, w)
        assert ours.dtype == F32
        assert_same(ours, eager)
        assert_same(torch.autograd.grad(ours.sum(), w), torch.autograd.grad(eager.sum(), w))
        return
    compiled = torch.compile(call, backend="aot_eager")
    for policy, wanted in (("fp32", F32), (F64, F64), ("fp16", BF16), ("fp32", F32)):
        with region(policy):
            ours, eager = compiled(x, w), call(x, w)
        assert ours.dtype == wanted
        assert_same(ours, eager)
        assert_same(torch.autograd.grad(ours.sum(), w), torch.autograd.grad(eager.sum(), w))
