"""Runs a single call like the candidate, on the reference's inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torch_promote import _C
from torch_promote.checking.overloads import argument_names, leaves, overload_name
from torch_promote.numerics.ranges.unnoticed import can_be_read
from torch_promote.numerics.records.calls import Call
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.named import Value
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.policy import Policy
from torch_promote.reference.autocast import replace_tensors, tensors_in
from torch_promote.regions.autocast import my_autocast

__all__ = ["LocalRuns", "random_state", "set_random_state"]

_keys: Any = torch._C
_HIDDEN = _keys.DispatchKeySet(_keys._dispatch_key_parse(_C.dispatch_observer_key()))

#: The state of the generators: the CPU's, the GPUs', and those among a call's arguments.
RandomState = tuple[torch.Tensor, list[torch.Tensor] | None, list[torch.Tensor]]
#: Arguments that batch and instance norm write to, although their schemas do not declare it.
_STATISTICS = frozenset({"running_mean", "running_var"})


class LocalRuns:
    """Runs calls of the reference in the way in which the candidate ran them.

    Args:
        candidate: The candidate's policy.
    """

    def __init__(self, candidate: Policy) -> None:
        self._policy = candidate.without_modules()
        self._regions: dict[Any, list[my_autocast]] = {}
        self.refused: dict[str, str] = {}

    def run(self, op: torch._ops.OpOverload, args: list[Any], as_in: Call) -> list[torch.Tensor] | None:
        """Runs a call.

        Args:
            op: The overload.
            args: The reference's arguments. They are not modified.
            as_in: The candidate's call: its dtypes, policy and regions.

        Returns:
            The tensors among the results; None if the call cannot be run alone (`refused` has the reason by overload).
        """
        closed = {type(one).__name__ for one in leaves(args) if isinstance(one, torch.Tensor) and not can_be_read(one)}
        if closed:  # without their own dispatch, kernels would read out of bounds
            self.refused.setdefault(overload_name(op), f"{', '.join(sorted(closed))} has no data of its own")
            return None
        dtypes = {info.name: info.dtype for info in as_in.ran_with}
        writes = {one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        writes |= _STATISTICS
        try:
            with _hidden(), torch.no_grad():
                given = {
                    name: _converted(name, value, dtypes, name in writes)
                    for name, value in zip(argument_names(op), args, strict=True)
                }
                keyword_only = {one.name for one in op._schema.arguments if one.kwarg_only}
                positional = [value for name, value in given.items() if name not in keyword_only]
                named = {name: value for name, value in given.items() if name in keyword_only}
                with contextlib.ExitStack() as stack:
                    for region in self._regions_of(overload_name(op), as_in):
                        stack.enter_context(region)
                    results = op(*positional, **named)
        except Exception as error:  # an op may refuse the dtypes, or a second call
            self.refused.setdefault(overload_name(op), f"{type(error).__name__}: {error}")
            return None
        return [one for one in leaves(results if isinstance(results, list | tuple) else [results]) if one is not None]

    def _regions_of(self, name: str, call: Call) -> list[my_autocast]:
        key = call.autocast, name, call.policy
        found = self._regions.get(key)
        if found is None:
            overrides: dict[str, Value] = {}
            if call.policy is not None and self._says_otherwise(name, call):
                overrides[exact_key(name)] = call.policy
            found = self._regions[key] = [
                my_autocast(device, dtype=dtype, policy=self._policy, overrides=overrides)
                for device, dtype in call.autocast
            ]
        return found

    def _says_otherwise(self, name: str, call: Call) -> bool:
        if call.policy is CastPolicy.fallthrough:
            return False
        return any(self._policy.lookup(exact_key(name), device) != call.policy for device, _ in call.autocast)


def _converted(name: str, value: Any, dtypes: Mapping[str, torch.dtype], copy: bool) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    chosen = {
        path: tensor.detach().to(dtypes.get(path, tensor.dtype), copy=copy) for path, tensor in tensors_in(name, value)
    }
    return replace_tensors(name, value, chosen) if chosen else value


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Hides ops from observers and modes, but not from autocast."""
    random = random_state()
    try:
        with (
            _keys.DisableTorchFunction(),
            _keys._DisableTorchDispatch(),
            _keys._ExcludeDispatchKeyGuard(_HIDDEN),
        ):
            yield
    finally:
        set_random_state(random)


def random_state(args: Iterable[Any] = ()) -> RandomState:
    """Returns the state of PyTorch's generators, and of those among a call's arguments."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, [one.get_state() for one in _generators(args)]


def set_random_state(state: RandomState, args: Iterable[Any] = ()) -> None:
    """Sets the state of PyTorch's generators, and of those among a call's arguments."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    for one, own in zip(_generators(args), state[2], strict=False):  # only one of the runs may pass a generator
        one.set_state(own)


def _generators(args: Iterable[Any]) -> list[torch.Generator]:
    return [one for one in args if isinstance(one, torch.Generator)]
