"""`find_nonfinite`: finds the call that made the first inf or NaN, and the policy that makes the program finite."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from torch_promote.errors import NonfiniteError, OptionError, PolicyError, check_flag
from torch_promote.numerics.nonfinite_finder import (
    BenignNonfinite,
    FinderState,
    NonfiniteFinder,
    NonfiniteOrigin,
)
from torch_promote.numerics.scaler_steps import ScalerSteps
from torch_promote.numerics.step_runs import current_policy, use_policy
from torch_promote.numerics.step_state import StepState
from torch_promote.observe.events import Call, Unseen
from torch_promote.observe.observer import observe
from torch_promote.observe.places import RunningModules, shorten
from torch_promote.policy.op_names import exact_key, find_overloads
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_forward import policy_of
from torch_promote.regions.module_policies import set_module_policy
from torch_promote.report.base import Code, Content, Listing, Report, module_name
from torch_promote.report.block import block
from torch_promote.report.codec import decode, encode

__all__ = ["Attempt", "NonfiniteReport", "find_nonfinite", "next_attempts"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of the step. It has overrides or policies of modules, or neither.

    Attributes:
        overrides: The overrides in force in every region, such as {"aten::mm.default": "fp32"}.
        finite: Whether all non-finite values were benign, and GradScaler skipped no step.
        result: The result, in a sentence.
        modules: The policies of modules, as in `set_module_policy`: {"head": {"aten::linear.default": "fp32"}}.
    """

    overrides: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False
    result: str = ""
    modules: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The code to write in the program; "" for the step as it is."""
        if self.modules:
            tables = {path: one if isinstance(one, str) else _short(one) for path, one in self.modules.items()}
            return f"tp.set_module_policy(model, {json.dumps(tables)})"
        return f"tp.my_autocast(..., overrides={json.dumps(_short(self.overrides))})" if self.overrides else ""

    @property
    def option(self) -> str:
        """The options of the commands that do the same, such as "--override linear=fp32"; "" if there is none."""
        return " ".join(f"--override {op}={value}" for op, value in _short(self.overrides).items())

    def __str__(self) -> str:
        return f"{self.code or 'as it is'}: {self.result}"


def _short(overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns overrides with the keys that people write: "linear" if it means the same as "aten::linear.default"."""

    def short(key: str) -> str:
        bare = key.removeprefix("aten::")
        name = bare.rpartition(".")[0]
        overloads = [one for one in find_overloads(name) if not one.endswith("out")] if bare != key else []
        return name if overloads == [key.removesuffix(".default")] else bare

    return {short(key): value for key, value in overrides.items()}


