"""Runs functions in several processes over gloo, each function in its own default process group."""

from __future__ import annotations

import datetime
import gc
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.subprocesses import Program, run_together

#: A function of a test file or helper; it gets the rank and the number of ranks.
Function = Callable[[int, int], Any]

SECONDS = 500
WORK = "import sys; from helpers import gloo_ranks; gloo_ranks.work(*sys.argv[1:])"


def in_ranks(functions: Mapping[str, Function], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Runs each function in every rank, and returns the results for each rank, by name.

    The result of a function that raises is the error as text.
    """
    folder.joinpath("functions").write_bytes(pickle.dumps(dict(functions)))
    paths = {str(Path(inspect.getfile(getattr(function, "func", function))).parent) for function in functions.values()}
    ranks = [
        Program(WORK, str(rank), str(world_size), str(folder), *paths, compiler=True) for rank in range(world_size)
    ]
    for done in run_together(ranks, SECONDS):
        assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def work(rank_: str, world_size_: str, folder: str, *paths: str) -> None:
    """The code of a rank's process."""
    rank, world_size = int(rank_), int(world_size_)
    torch.set_num_threads(1)
    sys.path += paths
    functions: dict[str, Function] = pickle.loads(Path(folder, "functions").read_bytes())
    results = {}
    gc.freeze()  # imported modules stay loaded, and the garbage collector runs after each function
    for number, (name, function) in enumerate(functions.items()):
        store = dist.FileStore(f"{folder}/store{number}", world_size)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            results[name] = function(rank, world_size)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        finally:
            end_group()  # each rank comes here, also after an error
    torch.save(results, f"{folder}/rank{rank}.pt")


def end_group() -> None:
    """Ends the default process group, in all ranks together.

    Reference cycles of a model hold the process group, whose threads have to end before Python does, in all ranks.
    Otherwise a rank sometimes dies with "terminate called without an active exception". Each rank has to call this: a
    rank that waits for one that has raised fails after the group's timeout.
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
