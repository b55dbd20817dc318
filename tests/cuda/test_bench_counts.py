"""The benchmark on a CUDA device measures kernels and bytes in addition to times."""

from __future__ import annotations

import pytest
import torch

from torch_promote.bench import Settings, list_cases, run
from torch_promote.bench.kernels import count_copies, count_kernels


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
    assert (ours.peak_bytes, ours.casts) == (stock.peak_bytes, stock.casts)
    assert plain.kernels is not None
    assert ours.kernels is not None
    assert stock.kernels is not None
    assert ours.kernels == stock.kernels
    assert 0 < plain.kernels < ours.kernels


def test_a_run_of_counts_has_the_same_counts() -> None:
    def counts(settings: Settings) -> object:
        [case] = [case for case in list_cases(settings, ["models"]) if case.name == "MLP, forward"]
        [result] = run([case], settings)
        return result.measured

    timed = Settings("cuda", rounds=2, slice_seconds=0, tiny=True)
    assert counts(timed) == counts(Settings("cuda", tiny=True, counted=True))


@pytest.mark.usefixtures("stand_in")
def test_casts_are_counted_by_tensor_and_their_kernels_apart() -> None:
    weights = [torch.randn(4, 4, device="cuda") for _ in range(3)]
    leaf = torch.randn(4, 4, device="cuda", requires_grad=True)

    def run() -> None:
        casts = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        torch._foreach_copy_(casts, weights)
        ((leaf * 1).bfloat16() @ weights[0].bfloat16()).t().contiguous().float().sum().backward()

    run()
    kernels, casts, copies = count_copies(run, weights)
    assert casts == {"weights": 4, "activations": 2, "gradients": 2}
    assert (copies.forward, copies.backward) == ({"narrowing": 5, "widening": 1}, {"narrowing": 1, "widening": 1})
    # Three weights at once, five casts on their own, and one copy in one dtype.
    assert (copies.cast_kernels, copies.kernels) == (1 + 5, 1 + 5 + 1)
    assert kernels > copies.kernels
    assert copies.moved_bytes == 8 * 16 * (4 + 2)


@pytest.mark.usefixtures("stand_in")
def test_a_weight_that_is_frozen_counts_as_a_weight_if_it_is_named() -> None:
    frozen = torch.randn(4, 4, device="cuda")
    for weights, kind in (((), "activations"), ([frozen], "weights")):
        _, casts, _ = count_copies(lambda: frozen.t().half(), weights)
        assert casts[kind] == 1
