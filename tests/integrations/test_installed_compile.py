"""torch.compile of functions with regions of torch.autocast inside, while `install` is in force."""

from __future__ import annotations

import threading
from collections.abc import Callable
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


@torch.autocast("cpu")
def decorated(x: torch.Tensor, w: Weights) -> Any:
    return compute(x, w)


def decorated_inside(x: torch.Tensor, w: Weights) -> Any:
    return torch.autocast("cpu")(compute)(x, w), x @ w[2]


PROGRAMS: tuple[Callable[[torch.Tensor, Weights], Any], ...] = (
    plain, nested, decorated, decorated_inside,
)  # fmt: skip
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


@pytest.mark.parametrize("program", [plain, decorated], ids=lambda program: program.__name__)
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


@pytest.mark.parametrize(
    "installed", [(MARKED,), pytest.param(({}, MARKED, HALVES), marks=pytest.mark.slow)], ids=["one", "several"]
)
def test_inductor(installed: tuple[Any, ...]) -> None:
    """The everyday run has one installation and none, because each one runs the C++ compiler."""
    args, dtypes = inputs(), {"{}": torch.bfloat16, str(MARKED): torch.float32, str(HALVES): HALF}
    compiled = torch.compile(plain, fullgraph=True)
    assert compiled(*args)[0][0].dtype is plain(*args)[0][0].dtype is torch.bfloat16
    for arguments in installed:
        tp.install(**arguments)
        assert compiled(*args)[0][0].dtype is plain(*args)[0][0].dtype is dtypes[str(arguments)]


def test_the_default_policy_acts_in_graphs() -> None:
    args = inputs()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with tp.installed_as():
        assert compiled(*args)[0][0].dtype is torch.bfloat16
        before = tp.set_default_policy("off")
        try:
            assert compiled(*args)[0][0].dtype is torch.float32
        finally:
            tp.set_default_policy(before)
        assert compiled(*args)[0][0].dtype is torch.bfloat16


# --- where Dynamo does not get through


def breaks_inside(x: torch.Tensor, w: Weights) -> Any:
    with torch.autocast("cpu"):
        first = x @ w[0]
        torch._dynamo.graph_break()
        with torch.autocast("cpu", HALF):
            second = x @ w[1]
            torch._dynamo.graph_break()
            third = x @ w[2]
        return first, second, third, x @ w[3]


def breaks_in_a_stock_region(x: torch.Tensor, w: Weights) -> Any:
    with tp.stock_autocast("cpu"):
        first = x @ w[0]
        torch._dynamo.graph_break()
        return first, x @ w[1]


@pytest.mark.parametrize("program", [breaks_inside, breaks_in_a_stock_region], ids=lambda p: p.__name__)
@pytest.mark.parametrize("arguments", [{}, MARKED], ids=str)
def test_graph_breaks(program: Any, arguments: Any) -> None:
    args = inputs()
    with leaves_no_trace(), tp.installed_as(**arguments):
        compiled = torch.compile(program, backend="aot_eager")
        for place in (None, (ours, {"dtype": HALF}), None):
            assert_same(called_in(place, compiled, *args), called_in(place, program, *args), what=str(place))


def test_a_graph_that_raises_inside_a_region() -> None:
    """Its region ends with the region around; without one, stock's and those of `my_autocast` stay open, too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", HALF):
            return torch.linalg.cholesky((x @ x).float())

    good, bad = torch.eye(4), -torch.eye(4)
    bad[0, 0] = float("nan")
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with tp.installed_as(**MARKED), leaves_no_trace():
        for region in (torch.autocast, tp.my_autocast):
            compiled(good)
            with leaves_no_trace(), pytest.raises(torch.linalg.LinAlgError), region("cpu"):
                compiled(bad)
        compiled(good)


def test_a_backend_that_raises() -> None:
    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        module.forward(*example)
        with torch.autocast("cpu"):
            raise ZeroDivisionError

    with tp.installed_as(**MARKED), leaves_no_trace(), pytest.raises(Exception, match="ZeroDivisionError"):
        torch.compile(plain, backend=backend, fullgraph=True)(*inputs())


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


def changes_inside(x: torch.Tensor, w: Weights) -> Any:
    with torch.autocast("cpu"):
        first = x @ w[0]
    tp.install(**HALVES)
    with torch.autocast("cpu"):
        second = x @ w[1]
    tp.uninstall()
    with torch.autocast("cpu"), tp.installed_as(**MARKED):
        return first, second, x @ w[2]


def test_a_change_inside_of_a_compiled_function() -> None:
    """The graph breaks there, or where it may not, the error says why."""
    args = inputs()
    with tp.installed_as(**MARKED) as installation, leaves_no_trace():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="changes the regions of compiled functions"):
            torch.compile(changes_inside, backend="eager", fullgraph=True)(*args)
        assert tp.installed() is installation
        for _ in range(2):
            tp.install(**MARKED)
            compiled = torch.compile(changes_inside, backend="aot_eager")(*args)
            tp.install(**MARKED)
            assert_same(compiled, changes_inside(*args))


def test_a_change_inside_a_region_of_a_compiled_function() -> None:
    """Dynamo ends the region at the graph break, and opens it again under the new installation."""

    def function(x: torch.Tensor) -> Any:
        with torch.autocast("cpu"):
            first = x @ x
            tp.install(**MARKED)
            second = x @ x
            tp.uninstall()
            return first.dtype, second.dtype, (x @ x).dtype

    x, marked, low = torch.ones(2, 2), torch.float32, torch.bfloat16
    cases = (({}, (low,) * 3, (low, marked, low)), (MARKED, (marked,) * 3, (marked, marked, low)))
    with leaves_no_trace():
        for before, eager, compiled in cases:
            for call, expected in ((function, eager), (torch.compile(function, backend="eager"), compiled)):
                tp.install(**before)
                assert call(x) == expected
                assert tp.installed() is None


def test_a_change_waits_for_what_another_thread_compiles() -> None:
    """Otherwise the function would be compiled partly for the old policy, and be cached for the new one."""
    compiling, order = threading.Event(), []

    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        compiling.set()
        changer.join(0.5)
        order.append("compiled")
        return module.forward

    def change() -> None:
        assert compiling.wait(60)
        tp.install(**HALVES)
        order.append("installed")

    changer = threading.Thread(target=change)
    args = inputs()
    with tp.installed_as(**MARKED):
        compiled = torch.compile(plain, backend=backend, fullgraph=True)
        changer.start()
        compiled(*args)
        changer.join(60)
        assert order == ["compiled", "installed"]
        assert_same(compiled(*args), plain(*args))
        assert order == ["compiled", "installed", "compiled"]
