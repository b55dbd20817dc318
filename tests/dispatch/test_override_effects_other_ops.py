"""Compares 300 random ops outside the op table, under overrides, with the reference's plan."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from helpers.dispatched_ops import functional_ops
from helpers.override_effects import Policy, by_turns, check_effect, has_sparse, on_fake_cuda, tensors
from helpers.rows import tensors_of
from helpers.side_by_side import Outcome
from torch_promote.parity.entry_run import Bound
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastPlan

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CASTING = (CastPolicy.fp32, CastPolicy.lower_precision_fp, CastPolicy.promote, F64)
OTHERS = (CastPolicy.keep, CastPolicy.banned, CastPolicy.fallthrough, CastPolicy.fp32_set_opt_dtype)

COUNT, PARTS = 300, 10
#: The everyday run has two parts of the ops.
EVERYDAY = (0, 1)
PARAMETERS = [pytest.param(part, marks=[] if part in EVERYDAY else pytest.mark.slow) for part in range(PARTS)]
each_part = pytest.mark.parametrize("part", PARAMETERS)


@functools.cache
def chosen() -> tuple[str, ...]:
    return tuple(random.Random(20).sample(sorted(functional_ops()), COUNT))


def calls(name: str) -> list[tuple[str, Bound]]:
    """A sample of float32 tensors, and one whose tensors alternate between the lower dtype and float32."""
    first, last = functional_ops()[name][0], functional_ops()[name][-1]
    op, args, kwargs = last
    mixed_args, mixed_kwargs = by_turns((args, kwargs), (BF16, F32))
    return [("float32", first), ("mixed", (op, mixed_args, mixed_kwargs))]


def policies(name: str) -> list[Policy]:
    legal = legal_policies(name)
    return [p for p in (*CASTING, *OTHERS) if (CastPolicy.fp32 if isinstance(p, torch.dtype) else p) in legal]


def outcomes(part: int) -> dict[Policy, list[tuple[AutocastPlan, Outcome]]]:
    found: dict[Policy, list[tuple[AutocastPlan, Outcome]]] = {policy: [] for policy in (*CASTING, *OTHERS)}
    for name in chosen()[part::PARTS]:
        for kind, bound in calls(name):
            for policy in policies(name):
                found[policy].append(check_effect(kind, bound, policy))
    return found


@each_part
def test_on_the_cpu_in_bits(part: int) -> None:
    for policy, made in outcomes(part).items():
        cast = [outcome for plan, outcome in made if plan.casts]
        with_gradients = [outcome for outcome in cast if outcome.gradients]
        if policy is CastPolicy.banned:
            assert all(outcome.error is not None for _, outcome in made)
        elif policy in CASTING:
            # Of one tensor alone there is nothing to promote.
            least = 2 if policy is CastPolicy.promote else 15
            assert len([outcome for outcome in cast if outcome.error is None]) >= least, policy
            assert with_gradients, policy
        else:
            assert not cast


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("part", PARAMETERS[::2])
def test_half_of_them_on_fake_cuda_in_dtypes_shapes_and_strides(part: int) -> None:
    ran = set()
    mixed = {name: calls(name)[1][1] for name in chosen()[part::PARTS]}
    with tensors_of(fake=True):
        for name, (op, args, kwargs) in mixed.items():
            if has_sparse((args, kwargs)):  # there are no fake ones
                continue
            bound = op, *on_fake_cuda((args, kwargs))
            for policy in policies(name):
                plan, outcome = check_effect("mixed", bound, policy, "cuda", torch.float16, fake=True)
                assert policy not in (CastPolicy.lower_precision_fp, F64) or plan.casts or not floats(bound)
                ran |= {policy} if plan.casts and outcome.error is None else set()
    assert ran == set(CASTING)


def floats(bound: Bound) -> bool:
    """Whether a call has tensors that autocast may cast."""
    return any(leaf.is_floating_point() and leaf.dtype is not F64 for leaf in tensors(bound[1:]))
