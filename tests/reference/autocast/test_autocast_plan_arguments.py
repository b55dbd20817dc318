"""The autocast plan for arguments of every kind, for weights that the cache knows, and for calls of two devices."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.autocast_plans import Autocast, check_call, watched
from helpers.casts import casts_made
from helpers.override_effects import carry_out
from helpers.rows import ROWS, calls, listed
from helpers.side_by_side import Bound
from torch_promote.parity.row_samples import MIXED
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastPlan, AutocastState, DeviceAutocast, autocast_plan

aten = torch.ops.aten
LOWER = torch.bfloat16
BOTH = [tp.my_autocast, tp.stock_autocast]
NAMES = ["ours", "stock"]


# --- arguments of every kind


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


#: What stands in an argument's place.
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda tensor: 2.5,
    "nothing": lambda tensor: None,
    "0-dim": lambda tensor: tensor.detach().flatten()[0].clone().requires_grad_(tensor.requires_grad),
    # Of a tensor of its own: what shares its data with others is cast at every use.
    "view": lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad).view(tensor.shape),
    "frozen": lambda tensor: tensor.detach().clone(),
    "no leaf": lambda tensor: tensor * 1,
    "inference": inference,
    # oneDNN has no tensors without elements or dimensions.
    "mkldnn": lambda tensor: torch.ones(2, 2).to_mkldnn(),
    "sparse": lambda tensor: tensor.detach().to_sparse(),
    "meta": lambda tensor: tensor.detach().to("meta"),
    **{
        str(dtype): lambda tensor, dtype=dtype: tensor.detach().to(dtype)
        for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float64, torch.int64, torch.float16, torch.bool)
    },
}


def changed(bound: Bound, kind: str) -> Iterator[Bound]:
    """Yields the call with each tensor changed in turn, list elements too."""
    op, args, kwargs = bound
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield op, (*args[:place], CHANGES[kind](value), *args[place + 1 :]), kwargs
        elif isinstance(value, list | tuple) and kind not in ("number", "nothing"):
            for index, x in enumerate(value):
                if isinstance(x, torch.Tensor):
                    elements = [*value[:index], CHANGES[kind](x), *value[index + 1 :]]
                    yield op, (*args[:place], elements, *args[place + 1 :]), kwargs


#: Of tensors made in inference mode, stock keeps casts: test_what_stock_keeps_and_ours_does_not.
KINDS = [(kind, tp.my_autocast) for kind in CHANGES] + [
    (kind, tp.stock_autocast) for kind in CHANGES if kind != "inference"
]


@pytest.mark.parametrize(("kind", "autocast"), KINDS)
def test_arguments_of_every_kind(kind: str, autocast: Autocast) -> None:
    bounds = [
        (f"{label}, {kind}", other)
        for row in ROWS
        if listed(row, "cpu")
        for label, bound in calls(row, MIXED, LOWER, "cpu")
        for other in changed(bound, kind)
    ]
    planned = [check_call(label, bound, "cpu", LOWER, autocast) for label, bound in bounds]
    assert len(planned) > 100
    assert sum(bool(plan.casts) for plan in planned) > 20


@pytest.mark.parametrize("autocast", BOTH, ids=NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes(mode: Callable[[], contextlib.AbstractContextManager[Any]], autocast: Autocast) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with mode():
        plan = check_call("mm", (aten.mm.default, (weight, weight), {}), "cpu", LOWER, autocast)
    assert [cast.cacheable for cast in plan.casts] == [mode is not torch.inference_mode] * 2


@pytest.mark.parametrize("autocast", BOTH, ids=NAMES)
def test_tensors_of_mkldnn_have_a_policy_only_beside_others(autocast: Autocast) -> None:
    own, dense = torch.ones(2, 2).to_mkldnn(), torch.ones(2, 2)
    alone, beside = ((aten.mm.default, pair, {}) for pair in ((own, own), (dense, own)))
    assert check_call("alone", alone, "cpu", LOWER, autocast) == AutocastPlan(None, None, (), "aten::mm")
    assert len(check_call("beside", beside, "cpu", LOWER, autocast).casts) == 2


# --- what the cache serves

HERE = AutocastState.region("cpu")


def plan_of(*args: Any, op: Any = aten.mm.default, state: AutocastState | None = None) -> AutocastPlan:
    return autocast_plan(op, args, {}, state or AutocastState.region("cpu"))


WEIGHT, OTHER = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
HELD = replace(AutocastState.region("cpu"), cached=((WEIGHT, LOWER),))
MORE = replace(AutocastState.region("cpu"), keeps_more=True)
SERVED: list[tuple[str, AutocastPlan, list[bool]]] = [
    ("the same weight twice", plan_of(WEIGHT, WEIGHT), [False, True]),
    ("two weights", plan_of(WEIGHT, OTHER), [False, False]),
    ("a frozen tensor twice", plan_of(WEIGHT.detach(), WEIGHT.detach()), [False, False]),
    ("held", plan_of(OTHER, WEIGHT, state=HELD), [False, True]),
    ("held in another dtype", plan_of(WEIGHT, OTHER, state=replace(HELD, cached=((WEIGHT, torch.half),))), [False] * 2),
    ("no cache", plan_of(WEIGHT, WEIGHT, state=replace(HELD, cache_enabled=False)), [False, False]),
    ("inference mode", plan_of(WEIGHT, WEIGHT, state=replace(HELD, inference_mode=True)), [False, False]),
    ("inference mode, beyond stock", plan_of(WEIGHT, WEIGHT, state=replace(MORE, inference_mode=True)), [False, True]),
    ("a list", plan_of([WEIGHT, OTHER, WEIGHT], op=aten.linalg_multi_dot.default), []),
]


@pytest.mark.parametrize(("what", "plan", "served"), SERVED, ids=[what for what, _, _ in SERVED])
def test_what_is_served(what: str, plan: AutocastPlan, served: list[bool]) -> None:
    assert [cast.served for cast in plan.casts] == served


PERSISTENT = functools.partial(tp.my_autocast, cache="persistent")


@pytest.mark.parametrize("autocast", [*BOTH, PERSISTENT], ids=[*NAMES, "persistent"])
def test_served_casts_are_not_made(autocast: Autocast) -> None:
    """In real regions, a call makes exactly the casts of its plan that the cache does not have."""

    def products(weight: torch.nn.Parameter, other: torch.Tensor) -> Iterator[tuple[tuple[Any, Any], ...]]:
        yield ((weight, weight),)
        yield (weight, other), (other, weight), (weight, weight)
        yield (weight.t(), weight), (weight.t(), weight)
        yield (other, other), (other, other)

    for cache_enabled in (True,) if autocast is PERSISTENT else (True, False):
        state = AutocastState.region("cpu", cache_enabled=cache_enabled)
        state = replace(state, keeps_more=autocast is PERSISTENT)
        for pairs in products(torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)):
            planned, cached = 0, []
            for pair in pairs:
                plan = plan_of(*pair, state=replace(state, cached=tuple(cached)))
                planned += sum(not cast.served for cast in plan.casts)
                by_name = dict(zip(("self", "mat2"), pair, strict=True))
                cached += [(by_name[cast.argument], cast.to) for cast in plan.casts if cast.cacheable]

            def program(region: Autocast, pairs: Any = pairs, cache_enabled: bool = cache_enabled) -> None:
                tp.clear_cache()  # of casts that the last program stored
                with region("cpu", cache_enabled=cache_enabled):
                    for pair in pairs:
                        torch.mm(*pair)

            assert casts_made(program, autocast) == planned


@pytest.mark.parametrize("policy", [torch.float64, torch.float16, CastPolicy.promote], ids=str)
def test_a_cast_to_another_dtype_is_kept_too(policy: CastPolicy | torch.dtype) -> None:
    """Stock keeps only casts to the autocast dtype, and has no policy that casts a weight to another one."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    bound = (aten.mm.default, (weight, weight), {})
    plan = check_call("mm", bound, "cpu", LOWER, tp.my_autocast, overrides={"aten::mm": policy})
    assert [cast.served for cast in plan.casts] == ([] if policy is CastPolicy.promote else [False, True])


