"""Timings against stock autocast: ratios, interleaved in one process, one thread.

Each case is a statement run under stock's region and under ours, in turn, for a number of rounds; the figure is the
median over the rounds of ours / stock, with its quartiles. Of overrides, which stock lacks, the other side is the same
call outside of regions with the casts written by hand. Absolute times are shown to give a sense of scale; on a busy
machine only the ratios mean something.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

import torch_promote as tp

__all__ = ["SUITES", "Result", "run"]


@dataclass(frozen=True, slots=True)
class Result:
    """One case's figures.

    Attributes:
        suite: The suite that the case belongs to.
        case: What was timed.
        ratio: Median over the rounds of ours / stock.
        low: Lower quartile of these ratios.
        high: Upper quartile of these ratios.
        ours_ns: Median of our time, in nanoseconds.
        stock_ns: Median of stock's time, in nanoseconds.
    """

    suite: str
    case: str
    ratio: float
    low: float
    high: float
    ours_ns: float
    stock_ns: float

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


_Round = Callable[[], tuple[float, float]]


def _timer(statement: str, names: dict[str, Any]) -> Callable[[], float]:
    """Returns a function that times the statement, in nanoseconds a run; about 10 ms at a time."""
    from torch.utils.benchmark import Timer  # here: it imports what finds and tries out compilers

    timer = Timer(statement, globals=names, num_threads=1)
    number = 0

    def time() -> float:
        nonlocal number
        if number == 0:  # calibrated at the first call, which is inside the region that the statement needs
            number = max(200, int(0.01 / timer.timeit(500).mean))
        return timer.timeit(number).mean * 1e9

    return time


def _region_cases() -> Iterator[tuple[str, _Round]]:
    statements = {
        "construct, enter, exit": "with autocast('cpu'): pass",
        "construct, enter, exit, with a dtype": "with autocast('cpu', dtype): pass",
        "enter, exit of one object": "with region: pass",
        "a decorated function": "decorated()",
    }
    for case, statement in statements.items():
        timers = []
        for autocast in (tp.my_autocast, torch.autocast):
            region = autocast("cpu")
            names = {"autocast": autocast, "dtype": torch.bfloat16, "region": region, "decorated": region(lambda: None)}
            timers.append(_timer(statement, names))
        ours, stock = timers
        yield case, lambda ours=ours, stock=stock: (ours(), stock())  # type: ignore[misc]


def _op_cases() -> Iterator[tuple[str, _Round]]:
    low = torch.randn(4, 4, dtype=torch.bfloat16)
    single = torch.randn(4, 4)
    weight = torch.randn(4, 4, requires_grad=True)
    names = {"torch": torch, "low": low, "single": single, "weight": weight, "linear": torch.nn.functional.linear}
    statements = {
        "mm, nothing to cast": "torch.mm(low, low)",
        "linear, nothing to cast": "linear(low, low)",
        "cat, nothing to cast": "torch.cat((low, low))",
        "mse_loss (fp32), nothing to cast": "torch.ops.aten.mse_loss(single, single)",
        "exp, a row of CUDA only": "torch.exp(single)",
        "mm, two activations cast": "torch.mm(single, single)",
        "mm, a weight from the cache": "torch.mm(single, weight)",
    }
    for case, statement in statements.items():
        yield case, _in_regions(_timer(statement, names))


def _in_regions(time: Callable[[], float]) -> _Round:
    def one_round() -> tuple[float, float]:
        with tp.my_autocast("cpu"):
            ours = time()
        with torch.autocast("cpu"):
            stock = time()
        return ours, stock

    return one_round


def _override_cases() -> Iterator[tuple[str, _Round]]:
    names = {
        "torch": torch,
        "low": torch.randn(4, 4, dtype=torch.bfloat16),
        "single": torch.randn(4, 4),
        "written": torch.zeros(4, 4),
    }
    overrides = {"mm": "fp32", "aten::neg": "fp32", "aten::add_.Tensor": "match_self"}
    for case, statement, by_hand in (
        ("a row (mm as fp32), two casts", "torch.mm(low, low)", "torch.mm(low.float(), low.float())"),
        ("a row (mm as fp32), nothing to cast", "torch.mm(single, single)", "torch.mm(single, single)"),
        ("another op (neg as fp32), a cast", "torch.neg(low)", "torch.neg(low.float())"),
        ("another op (neg as fp32), nothing to cast", "torch.neg(single)", "torch.neg(single)"),
        ("another op (add_ as match_self), a cast", "written.add_(low)", "written.add_(low.float())"),
        ("an op that is not overridden (abs)", "torch.abs(single)", "torch.abs(single)"),
    ):
        ours, hand = _timer(statement, names), _timer(by_hand, names)
        yield case, _overridden(overrides, ours, hand)


def _overridden(overrides: dict[str, str], ours: Callable[[], float], by_hand: Callable[[], float]) -> _Round:
    def one_round() -> tuple[float, float]:
        with tp.my_autocast("cpu", overrides=overrides):
            mine = ours()
        return mine, by_hand()

    return one_round


# Times an op at each line of its input. Imports nothing of ours by itself.
_WORKER = """
import sys, torch
from torch.utils.benchmark import Timer
if sys.argv[1] == "imported":
    import torch_promote
low = torch.randn(4, 4, dtype=torch.bfloat16)
timer = Timer("torch.mm(low, low)", globals={"torch": torch, "low": low}, num_threads=1)
timer.timeit(20000)
for line in sys.stdin:
    print(timer.timeit(10000).mean * 1e9, flush=True)
"""


def _import_cases() -> Iterator[tuple[str, _Round]]:
    """Outside regions: a process that has imported the package against one that has not."""
    with ExitStack() as stack:
        ours, stock = (stack.enter_context(_Worker(name)) for name in ("imported", "not imported"))
        yield "mm outside regions, package imported or not", lambda: (ours.ask(), stock.ask())


class _Worker:
    def __init__(self, name: str) -> None:
        command = [sys.executable, "-c", _WORKER, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # closes its input, which ends it


#: The suites by name.
SUITES: dict[str, Callable[[], Iterator[tuple[str, _Round]]]] = {
    "region": _region_cases,
    "ops": _op_cases,
    "overrides": _override_cases,
    "import": _import_cases,
}


def run(suite: str, rounds: int = 31) -> Iterator[Result]:
    """Runs a suite and yields its results as they come.

    Args:
        suite: A key of `SUITES`.
        rounds: How often each case is timed under each of the two, alternating.

    Yields:
        A `Result` for each case.
    """
    for case, one_round in SUITES[suite]():
        pairs = [one_round() for _ in range(rounds)]
        ratios = [ours / stock for ours, stock in pairs]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        ours_ns, stock_ns = (statistics.median(times) for times in zip(*pairs, strict=True))
        yield Result(suite, case, ratio, low, high, ours_ns, stock_ns)
