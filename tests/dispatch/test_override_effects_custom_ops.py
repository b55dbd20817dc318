"""Custom ops with every kind of argument under overrides, from torch.library.custom_op and from Library.define."""

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
from torch_promote.parity.samples import Bound
from torch_promote.policy.op_table import CastPolicy

#: The dtypes in which the kernels got their tensors, in their order.
got: list[torch.dtype] = []


def seen(*values: Any) -> Tensor:
    """Records the tensors' dtypes, and sums everything in the dtype of the first tensor."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    got.extend(leaf.dtype for leaf in leaves)
    total = leaves[0].clone()
    for leaf in leaves[1:]:
        total = total + leaf.to(total.dtype) * 0.3
    return total


def write(into: Tensor, *values: Any) -> Tensor:
    """Records the dtypes, and writes the result."""
    return into.copy_(seen(values))


def t(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor."""
    return (torch.linspace(0.1, 2.3, 6, dtype=torch.float64) * (seed + 1)).to(dtype)


BF16, F16, F32, F64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
CASTING: tuple[Policy, ...] = (CastPolicy.lower_precision_fp, CastPolicy.fp32, CastPolicy.promote, F16, F64)
POLICIES: tuple[Policy, ...] = (*CASTING, CastPolicy.keep, CastPolicy.fallthrough, CastPolicy.banned)
SCHEMAS = (
    "plain(Tensor x, Tensor? y, Tensor[] many, Tensor?[] maybe, *, Tensor w, Tensor? z=None, float f=1.5) -> Tensor",
    "many_or_none(Tensor[]? many, Tensor x) -> Tensor",
    "pair((Tensor, Tensor?) xs, Tensor y) -> Tensor",
    "named(Tensor x, Dict(str, Tensor) others) -> Tensor",
    "two(Tensor x, Tensor? y=None) -> Tensor",
    "rows(Tensor x, Tensor[][] others) -> Tensor",
    "nothing_but_a_tuple((Tensor, Tensor) xs) -> Tensor",
    "nothing_but_a_dict(Dict(str, Tensor) xs, *, float f=2.0) -> Tensor",
)
WRITING_SCHEMAS = (
    "into(Tensor(a!) x, Tensor y, *, Tensor? z=None) -> ()",
    "into_both(Tensor(a!) x, Tensor(b!) y, Tensor z) -> ()",
    "into_out(Tensor x, Tensor?[] ys, *, Tensor(a!) out) -> Tensor(a!)",
    "into_all(Tensor(a!)[] xs, Dict(str, Tensor) ys) -> ()",
)


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    """The ops, redefined for each test: an existing kernel of ours keeps working."""
    with torch.library._scoped_library("effects", "FRAGMENT") as made:
        for schema in SCHEMAS:
            made.define(schema)
            made.impl(schema.partition("(")[0], lambda *a, **k: seen(a, k), "CompositeExplicitAutograd")
        for schema in WRITING_SCHEMAS:
            made.define(schema)
        made.impl("into", lambda x, y, z=None: None if write(x, y, z) is x else x, "CompositeExplicitAutograd")
        made.impl("into_both", lambda x, y, z: None if write(y, z) is y else x, "CompositeExplicitAutograd")
        made.impl("into_out", lambda x, ys, out: write(out, x, ys), "CompositeExplicitAutograd")
        made.impl("into_all", lambda xs, ys: None if write(xs[0], ys) is xs[0] else xs, "CompositeExplicitAutograd")
        got.clear()
        yield made


def op(name: str) -> Any:
    return getattr(torch.ops.effects, name).default


#: Calls with tensors that may be cast, doubles, and integers.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("plain", (t(F32), t(BF16, 1), [t(F32, 2), t(F64)], [None, t(BF16, 3), t(I64)]), {"w": t(F16, 4), "z": t(F32)}),
    ("plain", (t(BF16), None, [], [None, t(F32)]), {"w": t(BF16, 4), "f": 0.5}),
    ("many_or_none", ([t(F32), t(BF16, 1)], t(BF16)), {}),
    ("many_or_none", (None, t(BF16)), {}),
    ("pair", ((t(F32), t(BF16, 1)), t(F32, 2)), {}),
    ("pair", ((t(BF16), None), t(F32, 2)), {}),
    ("named", (t(BF16), {"a": t(F32, 1), "b": t(F64, 2), "c": t(BF16)}), {}),
    ("named", (t(F32), {}), {}),
    ("two", (t(F32), t(BF16)), {}),
    ("rows", (t(F32), [[t(BF16)], [], [t(F16), t(I64)]]), {}),
    ("nothing_but_a_tuple", ((t(F32), t(BF16, 1)),), {}),
    ("nothing_but_a_dict", ({"a": t(BF16), "b": t(F32)},), {"f": 3.0}),
]

