"""The source of a policy (`Call.policy_source`), and the overrides that no call of a trace used."""

from __future__ import annotations

import asyncio
import html
import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote.observe.policy_sources import UnusedOverride
from torch_promote.reading.trace_report import TraceReport

X = torch.ones(2, 2)
TABLE, BEFORE = "PyTorch's table", "a region that was open before the trace"


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    before = tp.set_default_policy(None)
    yield
    tp.set_default_policy(before)


def said(report: TraceReport, op: str, phase: Any = None) -> list[str]:
    """The sources of an op's policies, each "region at FILE:LINE" as the comment on that line."""
    return [_by_comment(call.policy_source) for call in report.calls.where(op=op, phase=phase)]


def _by_comment(source: str) -> str:
    before, region, line = source.partition("region at ")
    file, _, number = line.rpartition(":")
    return before + linecache.getline(file, int(number)).partition("  # ")[2].strip() if region else source


def regions() -> None:
    region = tp.my_autocast("cpu", overrides={"mm": "fp32"})
    with region:  # outer
        X.mm(X)
        with tp.my_autocast("cpu", overrides={"mm": "fp32", "exp": "fp32"}):  # inner
            X.mm(X).float().exp()
            with tp.my_autocast("cpu", torch.float16):
                X.exp()
        with region:  # again
            X.mm(X)
        X.mm(X)
    with torch.autocast("cpu"):
        X.mm(X)
    X.mm(X)


def overrides_that_cast_nothing() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "fallthrough", "layer_norm": "keep"}):  # region
        F.layer_norm(X.mm(X), (2,))


def registered_and_default() -> None:
    tp.set_default_policy("cuda")
    with tp.register_policy("relu", "fp32"), tp.my_autocast("cpu"):
        X.relu(), X.exp(), X.mm(X)


def install() -> None:
    with tp.install(policy="cuda"), torch.autocast("cpu"):  # region
        X.mm(X), X.exp()
    with tp.install(), torch.autocast("cpu"):
        X.mm(X)


def module_policies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))
    tp.set_module_policy(model, {"1": {"linear": "fp32", "softmax": "lower_precision_fp"}})
    with tp.my_autocast("cpu", overrides={"linear": torch.float16}):  # region
        model(X)


def decorators_and_generators() -> None:
    @tp.my_autocast("cpu", overrides={"mm": "fp32"})  # decorator
    def decorated() -> torch.Tensor:
        return X.mm(X)

    @tp.my_autocast("cpu", overrides={"mm": "fp32"})  # decorator of a task
    async def task() -> None:
        X.mm(X)
        await asyncio.sleep(0)
        X.mm(X)

    def generator() -> Iterator[None]:
        with tp.my_autocast("cpu", overrides={"mm": torch.float16}):  # in the generator
            X.mm(X)
            yield
            X.mm(X)

    decorated()
    list(generator())
    asyncio.run(task())


def promotion() -> None:
    X + X.bfloat16()
    X + X
    with tp.promotion("jax"):
        X * X.bfloat16()
        nn.functional.cross_entropy(X, torch.tensor([0, 1]), label_smoothing=0.1)  # PyTorch divides by a count


