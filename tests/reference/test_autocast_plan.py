"""The autocast plan, carried out by hand, runs the same ops in the same dtypes as a region."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.override_effects import Kept, carry_out, full_name
from helpers.rows import ROWS, calls, listed
from helpers.side_by_side import Bound, SeenOp, Watch
from torch_promote.parity.samples import MIXED
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.autocast import AutocastPlan, AutocastState, DeviceAutocast, autocast_plan

# --- Carries out a plan by hand, with autocast off, and compares with a call in a region


#: A class of regions: tp.stock_autocast or ours.
Autocast = Callable[..., contextlib.AbstractContextManager[Any]]
#: The outcome of a call: the ops below autocast, and the type and text of the error if it raised.
Seen = tuple[list[SeenOp], tuple[type, str] | None]

#: A cast as it arrives below autograd, and as it arrives if autograd is skipped.
_CASTS = ("aten._to_copy.default", "aten.to.dtype")
#: The errors of stock's promote for calls to which ours gives a result: docs/differences.md.
_STOCK_PROMOTE = ("Unexpected floating ScalarType in at::autocast::prioritize", "promote type is double")


def watched(call: Callable[[], Any], region: contextlib.AbstractContextManager[Any], *, fake: bool = False) -> Seen:
    """Runs a call in a region and returns the ops below autocast, with the leading casts sorted."""
    watch, error = Watch(stand_in=fake), None
    with warnings.catch_warnings(), region, watch:
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as raised:
            error = type(raised), str(raised).partition("\n")[0]
    first = next((i for i, (name, _, _) in enumerate(watch.ops) if name not in _CASTS), len(watch.ops))
    # In which order the arguments of one call are cast is the C++ compiler's choice, and so is what comes before a cast
    # that raises.
    if any(not results for _, _, results in watch.ops[:first]):
        return [], error
    return sorted(watch.ops[:first]) + watch.ops[first:], error


def check_call(
    label: str,
    bound: Bound,
    device: str,
    lower: torch.dtype,
    autocast: Autocast,
    *,
    fake: bool = False,
    overrides: Mapping[str, CastPolicy | torch.dtype] | None = None,
) -> AutocastPlan:
    """Compares two equal calls in one region with the plan: the second makes no cast that a cache keeps."""
    op, args, kwargs = bound
    plan = autocast_plan(op, args, kwargs, AutocastState.region(device, lower, overrides=overrides))
    kept: Kept = {}
    options = {"overrides": {f"{name}.default": policy for name, policy in overrides.items()}} if overrides else {}
    with autocast(device, lower, **options):
        for _ in range(2):
            real = watched(functools.partial(op, *args, **kwargs), contextlib.nullcontext(), fake=fake)
            if plan.error is not None:
                assert real[0] == [], label
                assert real[1] is not None, label
                assert real[1][0] is RuntimeError, label
            elif plan.policy is CastPolicy.promote and _refused_by_stock_alone(real, autocast):
                return plan
            elif real[0] == [] and real == watched(
                functools.partial(op, *args, **kwargs), autocast(device, enabled=False)
            ):
                return plan  # refused while the arguments are read, before autocast sees them
            else:
                hand = functools.partial(carry_out, plan, bound, kept)
                off = watched(hand, autocast(device, enabled=False), fake=fake)
                assert real == off, f"{label}: {plan}"
    return plan


def _refused_by_stock_alone(real: Seen, autocast: Autocast) -> bool:
    return autocast is tp.stock_autocast and real[1] is not None and real[1][1].startswith(_STOCK_PROMOTE)


aten = torch.ops.aten
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

CPU = AutocastState.region("cpu")
CUDA = AutocastState.region("cuda")


def ones(dtype: torch.dtype = F32, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape or (2, 2), dtype=dtype, device=device)


def test_dtype_arguments() -> None:
    with FakeTensorMode():
        half, double = ones(F16, device="cuda"), ones(F64, device="cuda")
        plan = autocast_plan(aten.softmax.int, (half, 0), {}, CUDA)
        assert (plan.casts, dict(plan.dtype_arguments)) == ((), {"dtype": F32})
        assert not autocast_plan(aten.softmax.int, (half, 0), {"dtype": F16}, CUDA).dtype_arguments
        assert not autocast_plan(aten.softmax.int, (double, 0), {}, CUDA).dtype_arguments
        plan = autocast_plan(aten.norm.Scalar, (half, 2), {}, CUDA)
        assert (plan.runs, dict(plan.dtype_arguments)) == ("aten::norm.ScalarOpt_dtype", {"dtype": F32})
        plan = autocast_plan(aten.norm.ScalarOpt_dim, (double, 2, [0]), {}, CUDA)
        assert (plan.runs, dict(plan.dtype_arguments)) == ("aten::norm.ScalarOpt_dim_dtype", {"dtype": F64})


LOWER = torch.bfloat16
BOTH = [tp.my_autocast, tp.stock_autocast]
NAMES = ["ours", "stock"]


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
CHANGED_ARGUMENTS = [(kind, tp.my_autocast) for kind in CHANGES] + [
    pytest.param(kind, tp.stock_autocast, marks=() if kind in ("number", "view", "torch.float64") else pytest.mark.slow)
    for kind in CHANGES
    if kind != "inference"
]


@pytest.mark.parametrize(("kind", "autocast"), CHANGED_ARGUMENTS)
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
def test_tensors_of_mkldnn_have_a_policy_only_beside_others(autocast: Autocast) -> None:
    own, dense = torch.ones(2, 2).to_mkldnn(), torch.ones(2, 2)
    alone, beside = ((aten.mm.default, pair, {}) for pair in ((own, own), (dense, own)))
    assert check_call("alone", alone, "cpu", LOWER, autocast) == AutocastPlan(None, None, (), "aten::mm")
    assert len(check_call("beside", beside, "cpu", LOWER, autocast).casts) == 2


@pytest.mark.parametrize("policy", [torch.float64, torch.float16, CastPolicy.promote], ids=str)
def test_a_cast_to_another_dtype_is_kept_too(policy: CastPolicy | torch.dtype) -> None:
    """Stock keeps only casts to the autocast dtype, and has no policy that casts a weight to another one."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    bound = (aten.mm.default, (weight, weight), {})
    plan = check_call("mm", bound, "cpu", LOWER, tp.my_autocast, overrides={"aten::mm": policy})
    assert len(plan.casts) == (0 if policy is CastPolicy.promote else 2)


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


