"""`find_nonfinite`: finds the call that made the first inf or NaN, and the override that makes the program finite."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torch_promote.errors import NonfiniteError, OptionError, PolicyError, check_flag
from torch_promote.numerics.nonfinite_finder import BenignNonfinite, FinderState, NonfiniteFinder, NonfiniteOrigin
from torch_promote.numerics.step_runs import current_policy, use_policy
from torch_promote.numerics.step_state import StepState
from torch_promote.observe.events import Call
from torch_promote.observe.observer import observe
from torch_promote.observe.places import RunningModules
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.report.base import Content, Listing, Report, module_name
from torch_promote.report.codec import encode

__all__ = ["Attempt", "NonfiniteReport", "find_nonfinite", "next_override"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of the step.

    Attributes:
        overrides: The overrides in force in every region, such as {"mm.default": "fp32"}.
        finite: Whether all non-finite values were benign.
        result: The result, in a sentence.
    """

    overrides: Mapping[str, str]
    finite: bool
    result: str

    def __str__(self) -> str:
        return f"{f'overrides={dict(self.overrides)}' if self.overrides else 'as it is'}: {self.result}"


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
        self._seen = FinderState()

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies: everything except the model."""
        return {**vars(self), "_model": None}

    @property
    def found(self) -> bool:
        """Whether a call made a non-finite value that is not benign."""
        return self.origin is not None

    @property
    def benign(self) -> list[BenignNonfinite]:
        """The benign non-finite values by place: masks, steps that GradScaler skips, and those that `allow` names."""
        return list(self._seen.benign.values())

    @property
    def checked(self) -> int:
        """The number of checked calls. Calls after the origin are not checked."""
        return self._seen.checked

    def ops_at(self, module: str, line: str) -> list[str]:
        """Returns the names of the ops that the forward called in a module at a line."""
        return list(self._seen.forward_ops.get((module, line), ()))

    def suggest(self, step: Callable[[], Any]) -> Policy | None:
        """Finds the smallest override that makes the program finite, by running it.

        It runs the step without an override, then with one for the op that overflows. While another op overflows next,
        it adds an override for that op. At the end it removes overrides that are not needed. The overrides apply in
        regions of `my_autocast` and torch.autocast that the step opens, except for regions that name a policy.

        Args:
            step: Runs one step of the program, including its regions. Before each run and at the end, `suggest`
                restores random number generators; parameters, buffers and gradients of the model, if `find_nonfinite`
                got it; and optimizers, modules, scalers and schedulers that the step refers to. Gradients with a
                non-finite value become None.

        Returns:
            A policy with which the step was finite: the policy in force with the overrides, for the device types whose
            regions were open. None if the kind is "mathematics" or "data", the step is finite by itself, or nothing
            helps. `tried` lists all runs, with their results.

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
        return _Search(step, model, self._allow, self.tried).find()

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
    if (
        not isinstance(allow, Sequence)
        or isinstance(allow, str)
        or not all(isinstance(one, str) and one for one in allow)
    ):
        raise OptionError(
            f'`allow` expects a sequence of names, such as ("log", "blocks.3", "train.py:41"), got {allow!r}.'
        )
    check_flag("raise_at_first", raise_at_first)
    allowed = tuple(allow)
    modules = RunningModules(model)
    report = NonfiniteReport(model, allowed)
    del model  # it may be destroyed before the block ends

    def found(origin: NonfiniteOrigin | None) -> None:
        report.origin = origin
        if raise_at_first and origin is not None:
            raise NonfiniteError(origin)

    finder = NonfiniteFinder(modules, found, lambda call: any(_names(one, call) for one in allowed))
    report._seen = finder.seen
    try:
        with observe(finder, report.not_seen):
            yield report
    finally:
        finder.finish()


def _names(name: str, call: Call) -> bool:
    return (
        name in (call.op, call.name, call.op.partition("::")[2], call.name.partition("::")[2])
        or f"{call.module}.".startswith(f"{name}.")
        or (":" in name and call.line.endswith(name))
    )


# --- the search for an override

#: The maximum number of ops that get an override.
_MOST_OPS = 8
#: Ops that convert or pass on their argument; no override changes their results.
_CONVERTING = ("to.", "_to_copy.", "copy_.", "detach.", "view.", "t.")


def next_override(report: NonfiniteReport) -> str | None:
    """Returns the op that `NonfiniteReport.suggest` would run in float32 first, or None."""
    origin = report.origin
    if origin is None or origin.kind in ("mathematics", "data"):
        return None
    devices = _devices_of(origin)
    return next((name for names in _suspects(report) for name in names if _is_legal(name, "fp32", devices)), None)


