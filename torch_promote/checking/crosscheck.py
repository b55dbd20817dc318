"""`crosscheck`: every op that runs in a block is held against the reference, and against stock autocast if asked.

with tp.crosscheck() as report:
train_step()
print(report)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn, get_args

from torch_promote.checking.checker import Checker, Level
from torch_promote.checking.dispatch_observer import TapError, observe_dispatch
from torch_promote.checking.report import CrosscheckError, CrosscheckReport, Mismatch
from torch_promote.errors import DecoratorError, OptionError

__all__ = ["CrosscheckError", "CrosscheckReport", "Level", "Mismatch", "crosscheck"]

_reports = threading.local()


class crosscheck:  # noqa: N801 (what people write after `with`)
    """Checks every op that is dispatched in the block, forward and backward.

    The dtypes of each result, and for elementwise ops shape and strides, are compared with what the reference says;
    the dtypes in which autocast hands arguments on, under `my_autocast` or `torch.autocast`, with the autocast plan.
    Ops that no rule covers are counted and listed. Blocks may be nested: the innermost checks, and the outer ones get
    what it found. Entering one gives the report, which fills while the block runs.

    Args:
        level: "dtype" for that. "bits" also runs each call that a policy applies to a second time, under stock
            autocast, on the same inputs and from the same random state, and compares the results bit for bit.
        raise_on_mismatch: Raise at the first mismatch, from the line that called the op.

    Raises:
        OptionError: There is no such level.
        CrosscheckError: The first mismatch, under `raise_on_mismatch`.
        TapError: Another library holds the dispatch key that this needs, or a block is ended in another thread.
        DecoratorError: It is used as a decorator, which would leave nobody to read the report.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.crosscheck() as report, tp.my_autocast("cpu"):
        ...     _ = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum()
        >>> report.ok, report.with_policy["aten.linear.default"], report.no_rule.total()
        (True, 1, 0)
    """

    __slots__ = ("_blocks", "level", "raise_on_mismatch")

    def __init__(self, *, level: Level = "dtype", raise_on_mismatch: bool = False) -> None:
        if level not in get_args(Level):
            raise OptionError(f"crosscheck has no level {level!r}. Legal: {', '.join(map(repr, get_args(Level)))}.")
        self.level: Level = level
        self.raise_on_mismatch = raise_on_mismatch
        # With the thread that each was entered in.
        self._blocks: list[tuple[int, contextlib.AbstractContextManager[CrosscheckReport]]] = []

    def __enter__(self) -> CrosscheckReport:
        block = _checked(self.level, self.raise_on_mismatch)
        report = block.__enter__()
        self._blocks.append((threading.get_ident(), block))
        return report

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        here = threading.get_ident()
        position = max((i for i, (thread, _) in enumerate(self._blocks) if thread == here), default=None)
        if position is None:
            raise TapError(
                "a crosscheck is not open in this thread, so it cannot be ended here. End it in the thread that "
                "entered it, where it still is open; enter one in each thread."
            )
        self._blocks.pop(position)[1].__exit__(kind, value, traceback)

    def __call__(self, function: object) -> NoReturn:
        """Refuses to decorate; see the class."""
        raise DecoratorError(
            "crosscheck is no decorator: nobody could read its report. Write `with crosscheck() as report:` around the "
            "call, or inside the function."
        )


@contextlib.contextmanager
def _checked(level: Level, raise_on_mismatch: bool) -> Iterator[CrosscheckReport]:
    report = CrosscheckReport()
    around = _open_reports()
    with observe_dispatch(Checker(report, level, raise_on_mismatch)):
        around.append(report)
        try:
            yield report
        finally:
            # Tasks need not end in the order they began in: what was around this block may be gone.
            position = next(i for i, one in enumerate(around) if one is report)
            del around[position]
            if position > 0:
                around[position - 1].add(report)


def _open_reports() -> list[CrosscheckReport]:
    """Those of this thread's open blocks."""
    reports: list[CrosscheckReport] | None = getattr(_reports, "open", None)
    if reports is None:
        reports = _reports.open = []
    return reports
