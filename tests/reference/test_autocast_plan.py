"""The autocast plan against what a region does: a plan carried out by hand runs the same ops in the same dtypes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from row_samples.known import KINDS
from rows import LOWER_DTYPES, ROWS, calls, listed, overload, tensors_of
from side_by_side import Bound, SeenOp, Watch
from torch_promote.policies import CastPolicy, Row
from torch_promote.reference.autocast_plan import AutocastPlan, AutocastState, Cast, autocast_plan

#: What came of a call: the ops below autocast, and the type of the error if it raised.
Seen = tuple[list[SeenOp], type | None]

ON_CPU = [row for row in ROWS if listed(row, "cpu")]
ON_CUDA = [row for row in ROWS if listed(row, "cuda")]


def watched(call: Callable[[], Any], region: contextlib.AbstractContextManager[Any], *, fake: bool = False) -> Seen:
    """Runs a call in a region and says what arrives below autocast, the casts that come first sorted."""
    watch = Watch(stand_in=fake)
    with region, watch:
        error = raised(call)
    ops = watch.ops or []
    # In which order the arguments of one call are cast is the C++ compiler's choice.
    first = next((i for i, (name, _, _) in enumerate(ops) if name != "aten._to_copy.default"), len(ops))
    return sorted(ops[:first]) + ops[first:], error


def raised(call: Callable[[], Any]) -> type | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def autocast_name(op: Any) -> str:
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def by_hand(plan: AutocastPlan, bound: Bound, cached: dict[str, torch.Tensor]) -> None:
    """Carries out a plan with autocast off. Casts in `cached` are not made again; the cacheable ones get in."""
    op, args, kwargs = bound
    names = [argument.name for argument in op._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    for cast in plan.casts:
        name, _, index = cast.argument.removesuffix("]").partition("[")
        source = arguments[name][int(index)] if index else arguments[name]
        assert source.dtype is cast.from_
        made = cached[cast.argument] if cast.argument in cached else source.to(cast.to)
        if cast.cacheable:
            cached[cast.argument] = made
        if index:
            arguments[name] = [made if i == int(index) else tensor for i, tensor in enumerate(arguments[name])]
        else:
            arguments[name] = made
    arguments |= plan.dtype_arguments
    if plan.runs != autocast_name(op):  # the defaults are those of the overload that was called
        arguments = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()} | arguments
    op_name, _, overload_name = plan.runs.removeprefix("aten::").partition(".")
    runs = getattr(getattr(torch.ops.aten, op_name), overload_name or "default")
    positional = []
    for argument in runs._schema.arguments:
        if argument.kwarg_only or argument.name not in arguments:
            break
        positional.append(arguments.pop(argument.name))
    runs(*positional, **arguments)


def check(row: Row, device: str, lower: torch.dtype, *, fake: bool) -> None:
    """Compares two calls of each sample: what the second one no longer casts is what the plan calls cacheable."""
    for kind in KINDS:
        for label, bound in calls(row, kind, lower, device, fake=fake):
            op, args, kwargs = bound
            plan = autocast_plan(op, args, kwargs, AutocastState.region(device, lower))
            assert plan.policy is row.policy(device), label
            assert (plan.device, plan.then) == (device, None), label
            call = functools.partial(op, *args, **kwargs)
            cached: dict[str, torch.Tensor] = {}
            with tp.my_autocast(device, lower):
                for _ in range(2):
                    real = watched(call, contextlib.nullcontext(), fake=fake)
                    if plan.policy is CastPolicy.banned:
                        assert plan.error is not None, label
                        assert real == ([], RuntimeError), label
                    else:
                        off = tp.my_autocast(device, enabled=False)
                        hand = functools.partial(by_hand, plan, bound, cached)
                        assert real == watched(hand, off, fake=fake), f"{label}: {plan}"


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: row.name)
@pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)
def test_cpu_row(row: Row, lower: torch.dtype) -> None:
    check(row, "cpu", lower, fake=False)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("row", ON_CUDA, ids=lambda row: row.name)
@pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)
def test_cuda_row(row: Row, lower: torch.dtype) -> None:
    with tensors_of(fake=True):
        check(row, "cuda", lower, fake=True)


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


@pytest.mark.parametrize(
    "policy",
    [
        CastPolicy.lower_precision_fp,
        CastPolicy.fp32,
        CastPolicy.promote,
        CastPolicy.keep,
        CastPolicy.fallthrough,
        HALF,
        DOUBLE,
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["aten::mm", "aten::cat", "aten::addcmul", "aten::softmax.int"])
def test_overrides(name: str, policy: CastPolicy | torch.dtype) -> None:
    row = next(row for row in ROWS if row.name == name)
    op, arguments = (
        overload(row),
        {
            "aten::mm": (ones(), ones(BF16)),
            "aten::cat": ([ones(BF16), ones()],),
            "aten::addcmul": (ones(BF16), ones(), ones(BF16)),
            "aten::softmax.int": (ones(), 0),
        }[name],
    )
    plan = autocast_plan(op, arguments, {}, AutocastState.region("cpu", overrides={name: policy}))
    written = policy.value if isinstance(policy, CastPolicy) else policy
    real = watched(lambda: op(*arguments), tp.my_autocast("cpu", overrides={name: written}))
    assert real == watched(lambda: by_hand(plan, (op, arguments, {}), {}), contextlib.nullcontext())