def test_no_cast_of_a_weight_made_in_inference_mode_is_kept() -> None:
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.ones(2, 2))
    assert [cast.cacheable for cast in plan_of(weight, weight).casts] == [False, False]


# --- calls of two devices

ON_TWO_DEVICES: dict[str, tuple[Any, int]] = {
    "mm": (aten.mm.default, 2),
    "bmm": (aten.bmm.default, 2),
    "addmm": (aten.addmm.default, 3),
    "baddbmm": (aten.baddbmm.default, 3),
    "linear": (aten.linear.default, 3),
    "conv2d": (aten.conv2d.default, 3),
    "prelu": (aten.prelu.default, 2),
    "addcmul": (aten.addcmul.default, 3),
    "atan2": (aten.atan2.default, 2),
    "mse_loss": (aten.mse_loss.default, 2),
    "smooth_l1_loss": (aten.smooth_l1_loss.default, 2),
    "binary_cross_entropy": (aten.binary_cross_entropy.default, 3),
    "pow": (aten.pow.Tensor_Tensor, 2),
    "cat": (aten.cat.default, -3),
    "stack": (aten.stack.default, -3),
    "index_put": (aten.index_put.default, 0),
}


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("policy", [None, CastPolicy.keep, CastPolicy.promote, CastPolicy.fp32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ON_TWO_DEVICES)
def test_calls_of_two_devices(name: str, policy: CastPolicy | torch.dtype | None) -> None:
    op, count = ON_TWO_DEVICES[name]
    row = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    overrides = {} if policy is None else {row: policy}
    state = replace(AutocastState.region("cuda", overrides=overrides), devices=both_on())
    seen = set()
    for devices in itertools.product(("cpu", "cuda"), repeat=abs(count) or 2):
        for dtypes in itertools.product((torch.float32, torch.float16), repeat=len(devices)):
            with FakeTensorMode():
                tensors = [torch.empty(2, 2, dtype=t, device=d) for t, d in zip(dtypes, devices, strict=True)]
                args: tuple[Any, ...] = tuple(tensors)
                if count < 0:
                    args = (tensors,)
                elif count == 0:
                    args = (tensors[0], [torch.empty(2, dtype=torch.int64, device=devices[0])], tensors[1])
                plan = autocast_plan(op, args, {}, state)
                region = tp.my_autocast(["cuda", "cpu"], overrides=overrides)
                real, error = watched(functools.partial(op, *args), region, fake=True)
                if plan.error is not None:
                    assert (real, error is not None) == ([], True)
                    continue
                hand, by_hand_error = watched(
                    functools.partial(carry_out, plan, (op, args, {}), {}),
                    tp.my_autocast(["cuda", "cpu"], enabled=False),
                    fake=True,
                )
                assert (real, error) == (hand, by_hand_error), (name, devices, dtypes, plan)
                seen.add((plan.device, plan.then and plan.then.device))
    if policy is not None:
        assert seen == {("cpu", None), ("cuda", None), ("cuda", "cpu")}


def both_on() -> dict[str, DeviceAutocast]:
    return {"cpu": DeviceAutocast(True, torch.bfloat16), "cuda": DeviceAutocast(True, torch.float16)}


# --- kernels that the table knows nothing of


def test_an_op_that_a_library_registers_on_stocks_key_is_left_to_stock() -> None:
    with torch.library._scoped_library("plan_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        twice, state = torch.ops.plan_test.twice.default, AutocastState.region("cpu")
        assert not autocast_plan(twice, (torch.ones(2),), {}, state).left_to_stock
        library.impl("twice", lambda x: x.half(), "AutocastCPU")
        plan = autocast_plan(twice, (torch.ones(2),), {}, state)
        assert (plan.left_to_stock, plan.policy, plan.casts) == (True, None, ())
        overridden = autocast_plan(
            twice, (torch.ones(2),), {}, replace(state, overrides={"plan_test::twice": CastPolicy.fp32})
        )
        assert (overridden.left_to_stock, overridden.policy) == (False, CastPolicy.fp32)
