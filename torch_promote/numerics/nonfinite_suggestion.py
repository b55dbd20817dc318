"""Finds the smallest override that makes a program finite, by running the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from torch_promote.errors import PolicyError
from torch_promote.numerics.nonfinite_finder import NonfiniteOrigin
from torch_promote.numerics.step_state import StepState
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, rows_by_name
from torch_promote.policy.policy import Policy
from torch_promote.regions.defaults import default_policy, set_default_policy
from torch_promote.regions.installation import installed, installed_as
from torch_promote.regions.module_forward import attach, detach, policy_of
from torch_promote.regions.module_policies import set_module_policy

__all__ = ["Attempt", "find_cure", "next_override"]

#: The maximum number of ops that get an override before modules are tried.
_MOST_OPS = 8
#: Ops that convert or pass on their argument; no override changes their results.
_CONVERTING = ("to.", "_to_copy.", "copy_.", "detach.", "view.", "t.")


class NonfiniteReport(Protocol):
    """What the search reads of a `find_nonfinite.NonfiniteReport`."""

    origin: NonfiniteOrigin | None

    def ops_at(self, module: str, line: str) -> list[str]:
        """The ops that the forward called in a module at a line."""

    def ops_in(self, module: str) -> list[str]:
        """The ops that the forward called in a module and its submodules."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of the step.

    Attributes:
        overrides: The overrides in force in every region, such as {"mm.default": "fp32"}.
        modules: The policy of a module, such as {"blocks.3": "Policy.stock().override({'linear': 'fp32'})"}.
        finite: Whether all non-finite values were benign.
        result: The result, in a sentence.
    """

    overrides: Mapping[str, str]
    modules: Mapping[str, str]
    finite: bool
    result: str

    def __str__(self) -> str:
        parts = [f"overrides={dict(self.overrides)}"] if self.overrides else []
        modules = ", ".join(f"{path!r}: {policy}" for path, policy in self.modules.items())
        parts += [f"set_module_policy(model, {{{modules}}})"] if modules else []
        return f"{' and '.join(parts) or 'as it is'}: {self.result}"


def next_override(report: NonfiniteReport) -> str | None:
    """Returns the op that `find_cure` would run in float32 first, or None."""
    origin = report.origin
    if origin is None or origin.kind in ("mathematics", "data"):
        return None
    devices = _devices_of(origin)
    return next((name for names in _suspects(report) for name in names if _is_legal(name, "fp32", devices)), None)


def find_cure(
    step: Callable[[], Any],
    model: nn.Module | None,
    check: Callable[[], contextlib.AbstractContextManager[NonfiniteReport]],
    tried: list[Attempt],
) -> Policy | None:
    """Runs a step under overrides until it is finite.

    Args:
        step: Runs the step.
        model: The model, or None. Its state is restored between the runs, and that of objects that the step refers to;
            see `StepState`.
        check: Creates the `find_nonfinite` block for a run.
        tried: Receives the runs.

    Returns:
        The policy of the finite run in `tried` that has the fewest overrides, or None.
    """
    state = StepState(model, step=step)
    watching = state.watch_optimizers()
    search = _Search(step, model, check, tried, state)
    try:
        return search.find()
    finally:
        watching.remove()
        search.restore()


class _Search:
    """Runs the step under overrides, each set once."""

    def __init__(
        self,
        step: Callable[[], Any],
        model: nn.Module | None,
        check: Callable[[], contextlib.AbstractContextManager[NonfiniteReport]],
        tried: list[Attempt],
        state: StepState,
    ) -> None:
        self._step, self._model, self._check, self._tried, self._state = step, model, check, tried, state
        self._reports: dict[frozenset[tuple[str, str]], NonfiniteReport | None] = {}
        self._devices: tuple[str, ...] = DEVICE_TYPES

    def restore(self) -> None:
        """Restores the state, except for gradients that have become non-finite."""
        self._state.restore()
        for weight in () if self._model is None else self._model.parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                weight.grad = None

    def find(self) -> Policy | None:
        """Returns the policy, or None."""
        before = self._run_ops({})
        if before is None or before.origin is None or before.origin.kind in ("mathematics", "data"):
            return None
        self._devices = _devices_of(before.origin)
        for value in ("fp32", "bfloat16"):
            overrides = self._override_ops(before, value)
            if overrides is not None:
                return self._policy(self._without_needless(overrides))
        return self._override_module(before)

    def _run_ops(self, overrides: Mapping[str, str]) -> NonfiniteReport | None:
        """Runs the step under overrides in every region, unless that has been done. None if it raised."""
        key = frozenset(overrides.items())
        if key not in self._reports:
            self._reports[key] = self._run(overrides, None)
        return self._reports[key]

    def _run(self, overrides: Mapping[str, str], module: tuple[str, Policy] | None) -> NonfiniteReport | None:
        modules = {} if module is None else {module[0]: repr(module[1])}
        self.restore()
        try:
            with self._with_ops(overrides), self._with_module(module), self._check() as report:
                self._step()
        except Exception as error:
            if not overrides and not modules:
                raise
            self._tried.append(Attempt(dict(overrides), modules, False, f"raises {type(error).__name__}: {error}"))
            return None
        origin = report.origin
        result = "finite" if origin is None else f"{origin.kind} in {origin.call.name}, {origin.module or 'no module'}"
        self._tried.append(Attempt(dict(overrides), modules, origin is None, result))
        return report

    def _override_ops(self, report: NonfiniteReport, value: str) -> dict[str, str] | None:
        """Adds an override for the op that overflows, and for each one that overflows next, until none does."""
        overrides: dict[str, str] = {}
        while report.origin is not None and len(overrides) < _MOST_OPS:
            names = next((names for names in _suspects(report) if not set(names) <= set(overrides)), [])
            legal = [name for name in names if _is_legal(name, value, self._devices)]
            if set(legal) <= set(overrides):
                return None
            overrides.update(dict.fromkeys(legal, value))
            result = self._run_ops(overrides)
            if result is None:
                return None
            report = result
        return overrides if report.origin is None else None

    def _without_needless(self, overrides: dict[str, str]) -> dict[str, str]:
        """Removes each override that is not needed for the step to be finite."""
        for name in list(overrides) if len(overrides) > 1 else []:
            fewer = {key: value for key, value in overrides.items() if key != name}
            report = self._run_ops(fewer)
            if report is not None and report.origin is None:
                overrides = fewer
        return overrides

    def _override_module(self, report: NonfiniteReport) -> Policy | None:
        """Gives the origin's module a policy, then its parents: for the op, then for all ops with lower dtypes.

        That helps if the regions have policies of their own.
        """
        if self._model is None or report.origin is None:
            return None
        lowering = [
            exact_key(name)
            for name in rows_by_name()
            if any(stock_policy(name, device) is CastPolicy.lower_precision_fp for device in self._devices)
        ]
        suspects = [name for name in next(_suspects(report), []) if _is_legal(name, "fp32", self._devices)]
        path, paths = report.origin.module, {path for path, _ in self._model.named_modules()}
        while True:
            for names in filter(None, (suspects, lowering)) if path in paths else ():
                found = self._run({}, (path, self._in_fp32(names)))
                if found is not None and found.origin is None:
                    return self._of_called_ops(path, names, found)
            if not path:
                return None
            path = path.rpartition(".")[0]

    def _of_called_ops(self, path: str, names: list[str], report: NonfiniteReport) -> Policy:
        """Removes from a successful policy of a module the ops that the module did not call."""
        called = {exact_key(name) for name in report.ops_in(path)}
        fewer = [name for name in names if name in called]
        if not fewer or fewer == names:
            return self._in_fp32(names)
        again = self._run({}, (path, self._in_fp32(fewer)))
        if again is not None and again.origin is None:
            return self._in_fp32(fewer)
        self._run({}, (path, self._in_fp32(names)))  # the last run is the one that worked
        return self._in_fp32(names)

    def _in_fp32(self, names: list[str]) -> Policy:
        return Policy.stock().override(dict.fromkeys(names, "fp32"), self._devices)

    def _policy(self, overrides: Mapping[str, str]) -> Policy:
        return (default_policy() or Policy.stock()).override(overrides, self._devices)

    @contextlib.contextmanager
    def _with_ops(self, overrides: Mapping[str, str]) -> Iterator[None]:
        """Puts overrides in force in every region that is opened in the block, including torch.autocast."""
        if not overrides:
            yield
            return
        present = installed()
        with contextlib.ExitStack() as stack:
            stack.callback(set_default_policy, set_default_policy(self._policy(overrides)))
            if present is None:
                stack.enter_context(installed_as())
            else:
                merged = {**present.overrides, **overrides}
                stack.enter_context(installed_as(policy=present.policy, overrides=merged, cache=present.cache))
            yield

    @contextlib.contextmanager
    def _with_module(self, policy: tuple[str, Policy] | None) -> Iterator[None]:
        if self._model is None or policy is None:
            yield
            return
        module = self._model.get_submodule(policy[0])
        before = policy_of(module)
        set_module_policy(self._model, {policy[0]: policy[1]})
        try:
            yield
        finally:
            detach(module)
            if before is not None:
                attach(module, before)


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
