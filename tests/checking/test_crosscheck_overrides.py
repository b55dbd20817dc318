"""A crosscheck of blocks with overrides of any op: correct calls give no mismatch, wrong plans give one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from torch_promote.checking import expectation
from torch_promote.observe.autocast_state import overrides_in_force, state_in_force
from torch_promote.policy.op_table import CastPolicy

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def custom_ops() -> Iterator[Any]:
    def add_all(*args: Any, **kwargs: Any) -> Tensor:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return torch.stack([leaf.to(leaves[0].dtype) for leaf in leaves]).sum(0)

    with torch.library._scoped_library("crosschecked", "FRAGMENT") as library:
        library.define("mixed(Tensor x, Dict(str, Tensor) named, (Tensor, Tensor?) pair, *, Tensor? z=None) -> Tensor")
        library.impl("mixed", add_all, "CompositeExplicitAutograd")
        library.define("into(Tensor(a!) x, Tensor?[] ys) -> Tensor(a!)")
        library.impl("into", lambda x, ys: x.copy_(add_all(ys)), "CompositeExplicitAutograd")
        yield library


def pointwise(x: Tensor) -> Any:
    return torch.relu(x) + torch.sin(x.bfloat16()) * x, torch.maximum(x, x.half())


def lists(x: Tensor) -> Any:
    return torch.block_diag(x, x.bfloat16()), torch.broadcast_tensors(x, x.half()), torch.meshgrid(x[0], x[1])


def composite(x: Tensor) -> Any:
    return torch.nn.functional.linear(x, x), torch.chain_matmul(x, x, x), torch.einsum("ij,jk->ik", x, x)


def writes(x: Tensor) -> Any:
    y = x.bfloat16()
    y[torch.tensor([0, 1])] = x[:2].detach()
    y[1:] = x[1:].detach()
    y.addmm_(x, x).mul_(0.3).add_(x.double())
    torch.mm(x.detach(), x.detach(), out=(out := torch.empty(3, 3, dtype=F16)))
    return y, out, torch.zeros(3, 3, dtype=BF16).scatter_add_(0, torch.tensor([[0, 1, 2]] * 3), x)


def custom(x: Tensor) -> Any:
    made = torch.ops.crosschecked.mixed(x, {"a": x.bfloat16(), "b": x.double()}, (x.half(), None), z=x)
    return made, torch.ops.crosschecked.into(torch.zeros(3, 3, dtype=BF16), [None, x, x.double()])


BLOCKS: list[tuple[Callable[[Tensor], Any], dict[Any, Any]]] = [
    (pointwise, {"relu": F64, "sin.default": "fp32", "add.Tensor": "promote", "maximum": "fp16", "mul.Tensor": "keep"}),
    (lists, {"block_diag": "promote", "broadcast_tensors": F16, "meshgrid": "fp16"}),
    (composite, {"linear": "fallthrough", "addmm": "fp32", "einsum": "fp32", "bmm": F64, "tril": "fp16", "mm": F16}),
    (
        writes,
        {
            **dict.fromkeys(("index_put_", "copy_", "addmm_", "mm.out", "scatter_add_", "add_.Tensor"), "match_self"),
            "mul_.Tensor": "match_self",
        },
    ),
    (custom, {"crosschecked::mixed": F16, "crosschecked::into": "match_self"}),
    (custom, {"crosschecked::mixed": "promote", "crosschecked::into": "match_self", "stack": "fp32", "sum": F64}),
]
each_block = pytest.mark.parametrize(("block", "overrides"), BLOCKS, ids=[block.__name__ for block, _ in BLOCKS])


def made() -> Tensor:
    return torch.linspace(-1, 2, 9).reshape(3, 3).requires_grad_()


@pytest.mark.parametrize("level", ["dtype", "bits"])
@pytest.mark.parametrize("device_types", ["cpu", ["cpu", "cuda"]], ids=str)
@pytest.mark.filterwarnings("ignore")
@each_block
def test_correct_calls_give_no_mismatch(
    block: Callable[[Tensor], Any], overrides: dict[Any, Any], device_types: Any, level: Any
) -> None:
    with tp.crosscheck(level=level) as report:
        with tp.my_autocast(device_types, overrides=overrides):
            results = block(made())
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert report.ok, str(report)
    assert report.with_policy.total() >= 2


def without_its_last_cast(plan: Any) -> Any:
    return dataclasses.replace(plan, casts=plan.casts[:-1])


def with_another_dtype(plan: Any) -> Any:
    return dataclasses.replace(
        plan, casts=tuple(dataclasses.replace(cast, to=torch.float8_e5m2) for cast in plan.casts)
    )


@pytest.mark.parametrize("wrong", [without_its_last_cast, with_another_dtype])
@pytest.mark.filterwarnings("ignore")
@each_block
def test_a_wrong_plan_is_found(
    monkeypatch: pytest.MonkeyPatch,
    block: Callable[[Tensor], Any],
    overrides: dict[Any, Any],
    wrong: Callable[..., Any],
) -> None:
    right, planned = expectation.autocast_plan, 0

    def plan(op: Any, args: Any, kwargs: Any, state: Any) -> Any:
        nonlocal planned
        found = right(op, args, kwargs, state)
        if len(found.casts) < 2 or expectation.overload_name(op) not in state.overrides:
            return found
        planned += 1
        return wrong(found)

    monkeypatch.setattr(expectation, "autocast_plan", plan)
    with tp.crosscheck() as report, tp.my_autocast("cpu", overrides=overrides):
        block(made())
    assert planned > 0
    assert len(report.mismatches) >= planned, str(report)
    assert {"casts"} <= {mismatch.kind for mismatch in report.mismatches} <= {"casts", "dtype", "error", "strides"}


def test_the_state_has_the_overrides_in_force() -> None:
    overrides = {"relu": "fp32", aten.mm.default: F64, "index_put_": "match_self", "crosschecked::mixed": "banned"}
    with tp.my_autocast("cpu", overrides=overrides):
        with tp.my_autocast("cpu", overrides={"relu": "keep"}):
            assert overrides_in_force()["aten::relu"] == {"cpu": CastPolicy.keep, "cuda": CastPolicy.keep}
        state = state_in_force()
        assert state is not None
        assert {name: state.override(name, "cpu") for name in state.overrides} == {
            "aten::relu": CastPolicy.fp32,
            "aten::mm": F64,
            "aten::index_put_": CastPolicy.match_self,
            "crosschecked::mixed": CastPolicy.banned,
        }
    assert overrides_in_force() == {}


@pytest.mark.parametrize("level", ["dtype", "bits"])
@pytest.mark.parametrize("policy", ["cuda", "cpu", "fp32_safe", "off"])
@pytest.mark.filterwarnings("ignore")
def test_named_policies(policy: str, level: Any) -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    half = torch.rand(3).half()
    with tp.crosscheck(level=level) as report:
        with tp.my_autocast("cpu", policy=policy):
            loss = torch.nn.functional.cross_entropy(model(torch.rand(2, 3, 8)).sum(1), torch.tensor([1, 2]))
            loss = (
                loss + torch.cosine_similarity(torch.rand(2, 4), torch.rand(2, 4)).sum() + torch.softmax(half, 0).sum()
            )
            loss = loss + half.exp().sum() + torch.norm(half) + torch.linalg.vector_norm(half)
        loss.backward()
    assert report.ok, str(report)
    assert (report.with_policy.total() == 0) is (policy == "off")
    if level == "bits" and policy != "cpu":
        assert report.not_compared["the op's policy is overridden"] > 0
    else:
        assert "the op's policy is overridden" not in report.not_compared, "on the CPU it is stock's"


def test_the_cpu_policy_changes_nothing_on_the_cpu() -> None:
    with tp.my_autocast("cpu", policy="cpu"):
        assert overrides_in_force()
        assert all(set(by_device) == {"cuda"} for by_device in overrides_in_force().values())


@pytest.mark.parametrize("device_types", [None, "cpu", "cuda"])
def test_registered_policies(device_types: str | None) -> None:
    mixed = torch.ops.crosschecked.mixed.default
    args = torch.ones(2), {"a": torch.ones(2, dtype=F64)}, (torch.ones(2, dtype=F16), None)
    handle = tp.register_policy(mixed, "promote", device_type=device_types)
    try:
        with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={"relu": "fp16"}):
            mixed(*args)
    finally:
        handle.remove()
    with tp.crosscheck() as removed, tp.my_autocast("cpu"):
        mixed(*args)
    assert report.ok, str(report)
    assert report.with_policy[str(mixed)] == (0 if device_types == "cuda" else 1)
    assert (removed.ok, removed.with_policy[str(mixed)]) == (True, 0)


def test_level_bits_compares_ops_whose_kernels_call_overridden_ones() -> None:
    x = torch.randn(40, 8)
    overrides = {"neg": "fp16", "max.dim": F64, "mul.Tensor": F64}
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu", overrides=overrides):
        x.median(0), x.kthvalue(1), torch.linalg.matrix_exp(x[:8] / 9)
    assert report.ok, report
    assert {"aten.median.dim", "aten.kthvalue.default", "aten.linalg_matrix_exp.default"} <= set(report.with_stock)


@pytest.mark.parametrize("op", ["batch_norm", "native_batch_norm", "instance_norm"])
def test_running_statistics_are_updated_once(op: str) -> None:
    """An op that some region names has a kernel on our key, so it runs again under stock. Its schema names no write."""

    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        model.append(torch.nn.InstanceNorm2d(8, track_running_stats=True))
        for _ in range(3):
            with tp.my_autocast("cpu"):
                model(torch.randn(2, 3, 8, 8))
        return torch.cat([model[1].running_var, model[2].running_var])

    with tp.my_autocast("cpu", overrides={op: "fp32"}):
        pass
    expected = train()
    with tp.crosscheck(level="bits") as report:
        assert torch.equal(train(), expected)
    assert report.mismatches == []


def test_lists_are_written_once() -> None:
    tp.my_autocast("cpu", overrides={"_foreach_add_.List": "keep"})  # gives the op a kernel that might cast
    x = torch.ones(2)
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        torch._foreach_add_([x], [torch.ones(2)])
    assert torch.equal(x, torch.full((2,), 2.0))
    assert report.mismatches == []
    assert report.with_stock["aten._foreach_add_.List"] == 1
