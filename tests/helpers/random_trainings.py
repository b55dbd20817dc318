"""Random programs that train, evaluate, write to weights and capture CUDA graphs, on any device with graphs.

A program is drawn from a seed, and is correct under stock: it writes to no weight that the open region has used, and a
region does not cross the border of a capture. All draws are made before anything runs, so every kind of region runs the
same program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_promote as tp
from helpers.random_training_actions import (
    another_optimizer,
    clear,
    clear_inside,
    evaluate,
    fail,
    freeze,
    hold,
    in_a_thread,
    load,
    on_a_stream,
    step,
    step_in_backward,
    suspend,
    swap,
    tie,
    train,
    train_checkpointed,
    train_in_blocks,
    train_nested,
    train_observed,
    train_twice_through,
    train_with_hooks,
    transform,
    write,
)
from helpers.random_training_graphs import capture, drop_graph, replay, replay_inside
from helpers.random_training_state import Trained

__all__ = ["ACTIONS", "MODES", "outcome", "program"]

MODES = ("weights", "persistent", "all", "none")

Action = Callable[[Trained], None]
ACTIONS: dict[Action, int] = {
    train: 6,
    step: 6,
    evaluate: 3,
    train_nested: 2,
    train_in_blocks: 2,
    train_checkpointed: 2,
    train_twice_through: 1,
    train_with_hooks: 1,
    train_observed: 1,
    transform: 1,
    another_optimizer: 1,
    step_in_backward: 1,
    write: 3,
    swap: 1,
    load: 1,
    hold: 1,
    freeze: 1,
    tie: 1,
    clear: 1,
    clear_inside: 1,
    fail: 1,
    suspend: 1,
    in_a_thread: 1,
    on_a_stream: 1,
    capture: 2,
    replay: 3,
    replay_inside: 1,
    drop_graph: 1,
}

GRAPHS = (capture, replay, replay_inside, drop_graph)


def program(seed: int, graphs: bool = True) -> list[Action]:
    """The actions of a program."""
    draw = random.Random(seed)
    of = {action: weight for action, weight in ACTIONS.items() if graphs or action not in GRAPHS}
    some = draw.sample(list(of), k=draw.randint(3, 10))  # so that some programs repeat a few
    return draw.choices([train, step, *some], weights=[6, 6, *(of[action] for action in some)], k=draw.randint(4, 14))


def outcome(seed: int, mode: str | None, graphs: bool = True) -> tuple[list[str], list[Tensor]]:
    """Runs a program, and returns its actions and all their results.

    Args:
        seed: The seed of the program.
        mode: The cache mode, "mixed" for one that each region draws, or None for stock.
        graphs: Whether the program may capture CUDA graphs.
    """

    def region(dtype: torch.dtype, choice: float, enabled: bool = True) -> Any:
        if mode is None:
            return tp.stock_autocast("cuda", dtype=dtype, enabled=enabled)
        cache = MODES[int(choice * 3)] if mode == "mixed" else mode
        return tp.my_autocast("cuda", dtype=dtype, enabled=enabled, cache=cache)

    run = Trained(random.Random(seed), region)
    actions = program(seed, graphs)
    for action in actions:
        if not any(p.requires_grad for p in run.layers.parameters()):
            run.layers.requires_grad_(True)
        try:
            action(run)
        except RuntimeError as error:
            run.note(torch.tensor(hash(str(error).split("\n")[0]) % 1000))
            run.held.append(str(error))
    run.note(*run.layers.parameters())
    return [action.__name__ for action in actions], run.seen
