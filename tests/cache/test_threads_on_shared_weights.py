"""Threads that serve, clear, free and end in regions, while another trains or freezes the weights that they share."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp

pytestmark = pytest.mark.usefixtures("nothing_persists")

CACHES = ("weights", "all", "persistent")
ROUNDS = [30, pytest.param(200, marks=pytest.mark.slow)]
ours = functools.partial(tp.my_autocast, "cpu")

#: The value of all elements before the first step. It and all that follow are exact in bfloat16.
BEGIN = 256


class CountedDown:
    """Weights that each step decreases by one, so that a product tells how many steps its cast has seen."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.full((8, 8), float(BEGIN))) for _ in range(3)]
        self.x = torch.eye(8, dtype=torch.bfloat16)[:1]
        self.begun = self.done = 0

    @contextlib.contextmanager
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


def by_optimizer(weights: CountedDown, fused: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(weights.weights, lr=1.0, fused=fused, foreach=not fused)

    def train() -> None:
        weights.give_gradients()
        with weights.writing():
            optimizer.step()

    return train


def through_data(weights: CountedDown) -> Callable[[], None]:
    def write() -> None:
        with weights.writing():
            for weight in weights.weights:
                weight.data.sub_(1)

    return write


def while_frozen(weights: CountedDown) -> Callable[[], None]:
    def freeze_and_write() -> None:
        for weight in weights.weights:
            weight.requires_grad_(False)
        with weights.writing():
            for weight in weights.weights:
                weight.sub_(1)
        for weight in weights.weights:
            weight.requires_grad_(True)

    return freeze_and_write


WRITES = {
    "step": functools.partial(by_optimizer, fused=False),
    "fused step": functools.partial(by_optimizer, fused=True),
    "data": through_data,
    "frozen": while_frozen,
}


def clear(weights: CountedDown) -> None:
    tp.clear_cache()
    torch.clear_autocast_cache()
    with torch.autocast("cpu"):  # its end clears PyTorch's cache
        weights.use(ours)


def end_inside(weights: CountedDown) -> None:
    """A thread that ends with open regions and their casts."""

    def work() -> None:
        for cache in CACHES:
            region = ours(cache=cache)
            region.__enter__()
            weights.use(torch.no_grad)
            regions.append(region)

    regions: list[object] = []  # destroyed in this thread
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(regions) == len(CACHES)


def hand_over(to: queue.Queue[torch.Tensor]) -> None:
    """Puts a weight that has casts into the queue. If the other thread does not take any, frees it here."""
    weight = torch.ones(8, 8, requires_grad=True)
    with ours(cache="persistent"), torch.no_grad():
        weight @ weight
        with contextlib.suppress(queue.Full):
            to.put(weight, timeout=0.01)


def free(weights: queue.Queue[torch.Tensor]) -> None:
    with contextlib.suppress(queue.Empty):
        weights.get(timeout=0.01)


def suspend(weights: CountedDown) -> None:
    """Each step of a generator in another thread: the casts of its region move between them."""

    @ours(cache="all")
    def steps() -> Iterator[None]:
        for _ in range(3):
            weights.use(torch.no_grad)
            yield

    generator = steps()
    for _ in range(2):
        thread = threading.Thread(target=next, args=(generator,))
        thread.start()
        thread.join()
    assert len(list(generator)) == 1


@pytest.mark.usefixtures("no_cast_checks")  # a cast of what is being written
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("write", WRITES)
def test_no_thread_gets_a_cast_from_before_a_step(write: str, rounds: int) -> None:
    weights = CountedDown()
    to_free: queue.Queue[torch.Tensor] = queue.Queue(8)
    actions: dict[str, Callable[[], object]] = {
        "write": WRITES[write](weights),
        "clear": functools.partial(clear, weights),
        "hand over": functools.partial(hand_over, to_free),
        "free": functools.partial(free, to_free),
        "backward": functools.partial(weights.use, functools.partial(ours, cache="persistent"), backward=True),
    }
    if write != "data":  # within a region, that is a write that no cache sees, as under stock
        actions["end inside"] = functools.partial(end_inside, weights)
        actions["suspend"] = functools.partial(suspend, weights)
    for cache in CACHES:
        actions[f"serve {cache}"] = functools.partial(weights.use, functools.partial(ours, cache=cache))
    ran = at_once(actions, "write", rounds)
    assert ran["write"] == rounds == weights.done
    assert min(ran.values()) > 0
    for cache in CACHES:
        weights.use(functools.partial(ours, cache=cache))