class NonfiniteReport(Report):
    """The report of `find_nonfinite`. It fills while the block runs.

    `print(report)` shows the origin, a notebook a page; `save` writes text (.txt), a page (.html) or JSON.

    Attributes:
        origin: The first call with finite inputs and a non-finite output, or None.
        tried: The runs of `suggest`, in order.
        cure: The run whose policy `suggest` has returned, or None.
        not_seen: Computations of the block that were not checked, one sentence each.
        torch_version: PyTorch's version.
    """

    NOUN: ClassVar[str] = "report"
    FORMAT: ClassVar[str] = "torch_promote find_nonfinite"

    def __init__(self, model: nn.Module | None, allow: Sequence[str]) -> None:
        self.origin: NonfiniteOrigin | None = None
        self.tried: list[Attempt] = []
        self.cure: Attempt | None = None
        self.not_seen: list[Unseen] = []
        self.torch_version: str = str(torch.__version__)
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
    def scaler(self) -> ScalerSteps:
        """The steps of GradScaler before the origin, and how many of them it skipped."""
        return self._seen.scaler

    @property
    def checked(self) -> int:
        """The number of checked calls. Calls after the origin are not checked."""
        return self._seen.checked

    def ops_at(self, module: str, line: str) -> list[str]:
        """Returns the names of the ops that the forward called in a region of autocast, in a module at a line."""
        return list(self._seen.forward_ops.get((module, line), ()))

    def suggest(self, step: Callable[[], Any], *, budget: int = 32) -> Policy | None:
        """Finds the narrowest policy that makes the program finite, by running it.

        It runs the step as it is, then under one policy after another until a run is finite:

        1. the op that overflows, in float32 in its module: `set_module_policy(model, {"head": {"linear": "fp32"}})`;
        2. its whole module in float32: `set_module_policy(model, {"head": "fp32"})`;
        3. the op in float32 everywhere: `overrides={"linear": "fp32"}`;
        4. the op in bfloat16 everywhere;
        5. the modules around, up to the model, in float32.

        If another op overflows next, it gets the same policy, too, for up to 8 ops. At the end, policies that are not
        needed are removed. Overrides apply in regions of `my_autocast` and torch.autocast that the step opens, except
        for regions that name a policy; policies of modules apply in all regions.

        If GradScaler only skips the step, it looks in the same way for a policy under which it does not.

        Args:
            step: Runs one step of the program, including its regions. Before each run and at the end, `suggest`
                restores random number generators; parameters, buffers and gradients of the model; and optimizers,
                modules, scalers and schedulers that the step refers to. Gradients with a non-finite value become None.
            budget: The maximum number of runs of the step.

        Returns:
            A policy with which the step was finite: the policy in force with overrides, for the device types whose
            regions were open, or with tables of modules, for `my_autocast(policy=..., model=...)`. None if the kind is
            "mathematics" or "data", the step is finite by itself, or nothing helps. `cure` has the code to write, and
            `tried` all runs with their results.

        Raises:
            OptionError: `step` is not callable, or `budget` is not 1 or more. It is a ValueError.

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
            >>> print(report.cure)
            tp.my_autocast(..., overrides={"matmul": "fp32"}): finite
        """
        if not callable(step):
            raise OptionError(f"suggest() expects a function that runs a step, got {step!r}. Pass a function.")
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise OptionError(f"budget (the maximum number of runs of the step) must be 1 or more, got {budget!r}.")
        self.tried, self.cure = [], None
        model = None if self._model is None else self._model()
        search = _Search(step, model, self._allow, self.tried, budget)
        policy = search.find()
        self.cure = search.cure
        return policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values. `save("NAME.json")` writes them, and `load` reads them."""
        ops = [[*place, list(names)] for place, names in self._seen.forward_ops.items()]
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "found": self.found,
            "origin": encode(self.origin),
            "benign": encode(self.benign),
            "scaler": encode(self.scaler),
            "scaled": encode(self._seen.scaled),
            "tried": encode(self.tried),
            "cure": encode(self.cure),
            "not_seen": encode(self.not_seen),
            "checked": self.checked,
            "forward_ops": ops,
            "torch": self.torch_version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report whose `to_dict` returned the data, without the model.

        Raises:
            KeyError, TypeError, ValueError: The data is incomplete or was changed.
        """
        report = cls(None, ())
        report.origin = decode(NonfiniteOrigin | None, data["origin"])
        report.tried = decode(list[Attempt], data["tried"])
        report.cure = decode(Attempt | None, data["cure"])
        report.not_seen = decode(list[Unseen], data["not_seen"])
        report.torch_version = decode(str, data["torch"])
        benign = decode(list[BenignNonfinite], data["benign"])
        ops = decode(list[tuple[str, str, list[str]]], data["forward_ops"])
        report._seen = FinderState(
            benign={(one.kind, one.op, one.module, one.line): one for one in benign},
            checked=decode(int, data["checked"]),
            forward_ops={(module, line): dict.fromkeys(names) for module, line, names in ops},
            scaler=decode(ScalerSteps, data["scaler"]),
            scaled=decode(NonfiniteOrigin | None, data["scaled"]),
        )
        return report

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`."""
        return {".txt": ("the text", lambda: f"{self}\n"), **super().formats()}

    def content(self) -> Content:
        """Returns what the report says to people."""
        origin, scaler = self.origin, self.scaler
        first, *rest = str(origin).splitlines() if origin is not None else [self._clean()]
        facts = [("checked calls", f"{self.checked:,}"), ("torch", self.torch_version)]
        if scaler.skipped:
            facts.insert(0, ("skipped steps", f"{scaler.skipped:,} of {scaler.count:,}"))
        title = "The narrowest policy that makes the step finite"
        cure = [] if self.cure is None else [Code(title, self.cure.code, where="all")]
        return Content(
            title="find_nonfinite",
            verdict=first,
            facts=facts,
            good=not self.found and (None if scaler.skipped else True),
            parts=(
                Listing("The first call with finite inputs and a non-finite output", [line.strip() for line in rest]),
                Listing("Steps that GradScaler skipped", self._about_scaler()),
                *cure,
                Listing("Benign", list(map(str, self.benign))),
                Listing("Not seen", self.not_seen),
                Listing(f"Tried (runs of the step: {len(self.tried)})", list(map(str, self.tried)), most=40),
            ),
        )

    def _clean(self) -> str:
        clean = f"no inf or NaN (except benign ones) in {self.checked:,} checked calls"
        return f"{self.scaler}; otherwise {clean}" if self.scaler.skipped else clean

    def _about_scaler(self) -> list[str]:
        first, where = self._seen.scaled, ""
        if first is not None:
            line = shorten(first.line) or "line unknown"
            where = f"{first.call.name}, {first.phase}, {module_name(first.module)}, {line}"
        dtypes = [one.dtype for one in (() if first is None else first.outputs) if one.dtype.is_floating_point]
        return self.scaler.explain(
            first=where,
            size=max((one.unscaled for one in self.benign if one.unscaled), default=0.0),
            largest=max((torch.finfo(dtype).max for dtype in dtypes), default=0.0),
            codes=[one.code for one in next_attempts(self)],
        )

    def __str__(self) -> str:
        first = self._clean() if self.origin is None else str(self.origin)
        lines = [first, *(f"skipped steps: {one}" for one in self._about_scaler())]
        lines += [f"benign: {one}" for one in self.benign] + [f"not seen: {one}" for one in self.not_seen]
        lines += [f"tried: {one}" for one in self.tried]
        if self.cure is not None:
            option = f", or the option {self.cure.option}" if self.cure.option else ""
            lines.append(f"cure (runs of the step: {len(self.tried)}): {self.cure.code}{option}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<NonfiniteReport: {'no origin' if self.origin is None else f'{self.origin.kind}, {self.origin.op}'}>"


@block
def find_nonfinite(
    model: nn.Module | None = None, *, raise_at_first: bool = False, allow: Sequence[str] = ()
) -> Iterator[NonfiniteReport]:
    """Finds the first call in a block that has finite inputs and a non-finite output, in any phase.

    Infinite values that a mask asks for are benign, and so are gradients that overflow only because of GradScaler's
    scale: GradScaler then skips the step. The report lists both separately. A NaN is never benign. The program's
    results do not change. Until the first fault, each call costs a check of its results and of the arguments that it
    wrote to, which synchronizes on a GPU.

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
        with observe(finder.observer, report.not_seen):
            yield report
    finally:
        finder.finish()
        root = next(modules.named(), None)
        report._model = None if root is None else weakref.ref(root[0])


def _names(name: str, call: Call) -> bool:
    return (
        name in (call.op, call.name, call.op.partition("::")[2], call.name.partition("::")[2])
        or f"{call.module}.".startswith(f"{name}.")
        or (":" in name and call.line.endswith(name))
    )


# --- the search for a policy

#: Ops that convert or pass on their argument; no override changes their results.
_CONVERTING = ("to.", "_to_copy.", "copy_.", "detach.", "view.", "t.")
#: The op that stands for all ops of a module.
_WHOLE = ""

#: What a run changes: policies by module, None for all regions, and op.
_Changes = dict[tuple[str | None, str], str]


class _Way(NamedTuple):
    """A kind of change: of up to `most` ops that overflow, or of whole modules, in the module or everywhere."""

    in_module: bool
    whole: bool = False
    value: str = "fp32"
    most: int = 8


#: From narrow to wide.
_WAYS = (_Way(True), _Way(True, whole=True, most=2), _Way(False), _Way(False, value="bfloat16"))


def next_attempts(report: NonfiniteReport) -> list[Attempt]:
    """Returns what `NonfiniteReport.suggest` would try first, the narrowest first: in the module, and everywhere."""
    fault = _fault(report)
    if fault is None:
        return []
    devices = _devices_of(fault)
    names = next((legal for names in _suspects(report) if (legal := _legal(names, "fp32", devices))), [])
    paths = [fault.module, None] if fault.module else [None]
    return [_attempt({(path, name): "fp32" for name in names}) for path in paths if names]


def _first_fault(report: NonfiniteReport) -> NonfiniteOrigin | None:
    """The origin; without one, the call whose overflow made GradScaler skip a step."""
    return report.origin or (report._seen.scaled if report.scaler.skipped else None)


def _fault(report: NonfiniteReport) -> NonfiniteOrigin | None:
    """The same, if another dtype may cure it."""
    first = _first_fault(report)
    return None if first is None or first.kind in ("mathematics", "data") else first


def _suspects(report: NonfiniteReport) -> Iterator[list[str]]:
    """The ops whose dtype may be at fault, most likely first."""
    fault = _fault(report)
    if fault is None or not (fault.call.autocast or fault.phase == "backward"):  # no region was open
        return
    if fault.phase == "backward":  # a backward runs in the dtypes that the forward chose
        ops = report.ops_at(fault.module, fault.line)
        of_node = [op for op in ops if _plain(op) and fault.node.lower().startswith(f"{_plain(op)}backward")]
        yield from ([exact_key(name) for name in names] for names in (of_node, ops) if names)
        return
    yield [exact_key(fault.call.name)]
    if fault.inner != fault.call.name:
        yield [exact_key(fault.inner)]


def _plain(name: str) -> str:
    return name.partition("::")[2].partition(".")[0].replace("_", "")


def _devices_of(fault: NonfiniteOrigin) -> tuple[str, ...]:
    """The device types whose regions were open at a call, or all if there was none."""
    return tuple(device for device, _ in fault.call.autocast if device in DEVICE_TYPES) or DEVICE_TYPES


def _legal(names: Sequence[str], value: str, devices: tuple[str, ...]) -> list[str]:
    """The ops that can have a policy."""

    def is_legal(name: str) -> bool:
        try:
            Policy.stock().override({name: value}, devices)
        except PolicyError:
            return False
        return not _converts(name)

    return [name for name in names if is_legal(name)]


def _converts(name: str) -> bool:
    return name.removeprefix("aten::").startswith(_CONVERTING)


def _attempt(changes: _Changes) -> Attempt:
    overrides: dict[str, str] = {}
    modules: dict[str, Any] = {}
    for (path, op), value in changes.items():
        if path is None:
            overrides[op] = value
        elif op == _WHOLE:
            modules[path] = value
        else:
            modules.setdefault(path, {})[op] = value
    return Attempt(overrides, modules=modules)


class _OutOfRunsError(Exception):
    """The budget is spent."""


class _Search:
    """Runs the step under policies, each once. Its state is restored between the runs; see `StepState`.

    Attributes:
        cure: The last good run under a policy, which has the narrowest one, or None.
    """

    def __init__(
        self, step: Callable[[], Any], model: nn.Module | None, allow: Sequence[str], tried: list[Attempt], budget: int
    ) -> None:
        self._step, self._model, self._allow, self._tried, self._budget = step, model, allow, tried, budget
        self._state = StepState(model, step=step)
        self._reports: dict[frozenset[tuple[Any, str]], NonfiniteReport | None] = {}
        self._faulty: dict[str, str] = {}  # the module of the last fault that an op was changed for, by op
        self._devices: tuple[str, ...] = DEVICE_TYPES
        self._may_skip = True  # whether a run is good in which GradScaler skips the step
        self.cure: Attempt | None = None

    def find(self) -> Policy | None:
        """Returns the policy of `cure`, or None."""
        watching = self._state.watch_optimizers()
        try:
            before = self._run({})
            fault = None if before is None else _fault(before)
            if before is not None and fault is not None:
                self._devices, self._may_skip = _devices_of(fault), before.found
                try:
                    self._remove_needless(self._narrow(self._remove_needless(self._widen(before, fault))))
                except _OutOfRunsError:
                    last = self._tried[-1]
                    self._tried[-1] = replace(last, result=f"{last.result}. The budget ({self._budget} runs) is spent")
        finally:
            watching.remove()
            self._restore()
        if self.cure is None:
            return None
        policy = current_policy()
        return policy.override_modules(self.cure.modules) if self.cure.modules else self._with(self.cure.overrides)

    def _restore(self) -> None:
        self._state.restore()
        for weight in () if self._model is None else self._model.parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                weight.grad = None

    def _run(self, changes: _Changes) -> NonfiniteReport | None:
        """Runs the step under changes of the policy, unless that has been done. None if it raised."""
        key = frozenset(changes.items())
        if key in self._reports:
            return self._reports[key]
        if len(self._tried) == self._budget:
            raise _OutOfRunsError
        self._restore()
        attempt = self._attempt(changes)
        try:
            with self._in_force(attempt), find_nonfinite(self._model, allow=self._allow) as report:
                self._step()
        except Exception as error:
            if not changes:
                raise
            self._tried.append(replace(attempt, result=f"raises {type(error).__name__}: {error}"))
            return self._reports.setdefault(key, None)
        if self._model is None and report._model is not None:
            self._model = report._model()
        call = _first_fault(report)
        where = "" if call is None else f"{call.kind} in {call.call.name}, {module_name(call.module)}"
        is_good = not report.found and (self._may_skip or not report.scaler.skipped)
        skips = f"GradScaler skips the step{where and ': '}{where}"
        result = where if report.found else skips if report.scaler.skipped else "finite"
        self._tried.append(replace(attempt, finite=is_good, result=result))
        if is_good and changes:
            self.cure = self._tried[-1]
        return self._reports.setdefault(key, report)

    def _attempt(self, changes: _Changes) -> Attempt:
        """The attempt with the overrides that its modules have already, because a new policy replaces them."""
        attempt = _attempt(changes)
        modules = {
            path: table if isinstance(table, str) else {**(self._table_of(path) or {}), **table}
            for path, table in attempt.modules.items()
        }
        return replace(attempt, modules=modules)

    def _table_of(self, path: str) -> Mapping[str, str] | None:
        """The overrides of a module; None if there is no such module, or its policy is of another kind."""
        try:
            policy = policy_of(self._model.get_submodule(path))  # type: ignore[union-attr]
        except AttributeError:  # no model, or a module of another one
            return None
        value = {} if policy is None else policy.value
        return value if isinstance(value, Mapping) else None

    @contextlib.contextmanager
    def _in_force(self, attempt: Attempt) -> Iterator[None]:
        if attempt.overrides:
            with use_policy(self._with(attempt.overrides), self._model):
                yield
            return
        if self._model is None or not attempt.modules:
            yield
            return
        with set_module_policy(self._model, attempt.modules):
            yield

    def _with(self, overrides: Mapping[str, str]) -> Policy:
        return current_policy().override(overrides, self._devices)

    def _widen(self, before: NonfiniteReport, fault: NonfiniteOrigin) -> _Changes:
        """Returns the first changes with which a run is good, from narrow to wide; none if nothing helps."""
        if fault.phase != "backward" and _converts(exact_key(fault.call.name)):
            return {}
        for way in _WAYS:
            changes = self._add(way, before, {})
            if changes:
                return changes
        parts = fault.module.split(".")
        for path in (".".join(parts[:end]) for end in reversed(range(len(parts)))):
            whole: _Changes = {(path, _WHOLE): "fp32"}
            for changes in (self._ops(path, "fp32", before, {}), whole):
                if changes and self._table_of(path) is not None:
                    self._run(changes)
                    if self.cure is not None:
                        return changes
        return {}

    def _add(self, way: _Way, report: NonfiniteReport | None, changes: _Changes) -> _Changes:
        """Adds changes for one fault after another until a run is good; none if that does not help."""
        before = self.cure
        while report is not None and len(changes) < way.most:
            more = changes | self._changes(way, report, changes)
            if more == changes:
                break
            changes, report = more, self._run(more)
            if self.cure is not before:
                return changes
        return {}

    def _narrow(self, changes: _Changes) -> _Changes:
        """Returns good changes with each op in the modules whose calls overflow, instead of everywhere, or none."""
        if not changes or not all(path is None and self._faulty.get(op) for path, op in changes):
            return {}
        narrow: _Changes = {(self._faulty[op], op): value for (_, op), value in changes.items()}
        before, report = self.cure, self._run(narrow)
        return self._add(_WAYS[0], report, narrow) if self.cure is before else narrow

    def _changes(self, way: _Way, report: NonfiniteReport, known: _Changes) -> _Changes:
        """The changes for the call at fault in a run that had the known ones."""
        fault = _fault(report)
        if fault is None:
            return {}
        if way.in_module and (not fault.module or self._table_of(fault.module) is None):
            return {}
        path = fault.module if way.in_module else None
        if way.whole:
            return {(path, _WHOLE): way.value}
        changes = self._ops(path, way.value, report, known)
        self._faulty.update({op: fault.module for _, op in changes})
        return changes

    def _ops(self, path: str | None, value: str, report: NonfiniteReport, known: _Changes) -> _Changes:
        done = {op for place, op in known if place == path}
        names = next((names for names in _suspects(report) if not set(names) <= done), [])
        return {(path, name): value for name in _legal(names, value, self._devices)}

    def _remove_needless(self, changes: _Changes) -> _Changes:
        for key in list(changes) if len(changes) > 1 else []:
            fewer = {one: value for one, value in changes.items() if one != key}
            before, _ = self.cure, self._run(fewer)
            if self.cure is not before:
                changes = fewer
        return changes
