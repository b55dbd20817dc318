"""Inside the kernels of other ops, overrides and promotion rules cast nothing, and data movement has no casting policy.

A failure of these tests corrupts memory, so they run in separate processes.
"""

from __future__ import annotations

import json

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import run_python

#: A program, and an op that its kernels call. The policies are not checked, so that they can name these ops.
PROGRAMS = {
    "median": ("torch.randn(4000, 8).median(0)", ["clone", "contiguous", "unsqueeze"]),
    "kthvalue": ("torch.randn(4000, 8).kthvalue(1)", ["clone"]),
    "embedding": ("F.embedding(torch.tensor([1, 2, 3]), torch.randn(10, 300))", ["select.int"]),
    "sum": ("torch.randn(40, 80).sum(0)", ["as_strided"]),
    "mean": ("torch.randn(40, 80).mean(0)", ["as_strided"]),
    "prod": ("torch.randn(40, 80).prod(0)", ["as_strided"]),
    "matrix_exp": ("torch.linalg.matrix_exp(torch.randn(5, 5, 5))", ["max.dim", "mul.Tensor", "sum.dim_IntList"]),
}
SCRIPT = """
import json, sys, torch, torch_promote as tp
from torch.nn import functional as F
program, op = sys.argv[1:]
found = []
for mode in (torch.enable_grad, torch.no_grad):
    for policy in (tp.CastPolicy.lower_precision_fp, torch.float64):
        torch.manual_seed(0)
        plain = eval(program)
        torch.manual_seed(0)
        with mode(), tp.my_autocast("cpu", policy=tp.Policy((("aten::" + op, "cpu", policy),))):
            ours = eval(program)
        plain, ours = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (plain, ours))
        found.append(all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(plain, ours, strict=True)))
print(json.dumps(found))
"""


@pytest.mark.parametrize(("program", "op"), [(p, op) for p, ops in PROGRAMS.values() for op in ops])
def test_a_policy_of_an_op_that_a_kernel_calls_changes_nothing(program: str, op: str) -> None:
    ran = run_python(SCRIPT, program, op)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) == [True] * 4


@pytest.mark.parametrize(
    "op",
    ["clone", "contiguous", "unsqueeze", "slice", "narrow", "select", "as_strided", "empty_like", "to", "_to_copy"],
)
def test_data_movement_has_no_casting_policy(op: str) -> None:
    remedy = "change the conversion in the code" if op in ("to", "_to_copy") else "Override the op that computes with"
    for policy in ("fp16", "fp32", torch.float64, "promote", "fp32_set_opt_dtype"):
        with pytest.raises(tp.PolicyError, match=remedy):
            tp.my_autocast("cpu", overrides={op: policy})
        with pytest.raises(tp.PolicyError, match=remedy):
            tp.Policy.from_dict({"format": 1, "cpu": {op: str(policy).removeprefix("torch.")}})
    with tp.my_autocast("cpu", overrides={op: "keep"}):
        assert torch.ones(3).clone().dtype is torch.float32


def test_a_pattern_selects_the_ops_that_compute() -> None:
    with tp.my_autocast("cpu", overrides={"*": torch.float64}):
        x = torch.ones(3)
        assert (x.clone().dtype, x.neg().dtype, torch.relu(x[1:]).dtype) == (x.dtype, torch.float64, torch.float64)


def test_a_policy_applies_in_composite_ops_functions_and_vmap() -> None:
    x, policies = torch.randn(3, 4), {"bmm": torch.float64, "neg": torch.float64}

    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.neg()

    with tp.my_autocast("cpu", overrides=policies | {"einsum": "fallthrough", "matmul": "fallthrough"}):
        assert torch.einsum("bij,bjk->bik", x[None], x.t()[None]).dtype is torch.float64
        assert Negated.apply(x).dtype is torch.float64
        assert torch.vmap(torch.neg)(x).dtype is torch.float64
        assert torch.func.grad(lambda x: x.neg().sum())(x).dtype is torch.float32
        with torch.inference_mode():
            assert x.neg().dtype is torch.float64


def test_stock_policies_still_act_inside_kernels() -> None:
    """As in stock, for all calls of a kernel; another op's override does not change that."""
    x = torch.randn(2, 3, 8)
    with tp.stock_autocast("cpu"):
        stock = torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")
    with tp.my_autocast("cpu", overrides={"neg": "fp32"}):
        ours = torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")
    assert torch.equal(stock, ours)
    assert stock.dtype is ours.dtype


def test_a_promotion_rule_does_not_act_inside_kernels() -> None:
    x = torch.randint(1, 9, (7, 5))
    for program in (lambda: torch.std_mean(x.double(), 0), lambda: torch.linalg.matrix_exp(x.float()[:5] / 9)):
        plain = program()
        with tp.promotion("jax"):
            ours = program()
        assert all(map(torch.equal, plain, ours))
