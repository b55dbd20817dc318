"""The default mode takes no more memory and no more kernels than stock on a device; the others stay in their bounds."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp
from benchmarks.measures import peak_bytes
from benchmarks.programs import PROGRAMS
from helpers.program_peaks import EVERY_PROGRAM, check_bounds, peaks, step_of
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")

ours = functools.partial(tp.my_autocast, "cuda")
AROUND = pytest.mark.parametrize("around", [False, True], ids=["", "backward inside"])


@functools.cache
def of_stock(name: str, around: bool = False) -> tuple[int, int]:
    return peaks(name, "stock", "cuda", around)


@AROUND
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_mode_takes_no_more_memory_than_stock(name: str, around: bool) -> None:
    check_bounds(name, "weights", "cuda", of_stock(name, around), around)


@pytest.mark.slow  # how modes differ is host code, which tests/cache/test_cache_memory.py compares
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("name", "mode"), [one for one in EVERY_PROGRAM if "weights" not in one.values])
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cuda", of_stock(name))


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = [part for _ in range(16) for part in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*parts).cuda(), torch.randn(4, 64).cuda()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_is_held_after_the_region_than_under_stock(name: str) -> None:
    held = []
    for mode in ("stock", "weights"):
        step = step_of(name, mode, "cuda")
        before = torch.cuda.memory_allocated()
        step()
        held.append(torch.cuda.memory_allocated() - before)
        del step
    assert held[1] == held[0]


@pytest.mark.parametrize("policy", FLOAT8_POLICIES)
@pytest.mark.usefixtures("without_onednn")  # the stand-in's products are the host's
def test_training_in_float8_takes_no_more_memory(policy: CastPolicy) -> None:
    def peak(policy: CastPolicy | str) -> int:
        model, x = layers()

        def step() -> None:
            with ours(overrides={"linear": policy}):
                loss = model(x).float().square().mean()
            loss.backward()
            model.zero_grad(set_to_none=True)

        return peak_bytes(step, "cuda")

    assert 0 < peak(policy) <= 1.05 * peak("lower")


@AROUND
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_mode_runs_no_more_kernels_than_stock(name: str, around: bool) -> None:
    counted = []
    for mode in ("stock", "weights"):
        with cuda_stand_in.counting() as counts:
            step_of(name, mode, "cuda", around)()
        counted.append(counts)
    stock, found = counted
    assert found.total > 0
    assert found.kernels - stock.kernels == {}
