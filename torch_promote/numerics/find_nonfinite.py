"""`find_nonfinite`: finds the call that made the first inf or NaN."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.numerics.nonfinite_finder import BenignNonfinite, NonfiniteFinder, NonfiniteOrigin
from torch_promote.numerics.nonfinite_suggestion import Attempt, find_cure
from torch_promote.observe.events import Call
from torch_promote.observe.observer import observe
from torch_promote.observe.places import RunningModules
from torch_promote.policy.policy import Policy
from torch_promote.report.base import Content, Listing, Report
from torch_promote.report.codec import encode

__all__ = ["NonfiniteError", "NonfiniteReport", "find_nonfinite"]


class NonfiniteError(TorchPromoteError, ArithmeticError):
    """A call made an inf or a NaN in a block of `find_nonfinite(raise_at_first=True)`.

    Attributes:
        origin: The call that made it.
    """

    def __init__(self, origin: NonfiniteOrigin) -> None:
        super().__init__(str(origin))
        self.origin = origin


@dataclass(frozen=True)
class _Seen:
    """The state that a finder has collected."""

    benign: list[BenignNonfinite]
    checked: int
    forward_ops: Mapping[tuple[str, str], Any]


class NonfiniteReport(Report):
    """The report of `find_nonfinite`. It fills while the block runs.

    `print(report)` shows the origin, a notebook a page; `save` writes text (.txt), a page (.html) or JSON.

    Attributes:
        origin: The first call with finite inputs and a non-finite output, or None.
        tried: The runs of `suggest`, in order.
        not_seen: Computations of the block that were not checked, one sentence each.
        torch_version: PyTorch's version.
    """

    NOUN: ClassVar[str] = "report"

    def __init__(self, model: nn.Module | None, allow: Sequence[str]) -> None:
        self.origin: NonfiniteOrigin | None = None
        self.tried: list[Attempt] = []
        self.not_seen: list[str] = []
        self.torch_version = str(torch.__version__)
        self._model = None if model is None else weakref.ref(model)
        self._allow = allow
        self._finder: NonfiniteFinder | _Seen | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies: everything except the model."""
        finder = self._finder
        seen = None if finder is None else _Seen(self.benign, self.checked, dict(finder.forward_ops))
        return {**vars(self), "_model": None, "_finder": seen}

    @property
    def found(self) -> bool:
        """Whether a call made a non-finite value that is not benign."""
        return self.origin is not None

    @property
    def benign(self) -> list[BenignNonfinite]:
        """The benign non-finite values by place: masks, steps that GradScaler skips, and those that `allow` names."""
        return [] if self._finder is None else self._finder.benign

    @property
    def checked(self) -> int:
        """The number of checked calls. Calls after the origin are not checked."""
        return 0 if self._finder is None else self._finder.checked

    def ops_at(self, module: str, line: str) -> list[str]:
        """Returns the names of the ops that the forward called in a module at a line."""
        return [] if self._finder is None else list(self._finder.forward_ops.get((module, line), ()))

    def ops_in(self, module: str) -> list[str]:
        """Returns the names of the ops that the forward called in a module and its submodules."""
        if self._finder is None:
            return []
        inside = [ops for (path, _), ops in self._finder.forward_ops.items() if _is_inside(path, module)]
        return list(dict.fromkeys(name for ops in inside for name in ops))

    def suggest(self, step: Callable[[], Any]) -> Policy | None:
        """Finds the smallest override that makes the program finite, by running it.

        It runs the step without an override, then with one for the op that overflows. While another op overflows next,
        it adds an override for that op. At the end it removes overrides that are not needed. The overrides apply in
        regions of `my_autocast` and torch.autocast that the step opens. If they do not help and `find_nonfinite` got
        the model, it tries policies for the module of the origin and for its parents.

        Args:
            step: Runs one step of the program, including its regions. Before each run and at the end, `suggest`
                restores random number generators; parameters, buffers and gradients of the model, if `find_nonfinite`
                got it; and optimizers, modules, scalers and schedulers that the step refers to. Gradients with a
                non-finite value become None.

        Returns:
            A policy with which the step was finite: the default policy with the overrides, for the device types whose
            regions were open, or if no override of ops helps, the policy of a module, which `tried[-1].modules` names.
            None if the kind is "mathematics" or "data", the step is finite by itself, or nothing helps. `tried` lists
            all runs, with their results.

        Raises:
            OptionError: `step` is not callable. It is a ValueError.

        Example:
            >>> import torch, torch_promote as tp
            >>> x = torch.full((2, 300), 100.0)
            >>> def step():
            ...     with tp.my_autocast("cpu", torch.float16):
            ...         return x @ x.t()
            >>> with find_nonfinite() as report:
            ...     _ = step()
            >>> report.suggest(step)
            Policy.stock().override({'aten::matmul.default': 'fp32'}, device_type='cpu')
            >>> [str(attempt) for attempt in report.tried][-1]
            "overrides={'aten::matmul.default': 'fp32'}: finite"
        """
        if not callable(step):
            raise OptionError(f"suggest() expects a function that runs a step, got {step!r}. Pass a function.")
        self.tried = []
        model = None if self._model is None else self._model()
        return find_cure(step, model, lambda: find_nonfinite(model, allow=self._allow), self.tried)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values."""
        return {
            "found": self.found,
            "origin": encode(self.origin),
            "benign": encode(self.benign),
            "tried": encode(self.tried),
            "not_seen": list(self.not_seen),
            "checked": self.checked,
            "torch": self.torch_version,
        }

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`."""
        return {".txt": ("the text", lambda: f"{self}\n"), **super().formats()}

    def content(self) -> Content:
        """Returns what the report says to people."""
        origin = self.origin
        first, *rest = str(origin).splitlines() if origin is not None else [self._clean()]
        return Content(
            title="find_nonfinite",
            verdict=first,
            facts=[("checked calls", f"{self.checked:,}"), ("torch", self.torch_version)],
            good=not self.found,
            parts=(
                Listing("The first call with finite inputs and a non-finite output", [line.strip() for line in rest]),
                Listing("Benign", list(map(str, self.benign))),
                Listing("Not seen", self.not_seen),
                Listing("Tried", list(map(str, self.tried))),
            ),
        )

    def _clean(self) -> str:
        return f"no inf or NaN (except benign ones) in {self.checked:,} checked calls"

    def __str__(self) -> str:
        first = self._clean() if self.origin is None else str(self.origin)
        lines = [first, *(f"benign: {one}" for one in self.benign), *(f"not seen: {one}" for one in self.not_seen)]
        return "\n".join([*lines, *(f"tried: {one}" for one in self.tried)])

    def __repr__(self) -> str:
        return f"<NonfiniteReport: {'no origin' if self.origin is None else f'{self.origin.kind}, {self.origin.op}'}>"


