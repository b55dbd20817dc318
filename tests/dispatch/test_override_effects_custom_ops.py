"""Custom ops with every kind of argument under overrides, from torch.library.custom_op and from Library.define."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from helpers.override_effects import Policy, check_effect, on_fake_cuda
from helpers.recording_ops import got, seen, t, write
from helpers.rows import tensors_of
from torch_promote.policy.op_table import CastPolicy

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


@pytest.mark.usefixtures("pretend_cuda")
@each_call
@each_policy
def test_on_fake_cuda(name: str, args: Any, kwargs: Any, policy: Policy) -> None:
    with tensors_of(fake=True):
        check_effect("fake", (op(name), *on_fake_cuda((args, kwargs))), policy, "cuda", F16, fake=True)


WRITING: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("into", (t(BF16), t(F32, 1)), {"z": t(F64, 2)}),
    ("into", (t(F32), t(BF16, 1)), {}),
    ("into", (t(F64), t(F16, 1)), {"z": t(I64)}),
    ("into", (t(I64), t(F32, 1)), {}),
    ("into_out", (t(F32), [None, t(F64), t(BF16)]), {"out": t(F16)}),
    ("into_all", ([t(BF16), t(F32)], {"a": t(F64), "b": t(F16)}), {}),
    ("into_all", ([t(F32)], {"a": t(F32)}), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), WRITING, ids=[f"{i} {c[0]}" for i, c in enumerate(WRITING)])
@pytest.mark.parametrize("policy", ["match_self", "keep", "fallthrough"])
def test_what_custom_ops_write(name: str, args: Any, kwargs: Any, policy: str) -> None:
    plan, outcome = check_effect("once", (op(name), args, kwargs), CastPolicy(policy))
    assert outcome.error is None
    written = kwargs.get("out", args[0][0] if isinstance(args[0], list) else args[0])
    if policy == "match_self" and written.is_floating_point():
        assert {dtype for dtype in got if dtype is not I64} == {written.dtype}
    else:
        assert plan.casts == ()
    assert [w.dtype for w in tree_leaves(outcome.result[1])] == [
        leaf.dtype for leaf in tree_leaves(kwargs.get("out", args[0]))
    ], "what is written to is never cast"
