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

__all__ = ["Attempt", "Findings", "find_cure", "next_override"]


#: The maximum number of ops that get an override before modules are tried.
_MOST_OPS = 8


class Findings(Protocol):
    """The results of a run under `find_nonfinite`."""

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

    def to_dict(self) -> dict[str, Any]:
        """Returns the run as JSON-compatible values."""
        return {
            "overrides": dict(self.overrides),
            "modules": dict(self.modules),
            "finite": self.finite,
            "result": self.result,
        }

    def __str__(self) -> str:
        parts = [f"overrides={dict(self.overrides)}"] if self.overrides else []
        modules = ", ".join(f"{path!r}: {policy}" for path, policy in self.modules.items())
        parts += [f"set_module_policy(model, {{{modules}}})"] if modules else []
        return f"{' and '.join(parts) or 'as it is'}: {self.result}"


def find_cure(
    step: Callable[[], Any],
    model: nn.Module | None,
    check: Callable[[], contextlib.AbstractContextManager[Findings]],
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
    runs = _Runs(step, model, check, tried)
    with _same_state(model, step) as restore:
        runs.restore = restore
        before = runs.under({})
        if before is None or before.origin is None or before.origin.kind in ("mathematics", "data"):
            return None
        runs.devices = _devices(before.origin)
        for value in ("fp32", "bfloat16"):
            overrides = _override_ops(runs, before, value)
            if overrides is not None:
                return _policy(_without_needless(runs, overrides), runs.devices)
        return _override_modules(runs, before, model)


class _Runs:
    """Runs the step and records the runs."""

    def __init__(
        self,
        step: Callable[[], Any],
        model: nn.Module | None,
        check: Callable[[], contextlib.AbstractContextManager[Findings]],
        tried: list[Attempt],
    ) -> None:
        self._step = step
        self._model = model
        self._check = check
        self._tried = tried
        self._known: dict[frozenset[tuple[str, str]], Findings | None] = {}
        self.restore: Callable[[], None] = lambda: None
        self.devices: tuple[str, ...] = DEVICE_TYPES

    def under(self, overrides: Mapping[str, str]) -> Findings | None:
        """Runs the step under overrides, unless that has been done already. None if it raised."""
        key = frozenset(overrides.items())
        if key not in self._known:
            self._known[key] = self.run(overrides)
        return self._known[key]

    def run(
        self, overrides: Mapping[str, str] | None = None, module: tuple[str, Policy] | None = None
    ) -> Findings | None:
        """Runs the step under overrides in every region, or with the policy of a module. None if it raised."""
        overrides = dict(overrides or {})
        modules = {} if module is None else {module[0]: repr(module[1])}
        self.restore()
        try:
            with _in_force(overrides, self.devices), _of_module(self._model, module), self._check() as report:
                self._step()
        except Exception as error:
            if not overrides and not modules:
                raise
            self._tried.append(Attempt(overrides, modules, False, f"raises {type(error).__name__}: {error}"))
            return None
        origin = report.origin
        result = "finite" if origin is None else f"{origin.kind} in {origin.call.name}, {origin.module or 'no module'}"
        self._tried.append(Attempt(overrides, modules, origin is None, result))
        return report


def _override_ops(runs: _Runs, found: Findings, value: str) -> dict[str, str] | None:
    """Adds an override for the op that overflows, and for each one that overflows next, until none does."""
    overrides: dict[str, str] = {}
    while found.origin is not None and len(overrides) < _MOST_OPS:
        added = next((names for names in _blamed(found) if not set(names) <= set(overrides)), None)
        if added is None or not (legal := [name for name in added if _is_legal(name, value, runs.devices)]):
            return None
        if set(legal) <= set(overrides):
            return None
        overrides.update(dict.fromkeys(legal, value))
        result = runs.under(overrides)
        if result is None:
            return None
        found = result
    return overrides if found.origin is None else None


def _blamed(found: Findings) -> Iterator[list[str]]:
    """The ops whose dtype may be at fault, most likely first."""
    origin = found.origin
    assert origin is not None
    if origin.phase == "backward":  # a backward runs in the dtypes that the forward chose
        ops = found.ops_at(origin.module, origin.line)
        of_node = [op for op in ops if _plain(op) and origin.node.lower().startswith(f"{_plain(op)}backward")]
        for names in (of_node, ops):
            if names:
                yield [exact_key(name) for name in names]
        return
    yield [exact_key(origin.call.name)]
    if origin.inner != origin.call.name:
        yield [exact_key(origin.inner)]


def _plain(name: str) -> str:
    return name.partition("::")[2].partition(".")[0].replace("_", "")


def _devices(origin: NonfiniteOrigin) -> tuple[str, ...]:
    """The device types whose regions were open at the origin, or all if there was none."""
    return tuple(device for device, _ in origin.call.autocast if device in DEVICE_TYPES) or DEVICE_TYPES


def next_override(found: Findings) -> str | None:
    """Returns the op that `find_cure` would run in float32 first, or None."""
    origin = found.origin
    if origin is None or origin.kind in ("mathematics", "data"):
        return None
    devices = _devices(origin)
    return next((name for names in _blamed(found) for name in names if _is_legal(name, "fp32", devices)), None)


def _is_legal(name: str, value: str, devices: tuple[str, ...]) -> bool:
    try:
        Policy.stock().override({name: value}, devices)
    except PolicyError:
        return False
    return not name.startswith(("to.", "_to_copy.", "copy_.", "detach.", "view.", "t."))


def _without_needless(runs: _Runs, overrides: dict[str, str]) -> dict[str, str]:
    """Removes each override that is not needed for the step to be finite."""
    for name in list(overrides) if len(overrides) > 1 else []:
        fewer = {key: value for key, value in overrides.items() if key != name}
        result = runs.under(fewer)
        if result is not None and result.origin is None:
            overrides = fewer
    return overrides


def _override_modules(runs: _Runs, found: Findings, model: nn.Module | None) -> Policy | None:
    """Gives the origin's module a policy, then its parents: for the op, then for all ops with lower dtypes."""
    origin = found.origin
    if model is None or origin is None:
        return None
    names = [name for name in next(_blamed(found), []) if _is_legal(name, "fp32", runs.devices)]
    policies = [_in_fp32(names, runs.devices)] if names else []
    policies.append(_in_fp32(_lowering(runs.devices), runs.devices))
    paths = {path for path, _ in model.named_modules()}
    path = origin.module
    while True:
        for policy in policies if path in paths else []:
            result = runs.run(module=(path, policy))
            if result is not None and result.origin is None:
                return _of_called_ops(runs, path, policy, result)
        if not path:
            return None
        path = path.rpartition(".")[0]


def _of_called_ops(runs: _Runs, path: str, policy: Policy, result: Findings) -> Policy:
    """Removes from a successful module policy the ops that the module did not call, and those that do not need it."""
    called = {exact_key(name) for name in result.ops_in(path)}
    needed = sorted({exact_key(one.overload) for one in policy.diff("stock")} & called)
    without = [[other for other in needed if other != name] for name in needed] if len(needed) <= _MOST_OPS else []
    last = policy
    for names in [needed, *without]:
        names = [name for name in names if name in needed]
        last = _in_fp32(names, runs.devices)
        if not names or last == policy:
            continue
        again = runs.run(module=(path, last))
        if again is not None and again.origin is None:
            policy, needed = last, names
        elif names == needed:
            break
    if last != policy:
        runs.run(module=(path, policy))  # the last run is the one that worked
    return policy


def _in_fp32(names: list[str], devices: tuple[str, ...]) -> Policy:
    return Policy.stock().override(dict.fromkeys(names, "fp32"), devices)


def _lowering(devices: tuple[str, ...]) -> list[str]:
    """The ops that PyTorch's table runs in a lower dtype on one of the devices."""
    wanted = CastPolicy.lower_precision_fp
    return [exact_key(name) for name in rows_by_name() if any(stock_policy(name, d) is wanted for d in devices)]


def _policy(overrides: Mapping[str, str], devices: tuple[str, ...]) -> Policy:
    return (default_policy() or Policy.stock()).override(overrides, devices)


@contextlib.contextmanager
def _in_force(overrides: Mapping[str, str], devices: tuple[str, ...] = DEVICE_TYPES) -> Iterator[None]:
    """Puts overrides in force in every region that is opened in the block, including torch.autocast."""
    if not overrides:
        yield
        return
    present = installed()
    with contextlib.ExitStack() as stack:
        before = set_default_policy(_policy(overrides, devices))
        stack.callback(set_default_policy, before)
        if present is None:
            stack.enter_context(installed_as())
        else:
            merged = {**present.overrides, **overrides}
            stack.enter_context(installed_as(policy=present.policy, overrides=merged, cache=present.cache))
        yield


@contextlib.contextmanager
def _of_module(model: nn.Module | None, policy: tuple[str, Policy] | None) -> Iterator[None]:
    if model is None or policy is None:
        yield
        return
    module = model.get_submodule(policy[0])
    before = policy_of(module)
    set_module_policy(model, {policy[0]: policy[1]})
    try:
        yield
    finally:
        detach(module)
        if before is not None:
            attach(module, before)


@contextlib.contextmanager
def _same_state(model: nn.Module | None, step: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Yields a function that restores the state, except for gradients that have become non-finite."""
    state = StepState(model, step=step)
    watching = state.watch_optimizers()

    def restore() -> None:
        state.restore()
        for weight in () if model is None else model.parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                weight.grad = None

    try:
        yield restore
    finally:
        watching.remove()
        restore()