@contextlib.contextmanager
def find_nonfinite(
    model: nn.Module | None = None, *, raise_at_first: bool = False, allow: Sequence[str] = ()
) -> Iterator[NonfiniteReport]:
    """Finds the first call in a block that has finite inputs and a non-finite output, in the forward or a backward.

    Infinite values that a mask asks for are benign, and so are gradients that overflow only because of GradScaler's
    scale: GradScaler then skips the step. The report lists both separately. A NaN is never benign. The program's
    results do not change. Until the first fault, each call costs a check of its results, which synchronizes on a GPU.

    Args:
        model: The module whose paths the report uses. None: the first module that is called outside of other modules.
        raise_at_first: Whether to raise at the call itself, so that a debugger stops there. It then also raises for
            infinite values that the program only converts to integers, which would be benign at the end of the block.
        allow: Ops ("log", "aten::log"), modules ("blocks.3", with those inside it) and lines ("train.py:41") that may
            make non-finite values.

    Yields:
        The report.

    Raises:
        NonfiniteError: `raise_at_first` is set, and a call made a non-finite value. It is an ArithmeticError.
        OptionError: `model` is not a module, or `allow` not a sequence of strings. It is a ValueError.

    Example:
        >>> import torch, torch_promote as tp
        >>> with find_nonfinite() as report, tp.my_autocast("cpu", torch.float16):
        ...     x = torch.full((2, 300), 100.0)
        ...     _ = (x @ x.t()).relu()
        >>> report.origin.op, report.origin.kind
        ('aten::matmul', 'overflow in the op')
    """
    if isinstance(allow, str) or not all(isinstance(one, str) and one for one in allow):
        raise OptionError(
            f'`allow` expects a sequence of names, such as ("log", "blocks.3", "train.py:41"), got {allow!r}.'
        )
    allowed = tuple(allow)
    modules = RunningModules(model)
    report = NonfiniteReport(model, allowed)
    del model  # it may be destroyed before the block ends

    def found(origin: NonfiniteOrigin | None) -> None:
        report.origin = origin
        if raise_at_first and origin is not None:
            raise NonfiniteError(origin)

    finder = NonfiniteFinder(modules, found, lambda call: any(_names(one, call) for one in allowed))
    report._finder = finder
    try:
        with observe(finder, report.not_seen):
            yield report
    finally:
        finder.finish()


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _names(name: str, call: Call) -> bool:
    return (
        name in (call.op, call.name, call.op.partition("::")[2], call.name.partition("::")[2])
        or (bool(call.module) and _is_inside(call.module, name))
        or (":" in name and call.line.endswith(name))
    )
