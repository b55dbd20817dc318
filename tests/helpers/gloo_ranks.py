"""Runs functions in several processes over gloo, each function in a default process group of its own."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: A function of a module that the processes can import; it gets the rank and the number of ranks.
Function = Callable[[int, int], Any]

SECONDS = 500


def in_ranks(functions: Mapping[str, Function], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Runs each function in every rank, and returns for each rank what they returned, by name.

    Of a function that raises, it is the error as text.
    """
    context = torch.multiprocessing.start_processes(
        _work, args=(world_size, str(folder), dict(functions)), nprocs=world_size, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, f"{world_size} processes did not end within {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _work(rank: int, world_size: int, folder: str, functions: dict[str, Function]) -> None:
    torch.set_num_threads(1)
    results = {}
    for number, (name, function) in enumerate(functions.items()):
        store = dist.FileStore(f"{folder}/store{number}", world_size)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            results[name] = function(rank, world_size)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
            dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")
