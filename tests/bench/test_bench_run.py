"""The contenders alternate, the run times the right code, and restores the settings of the process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from torch_promote.bench import run
from torch_promote.bench.cases import HAND, OURS, PLAIN, STOCK, Case, Prepared, Settings, Timer
from torch_promote.bench.figures import Spread
from torch_promote.bench.kernels import count_kernels
from torch_promote.bench.run import interleaved, summary
from torch_promote.bench.timing import stopwatch, threads


def test_contenders_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []

    def contender(name: str) -> Timer:
        def time() -> float:
            order.append(name)
            return float(len(order))

        return time

    times = interleaved({name: contender(name) for name in "abc"}, rounds=4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert times == {"a": [4, 9, 11, 13], "b": [5, 7, 12, 14], "c": [6, 8, 10, 15]}


def _case(prepared: Prepared) -> Case:
    return Case("suite", "name", lambda settings: prepared)


def _prepared(**times: list[float]) -> Prepared:
    """Contenders that take these times; the first is that of the round which is not counted."""

    def timer(values: Iterator[float]) -> Timer:
        return lambda: next(values)

    return Prepared({name: timer(iter(values)) for name, values in times.items()}, bases=(HAND, PLAIN))


def test_result_has_ratios_and_overheads() -> None:
    prepared = _prepared(stock=[99, 10, 10, 16], ours=[99, 5, 8, 10], hand=[99, 2, 2, 4])
    [result] = run([_case(prepared)], Settings(rounds=3))
    assert result.ratio is not None
    assert result.ratio_to_hand is not None
    assert (result.ratio.median, result.ratio_to_hand.median) == (0.625, 2.5)
    # (5-2)/8, (8-2)/8, (10-4)/12; there is no overhead over a contender that the case does not have.
    assert list(result.overheads) == [HAND]
    assert result.overheads[HAND].spread == Spread(0.5, 0.4375, 0.625)
    assert {name: costs.median for name, costs in result.overheads_ns[HAND].items()} == {STOCK: 8, OURS: 6}
    assert {name: times.median for name, times in result.times_ns.items()} == {STOCK: 10, OURS: 8, HAND: 2}
    assert result.main_ratio is result.ratio


def test_without_stock_the_ratio_is_to_casts_by_hand() -> None:
    [result] = run([_case(_prepared(ours=[9, 1, 1], hand=[9, 2, 2]))], Settings(rounds=2))
    assert result.ratio is None
    assert result.main_ratio == result.ratio_to_hand == Spread(0.5, 0.5, 0.5)
    assert result.overheads == {}
    assert list(result.overheads_ns[HAND]) == [OURS]


def test_a_case_is_closed_even_if_it_fails() -> None:
    closed: list[bool] = []

    def fail() -> float:
        raise RuntimeError("planted")

    prepared = Prepared({OURS: fail}, close=lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="planted"):
        list(run([_case(prepared)], Settings()))
    assert closed == [True]


def test_measures_come_with_the_result() -> None:
    prepared = Prepared({OURS: lambda: 1.0, STOCK: lambda: 1.0}, measure=dict)
    assert summary(_case(prepared), prepared, {OURS: [1, 1], STOCK: [1, 1]}).measured == {}


# --- kernels


class _Event:
    def __init__(self, name: str, device: DeviceType) -> None:
        self.name = lambda: name
        self.device_type = lambda: device


def test_gpu_kernels_are_counted_without_copies_and_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, cpu = DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        _Event("void at::native::vectorized_elementwise_kernel<4, ...>", gpu),
        _Event("cudaLaunchKernel", cpu),
        _Event("Memcpy DtoH (Device -> Pageable)", gpu),
        _Event("Memset (Device)", gpu),
        _Event("sm90_xmma_gemm_bf16bf16_bf16f32", gpu),
    ]
    results = SimpleNamespace(events=lambda: events)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    monkeypatch.setattr("torch.profiler.profile", lambda **_: nullcontext(profiler))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    ran: list[bool] = []
    assert count_kernels(lambda: ran.append(True)) == 2
    assert ran == [True]


# --- threads


def test_threads_are_those_asked_for_and_given_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def look() -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    list(run([_case(Prepared({OURS: look, STOCK: look}))], Settings(rounds=2, threads=before + 2)))
    assert set(seen) == {before + 2}
    assert torch.get_num_threads() == before


def test_threads_are_given_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), threads(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before


# --- the stopwatch


def test_a_slice_is_timed_inside_the_region_and_after_a_run_that_is_not_counted() -> None:
    runs: list[bool] = []
    opened = False

    @contextmanager
    def region() -> Iterator[None]:
        nonlocal opened
        opened = True
        yield
        opened = False

    timer = stopwatch(lambda: runs.append(opened), {}, Settings(slice_seconds=0), region)
    assert timer() > 0
    # The run that fills the cache, one to see how long it takes, and the one that is timed.
    assert runs == [True] * 3
    timer()
    assert runs == [True] * 5
    assert not opened


def test_a_slice_holds_as_many_runs_as_fit() -> None:
    runs = 0

    def statement() -> None:
        nonlocal runs
        runs += 1

    timer = stopwatch(statement, {}, Settings(threads=1, slice_seconds=0.002))
    timer()
    calibrating, runs = runs, 0
    timer()
    assert calibrating > runs > 10


@pytest.mark.parametrize(
    ("settings", "clock", "sleeps"),
    [(Settings(), "cpu", False), (Settings(threads=2), "wall", True), (Settings("cuda"), "wall", None)],
)
def test_time_of_other_programs_does_not_count_with_one_thread(
    settings: Settings, clock: str, sleeps: bool | None
) -> None:
    assert settings.clock == clock
    if sleeps is not None:
        took = stopwatch(lambda: time.sleep(0.02), {}, replace(settings, slice_seconds=0))()
        assert (took >= 0.02 * 1e9) == sleeps


def test_source_can_use_the_given_names() -> None:
    found: list[int] = []
    stopwatch("found.append(number)", {"found": found, "number": 3}, Settings(slice_seconds=0))()
    assert set(found) == {3}
