"""A call's outputs are its results and the arguments that it wrote to, with their values."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from helpers.writing_ops import copy_to, scale, store, two_of_three
from torch_promote.observe.ops import facts_of
from torch_promote.recording.values import Values

aten = torch.ops.aten


def ones(number: int = 2) -> list[Tensor]:
    return [torch.ones(2, 3) for _ in range(number)]


def batch_norm(training: bool, mean: Tensor, variance: Tensor) -> Tensor:
    x = torch.arange(12.0).view(4, 3)
    return torch.batch_norm(x, None, None, mean, variance, training, 0.5, 1e-5, False)


def fused_adam(weights: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
    steps = [torch.ones(()) for _ in weights]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adam_(weights, grads, first, second, [], steps, amsgrad=False, maximize=False, **numbers)


two = ["self[0]", "self[1]"]
#: The op, a call of it on new tensors, and the names of its outputs with the tensors that they have to be.
CALLS: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {}


def case(op: str) -> Callable[[Callable[[], dict[str, Tensor]]], None]:
    def add(make: Callable[[], dict[str, Tensor]]) -> None:
        CALLS[make.__name__] = op, make

    return add


@case("aten::_foreach_mul_.Scalar")
def foreach() -> dict[str, Tensor]:
    tensors = ones()
    torch._foreach_mul_(tensors, 3.0)
    return dict(zip(two, tensors, strict=True))


@case("aten::_foreach_lerp_.Scalar")
def moving_average() -> dict[str, Tensor]:
    averages = ones()
    torch._foreach_lerp_(averages, [torch.zeros(2, 3), torch.zeros(2, 3)], 0.25)
    return dict(zip(two, averages, strict=True))


@case("aten::_foreach_add.Scalar_out")
def foreach_with_out() -> dict[str, Tensor]:
    outs = [torch.empty(0), torch.empty(0)]
    aten._foreach_add.Scalar_out(ones(), 1.0, out=outs)
    return {"out[0]": outs[0], "out[1]": outs[1]}


@case("aten::_fused_adam_")
def fused() -> dict[str, Tensor]:
    weights, grads, first, second = ones(1), ones(1), ones(1), ones(1)
    fused_adam(weights, grads, first, second)
    return {"self[0]": weights[0], "grads[0]": grads[0], "exp_avgs[0]": first[0], "exp_avg_sqs[0]": second[0]}


@case("aten::_amp_foreach_non_finite_check_and_unscale_")
def unscale() -> dict[str, Tensor]:
    grads, found = ones(1), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((), 0.5))
    return {"self[0]": grads[0], "found_inf": found}


@case("aten::add_.Tensor")
def in_place() -> dict[str, Tensor]:
    return {"0": torch.ones(3).add_(2.0)}


@case("aten::mul.out")
def out() -> dict[str, Tensor]:
    found = torch.empty(3)
    torch.mul(torch.ones(3), 5.0, out=found)
    return {"0": found}


@case("aten::index_put_")
def index_put() -> dict[str, Tensor]:
    return {"0": torch.zeros(3).index_put_((torch.tensor([1]),), torch.ones(1))}


@case("aten::batch_norm")
def statistics() -> dict[str, Tensor]:
    mean, variance = torch.zeros(3), torch.ones(3)
    return {"0": batch_norm(True, mean, variance), "running_mean": mean, "running_var": variance}


@case("aten::batch_norm")
def statistics_that_are_only_read() -> dict[str, Tensor]:
    return {"0": batch_norm(False, torch.zeros(3), torch.ones(3))}


@case("writes::two_of_three")
def custom() -> dict[str, Tensor]:
    product, copy = torch.empty(3), torch.empty(3)
    two_of_three(torch.ones(3), product, copy, 7.0)
    return {"product": product, "copy": copy}


@case("writes::scale")
def custom_with_a_list() -> dict[str, Tensor]:
    tensors, count = ones(), torch.zeros(())
    return {"0": scale(tensors, count, 2.0), "tensors[0]": tensors[0], "tensors[1]": tensors[1], "count": count}


@case("writes::copy_to")
def custom_with_optional_ones() -> dict[str, Tensor]:
    one, several = torch.zeros(3), ones()
    copy_to(torch.full((3,), 5.0), one, several)
    return {"one": one, "several[0]": several[0], "several[1]": several[1]}


@case("writes::copy_to")
def custom_without_the_optional_ones() -> dict[str, Tensor]:
    copy_to(torch.ones(3), None, None)
    return {}


@case("writes::store")
def compiled() -> dict[str, Tensor]:
    cache = torch.zeros(2, 3)
    torch.compile(lambda x, cache: store(x, cache, 1), backend="aot_eager")(torch.ones(3), cache)
    return {"cache": cache}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_are_what_a_call_produced(name: str) -> None:
    op, make = CALLS[name]
    with tp.trace(values=True) as report:
        expected = make()
    call = report.calls.where(op=op)[-1]
    assert {info.name: (info.dtype, info.shape) for info in call.outputs} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in expected.items()
    }
    assert list(report.values_of(call)) == [Values.of(tensor) for tensor in expected.values()]


def test_ops_that_declare_a_write_and_write_nothing() -> None:
    assert not facts_of(aten.record_stream.default).writes
    assert not facts_of(aten.retain_grad.default).writes


def test_a_traced_linear_costs_at_most_171_python_calls() -> None:
    called: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(tp.__path__[0]):
            called.append(frame.f_code.co_name)

    linear, x = nn.Linear(3, 4), torch.ones(2, 3)
    with tp.trace(), tp.my_autocast("cpu"):
        linear(x)  # fills the caches
        gc.disable()  # a collection would add the calls of its callbacks, such as that of Hypothesis
        sys.setprofile(note)
        try:
            linear(x)
        finally:
            sys.setprofile(None)
            gc.enable()
    assert "produced" in called
    assert "written" not in called
    assert len(called) <= 171


def test_running_statistics_are_written_by_the_ops_that_normalize_with_them() -> None:
    """Names the others, so that somebody decides whether an op of a new PyTorch writes to them."""
    statistics = {"running_mean", "running_var"}
    undeclared = set()
    for schema in torch._C._jit_get_all_schemas():
        if any(one.name in statistics and one.alias_info is None for one in schema.arguments):
            op = getattr(getattr(aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")
            if not statistics & {write.name for write in facts_of(op).writes}:
                undeclared.add(schema.name.removeprefix("aten::"))
    assert {name for name in undeclared if "backward" not in name and "functional" not in name} == {
        "_batch_norm_no_update",
        "_native_batch_norm_legit_no_training",
    }
