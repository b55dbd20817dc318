"""The default mode takes no more memory and no more kernels than stock on a device; the others stay in their bounds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cuda_stand_in
import torch_promote as tp
from benchmarks.measures import peak_bytes
from helpers.casts import Region
from helpers.memory_uses import NAMES, USES, model_and_input
from helpers.program_peaks import EVERY_PROGRAM, check_bounds, peaks
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")

stock: Region = functools.partial(tp.stock_autocast, "cuda")
ours: Region = functools.partial(tp.my_autocast, "cuda")


def peak(region: Region, name: str, use: str) -> int:
    model, x = model_and_input(name, "cuda")
    return peak_bytes(lambda: USES[use](region, model, x), "cuda")


def half(which: int) -> list[Any]:
    """Every model in every use. The everyday run counts the memory of half of them, and the kernels of the others."""
    return [
        pytest.param(name, use, marks=() if (i + j) % 2 == which else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for j, use in enumerate(USES)
    ]


@pytest.mark.parametrize(("name", "use"), half(0))
def test_the_default_mode_takes_no_more_memory_than_stock(name: str, use: str) -> None:
    assert 0 < peak(ours, name, use) <= 1.05 * peak(stock, name, use)


def test_the_other_modes_take_more() -> None:
    """Otherwise the test above could not fail."""
    for cache in ("all", "persistent"):
        region = functools.partial(ours, cache=cache)
        model, x = model_and_input("layers", "cuda")
        model.requires_grad_(False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with region(), torch.no_grad():
            model(x)
            held = torch.cuda.memory_allocated() - before
        assert held > 16 * 64 * 64 * 2  # the weights, in half precision, and the biases
        tp.clear_cache()


def test_nothing_is_held_after_the_region() -> None:
    model, x = model_and_input("layers", "cuda")
    before = torch.cuda.memory_allocated()
    for use in USES.values():
        use(ours, model, x)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("policy", FLOAT8_POLICIES)
@pytest.mark.usefixtures("without_onednn")  # the stand-in's products are the host's
def test_training_in_float8_takes_no_more_memory(policy: CastPolicy) -> None:
    in_float8, low = (functools.partial(ours, overrides={"linear": value}) for value in (policy, "lower"))
    assert 0 < peak(in_float8, "layers", "train") <= 1.05 * peak(low, "layers", "train")


def kernels(region: Region, name: str, use: str) -> cuda_stand_in.Counts:
    model, x = model_and_input(name, "cuda")
    with cuda_stand_in.counting() as counts:
        USES[use](region, model, x)
    return counts


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("name", "use"), half(1))
def test_the_default_mode_runs_no_more_kernels_than_stock(name: str, use: str) -> None:
    expected, found = kernels(stock, name, use), kernels(ours, name, use)
    assert found.total > 0
    assert found.kernels - expected.kernels == {}


@functools.cache
def of_stock(name: str) -> tuple[int, int]:
    return peaks(name, "stock", "cuda")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "mode"),  # how modes differ is host code, which tests/cache/test_cache_memory.py compares
    [
        pytest.param(*one.values, id=one.id, marks=() if one.values[1] == "weights" else pytest.mark.slow)
        for one in EVERY_PROGRAM
    ],
)
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cuda", of_stock(name))
