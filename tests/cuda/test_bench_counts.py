"""What the benchmark measures on a CUDA device: kernels and bytes beside times."""

from __future__ import annotations

import pytest
import torch

from torch_promote.bench import Settings, list_cases, run
from torch_promote.bench.kernels import count_kernels


def test_kernels_are_counted_without_copies() -> None:
    x = torch.ones(4, device="cuda")
    assert count_kernels(lambda: None) == 0
    assert count_kernels(lambda: x.add(1)) == 1
    assert count_kernels(lambda: (x @ x, x.exp(), x.half())) >= 3


@pytest.mark.needs_gpu
def test_copies_to_the_host_are_no_kernels() -> None:
    x = torch.ones(4, device="cuda")
    assert count_kernels(lambda: x.add(1).cpu()) == 1


def test_a_run_has_times_kernels_and_bytes() -> None:
    settings = Settings("cuda", rounds=2, slice_seconds=0, tiny=True)
    [case] = [case for case in list_cases(settings, ["models"]) if case.name == "MLP, forward and backward"]
    [result] = run([case], settings)
    contenders = {"stock", "ours", "hand", "already_cast", "plain"}
    assert set(result.times_ns) == set(result.measured) == contenders
    assert result.ratio is not None
    ours, stock, plain = (result.measured[name] for name in ("ours", "stock", "plain"))
    assert (ours.kernels, ours.peak_bytes, ours.casts) == (stock.kernels, stock.peak_bytes, stock.casts)
    assert plain.kernels is not None
    assert ours.kernels is not None
    assert 0 < plain.kernels < ours.kernels


def test_a_run_of_counts_has_the_same_counts() -> None:
    def counts(settings: Settings) -> object:
        [case] = [case for case in list_cases(settings, ["models"]) if case.name == "MLP, forward"]
        [result] = run([case], settings)
        return result.measured

    timed = Settings("cuda", rounds=2, slice_seconds=0, tiny=True)
    assert counts(timed) == counts(Settings("cuda", tiny=True, counted=True))
