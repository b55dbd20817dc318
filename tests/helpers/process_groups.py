"""How a program with several processes ends its default process group."""

from __future__ import annotations

import gc

import torch.distributed as dist

__all__ = ["end_group"]


def end_group() -> None:
    """Ends the default process group, in all ranks together.

    What a model's reference cycles hold includes the process group, whose threads have to end before Python does, here
    and in the other ranks. Else a rank dies at times with "terminate called without an active exception". Each rank has
    to come here: one that waits for a rank that has raised fails after the group's timeout.
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
