"""`crosscheck`: compares every op that runs in a block with the reference, and with stock autocast if asked.

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
from torch_promote.checking.report import CrosscheckError, CrosscheckReport, Mismatch
from torch_promote.errors import DecoratorError, OptionError
from torch_promote.observe.dispatch import DispatchObserverError, observe_dispatch

__all__ = ["CrosscheckError", "CrosscheckReport", "Level", "Mismatch", "crosscheck"]

_reports = threading.local()


class crosscheck:  # noqa: N801 (what people write after `with`)
    """Checks every op that is dispatched in the block, forward and backward.

    Crosscheck compares the dtypes of each result, and the shape and strides of elementwise results, with the reference.
    Under `my_autocast` or `torch.autocast`, it compares the casts of the arguments with the autocast plan. It lists the
    ops that no rule covers. Blocks can be nested: the innermost block checks, and passes its report on to the
    outer ones. `with` gives the report, which fills while the block runs.

    Args:
        level: "dtype": the comparisons above. "bits": also runs each call to which a policy applies a second time,
            under stock autocast, on the same inputs and from the same random state, and compares the results bit for
            bit.
        raise_on_mismatch: Raise at the first mismatch, from the line that called the op.

    Raises:
        OptionError: `level` is not a level.
        CrosscheckError: The first mismatch, under `raise_on_mismatch`.
        DispatchObserverError: Another library uses the dispatch key that crosscheck needs, or the block ends in another
            thread than it began in.
        DecoratorError: `crosscheck` is used as a decorator: the caller could not read the report.

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
            raise OptionError(
                f"{level!r} is not a level of crosscheck. Legal: {', '.join(map(repr, get_args(Level)))}."
            )
        self.level: Level = level
        self.raise_on_mismatch = raise_on_mismatch
        # Each with the thread that entered it.
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
            raise DispatchObserverError(
                "this crosscheck was not entered in this thread, so it cannot end here. It is still open in the thread "
                "that entered it: end it there. Each thread needs a block of its own."
            )
        self._blocks.pop(position)[1].__exit__(kind, value, traceback)

    def __call__(self, function: object) -> NoReturn:
        """Raises; see the class."""
        raise DecoratorError(
            "crosscheck is not a decorator: the caller could not read its report. Write `with crosscheck() as report:` "
            "around the call, or inside the function."
        )


@contextlib.contextmanager
def _checked(level: Level, raise_on_mismatch: bool) -> Iterator[CrosscheckReport]:
    report = CrosscheckReport()
    open_reports = _open_reports()
    with observe_dispatch(Checker(report, level, raise_on_mismatch)):
        open_reports.append(report)
        try:
            yield report
        finally:
            # asyncio tasks may end in any order: the block around this one may have ended already.
            position = next(i for i, one in enumerate(open_reports) if one is report)
            del open_reports[position]
            if position > 0:
                open_reports[position - 1].add(report)


def _open_reports() -> list[CrosscheckReport]:
    """The reports of the open blocks of this thread."""
    reports: list[CrosscheckReport] | None = getattr(_reports, "open", None)
    if reports is None:
        reports = _reports.open = []
    return reports