each_call = pytest.mark.parametrize(("name", "args", "kwargs"), CALLS, ids=[f"{i} {c[0]}" for i, c in enumerate(CALLS)])
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


@each_call
@each_policy
def test_every_kind_of_argument(name: str, args: Any, kwargs: Any, policy: Policy) -> None:
    before = tree_leaves((args, kwargs))
    dtypes = [leaf.dtype for leaf in before if isinstance(leaf, Tensor)]
    check_effect("once", (op(name), args, kwargs), policy)
    if policy is CastPolicy.banned:
        assert got == []
        return
    in_the_region, by_hand = got[: len(dtypes)], got[len(dtypes) :]
    assert in_the_region == by_hand
    to = {CastPolicy.lower_precision_fp: BF16, CastPolicy.fp32: F32}.get(policy, policy)  # type: ignore[call-overload]
    if isinstance(to, torch.dtype):
        assert in_the_region == [to if d in (BF16, F16, F32) else d for d in dtypes]
    elif policy is not CastPolicy.promote:
        assert in_the_region == dtypes


WRITING: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("into", (t(BF16), t(F32, 1)), {"z": t(F64, 2)}),
    ("into", (t(F32), t(BF16, 1)), {}),
    ("into", (t(F64), t(F16, 1)), {"z": t(I64)}),
    ("into", (t(I64), t(F32, 1)), {}),
    ("into_both", (t(BF16), t(F64, 1), t(F32, 2)), {}),  # the first one decides
    ("into_out", (t(F32), [None, t(F64), t(BF16)]), {"out": t(F16)}),
    ("into_all", ([t(BF16), t(BF16)], {"a": t(F64), "b": t(F16)}), {}),
    ("into_all", ([t(BF16), t(F32)], {"a": t(F64), "b": t(F16)}), {}),  # which one of the two should they match?
    ("into_all", ([t(F32)], {"a": t(F32)}), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), WRITING, ids=[f"{i} {c[0]}" for i, c in enumerate(WRITING)])
@pytest.mark.parametrize("policy", ["match_self", "keep", "fallthrough"])
def test_what_custom_ops_write(name: str, args: Any, kwargs: Any, policy: str) -> None:
    plan, outcome = check_effect("once", (op(name), args, kwargs), CastPolicy(policy))
    assert outcome.error is None
    into = tree_leaves(kwargs.get("out", args[:2] if name == "into_both" else args[0]))
    written = into[0]
    one = name == "into_both" or len({leaf.dtype for leaf in into}) == 1
    if policy == "match_self" and written.is_floating_point() and one:
        assert {dtype for dtype in got if dtype is not I64} == {written.dtype}
    else:
        assert plan.casts == ()
    assert [w.dtype for w in tree_leaves(outcome.result[1])] == [leaf.dtype for leaf in into], "they are never cast"


# --- with an autograd formula, eager and compiled


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
    scaled.register_fake(lambda x, w, b, others, *, by=2.0: torch.empty_like(x))
    got.clear()
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
def test_under_torch_compile() -> None:
    overload = torch.ops.effects_custom.scaled.default
    torch._dynamo.reset()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return overload(x, w, None, [], by=0.5) * 2

    x, w = t(BF16), grad(F32, 1)
    compiled = torch.compile(call, backend="aot_eager")
    for policy, wanted in (("fp32", F32), (F64, F64), ("fp16", BF16), ("fp32", F32)):
        with tp.my_autocast("cpu", overrides={overload: policy}):
            ours, eager = compiled(x, w), call(x, w)
        assert ours.dtype == wanted
        assert_same(ours, eager)
        assert_same(torch.autograd.grad(ours.sum(), w), torch.autograd.grad(eager.sum(), w))