class _Search:
    """Runs the step under overrides, each set once. Its state is restored between the runs; see `StepState`."""

    def __init__(
        self, step: Callable[[], Any], model: nn.Module | None, allow: Sequence[str], tried: list[Attempt]
    ) -> None:
        self._step, self._model, self._allow, self._tried = step, model, allow, tried
        self._state = StepState(model, step=step)
        self._reports: dict[frozenset[tuple[str, str]], NonfiniteReport | None] = {}
        self._devices: tuple[str, ...] = DEVICE_TYPES

    def find(self) -> Policy | None:
        """Returns the policy of the finite run in `tried` that has the fewest overrides, or None."""
        watching = self._state.watch_optimizers()
        try:
            before = self._run({})
            if before is None or before.origin is None or before.origin.kind in ("mathematics", "data"):
                return None
            self._devices = _devices_of(before.origin)
            for value in ("fp32", "bfloat16"):
                overrides = self._override_ops(before, value)
                if overrides is not None:
                    return self._policy(self._without_needless(overrides))
            return None
        finally:
            watching.remove()
            self._restore()

    def _restore(self) -> None:
        self._state.restore()
        for weight in () if self._model is None else self._model.parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                weight.grad = None

    def _run(self, overrides: Mapping[str, str]) -> NonfiniteReport | None:
        """Runs the step under overrides in every region, unless that has been done. None if it raised."""
        key = frozenset(overrides.items())
        if key in self._reports:
            return self._reports[key]
        self._restore()
        in_force = use_policy(self._policy(overrides), self._model) if overrides else contextlib.nullcontext()
        try:
            with in_force, find_nonfinite(self._model, allow=self._allow) as report:
                self._step()
        except Exception as error:
            if not overrides:
                raise
            self._tried.append(Attempt(dict(overrides), False, f"raises {type(error).__name__}: {error}"))
            return self._reports.setdefault(key, None)
        origin = report.origin
        result = "finite" if origin is None else f"{origin.kind} in {origin.call.name}, {module_name(origin.module)}"
        self._tried.append(Attempt(dict(overrides), origin is None, result))
        return self._reports.setdefault(key, report)

    def _override_ops(self, report: NonfiniteReport, value: str) -> dict[str, str] | None:
        """Adds an override for the op that overflows, and for each one that overflows next, until none does."""
        overrides: dict[str, str] = {}
        while report.found and len(overrides) < _MOST_OPS:
            names = next((names for names in _suspects(report) if not set(names) <= set(overrides)), [])
            legal = [name for name in names if _is_legal(name, value, self._devices)]
            if set(legal) <= set(overrides):
                return None
            overrides.update(dict.fromkeys(legal, value))
            result = self._run(overrides)
            if result is None:
                return None
            report = result
        return None if report.found else overrides

    def _without_needless(self, overrides: dict[str, str]) -> dict[str, str]:
        for name in list(overrides) if len(overrides) > 1 else []:
            fewer = {key: value for key, value in overrides.items() if key != name}
            report = self._run(fewer)
            if report is not None and not report.found:
                overrides = fewer
        return overrides

    def _policy(self, overrides: Mapping[str, str]) -> Policy:
        return current_policy().override(overrides, self._devices)


def _suspects(report: NonfiniteReport) -> Iterator[list[str]]:
    """The ops whose dtype may be at fault, most likely first."""
    origin = report.origin
    assert origin is not None
    if origin.phase == "backward":  # a backward runs in the dtypes that the forward chose
        ops = report.ops_at(origin.module, origin.line)
        of_node = [op for op in ops if _plain(op) and origin.node.lower().startswith(f"{_plain(op)}backward")]
        yield from ([exact_key(name) for name in names] for names in (of_node, ops) if names)
        return
    yield [exact_key(origin.call.name)]
    if origin.inner != origin.call.name:
        yield [exact_key(origin.inner)]


def _plain(name: str) -> str:
    return name.partition("::")[2].partition(".")[0].replace("_", "")


def _devices_of(origin: NonfiniteOrigin) -> tuple[str, ...]:
    """The device types whose regions were open at the origin, or all if there was none."""
    return tuple(device for device, _ in origin.call.autocast if device in DEVICE_TYPES) or DEVICE_TYPES


def _is_legal(name: str, value: str, devices: tuple[str, ...]) -> bool:
    try:
        Policy.stock().override({name: value}, devices)
    except PolicyError:
        return False
    return not name.startswith(_CONVERTING)
