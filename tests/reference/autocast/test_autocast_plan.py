"""The autocast plan, carried out by hand, runs the same ops in the same dtypes as a region."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.autocast_plans import Autocast, check_row
from helpers.rows import LOWER_DTYPES, ROWS, calls, listed, tensors_of
from torch_promote.policy.op_table import Row
from torch_promote.reference.autocast import AutocastPlan, AutocastState, Cast, autocast_plan

ON_CPU = [row for row in ROWS if listed(row, "cpu")]
ON_CUDA = [row for row in ROWS if listed(row, "cuda")]

KINDS = {"ours": tp.my_autocast, "stock": tp.stock_autocast}
#: What makes the region, and its autocast dtype. The everyday run has each dtype and each kind of region once.
EVERYDAY = (("ours", torch.float16), ("stock", torch.bfloat16))
each_region = pytest.mark.parametrize(
    ("autocast", "lower"),
    [
        pytest.param(make, lower, id=f"{kind}-{lower}", marks=[] if (kind, lower) in EVERYDAY else pytest.mark.slow)
        for (kind, make), lower in itertools.product(KINDS.items(), LOWER_DTYPES)
    ],
)


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: row.name)
@each_region
def test_cpu_row(row: Row, lower: torch.dtype, autocast: Autocast) -> None:
    check_row(row, "cpu", lower, autocast, fake=False)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("row", ON_CUDA, ids=lambda row: row.name)
@each_region
def test_cuda_row(row: Row, lower: torch.dtype, autocast: Autocast) -> None:
    with tensors_of(fake=True):
        check_row(row, "cuda", lower, autocast, fake=True)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ON_CPU], ids=lambda row: row.name)
def test_a_row_of_the_other_device_has_no_policy(row: Row) -> None:
    for _, (op, args, kwargs) in calls(row, "mixed", torch.bfloat16, "cpu"):
        plan = autocast_plan(op, args, kwargs, AutocastState.region("cpu"))
        assert plan == AutocastPlan(None, None, (), row.name)


aten = torch.ops.aten
FLOAT, HALF, BF16, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
CPU = AutocastState.region("cpu")
CUDA = AutocastState.region("cuda")


def casts(op: Any, *args: Any, state: AutocastState = CPU, **kwargs: Any) -> list[str]:
    return [str(cast) for cast in autocast_plan(op, args, kwargs, state).casts]


def ones(dtype: torch.dtype = FLOAT, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape or (2, 2), dtype=dtype, device=device)


def test_lower_precision_casts_what_is_eligible_and_no_more() -> None:
    assert casts(aten.mm.default, ones(), ones(HALF)) == ["self: float32 -> bfloat16", "mat2: float16 -> bfloat16"]
    assert casts(aten.mm.default, ones(BF16), ones(BF16)) == []
    assert casts(aten.mm.default, ones(DOUBLE), ones()) == ["mat2: float32 -> bfloat16"]
    assert casts(aten.mm.default, ones(torch.complex64), ones(torch.int64)) == []


def test_optional_tensors_are_cast() -> None:
    image, weight = ones(FLOAT, 1, 1, 2, 2), ones(FLOAT, 1, 1, 1, 1)
    assert casts(aten.conv2d.default, image, weight, ones(FLOAT, 1))[-1] == "bias: float32 -> bfloat16"
    assert len(casts(aten.conv2d.default, image, weight)) == 2


def test_promote_joins_lists_without_order() -> None:
    assert casts(aten.cat.default, [ones(HALF), ones(HALF)]) == []
    assert casts(aten.cat.default, [ones(HALF), ones(BF16)]) == [
        "tensors[0]: float16 -> float32",
        "tensors[1]: bfloat16 -> float32",
    ]
    assert casts(aten.cat.default, [ones(DOUBLE), ones(BF16), ones(torch.int64)]) == []
    assert casts(aten.cat.default, [ones(), ones(BF16), ones(DOUBLE)]) == ["tensors[1]: bfloat16 -> float32"]


def test_only_weights_are_cacheable() -> None:
    def cacheable(weight: torch.Tensor, state: AutocastState = CPU) -> bool:
        return autocast_plan(aten.mm.default, (weight, ones(BF16)), {}, state).casts[0].cacheable

    weight = torch.nn.Parameter(ones())
    assert cacheable(weight)
    assert not cacheable(weight.t())
    assert not cacheable(weight.detach())
    assert not cacheable(weight * 1)
    assert not cacheable(torch.nn.Parameter(ones(HALF)))
    assert not cacheable(weight, AutocastState.region("cpu", cache_enabled=False))
    with torch.inference_mode():
        assert not cacheable(torch.nn.Parameter(ones()))


def test_dtype_arguments() -> None:
    with FakeTensorMode():
        half, double = ones(HALF, device="cuda"), ones(DOUBLE, device="cuda")
        plan = autocast_plan(aten.softmax.int, (half, 0), {}, CUDA)
        assert (plan.casts, dict(plan.dtype_arguments)) == ((), {"dtype": FLOAT})
        assert not autocast_plan(aten.softmax.int, (half, 0), {"dtype": HALF}, CUDA).dtype_arguments
        assert not autocast_plan(aten.softmax.int, (double, 0), {}, CUDA).dtype_arguments
        plan = autocast_plan(aten.norm.Scalar, (half, 2), {}, CUDA)
        assert (plan.runs, dict(plan.dtype_arguments)) == ("aten::norm.ScalarOpt_dtype", {"dtype": FLOAT})
        plan = autocast_plan(aten.norm.ScalarOpt_dim, (double, 2, [0]), {}, CUDA)
        assert (plan.runs, dict(plan.dtype_arguments)) == ("aten::norm.ScalarOpt_dim_dtype", {"dtype": DOUBLE})


def test_optional_tensors_have_no_say_in_promote() -> None:
    with FakeTensorMode():
        half, bias = ones(HALF, device="cuda"), ones(FLOAT, 2, device="cuda")
        plan = autocast_plan(aten.bilinear.default, (half, half, ones(HALF, 2, 2, 2, device="cuda"), bias), {}, CUDA)
        assert plan.casts == (Cast("bias", FLOAT, HALF, cacheable=False),)


def test_a_call_of_both_devices_has_two_turns() -> None:
    state = AutocastState({**CPU.devices, **CUDA.devices})
    with FakeTensorMode():
        plan = autocast_plan(aten.mm.default, (ones(device="cuda"), ones()), {}, state)
        assert [str(cast) for cast in plan.all_casts()] == ["self: float32 -> float16", "mat2: float32 -> bfloat16"]
        assert plan.then is not None
        assert (plan.device, plan.then.device) == ("cuda", "cpu")


def test_no_policy_no_plan() -> None:
    assert autocast_plan(aten.relu.default, (ones(),), {}, CPU) == AutocastPlan(None, None, (), "aten::relu")
    assert autocast_plan(aten.mm.default, (ones(), ones()), {}, AutocastState({})).policy is None
    assert autocast_plan(aten.mm.default, (ones(), ones()), {}, CUDA).policy is None


def test_the_current_state() -> None:
    assert not AutocastState.current().devices["cpu"].enabled
    with tp.my_autocast("cpu", HALF, cache_enabled=False):
        state = AutocastState.current()
    assert (state.devices["cpu"], state.cache_enabled) == (AutocastState.region("cpu", HALF).devices["cpu"], False)
