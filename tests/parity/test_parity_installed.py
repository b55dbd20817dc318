"""parity and crosscheck compare with PyTorch's own autocast while `install` is in force."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from torch_promote.parity import entry_run
from torch_promote.parity.model import Entry, Options
from torch_promote.parity.runner import run_entry

MM = Entry("aten::mm", "row")


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
@pytest.mark.parametrize("installed", [{}, {"policy": "off"}, {"overrides": {"mm": "fp32"}}], ids=str)
def test_parity_finds_what_it_finds_uninstalled(device: str, installed: dict[str, Any]) -> None:
    expected = run_entry(MM, Options(device))
    with tp.installed_as(**installed):
        found = run_entry(MM, Options(device))
    assert (found.samples, found.mismatches, found.stale) == (expected.samples, (), ())
    assert found.checked == expected.checked


@pytest.mark.parametrize("installed", [{}, {"overrides": {"mm": "fp32"}}], ids=str)
def test_parity_finds_a_wrong_policy(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the same is installed: then a contender made by torch.autocast would have the same results."""
    wrong = functools.partial(tp.my_autocast, overrides={"mm": "fp32"})
    monkeypatch.setattr(entry_run, "my_autocast", wrong)
    with tp.installed_as(**installed):
        assert run_entry(MM, Options("cpu")).mismatches


def test_stock_alone_is_stock() -> None:
    with tp.installed_as(overrides={"mm": "fp32"}):
        assert run_entry(MM, Options("cpu", stock_only=True)).mismatches == ()


def test_crosscheck_compares_an_installed_region_with_stock() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with tp.stock_autocast("cpu"):
        stock = x @ w
    with tp.installed_as(), tp.crosscheck(level="bits") as report, torch.autocast("cpu"):
        assert_same(x @ w, stock)
    assert report.mismatches == []
    assert report.with_stock["aten.mm.default"] + report.with_stock["aten.matmul.default"] > 0


def test_crosscheck_compares_no_other_policy_with_stock() -> None:
    x = torch.randn(4, 4)
    with tp.installed_as(policy="off"), tp.crosscheck(level="bits") as report, torch.autocast("cpu"):
        assert (x @ x).dtype is torch.float32
    assert report.mismatches == []
    assert report.with_stock["aten.matmul.default"] == 0
