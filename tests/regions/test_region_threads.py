"""Regions and threads: each thread has its own regions and its own cast cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import Region, autocast_dtype, in_thread, leaves_no_trace

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None


@contextmanager
def another_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yields a function that runs functions in one other thread, which lives as long as the block."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield lambda function: pool.submit(function).result(timeout=60)


def test_one_object_open_in_many_threads_at_once() -> None:
    region = tp.my_autocast("cpu", FP16)
    together = threading.Barrier(4, timeout=60)

    def worker() -> list[Seen]:
        found = []
        with leaves_no_trace():
            for _ in range(50):
                with region:
                    together.wait()
                    with region:
                        found.append(autocast_dtype())
                    found.append(autocast_dtype())
                found.append(autocast_dtype())
        return found

    with ThreadPoolExecutor(max_workers=4) as pool:
        for future in [pool.submit(worker) for _ in range(4)]:
            assert future.result(timeout=60) == [FP16, FP16, None] * 50


# --- ends that do not come


def test_a_thread_that_ends_inside_a_region_does_not_affect_others() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    kept: list[tp.my_autocast] = []

    def forgetful() -> None:
        for overrides in ({}, {"mm": "fp16"}, {"exp": "fp16"}):
            kept.append(tp.my_autocast("cpu", FP16, overrides=overrides))
            kept[-1].__enter__()
        torch.mm(weight, weight)
        assert tp.cache_info()["entries"] == 1

    with tp.my_autocast("cpu", BF16), leaves_no_trace():
        for _ in range(3):
            in_thread(forgetful)
            assert in_thread(autocast_dtype) is None
            assert autocast_dtype() == BF16
            assert in_thread(tp.cache_info)["entries"] == 0
        for region in kept:
            with pytest.raises(tp.errors.RegionError):
                region.__exit__(None, None, None)


def test_a_region_cannot_be_left_in_another_thread() -> None:
    region = tp.my_autocast("cpu", FP16)
    with another_thread() as there, region:

        def leave() -> None:
            with leaves_no_trace(), tp.my_autocast("cpu", BF16), leaves_no_trace():
                with pytest.raises(tp.errors.RegionError, match="belongs to the thread that entered it"):
                    region.__exit__(None, None, None)
                assert autocast_dtype() == BF16

        with leaves_no_trace():
            there(leave)
        assert autocast_dtype() == FP16


# --- the cast cache


def test_each_thread_counts_its_own_cache_and_clears_all() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    tp.clear_cache()  # casts that outlive regions, of other tests' weights, are the process's
    with another_thread() as there, tp.my_autocast("cpu"):
        torch.mm(weight, weight)
        before = tp.cache_info()
        assert before["entries"] == 1
        assert there(tp.cache_info) == dict.fromkeys(before, 0)
        there(lambda: tp.my_autocast("cpu")(torch.mm)(weight, weight))
        assert tp.cache_info() == before
        there(tp.clear_cache)
        assert tp.cache_info()["entries"] == 0
        assert there(tp.cache_info)["misses"] == 1


def test_threads_of_two_dtypes_do_not_get_each_others_casts() -> None:
    """Stock keeps one cast of a weight for all threads and dtypes."""
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2)

    def product(kind: Callable[..., Region], dtype: torch.dtype) -> torch.dtype:
        with kind("cpu", dtype):
            return torch.mm(x, weight).dtype

    def in_half_while_here_in_bfloat16(kind: Callable[..., Region]) -> torch.dtype:
        with kind("cpu", BF16):
            torch.mm(x, weight)
            return in_thread(lambda: product(kind, FP16))

    assert in_half_while_here_in_bfloat16(tp.my_autocast) == FP16
    with pytest.raises(RuntimeError, match="same dtype"):
        in_half_while_here_in_bfloat16(tp.stock_autocast)


# --- workers that share a module, each in a region of its own, as in DataParallel

WORKERS: list[dict[str, Any]] = [
    {"dtype": BF16},
    {"dtype": FP16},
    {"dtype": BF16, "cache_enabled": False},
    {"dtype": FP16, "overrides": {"linear": "fp32"}},
    {"enabled": False},
]


def step(module: torch.nn.Module, x: torch.Tensor, arguments: dict[str, Any]) -> list[torch.Tensor]:
    with tp.my_autocast("cpu", **arguments):
        y = module(x)
        loss = torch.nn.functional.mse_loss(y, torch.ones_like(y))
    return [y, loss, *torch.autograd.grad(loss, tuple(module.parameters()))]


def test_workers_that_share_a_module_get_the_bits_of_one_thread() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    inputs = [torch.randn(6, 8) for _ in WORKERS]
    alone = [step(module, x, arguments) for x, arguments in zip(inputs, WORKERS, strict=True)]
    together = threading.Barrier(len(WORKERS), timeout=60)

    def worker(x: torch.Tensor, arguments: dict[str, Any]) -> list[list[torch.Tensor]]:
        torch.set_num_threads(1)
        results = []
        with leaves_no_trace():
            for _ in range(20):
                together.wait()
                results.append(step(module, x, arguments))
        return results

    with ThreadPoolExecutor(max_workers=len(WORKERS)) as pool:
        futures = [pool.submit(worker, x, arguments) for x, arguments in zip(inputs, WORKERS, strict=True)]
        for future, expected in zip(futures, alone, strict=True):
            for results in future.result(timeout=120):
                assert_same(results, expected, "a worker's results")
    assert len({result[0].dtype for result in alone}) == 3, "the workers did not all compute the same"
