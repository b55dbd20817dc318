"""Ends the default process group of a program with several processes."""

from __future__ import annotations

import gc

import torch.distributed as dist

__all__ = ["end_group"]


def end_group() -> None:
    """Ends the default process group, in all ranks together.

    Reference cycles of a model hold the process group, whose threads have to end before Python does, in all ranks.
    Otherwise a rank sometimes dies with "terminate called without an active exception". Each rank has to call this: a
    rank that waits for one that has raised fails after the group's timeout.
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
