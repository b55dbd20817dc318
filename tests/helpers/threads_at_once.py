"""Threads that work at once on weights which one of them trains, and the check of what the others compute."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: The value of all elements before the first step. It and all that follow are exact in bfloat16.
BEGIN = 256


class CountedDown:
    """Weights that each step decreases by one, so that a product tells how many steps its cast has seen."""

    def __init__(self, device: str, count: int = 3) -> None:
        self.weights = [nn.Parameter(torch.full((8, 8), float(BEGIN), device=device)) for _ in range(count)]
        self.x = torch.eye(8, device=device, dtype=torch.bfloat16)[:1]
        self.begun = self.done = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Counts a step, which the block makes."""
        self.begun += 1
        yield
        self.done += 1

    def give_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)

    def use(self, region: Callable[[], object], backward: bool = False) -> None:
        """Multiplies with each weight in a region, and checks that no cast is older than the last step before."""
        for weight in self.weights:
            done = self.done
            x = self.x.clone().requires_grad_(backward)
            with region(), torch.set_grad_enabled(backward):  # type: ignore[attr-defined]
                product = x @ weight
                self._check(product, done)
            if backward:
                (gradient,) = torch.autograd.grad(product, x, self.x)
                self._check(gradient, done)

    def _check(self, values: Tensor, done: int) -> None:
        newest, oldest = BEGIN - self.begun, BEGIN - done
        assert values.dtype is torch.bfloat16
        assert newest <= values.min().item(), (newest, oldest, values)
        assert values.max().item() <= oldest, (newest, oldest, values)


def at_once(actions: Mapping[str, Callable[[], object]], leading: str, rounds: int) -> Counter[str]:
    """Repeats each action in a thread of its own, until one has run often enough and each has run once."""
    ran: Counter[str] = Counter(dict.fromkeys(actions, 0))
    failures: list[BaseException] = []
    together = threading.Barrier(len(actions), timeout=100)

    def is_over() -> bool:
        return bool(failures) or (ran[leading] >= rounds and min(ran.values()) > 0)

    def repeat(name: str) -> None:
        torch.set_num_threads(1)
        try:
            together.wait()
            while not is_over() and not (name == leading and ran[name] >= rounds):
                actions[name]()
                ran[name] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(name,)) for name in actions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
    return ran