#: The everyday run has each op under a third of the policies.
NAMES_AND_POLICIES = [
    pytest.param(name, policy, id=f"{name}-{policy}", marks=pytest.mark.slow if (i + j) % 3 else ())
    for i, name in enumerate(ON_TWO_DEVICES)
    for j, policy in enumerate((None, CastPolicy.keep, CastPolicy.promote, CastPolicy.fp32, torch.float64))
]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize(("name", "policy"), NAMES_AND_POLICIES)
@pytest.mark.parametrize("pair", [("cpu", "cuda"), pytest.param(("xpu", "mps"), marks=pytest.mark.slow)], ids="-".join)
def test_calls_of_two_devices(pair: tuple[str, str], name: str, policy: CastPolicy | torch.dtype | None) -> None:
    op, count = ON_TWO_DEVICES[name]
    row = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    overrides = {} if policy is None else {row: policy}
    state = replace(AutocastState.region("cuda", overrides=overrides), devices=both_on(*pair))
    seen = set()
    places = itertools.product(pair, repeat=abs(count) or 2)
    choices = itertools.product((torch.float32, torch.float16), repeat=abs(count) or 2)
    with FakeTensorMode():
        for devices, dtypes in itertools.product(places, choices):
            tensors = [torch.empty(2, 2, dtype=t, device=d) for t, d in zip(dtypes, devices, strict=True)]
            args: tuple[Any, ...] = tuple(tensors)
            if count < 0:
                args = (tensors,)
            elif count == 0:
                args = (tensors[0], [torch.empty(2, dtype=torch.int64, device=devices[0])], tensors[1])
            plan = autocast_plan(op, args, {}, state)
            region = tp.my_autocast(pair, overrides=overrides)
            real, error = watched(functools.partial(op, *args), region, fake=True)
            if plan.error is not None:
                assert (real, error is not None) == ([], True)
                continue
            hand, by_hand_error = watched(
                functools.partial(carry_out, plan, (op, args, {}), {}),
                tp.my_autocast(pair, enabled=False),
                fake=True,
            )
            assert (real, error) == (hand, by_hand_error), (name, devices, dtypes, plan)
            seen.add((plan.device, plan.then and plan.then.device))
    if policy is not None:
        later, first = pair
        assert seen == {(later, None), (first, None), (first, later)}


def both_on(*devices: str) -> dict[str, DeviceAutocast]:
    return {device: DeviceAutocast(True, torch.get_autocast_dtype(device)) for device in devices or ("cpu", "cuda")}


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with torch.library._scoped_library("plan_any", "FRAGMENT") as made:
        made.define("twice(Tensor x) -> Tensor")
        made.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        yield made


def test_an_override_for_one_device_type_says_nothing_about_the_other() -> None:
    overrides: dict[str, Any] = {"aten::mm": {"cpu": CastPolicy.fp32}, "aten::relu": {"cuda": F64}}
    state = AutocastState(both_on(), overrides=overrides)
    with FakeTensorMode():
        for device, mm, relu in (("cpu", CastPolicy.fp32, None), ("cuda", CastPolicy.lower_precision_fp, F64)):
            x = ones(device=device)
            assert autocast_plan(aten.mm.default, (x, x), {}, state).policy == mm
            assert autocast_plan(aten.relu.default, (x,), {}, state).policy == relu


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
