"""The record of a call in a trace equals the reference's plan, computed only from the record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.plan_from_report import differences
from helpers.traced_programs import PROGRAMS, Block
from torch_promote.observe.trace import trace

OVERRIDES = {"linear": "fp32", "softmax": "lower_precision_fp", "add": "promote", "mm": torch.float16, "sum": "fp32"}
NOTHING = {"linear": "fallthrough", "softmax": "keep", "layer_norm": "fallthrough", "addcmul": "promote"}


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    with tp.register_policy("relu", "fp32"), tp.register_policy("matmul", "fp32"), tp.my_autocast("cpu"):
        yield


@contextlib.contextmanager
def _default() -> Iterator[None]:
    before = tp.set_default_policy("cuda")
    try:
        with tp.my_autocast("cpu"):
            yield
    finally:
        tp.set_default_policy(before)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    tp.install()
    try:
        with torch.autocast("cpu"):
            yield
    finally:
        tp.uninstall()


@contextlib.contextmanager
def _nested() -> Iterator[None]:
    with (
        tp.my_autocast("cpu", overrides=OVERRIDES),
        tp.my_autocast("cpu", torch.float16, overrides={"linear": "fallthrough"}),
    ):
        yield


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "my_autocast": lambda: tp.my_autocast("cpu"),
    "stock": lambda: torch.autocast("cpu"),
    "float16": lambda: tp.my_autocast("cpu", torch.float16),
    "overrides": lambda: tp.my_autocast("cpu", overrides=OVERRIDES),
    "casting nothing": lambda: tp.my_autocast("cpu", overrides=NOTHING),
    "nested": _nested,
    "cache=all": lambda: tp.my_autocast("cpu", cache="all"),
    "register_policy": _registered,
    "default policy": _default,
    "install": _installed,
    "none": contextlib.nullcontext,
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_are_as_planned(name: str, region: str) -> None:
    torch.manual_seed(0)
    with trace() as report, suppress(RuntimeError):  # the LSTM in float16
        PROGRAMS[name](REGIONS[region])
    assert len(report.calls) > 30
    assert list(differences(report.calls)) == []
    assert report.total.reused + report.total.casts == sum(len(call.casts) for call in report.calls)


def test_module_policies_are_as_planned() -> None:
    model = torch.nn.Sequential(Block(), Block())
    tp.set_module_policy(model, {"1": {"linear": "fp32", "softmax": torch.float16}, "0.up": {"linear": "fallthrough"}})
    with trace(model) as report:
        with tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
            output = model(torch.randn(2, 3, 8))
        output.float().sum().backward()
    assert list(differences(report.calls)) == []
    policies = {call.policy_name for call in report.calls.where(op="linear")}
    assert policies == {"lower_precision_fp", "fp32", "fallthrough"}
