"""The memory of small casts: it is reused, given back, seen by the memory profiler, and may change threads."""

from __future__ import annotations

import gc
import itertools
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from helpers.fast_cast import BF16, FP16, FP32, cast

#: Around the bounds of the kinds of blocks, in bytes of a 16-bit cast, and beyond the last of them.
BYTES = sorted({max(2, (64 << kind) + off) for kind in range(9) for off in (-2, 0, 2)} | {2, 40000})


def test_every_size_is_aligned_and_its_own() -> None:
    alive = []
    for size in BYTES:
        for number in range(5):
            source = torch.full((size // 2,), float(number))
            alive.append((cast(source, BF16), number))
    for tensor, number in alive:
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.full_like(tensor, number))
    starts = sorted((t.data_ptr(), t.untyped_storage().nbytes()) for t, _ in alive)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(starts))


def test_a_freed_block_serves_the_next_cast_of_its_size() -> None:
    x = torch.randn(100)
    first = cast(x, BF16).data_ptr()
    assert cast(x + 1, FP16).data_ptr() == first
    held = cast(x, BF16)
    assert held.data_ptr() == first
    assert cast(x, BF16).data_ptr() != first


def test_random_sizes_in_random_order() -> None:
    """No block is handed out twice: what is alive keeps its numbers."""
    choose = random.Random(0)
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(1500):
        if alive and choose.random() < 0.45:
            tensor, expected = alive.pop(choose.randrange(len(alive)))
            assert torch.equal(tensor, expected)
        else:
            source = torch.full((choose.randrange(1, 9000),), float(number % 251))
            alive.append((cast(source, choose.choice([BF16, FP16])), source.to(FP32)))
            alive[-1] = (alive[-1][0], source.to(alive[-1][0].dtype))
    assert len(alive) > 50
    for tensor, expected in alive:
        assert torch.equal(tensor, expected)


def memory_events(action: object) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()  # type: ignore[operator]
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [event.nbytes() for event in events if event.name() == "[memory]"]


@pytest.mark.parametrize("count", [1, 33, 5000, 8192, 8193, 20000])
def test_the_memory_profiler_sees_each_cast_come_and_go(count: int) -> None:
    x = torch.randn(count)

    def casts() -> None:
        for _ in range(5):
            kept = [cast(x, BF16) for _ in range(3)]
            del kept

    assert sorted(memory_events(casts)) == [-2 * count] * 15 + [2 * count] * 15


def test_totals_are_as_by_the_general_kernel() -> None:
    x = torch.randn(64, requires_grad=True)

    def step(low: torch.Tensor) -> None:
        torch.autograd.grad(low.square().sum(), x)

    ours = memory_events(lambda: step(cast(x, BF16)))
    general = memory_events(lambda: step(x.to(BF16)))
    assert sum(ours) == sum(general) == 0
    assert sorted(ours) == sorted(general)


# --- threads


def test_a_cast_is_freed_in_another_thread() -> None:
    handed: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=50)
    wrong: list[int] = []

    def consume() -> None:
        number = 0
        while (tensor := handed.get()) is not None:
            if not torch.equal(tensor, torch.full_like(tensor, number % 250)):
                wrong.append(number)
            number += 1
            del tensor
            cast(torch.randn(50), BF16)  # from the blocks that this thread has let go of

    thread = threading.Thread(target=consume)
    thread.start()
    for number in range(1000):
        handed.put(cast(torch.full((1 + number % 700,), float(number % 250)), BF16))
    handed.put(None)
    thread.join()
    assert wrong == []


def test_casts_outlive_the_thread_that_made_them() -> None:
    def make(number: int) -> list[torch.Tensor]:
        for size in BYTES:
            cast(torch.ones(size // 2), BF16)  # leaves a free block of each kind to the end of the thread
        return [cast(torch.full((size // 2,), float(number)), BF16) for size in BYTES]

    made = []
    for number in range(6):
        with ThreadPoolExecutor(1) as pool:
            made.append(pool.submit(make, number).result())
    cast(torch.randn(9), BF16)
    for number, tensors in enumerate(made):
        for tensor in tensors:
            assert torch.equal(tensor, torch.full_like(tensor, number))
    del made, tensors, tensor
    gc.collect()
    alive = [cast(torch.full((size // 2,), 7.0), FP16) for size in BYTES for _ in range(8)]
    assert len({tensor.data_ptr() for tensor in alive}) == len(alive)


def test_a_cast_that_dies_as_its_thread_ends() -> None:
    local = threading.local()

    def work() -> None:
        local.held = [cast(torch.randn(size // 2), BF16) for size in BYTES]

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not hasattr(local, "held")
    assert torch.equal(cast(torch.ones(3), BF16), torch.ones(3, dtype=BF16))


def test_threads_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=60)

    def work(seed: int) -> bool:
        choose = random.Random(seed)
        barrier.wait()
        alive: list[torch.Tensor] = []
        for _ in range(300):
            alive.append(cast(torch.full((choose.randrange(1, 5000),), float(seed)), BF16))
            if len(alive) > 20:
                alive.pop(choose.randrange(20))
        return all(torch.equal(tensor, torch.full_like(tensor, seed)) for tensor in alive)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
