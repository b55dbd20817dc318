"""Steps that write weights without increasing their version, compiled or not: persistent casts are made again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from helpers.persistent_casts import ours
from helpers.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "nothing_persists")

EYE = torch.eye(4)
Step = Callable[[], object]
#: Makes a step that changes a weight, given a function that compiles.
Maker = Callable[[nn.Parameter, Callable[..., Any]], Step]


class BehindPyTorchsBack(torch.optim.Optimizer):
    """Like optimizers of other libraries, it writes in a kernel that Dynamo and the dispatcher do not see."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {})
        self.memory = [(ctypes.c_float * weight.numel()).from_address(weight.data_ptr()) for weight in weights]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch._dynamo.graph_break()
        for memory in self.memory:
            memory[:] = [number - 1 for number in memory]


def in_place(write: Callable[[torch.Tensor], object]) -> Maker:
    def make(w: nn.Parameter, compiled: Callable[..., Any]) -> Step:
        return compiled(torch.no_grad()(lambda: write(w)))

    return make


STEPS: dict[str, Maker] = {
    "fused AdamW": lambda w, compiled: compiled(torch.optim.AdamW([w], lr=1.0, fused=True).step),
    "behind PyTorch's back": lambda w, compiled: compiled(BehindPyTorchsBack([w]).step),
    "sub_": in_place(lambda w: w.sub_(1)),
    "detach": in_place(lambda w: w.detach().sub_(1)),
}


@torch.no_grad()
def corner(w: torch.Tensor) -> float:
    """An element, read without a tensor over the weight's data: that would drop the casts."""
    return w.clone()[0, 0].item()


def product(w: torch.Tensor) -> float:
    with ours(), torch.no_grad():
        return (EYE @ w)[0, 0].item()


EVERYDAY = [*((name, "eager") for name in STEPS), ("fused AdamW", "aot_eager"), ("fused AdamW", "inductor")]
OTHERS = [(name, backend) for name in STEPS for backend in ("aot_eager", "inductor") if name != "fused AdamW"]


@pytest.mark.parametrize(
    ("name", "backend"), [*EVERYDAY, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_a_compiled_step_drops_the_casts_of_what_it_writes(name: str, backend: str) -> None:
    w = nn.Parameter(torch.full((4, 4), 8.0))
    w.grad = torch.ones_like(w)
    step = STEPS[name](w, lambda function: torch.compile(function, backend=backend))
    seen = []
    for _ in range(4):
        assert product(w) == pytest.approx(corner(w), rel=1e-2)
        seen.append(product(w))
        step()
    assert len(set(seen)) == 4, seen


COMPILED_FIRST = """
import torch, torch_promote as tp
w, eye = torch.nn.Parameter(torch.ones(4, 4)), torch.eye(4)
w.grad = torch.ones_like(w)
steps = [torch.compile(torch.optim.SGD([w], lr=1.0, fused=True).step, backend=b) for b in ("eager", "aot_eager")]
for step in steps:
    step()
for step in (*steps, *steps):
    with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
        print((eye @ w)[0, 0].item(), end=" ")
    step()
"""


def test_a_step_that_was_compiled_before_the_first_region() -> None:
    done = run_python(COMPILED_FIRST, compiler=True, timeout=200)
    assert done.stdout.split() == ["-1.0", "-2.0", "-3.0", "-4.0"], done.stderr


# --- the hook after steps


class Stepped(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        return "stepped"


WEIGHT = nn.Parameter(torch.ones(2))
GROUPS: dict[str, list[Any]] = {
    "no group": [],
    "a group without weights": [{"lr": 1}],
    "something else among the weights": [{"params": [None, WEIGHT, "x"]}],
    "an iterator": [{"params": iter([WEIGHT])}],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_step_returns_whatever_the_groups_hold(groups: list[Any]) -> None:
    optimizer = Stepped([WEIGHT], {})
    optimizer.param_groups = groups
    assert optimizer.step() == "stepped"


def test_a_step_on_fake_weights_of_a_device_that_pytorch_lacks() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    assert weight._version == 1
