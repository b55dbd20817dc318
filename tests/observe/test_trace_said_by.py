"""The source of a policy: `Call.said_by`."""

from __future__ import annotations

import asyncio
import html
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote.observe.trace import trace
from torch_promote.observe.trace_report import TraceReport

X = torch.ones(2, 2)


def here(plus: int = 0) -> str:
    """The calling line, and the name of a region there."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"region at {__file__}:{frame.f_back.f_lineno + plus}"


def said(report: TraceReport, op: str, phase: Any = None) -> list[str]:
    return [call.said_by for call in report.calls.where(op=op, phase=phase)]


def test_pytorchs_table() -> None:
    with trace() as report:
        for region in (torch.autocast("cpu"), tp.my_autocast("cpu"), tp.my_autocast("cpu", overrides={"exp": "fp32"})):
            with region:
                torch.mm(X, X)
        torch.mm(X, X)
    assert said(report, "mm") == ["PyTorch's table"] * 3 + [""]


def test_regions() -> None:
    with trace() as report:
        with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
            outer = here(-1)
            torch.mm(X, X)
            with tp.my_autocast("cpu", overrides={"mm": "fp32", "exp": "fp32"}):
                inner = here(-1)
                torch.mm(X, X)
                torch.exp(X)
                with tp.my_autocast("cpu", torch.float16):
                    torch.exp(X)
            torch.mm(X, X)
        with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
            later = here(-1)
            torch.mm(X, X)
    assert said(report, "mm") == [outer, inner, outer, later]
    assert said(report, "exp") == [inner, inner]


def test_one_object_entered_twice() -> None:
    region = tp.my_autocast("cpu", overrides={"mm": "fp32"})
    with trace() as report, region:
        outer = here(-1)
        with region:
            inner = here(-1)
            torch.mm(X, X)
        torch.mm(X, X)
    assert said(report, "mm") == [inner, outer]


def test_overrides_that_cast_nothing() -> None:
    with trace() as report, tp.my_autocast("cpu", overrides={"mm": "fallthrough", "layer_norm": "keep"}):
        region = here(-1)
        torch.mm(X, X)
        F.layer_norm(X, (2,))
    assert said(report, "mm") == [region]
    assert {call.policy_name for call in report.calls.where(op="mm")} == {"fallthrough"}
    assert region in said(report, "layer_norm")


def test_register_policy_and_the_default_policy() -> None:
    before = tp.set_default_policy("cuda")
    try:
        with trace() as report, tp.register_policy("relu", "fp32"), tp.my_autocast("cpu"):
            X.relu()
            X.exp()
            torch.mm(X, X)
    finally:
        tp.set_default_policy(before)
    assert said(report, "relu") == ["register_policy"]
    assert said(report, "exp") == ["the default policy"]
    assert said(report, "mm") == ["PyTorch's table"]


def test_install() -> None:
    tp.install(policy="cuda")
    try:
        with trace() as report, torch.autocast("cpu"):
            line = here(-1)
            torch.mm(X, X)
            X.exp()
    finally:
        tp.uninstall()
    tp.install()
    try:
        with trace() as bare, torch.autocast("cpu"):
            torch.mm(X, X)
    finally:
        tp.uninstall()
    assert said(report, "mm") == said(bare, "mm") == ["PyTorch's table"]
    assert said(report, "exp") == [f"install, {line}"]


def test_module_policies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))
    tp.set_module_policy(model, {"1": {"linear": "fp32", "softmax": "lower_precision_fp"}})
    with trace(model) as report, tp.my_autocast("cpu", overrides={"linear": torch.float16}):
        region = here(-1)
        model(X)
    assert said(report, "linear") == [region, 'module policy "1"']
    assert said(report, "softmax") == ['module policy "1"']


def test_decorators_and_coroutines() -> None:
    @tp.my_autocast("cpu", overrides={"mm": "fp32"})
    def decorated() -> torch.Tensor:
        return torch.mm(X, X)

    def generator() -> Iterator[None]:
        with tp.my_autocast("cpu", overrides={"mm": torch.float16}):
            torch.mm(X, X)
            yield
            torch.mm(X, X)

    with trace() as report:
        decorated()
        call = here(-1)
        list(generator())
    in_generator = f"region at {__file__}:{inspect.getsourcelines(generator)[1] + 1}"
    assert said(report, "mm") == [call, in_generator, in_generator]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_a_checkpoint(use_reentrant: bool) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    x = torch.ones(2, 2, requires_grad=True)
    with trace(model) as report:
        with tp.my_autocast("cpu", overrides={"linear": "fp32"}):
            before = here(-1)
            y = checkpoint(first, x, use_reentrant=use_reentrant)
        with tp.my_autocast("cpu", overrides={"linear": "fp32"}):
            after = here(-1)
            y = checkpoint(second, y, use_reentrant=use_reentrant)
        y.sum().backward()
    assert said(report, "linear", "forward") == [before, after]
    assert said(report, "linear", "recompute") == [after, before]


def test_promotion() -> None:
    low = X.bfloat16()
    with trace() as report:
        X + low
        X + X
        with tp.promotion("jax"):
            X * low
    assert said(report, "add") == ["promotion rule torch", ""]
    assert said(report, "mul") == ["promotion rule jax"]


def test_regions_that_were_open_before() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "fp32"}), trace() as report:
        torch.mm(X, X)
    assert said(report, "mm") == ["a region that was open before the trace"]
    with tp.my_autocast("cpu", enabled=False), trace() as report:
        torch.mm(X, X)
    assert said(report, "mm") == [""]


def test_a_librarys_autocast_kernel() -> None:
    with torch.library._scoped_library("traced_here", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_autocast("traced_here::op", "cpu", torch.bfloat16, lib=library)
        with trace() as report, tp.my_autocast("cpu"):
            torch.ops.traced_here.op(X)
    assert said(report, "traced_here::op") == ["a kernel on PyTorch's autocast key"]
    text = report.explain("traced_here::op").paragraph
    assert "without a policy: a kernel on PyTorch's autocast key (1)" in text


def test_autocast_switched_off_by_a_module_policy() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tp.set_module_policy(net, {"1": "fp32"})
    with tp.trace(net) as report, tp.my_autocast("cpu"):
        net(torch.ones(2, 3))
    first, second = report.calls.where(op="linear")
    assert (first.said_by, second.said_by) == ("PyTorch's table", 'autocast off by module policy "1"')
    assert second.policy is None
    inner = [call for call in report.calls if call.module == "1" and call.op != "aten::linear"]
    assert inner
    assert not any("autocast off" in call.said_by for call in inner)  # what linear is made of
    assert 'autocast off by module policy "1" (1)' in report.explain("1").paragraph
    assert 'autocast off by module policy "1"' in html.unescape(html.unescape(report._repr_html_()))


def test_autocast_switched_off_by_a_region() -> None:
    x = torch.ones(2, 2)
    with tp.trace() as report, tp.my_autocast("cpu"):
        with tp.my_autocast("cpu", enabled=False):
            x @ x
            x + 1  # has no policy anyway
        with tp.installed_as(), torch.autocast("cpu", enabled=False):
            x @ x
        with tp.stock_autocast("cpu", enabled=False):
            x @ x
        x @ x
    said = [call.said_by for call in report.calls.where(op="matmul")]
    assert said[0].startswith("autocast off by region at ")
    assert said[1].startswith("autocast off by install, region at ")
    assert said[2:] == ["autocast off by a region of torch.autocast inside", "PyTorch's table"]
    assert [call.said_by for call in report.calls.where(op="add")] == [""]


def test_a_decorated_coroutine_that_is_a_task_of_its_own() -> None:
    @tp.my_autocast("cpu", overrides={"mm": "fp32"})
    async def work() -> None:
        torch.mm(X, X)
        await asyncio.sleep(0)
        torch.mm(X, X)

    with trace() as report:
        asyncio.run(work())
    assert said(report, "mm") == [here(-1)] * 2
    assert {call.line.rpartition(":")[0] for call in report.calls.where(op="mm")} == {__file__}
