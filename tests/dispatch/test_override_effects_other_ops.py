"""Compares ops outside the op table, under every kind of policy, with the reference's plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.override_effects import Policy, by_turns, check_effect, full_name
from torch_promote.policy.op_table import CastPolicy, op_table
from torch_promote.policy.overrides import legal_policies

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CASTING = (CastPolicy.fp32, CastPolicy.lower_precision_fp, CastPolicy.promote, F64)
OTHERS = (CastPolicy.keep, CastPolicy.banned, CastPolicy.fallthrough, CastPolicy.fp32_set_opt_dtype)
aten = torch.ops.aten


def t(*shape: int, grad: bool = True) -> torch.Tensor:
    numbers = torch.linspace(0.1, 0.9, torch.Size(shape).numel()).view(shape)
    return numbers.requires_grad_() if grad else numbers


INDEX = torch.tensor([1, 0, 1])
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.sin.default, (t(3, 4),), {}),
    (aten.sigmoid.default, (t(3, 4),), {}),
    (aten.maximum.default, (t(3, 4), t(4)), {}),
    (aten.add.Tensor, (t(3, 4), t(3, 1)), {"alpha": 2}),
    (aten.mul.Scalar, (t(3, 4), 0.3), {}),
    (aten.lerp.Tensor, (t(3, 4), t(3, 4), t(4)), {}),
    (aten.where.self, (torch.tensor([True, False, True]), t(3), t(3)), {}),
    (aten.clamp.Tensor, (t(3, 4), None, t(4)), {}),
    (aten.amax.default, (t(3, 4), [1]), {}),
    (aten.var_mean.correction, (t(3, 4), [1]), {"correction": 1}),
    (aten.nansum.default, (t(3, 4),), {}),
    (aten.sort.default, (t(3, 4),), {}),
    (aten.hypot.default, (t(3, 4), t(3, 1)), {}),
    (aten.cummax.default, (t(3, 4), 1), {}),
    (aten.index_add.default, (t(3, 4), 0, INDEX, t(3, 4)), {"alpha": 0.5}),
    (aten.logaddexp.default, (t(3, 4), t(3, 4)), {}),
    (aten.glu.default, (t(3, 4),), {}),
    (aten._foreach_add.List, ([t(3), t(2, 2)], [t(3), t(2, 2)]), {}),
]


@pytest.mark.filterwarnings("ignore")
def test_on_the_cpu_in_bits() -> None:
    rows, cast, ran = {row.name for row in op_table()}, dict.fromkeys((*CASTING, *OTHERS), 0), 0
    for op, args, kwargs in CALLS:
        assert full_name(op) not in rows
        legal = legal_policies(full_name(op))
        mixed_args, mixed_kwargs = by_turns((args, kwargs), (BF16, F32))
        policies: list[Policy] = [p for p in (*CASTING, *OTHERS) if (CastPolicy.fp32 if p is F64 else p) in legal]
        for bound in ((op, args, kwargs), (op, mixed_args, mixed_kwargs)):
            for policy in policies:
                plan, outcome = check_effect(full_name(op), bound, policy)
                cast[policy] += bool(plan.casts) and outcome.error is None
                ran += outcome.error is None
                assert policy is not CastPolicy.banned or outcome.error is not None
    assert min(cast[policy] for policy in CASTING) >= 5
    assert not any(cast[policy] for policy in OTHERS)
    assert ran > 150
