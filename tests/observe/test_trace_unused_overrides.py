"""`unused_overrides`: overrides of regions, modules, `install` and defaults that no call used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.observe.policy_sources import UnusedOverride
from torch_promote.observe.trace_report import TraceReport


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    before = tp.set_default_policy(None)
    yield
    tp.set_default_policy(before)


def unused(report: TraceReport) -> list[tuple[str, str, str]]:
    return [(one.op, one.policy, one.said_by.partition(" at ")[0]) for one in report.unused_overrides()]


X = torch.ones(2, 2)


def test_regions() -> None:
    with tp.trace() as report:
        for _ in range(3):  # one override, however often its region is entered
            with tp.my_autocast("cpu", overrides={"mm": "fp32", "softmax": "fp16", torch.ops.aten.exp.default: "fp32"}):
                X.mm(X)
    assert unused(report) == [("softmax", "lower_precision_fp", "region"), ("aten::exp.default", "fp32", "region")]
    one = report.unused_overrides()[0]
    assert one.device == "cpu"
    assert one.said_by.partition(" at ")[2].startswith(f"{__file__}:")
    assert str(one) == f"softmax: lower_precision_fp, asked for by {one.said_by}"
    assert one.to_dict() == {
        "op": "softmax",
        "device": "cpu",
        "policy": "lower_precision_fp",
        "said_by": one.said_by,
    }


def test_a_pattern_is_one_override() -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"linalg_*": "fp32", "*pool*": "fp32"}):
        torch.linalg.vector_norm(X)
    assert unused(report) == [("*pool*", "fp32", "region")]


def test_an_op_inside_one_that_was_cast() -> None:
    """Matmul casts; the mm that it calls runs with autocast off."""
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        torch.matmul(X, X)
    assert unused(report) == [("mm", "fp32", "region")]


def test_fallthrough_is_used_by_a_call_without_a_policy() -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"mm": "fallthrough", "bmm": "fallthrough"}):
        X.mm(X)
    assert unused(report) == [("bmm", "fallthrough", "region")]


def test_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1), nn.Linear(2, 2), nn.Linear(2, 2))
    policies = {"0": {"linear": "fp32", "exp": "fp32"}, "1": "fp32", "2": {"linear": "fp16"}, "3": {"mm": "fp32"}}
    tp.set_module_policy(model, policies)
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model[:3](X)
    assert unused(report) == [
        ("exp", "fp32", 'module policy "0"'),
        ("mm", "fp32", 'module policy "3"'),  # it never ran
    ]


def test_a_default_policy() -> None:
    tp.set_default_policy(tp.Policy.stock().override({"exp": "fp32", "mm": "fp32"}))
    with tp.trace() as report, tp.my_autocast("cpu"):
        X.mm(X)
    assert unused(report) == [("exp", "fp32", "the default policy")]


def test_a_decorator_is_one_region() -> None:
    """Its region is entered at the lines of the calls, and one of them uses the override."""

    @tp.my_autocast("cpu", overrides={"mm": "fp32", "exp": "fp32"})
    def run(function: str) -> None:
        getattr(X, function)(X)

    with tp.trace() as report:
        run("add")
        run("mm")
    assert unused(report) == [("exp", "fp32", "region")]


def test_install() -> None:
    with tp.installed_as(overrides={"exp": "fp32", "mm": "fp32"}), tp.trace() as report:
        with torch.autocast("cpu"):
            X.mm(X)
        with torch.autocast("cpu"):  # another line
            X.mm(X)
    assert report.unused_overrides() == [UnusedOverride("exp", "cpu, cuda", "fp32", "install")]


def test_it_survives_a_file_and_pickle(tmp_path: object) -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"mm": "fp32", "exp": "fp32"}):
        X.mm(X)
    again = pickle.loads(pickle.dumps(report))
    assert again.unused_overrides() == report.unused_overrides() != []
    report.save(f"{tmp_path}/run.json")
    assert TraceReport.load(f"{tmp_path}/run.json").unused_overrides() == report.unused_overrides()
