"""What a monitor costs a whole training: `python -m benchmarks.monitor`, of the GPT of examples/train_gpt.py.

Two trainings take turns, step by step, one of them monitored. CPU time is counted, in one thread, which other programs
on the machine change less than time on the clock. Each round is of so many steps as there are from look to look, and
has one look.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import torch_promote as tp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt.data import SYMBOLS, Batches, stdlib_corpus
from gpt.model import GPT, Config

#: The step of a round, from 0, that is looked at.
_LOOK = 49


def _training() -> tuple[nn.Module, Callable[[], float]]:
    """A model, and a function that trains it for a step and returns the CPU time that the step took, in seconds."""
    config = Config(symbols=len(SYMBOLS))
    torch.manual_seed(0)
    model, batches = GPT(config), Batches(stdlib_corpus(), 32, config.context, 0, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step() -> float:
        start = time.process_time()
        ids, targets = batches.next()
        with tp.my_autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.process_time() - start

    return model, step


def main() -> None:
    """Measures, and prints the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps from look to look (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (_, plain), (model, monitored) = _training(), _training()
    looks, between, rounds = [], [], []
    with tempfile.TemporaryDirectory() as folder, tp.monitor(model, every=arguments.every, to=folder):
        for _ in range(arguments.every - _LOOK - 1):
            plain(), monitored()
        for number in range(arguments.rounds):
            times: tuple[list[float], list[float]] = [], []
            for place in range(arguments.every):
                # The look opens behind the step before it. The other training does not run in it.
                for which in (0, 1) if place % 2 == 0 else (1, 0):
                    times[which].append((plain, monitored)[which]())
            usual = statistics.median(times[0])
            looks.append(times[1].pop(_LOOK) / usual)
            between.append(statistics.median(times[1]) / usual)
            rounds.append((sum(times[1]) + looks[-1] * usual) / sum(times[0]))
            print(f"round {number}: {rounds[-1]:.4f}, a step {1000 * usual:.1f} ms, a look {looks[-1]:.2f} steps")
    print(f"a training: {statistics.median(rounds):.4f} of its time ({min(rounds):.4f} to {max(rounds):.4f})")
    print(f"a step between looks: {statistics.median(between):.4f}; a look: {statistics.median(looks):.2f} steps")


if __name__ == "__main__":
    main()
