"""Ops that write to an argument under their legal policies, above all `match_self`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten
#: Makes a tensor of a shape.
Make = Callable[..., torch.Tensor]
#: The dtype of the written tensor, and that of the other tensors.
PAIRS = [(BF16, F32), (F32, BF16), (F16, F64), (F64, F16), (F32, F64), (BF16, F16)]

each_pair = pytest.mark.parametrize(("own", "given"), PAIRS, ids=str)


def x(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-2, 3, 12, dtype=F64).reshape(4, 3).to(dtype)


def maker(dtype: torch.dtype, cast_to: torch.dtype | None = None) -> Make:
    """Makes the other tensors with the given shapes and dtype, and casts them by hand to another dtype if given."""

    def make(*shape: int) -> torch.Tensor:
        made = torch.linspace(0.1, 1.7, 12, dtype=F64)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
        return made.to(cast_to or dtype)

    return make


INDEX = torch.tensor([2, 0])

#: The op that is called, and the call as Python writes it: of the tensor, and of what makes the others.
WRITES: dict[str, tuple[Any, Callable[[torch.Tensor, Make], Any]]] = {
    "x[idx] = y": (aten.index_put_.default, lambda x, y: x.__setitem__(INDEX, y(2, 3))),
    "x[mask] = y": (aten.index_put_.default, lambda x, y: x.__setitem__(x > 1, y(5))),
    "x[:, idx] = y": (aten.index_put_.default, lambda x, y: x.__setitem__((slice(None), INDEX), y(4, 2))),
    "index_put_, accumulating": (aten.index_put_.default, lambda x, y: x.index_put_((INDEX,), y(3), True)),
    "x[1:3] = y": (aten.copy_.default, lambda x, y: x.__setitem__(slice(1, 3), y(2, 3))),
    "copy_": (aten.copy_.default, lambda x, y: x.copy_(y(4, 3))),
    "addmm_": (aten.addmm_.default, lambda x, y: x.addmm_(y(4, 2), y(2, 3))),
    "mm(out=)": (aten.mm.out, lambda x, y: torch.mm(y(4, 2), y(2, 3), out=x)),
    "cat(out=)": (aten.cat.out, lambda x, y: torch.cat([y(2, 3), y(2, 3)], out=x)),
    "scatter_add_": (
        aten.scatter_add_.default,
        lambda x, y: x.scatter_add_(0, torch.tensor([[0, 1, 2], [3, 3, 0]]), y(2, 3)),
    ),
    "scatter_": (aten.scatter_.src, lambda x, y: x.scatter_(0, torch.tensor([[0, 1, 2], [3, 2, 0]]), y(2, 3))),
    "index_add_": (aten.index_add_.default, lambda x, y: x.index_add_(0, INDEX, y(2, 3), alpha=0.3)),
    "index_copy_": (aten.index_copy_.default, lambda x, y: x.index_copy_(0, INDEX, y(2, 3))),
    "masked_scatter_": (aten.masked_scatter_.default, lambda x, y: x.masked_scatter_(x > 1, y(5))),
    "lerp_": (aten.lerp_.Tensor, lambda x, y: x.lerp_(y(4, 3), y(3))),
    "addcmul_": (aten.addcmul_.default, lambda x, y: x.addcmul_(y(4, 3), y(3), value=0.3)),
    "add_": (aten.add_.Tensor, lambda x, y: x.add_(y(4, 3), alpha=0.3)),
    "mul_ by a number": (aten.mul_.Tensor, lambda x, y: x.mul_(0.1)),
    "div_ by a number": (aten.div_.Tensor, lambda x, y: x.div_(0.3)),
    "_foreach_mul_": (
        aten._foreach_mul_.List,
        lambda x, y: torch._foreach_mul_([x, x[0]], [y(4, 3), y(3)]),
    ),
    "_foreach_add_ a number": (aten._foreach_add_.Scalar, lambda x, y: torch._foreach_add_([x], 0.1)),
}

each_write = pytest.mark.parametrize("name", WRITES)


@each_write
@each_pair
def test_what_is_written(name: str, own: torch.dtype, given: torch.dtype) -> None:
    """As if each tensor argument had been cast to the dtype of the written tensor. Python numbers are not cast."""
    op, write = WRITES[name]
    ours, by_hand = x(own), x(own)
    with tp.my_autocast("cpu", overrides={op: "match_self"}):
        write(ours, maker(given))
    write(by_hand, maker(given, cast_to=own))
    assert_same(ours, by_hand, name)


# --- lists go in step

#: Every op on lists that writes to a list.
ON_LISTS = {
    name: op
    for packet in dir(aten)
    if packet.startswith("_foreach_")
    for op in (getattr(getattr(aten, packet), overload) for overload in getattr(aten, packet).overloads())
    for name in [str(op).removeprefix("aten.")]
    if any(argument.alias_info is not None for argument in op._schema.arguments)
}
OWN, GIVEN = (BF16, F32, F64, F16), (F32, F64, BF16, F16)


def on_lists(op: Any, beside: torch.dtype | None) -> dict[str, Any]:
    """Arguments of an op on lists of several dtypes; a single tensor beside the lists has the given dtype."""
    values: dict[str, Any] = {}
    for number, argument in enumerate(op._schema.arguments):
        kind, start = str(argument.type), 0.3 + 0.2 * number
        if kind == "List[Tensor]":
            dtypes = OWN if argument.name == "self" or argument.is_out else GIVEN
            values[argument.name] = [torch.linspace(start, start + 0.4, 4).to(dtype) for dtype in dtypes]
        elif kind == "Tensor":
            numbers = [0.13, 0.37, 0.71, 0.97] if argument.name == "scalars" else 0.37
            values[argument.name] = torch.tensor(numbers, dtype=beside)
        elif kind == "List[number]":
            values[argument.name] = [0.13, 0.37, 0.71, 0.97]
        elif not argument.has_default_value():
            values[argument.name] = 0.37 if kind == "number" else 2
    return values


def at_place(place: int, value: Any) -> Any:
    """What an argument is for one place of the lists, cast by hand to the dtype that is written there."""
    if not isinstance(value, list):
        return value
    one = value[place]
    return [one.to(OWN[place], copy=True)] if isinstance(one, torch.Tensor) else [one]


@pytest.mark.parametrize("name", ON_LISTS)
def test_lists_go_in_step(name: str) -> None:
    """As if each place were a call of its own. A tensor beside lists of several dtypes has no dtype to match."""
    op = ON_LISTS[name]
    ours = on_lists(op, beside=F32)
    by_hand = [{name: at_place(place, value) for name, value in on_lists(op, beside=F32).items()} for place in range(4)]
    if isinstance(ours.get("scalars"), torch.Tensor):
        for place, values in enumerate(by_hand):
            values["scalars"] = values["scalars"][place : place + 1]
    with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={op: "match_self"}):
        op(**ours)
    for values in by_hand:
        op(**values)
    written = next(argument.name for argument in op._schema.arguments if argument.alias_info is not None)
    assert_same(ours[written], [one for values in by_hand for one in values[written]], name)
    assert report.mismatches == []


def test_a_tensor_beside_lists_of_one_dtype_matches_them() -> None:
    ours, by_hand = ([x(BF16), x(BF16)[0]] for _ in range(2))
    factor = torch.tensor(0.3)
    with tp.my_autocast("cpu", overrides={"_foreach_mul_.Tensor": "match_self"}):
        torch._foreach_mul_(ours, factor)
    torch._foreach_mul_(by_hand, factor.bfloat16())
    assert_same(ours, by_hand)


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_optimizers_step_as_without_the_policy(optimizer: Any, how: str) -> None:
    """Their lists have one dtype each, and the counts of steps are float32: 257 is not a bfloat16."""
    if how == "fused" and optimizer is torch.optim.RMSprop:
        return  # it has no fused kernel
    results = []
    for region in (contextlib.nullcontext(), tp.my_autocast("cpu", overrides={"_f*_": "match_self"})):
        parameters = [torch.nn.Parameter(x(dtype)) for dtype in (BF16, F32, BF16)]
        step = optimizer(parameters, lr=0.01, **{how: True})
        with region:
            for _ in range(260):
                for parameter in parameters:
                    parameter.grad = parameter.detach() * 0.1
                step.step()
        results.append((parameters, [state for _, state in sorted(step.state_dict()["state"].items())]))
    assert_same(results[1], results[0])
