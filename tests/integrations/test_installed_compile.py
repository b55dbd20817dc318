"""torch.compile of functions with regions of torch.autocast inside, while `install` is in force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.compiling import HALF, Weights, called_in, compute, inputs, with_gradients
from helpers.probes import leaves_no_trace
from helpers.program_comparison import ours

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "nothing_installed")

MARKED: dict[str, Any] = {"overrides": {"matmul": "fp32"}}
HALVES: dict[str, Any] = {"overrides": {"matmul": HALF}}

AT_MODULE_LEVEL = torch.autocast("cpu", HALF)


def plain(x: torch.Tensor, w: Weights) -> Any:
    with torch.autocast("cpu"):
        inside = compute(x, w)
    return inside, x @ w[3]


def nested(x: torch.Tensor, w: Weights) -> Any:
    with torch.autocast("cpu"):
        first = x @ w[0]
        with torch.autocast("cpu", dtype=HALF):
            second = x @ w[1], torch.softmax(x, -1)
            with torch.autocast("cpu", enabled=False):
                third = x @ w[2]
    return first, second, third, x @ w[3]


def made_outside(x: torch.Tensor, w: Weights) -> Any:
    with AT_MODULE_LEVEL:
        first = x @ w[0]
    with AT_MODULE_LEVEL:
        return first, x @ w[1]


@torch.autocast("cpu")
def decorated(x: torch.Tensor, w: Weights) -> Any:
    return compute(x, w)


def beside_our_own(x: torch.Tensor, w: Weights) -> Any:
    with tp.my_autocast("cpu", overrides={"softmax": "fp16"}):
        first = x @ w[0], torch.softmax(x, -1)
        with torch.autocast("cpu", HALF):
            second = x @ w[1], torch.softmax(x, -1)
    with torch.autocast("cpu"), tp.my_autocast("cpu", HALF):
        return first, second, x @ w[2]


PROGRAMS = (plain, nested, made_outside, decorated, beside_our_own)
EVERYWHERE = [(program, "aot_eager", arguments) for program in PROGRAMS for arguments in ({}, MARKED)]
ONCE = [
    (plain, "eager", MARKED),
    (nested, "eager", {}),
    *((nested, "aot_eager", a) for a in ({"policy": "off"}, {"cache": "all"})),
]


@pytest.mark.parametrize(
    ("program", "backend", "arguments"), EVERYWHERE + ONCE, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_in_one_graph_as_eager(program: Any, backend: str, arguments: Any) -> None:
    args = inputs()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    with leaves_no_trace(), tp.installed_as(**arguments):
        for place in (None, (ours, {"dtype": HALF}), (torch_region, {})):
            assert_same(called_in(place, compiled, *args), called_in(place, program, *args), what=str(place))


def torch_region(**arguments: Any) -> Any:
    return torch.autocast("cpu", **arguments)


@pytest.mark.parametrize("program", [plain, made_outside, decorated], ids=lambda program: program.__name__)
def test_every_change_recompiles(program: Any) -> None:
    args = inputs()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, backend=counter, fullgraph=True)

    def check(recompiles: bool) -> None:
        before = counter.frame_count
        assert_same(with_gradients(compiled, *args), with_gradients(program, *args))
        assert (counter.frame_count > before) == recompiles

    check(True)
    for arguments in (MARKED, HALVES, {}):
        tp.install(**arguments)
        check(True)
        tp.install(**arguments)
        check(False)
    tp.uninstall()
    check(True)
    tp.uninstall()
    check(False)


# --- where Dynamo does not get through


# --- install and uninstall while a function is compiled, or runs


@pytest.mark.parametrize("change", [tp.install, tp.uninstall, lambda: tp.installed_as().__enter__()])
def test_a_change_by_a_backend_is_an_error(change: Any) -> None:
    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        change()
        return module.forward

    with tp.installed_as(**MARKED) as installation:
        with leaves_no_trace(), pytest.raises(Exception, match=r"install.*was called while torch\.compile compiles"):
            torch.compile(plain, backend=backend, fullgraph=True)(*inputs())
        assert tp.installed() is installation
