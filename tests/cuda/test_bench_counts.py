"""The benchmarks on a GPU count kernels and bytes in addition to times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import Settings, measure
from benchmarks.measures import count_kernels
from benchmarks.suites import SUITES

pytestmark = pytest.mark.needs_gpu


def test_kernels_are_counted_without_copies() -> None:
    x = torch.ones(4, device="cuda")
    assert count_kernels(lambda: None) == 0
    assert count_kernels(lambda: x.add(1).cpu()) == 1
    assert count_kernels(lambda: (x @ x, x.exp(), x.half())) >= 3


def test_a_run_has_times_kernels_and_bytes() -> None:
    settings = Settings("cuda", rounds=2, slice_seconds=0, tiny=True)
    result = measure(SUITES["models"]["MLP, forward and backward"], settings)
    contenders = {"stock", "ours", "already_cast", "plain"}
    assert set(result["times_ns"]) == set(result["kernels"]) == set(result["peak_bytes"]) == contenders
    assert result["peak_bytes"]["ours"] <= result["peak_bytes"]["stock"]
    assert 0 < result["kernels"]["plain"] < result["kernels"]["ours"] <= result["kernels"]["stock"]
