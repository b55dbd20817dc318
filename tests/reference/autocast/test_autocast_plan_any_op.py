"""The autocast plan of ops outside of the op table, of ops that write, and of overrides by device type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.override_effects import Policy, carry_out, full_name
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastState, DeviceAutocast, autocast_plan

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


def ones(dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.ones(2, 2, dtype=dtype, device=device)


def casts(op: Any, policy: Policy, *args: Any, device: str = "cpu", **kwargs: Any) -> list[str]:
    state = AutocastState.region(device, overrides={full_name(op): policy})
    return [str(cast).removeprefix("torch.") for cast in autocast_plan(op, args, kwargs, state).casts]


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with torch.library._scoped_library("plan_any", "FRAGMENT") as made:
        made.define("all(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, (Tensor, Tensor?) e, Dict(str, Tensor) f) -> ()")
        made.define("into(Tensor x, *, Tensor(a!)[] out, Tensor(b!)? other=None) -> ()")
        made.define("twice(Tensor x) -> Tensor")
        made.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        made.define("first_of((Tensor, Tensor) pair, Dict(str, Tensor) named) -> Tensor")
        made.impl("first_of", lambda pair, named: pair[0] + 0, "CompositeExplicitAutograd")
        yield made


def test_every_tensor_in_any_argument_is_cast_in_the_schemas_order() -> None:
    args = (
        ones(),
        ones(),
        [ones(), ones(F64)],
        [None, ones()],
        (ones(), ones(F16)),
        {"k": ones(), "i": ones(torch.int8)},
    )
    found = casts(torch.ops.plan_any.all.default, CastPolicy.lower_precision_fp, *args)
    paths = ["a", "b", "c[0]", "d[1]", "e[0]", "e[1]", "f[k]"]
    assert [cast.partition(":")[0] for cast in found] == paths
    assert {cast.partition(" -> ")[2] for cast in found} == {"bfloat16"}


@pytest.mark.parametrize(("at", "wanted"), [("a", F32), ("b", F16), ("c", F32), ("d", F16), ("e", F32), ("f", F32)])
def test_promote_asks_all_but_optional_tensors(at: str, wanted: torch.dtype) -> None:
    h, f = ones(F16), {at: ones(F32)}
    args = (f.get("a", h), f.get("b"), [f.get("c", h)], [f.get("d")], (f.get("e", h), None), {"k": f.get("f", h)})
    found = casts(torch.ops.plan_any.all.default, CastPolicy.promote, *args)
    assert {cast.partition(" -> ")[2] for cast in found} == {str(wanted).removeprefix("torch.")}


def test_the_list_of_optional_tensors_of_a_row_is_left_alone() -> None:
    args = ones(F16), [ones()], ones(F16)
    assert casts(aten.index_put.default, CastPolicy.lower_precision_fp, *args) == [
        "self: float16 -> bfloat16",
        "values: float16 -> bfloat16",
    ]


# --- what is written to


def test_match_self_casts_doubles_and_leaves_numbers_and_what_is_not_floating() -> None:
    policy = CastPolicy.match_self
    assert casts(aten.add_.Tensor, policy, ones(F16), ones(F64)) == ["other: float64 -> float16"]
    assert casts(aten.add_.Tensor, policy, ones(F64), ones(F16)) == ["other: float16 -> float64"]
    assert casts(aten.add_.Tensor, policy, ones(F16), 0.1) == []
    for dtype in (torch.int64, torch.complex64, F16):
        assert casts(aten.add_.Tensor, policy, ones(F16), ones(dtype)) == []
    for dtype in (torch.int64, torch.bool, torch.complex64):
        assert casts(aten.add_.Tensor, policy, ones(dtype), ones(F16)) == []
    assert casts(aten.mm.out, policy, ones(), ones(F64), out=ones(F16)) == [
        "self: float32 -> float16",
        "mat2: float64 -> float16",
    ]


def test_the_first_tensor_that_is_written_decides_and_none_is_cast() -> None:
    into = torch.ops.plan_any.into.default
    out, other = [ones(F16), ones()], ones(F64)
    assert casts(into, CastPolicy.match_self, ones(), out=out, other=other) == ["x: float32 -> float16"]
    assert casts(into, CastPolicy.match_self, ones(), out=[], other=other) == ["x: float32 -> float64"]
    assert casts(into, CastPolicy.match_self, ones(), out=[]) == []
    assert casts(into, CastPolicy.fp32, ones(F16), out=out) == ["x: float16 -> float32"]


def test_a_cast_of_a_weight_that_is_matched_is_kept() -> None:
    weight = torch.nn.Parameter(ones())
    assert casts(aten.addmm_.default, CastPolicy.match_self, ones(BF16), weight, weight) == [
        "mat1: float32 -> bfloat16, cached",
        "mat2: float32 -> bfloat16, from the cache",
    ]


# --- by device type

BOTH_ON = {"cpu": DeviceAutocast(True, BF16), "cuda": DeviceAutocast(True, F16)}


def test_an_override_for_one_device_type_says_nothing_about_the_other() -> None:
    overrides: dict[str, Any] = {"aten::mm": {"cpu": CastPolicy.fp32}, "aten::relu": {"cuda": F64}}
    state = AutocastState(BOTH_ON, overrides=overrides)
    with FakeTensorMode():
        for device, mm, relu in (("cpu", CastPolicy.fp32, None), ("cuda", CastPolicy.lower_precision_fp, F64)):
            x = ones(device=device)
            assert autocast_plan(aten.mm.default, (x, x), {}, state).policy == mm
            assert autocast_plan(aten.relu.default, (x,), {}, state).policy == relu


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("policy", [CastPolicy.keep, CastPolicy.promote, CastPolicy.fp32, F64], ids=str)
@pytest.mark.parametrize("name", ["maximum", "first_of"])
def test_calls_of_two_devices(name: str, policy: Policy) -> None:
    op = aten.maximum.default if name == "maximum" else torch.ops.plan_any.first_of.default
    state = AutocastState(BOTH_ON, overrides={full_name(op): policy})
    seen = set()
    for devices in itertools.product(("cpu", "cuda"), repeat=2):
        for dtypes in itertools.product((F32, F16), repeat=2):
            with FakeTensorMode():
                x, y = (torch.empty((), dtype=t, device=d) for t, d in zip(dtypes, devices, strict=True))
                args: tuple[Any, ...] = (x, y) if name == "maximum" else ((x, x), {"y": y})
                plan = autocast_plan(op, args, {}, state)
                with tp.my_autocast(["cuda", "cpu"], overrides={op: policy}):
                    ours = op(*args)
                assert_same(ours, carry_out(plan, (op, args, {})))
                seen.add((plan.device, plan.then and plan.then.device))
    assert seen == {("cpu", None), ("cuda", None), ("cuda", "cpu")}


# --- an autocast kernel of PyTorch's for a custom op


def test_an_override_stands_in_for_stocks_kernel_on_its_device_alone(library: Any) -> None:
    library.impl("twice", lambda x: x.half(), "AutocastCPU")
    twice = torch.ops.plan_any.twice.default
    for policy, dtype in ((CastPolicy.fp32, F32), (F64, F64), (CastPolicy.keep, BF16), (CastPolicy.fallthrough, BF16)):
        plan = autocast_plan(
            twice, (ones(BF16),), {}, AutocastState.region("cpu", overrides={full_name(twice): policy})
        )
        assert not plan.left_to_stock
        with tp.my_autocast("cpu", overrides={twice: policy}):
            assert twice(ones(BF16)).dtype == dtype == carry_out(plan, (twice, (ones(BF16),), {})).dtype
        with tp.my_autocast("cpu"):
            assert twice(ones(BF16)).dtype == F16, "stock's kernel, where ours has no say"
    on_cuda: dict[str, Any] = {full_name(twice): {"cuda": CastPolicy.fp32}}
    assert autocast_plan(twice, (ones(),), {}, AutocastState.region("cpu", overrides=on_cuda)).left_to_stock