def switched_off() -> None:
    with tp.my_autocast("cpu"):
        with tp.my_autocast("cpu", enabled=False):  # region
            X @ X
            X + 1  # has no policy anyway
        with tp.install(), torch.autocast("cpu", enabled=False):  # region
            X @ X
        with tp.stock_autocast("cpu", enabled=False):
            X @ X
        X @ X


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (regions, {"mm": ["outer", "inner", "again", "outer", TABLE, ""], "exp": ["inner", "inner"]}),
        (overrides_that_cast_nothing, {"mm": ["region"], "layer_norm": ["region"]}),
        (registered_and_default, {"relu": ["register_policy"], "exp": ["the default policy"], "mm": [TABLE]}),
        (install, {"mm": [TABLE, TABLE], "exp": ["install, region"]}),
        (module_policies, {"linear": ["region", 'module policy "1"'], "softmax": ['module policy "1"']}),
        (decorators_and_generators, {"mm": ["decorator", *["in the generator"] * 2, *["decorator of a task"] * 2]}),
        (
            promotion,
            {
                "add": ["promotion rule torch", "", ""],
                "mul": ["promotion rule jax", "", ""],
                "div": ["promotion rule torch"],
            },
        ),
        (
            switched_off,
            {
                "matmul": [
                    "autocast off by region",
                    "autocast off by install, region",
                    "autocast off by a region of torch.autocast inside",
                    TABLE,
                ],
                "add": [""],
            },
        ),
    ],
)
def test_sources(program: Callable[[], None], expected: dict[str, list[str]]) -> None:
    with tp.trace() as report:
        program()
    assert {op: said(report, f"aten::{op}", "forward") for op in expected} == expected


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_a_checkpoint(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    y = torch.ones(2, 2, requires_grad=True)
    with tp.trace(model) as report:
        with tp.my_autocast("cpu", overrides={"linear": "fp32"}):  # before
            y = checkpoint(model[0], y, use_reentrant=use_reentrant)
        with tp.my_autocast("cpu", overrides={"linear": "fp32"}):  # after
            y = checkpoint(model[1], y, use_reentrant=use_reentrant)
        y.sum().backward()
    assert said(report, "linear", "forward") == ["before", "after"]
    assert said(report, "linear", "recompute") == ["after", "before"]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.autocast("cpu")  # decorator
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):  # block
            grad = grad @ torch.ones(2, 2)
        return grad @ torch.ones(2, 2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_regions_that_a_backward_and_a_recomputation_open(use_reentrant: bool) -> None:
    """The line that calls backward() opens none of them."""
    with tp.install(), tp.trace() as report:
        y = checkpoint(nn.Linear(2, 2), Scaled.apply(torch.ones(2, 2, requires_grad=True)), use_reentrant=use_reentrant)
        y.sum().backward()
    opened = (call.policy_source for call in report.calls.where(op="matmul", phase="backward"))
    start = f"region opened in the backward at {__file__}:"
    marks = [
        (before, linecache.getline(__file__, int(at))) for before, _, at in (one.rpartition(start) for one in opened)
    ]
    assert [(before, text.partition("  # ")[2].strip()) for before, text in marks] == [
        ("autocast off by install, ", "block"),
        (f"{TABLE}, ", "decorator"),
    ]
    (again,) = report.calls.where(op="linear", phase="recompute")
    assert re.fullmatch(r"autocast off by install, region at \S+checkpoint\.py:\d+", again.policy_source)


def test_regions_that_were_open_before() -> None:
    for options, source in (({"overrides": {"mm": "fp32"}}, BEFORE), ({"enabled": False}, "")):
        with tp.my_autocast("cpu", **options), tp.trace() as report:  # type: ignore[arg-type]
            X.mm(X)
        assert said(report, "mm") == [source]


def test_a_librarys_autocast_kernel() -> None:
    with torch.library._scoped_library("traced_here", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_autocast("traced_here::op", "cpu", torch.bfloat16, lib=library)
        with tp.trace() as report, tp.my_autocast("cpu"):
            torch.ops.traced_here.op(X)
    assert said(report, "traced_here::op") == ["a kernel on PyTorch's autocast key"]
    text = report.explain("traced_here::op").paragraph
    assert "without a policy: a kernel on PyTorch's autocast key (1)" in text


def test_autocast_switched_off_by_a_module_policy() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tp.set_module_policy(net, {"1": "fp32"})
    with tp.trace(net) as report, tp.my_autocast("cpu"):
        net(torch.ones(2, 3))
    off = 'autocast off by module policy "1"'
    assert said(report, "linear") == [TABLE, off]
    inner = [call.policy_source for call in report.calls if call.module == "1" and call.op != "aten::linear"]
    assert set(inner) == {""}, "what linear is made of"
    assert off in html.unescape(html.unescape(report._repr_html_()))


def unused(report: TraceReport) -> list[tuple[str, str, str]]:
    return [(one.op, one.policy, one.policy_source.partition(" at ")[0]) for one in report.unused_overrides()]


def _region(program: Callable[[], Any], times: int = 1, **overrides: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            with tp.my_autocast("cpu", overrides={key.replace("all", "*"): value for key, value in overrides.items()}):
                program()

    return run


def _default() -> None:
    tp.set_default_policy(tp.Policy.stock().override({"exp": "fp32", "mm": "fp32"}))
    with tp.my_autocast("cpu"):
        X.mm(X)


def _decorated() -> None:
    """One region, which is entered at the lines of the calls. One of them uses the override."""

    @tp.my_autocast("cpu", overrides={"mm": "fp32", "exp": "fp32"})
    def run(function: str) -> None:
        getattr(X, function)(X)

    run("add")
    run("mm")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (_region(lambda: X.mm(X), 3, mm="fp32", softmax="fp16"), [("softmax", "lower_precision_fp", "region")]),
        (
            _region(lambda: torch.linalg.vector_norm(X), linalg_all="fp32", allpoolall="fp32"),
            [("*pool*", "fp32", "region")],
        ),
        # The mm that matmul calls runs with autocast off.
        (_region(lambda: X.matmul(X), mm="fp32"), [("mm", "fp32", "region")]),
        (_region(lambda: X.mm(X), mm="fallthrough", bmm="fallthrough"), [("bmm", "fallthrough", "region")]),
        (_default, [("exp", "fp32", "the default policy")]),
        (_decorated, [("exp", "fp32", "region")]),
    ],
)
def test_unused_overrides(program: Callable[[], None], expected: list[tuple[str, str, str]]) -> None:
    with tp.trace() as report:
        program()
    assert unused(report) == expected


def test_a_default_policy_of_a_file_is_called_by_its_name(tmp_path: Path) -> None:
    tp.Policy.stock().override({"exp": "fp32", "mv": "fp32"}).save(tmp_path / "mine.toml")
    tp.set_default_policy(tmp_path / "mine.toml")
    name = "mine.toml, the default policy"
    with tp.trace() as report, tp.my_autocast("cpu"):
        X.exp()
    assert (report.calls[0].policy_source, unused(report)) == (name, [("mv", "fp32", name)])
    assert f"The policy of aten::exp was set by: {name}. Change it there." in str(report.explain("exp"))


def test_unused_overrides_of_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1), nn.Linear(2, 2), nn.Linear(2, 2))
    policies = {"0": {"linear": "fp32", "exp": "fp32"}, "1": "fp32", "2": {"linear": "fp16"}, "3": {"mm": "fp32"}}
    tp.set_module_policy(model, policies)
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model[:3](X)
    assert unused(report) == [
        ("exp", "fp32", 'module policy "0"'),
        ("mm", "fp32", 'module policy "3"'),  # it never ran
    ]


def test_unused_overrides_of_install() -> None:
    with tp.install(overrides={"exp": "fp32", "mm": "fp32"}), tp.trace() as report:
        with torch.autocast("cpu"):
            X.mm(X)
        with torch.autocast("cpu"):  # another line
            X.mm(X)
    assert report.unused_overrides() == [UnusedOverride("exp", "cpu, cuda, xpu, mps", "fp32", "install")]


def test_unused_overrides_survive_a_file(tmp_path: Path) -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"mm": "fp32", torch.ops.aten.exp.default: "fp32"}):
        X.mm(X)
    [one] = report.unused_overrides()
    assert (one.op, one.device) == ("aten::exp.default", "cpu")
    assert one.policy_source.partition(" at ")[2].startswith(f"{__file__}:")
    assert str(one) == f"aten::exp.default: fp32, asked for by {one.policy_source}"
    report.save(tmp_path / "run.jsonl.gz")
    [again] = tp.load(tmp_path / "run.jsonl.gz").unused_overrides()
    assert (again.op, again.device, again.policy) == (one.op, one.device, one.policy)
    assert again.policy_source.startswith(f"region at {Path(__file__).name}:")
