"""Saves, restores and compares the state that a step changes.

NOTE [ What is state ]
Parameters, buffers and gradients of the model; the random number generators of Python, NumPy and PyTorch; objects that
the caller lists; and objects that the step refers to: see `found_in`. An optimizer that the step reaches in another way
is found at its first step. kept.py describes the saved state of an object.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_promote.errors import OptionError, StepError
from torch_promote.integrations.compile import skip_frames
from torch_promote.numerics.runs.found import found_in
from torch_promote.numerics.runs.kept import Keeper, digest, is_random
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = ["StepState"]

_GLOBAL = "random number generators and modes"


class StepState:
    """The state before a step. `restore` restores it in place.

    It holds one copy of the state, each tensor once, on the tensor's device. For training with AdamW from its second
    step on, that is the memory of the weights, the gradients and two moments.

    Args:
        model: The model; None if there is none.
        restore: More state: modules, optimizers, tensors, generators, lists, dicts, and objects with `state_dict` and
            `load_state_dict`, or with `get_state` and `set_state`.
        step: The step, which is searched for more state.

    Raises:
        OptionError: An object in `restore` is of another kind.
        StepError: A module has lazy parameters, which its first call will initialize.
    """

    def __init__(self, model: nn.Module | None, restore: Iterable[Any] = (), step: Callable[..., Any] | None = None):
        self._keeper = Keeper()
        self._parts: dict[str, Any] = {}
        self._process = _OfTheProcess()
        self._add(_GLOBAL, self._process)
        if model is not None:
            self._add("model", model)
        for number, one in enumerate(restore):
            if not self._add(f"restore[{number}]", one):
                raise OptionError(
                    f"restore[{number}] is a {type(one).__name__}, whose state cannot be restored. Legal: modules, "
                    f"optimizers, tensors, generators, lists, dicts, objects with state_dict and load_state_dict, and "
                    f"objects with get_state and set_state."
                )
        for name, one in found_in(step) if step is not None else ():
            self._add(name, one)
        self._hashes = self.hashes()

    def _add(self, name: str, one: Any) -> bool:
        if self._keeper.knows(one):
            return True
        if isinstance(one, nn.Module):
            _check_lazy(name, one)
        if not self._keeper.keep(one):
            return False
        while name in self._parts:
            name += "'"
        self._parts[name] = one
        return True

    def watch_optimizers(self) -> Any:
        """Adds optimizers that step for the first time, until the handle's `remove()` is called."""

        def about_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self._keeper.knows(optimizer):
                before = self._keeper.ids()
                self._add(f"{type(optimizer).__name__} that the step uses", optimizer)
                self._hashes[next(reversed(self._parts))] = digest(optimizer, before)

        skip_frames(about_to_step)
        return register_optimizer_step_pre_hook(about_to_step)

    def loss_scale(self) -> float:
        """Returns the current scale of the GradScaler in the state, or 1.0 if there is none."""
        scalers = [one for one in self._parts.values() if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        return float(scalers[0].get_scale()) if scalers else 1.0

    def restore(self) -> None:
        """Restores the state."""
        self._keeper.restore()

    def use_other_random_numbers(self, which: int = 1) -> None:
        """Seeds all generators, until `restore` is called.

        Args:
            which: 1, 2, ...: each gives other numbers, derived from the current state of PyTorch's generator.
        """
        seed = int(torch.randint(2**31, ())) ^ (0x5EED * which)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        for one in self._parts.values():
            if isinstance(one, torch.Generator):
                one.manual_seed(seed)
            elif is_random(one) and hasattr(one, "bit_generator"):
                one.bit_generator.state = type(one.bit_generator)(seed).state
            elif is_random(one):
                one.seed(seed)

    def hashes(self) -> dict[str, str]:
        """Returns a hash of each part of the current state, by name. Shared objects count for the first part."""
        seen: set[int] = set()
        return {name: digest(part, seen) for name, part in self._parts.items()}

    def check(self) -> None:
        """Checks that the current state equals the saved state.

        Raises:
            StepError: It differs. The message names the parts.
        """
        now = self.hashes()
        different = [name for name in self._parts if now[name] != self._hashes[name]]
        if different:
            raise StepError(
                f"the state before the step could not be restored: {', '.join(different)} "
                f"{'differs' if len(different) == 1 else 'differ'}. Pass the changed objects in restore=(...)."
            )


def _check_lazy(name: str, module: nn.Module) -> None:
    lazy = [path for path, one in (*module.named_parameters(), *module.named_buffers()) if is_lazy(one)]
    if lazy:
        raise StepError(
            f"{name} has lazy parameters, whose initialization by the first call cannot be undone: "
            f"{', '.join(lazy[:3])}{', ...' if lazy[3:] else ''}. Call it once on a batch first."
        )


class _OfTheProcess:
    """Random number generators, and global modes that a step may change."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")
        self._on_gpu = torch.cuda.is_initialized()

    def get_state(self) -> tuple[Any, ...]:
        return (
            random.getstate(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if self._on_gpu else None,
            None if self._numpy is None else self._numpy.random.get_state(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            [torch.get_autocast_dtype(device_type) for device_type in DEVICE_TYPES],
        )

    def set_state(self, state: tuple[Any, ...]) -> None:
        python, cpu, on_gpu, of_numpy, with_gradients, dtype, dtypes = state
        random.setstate(python)
        torch.set_rng_state(cpu)
        if self._on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        if self._numpy is not None:
            self._numpy.random.set_state(of_numpy)
        torch.set_grad_enabled(with_gradients)
        torch.set_default_dtype(dtype)
        for device_type, one in zip(DEVICE_TYPES, dtypes, strict=True):
            torch.set_autocast_dtype(device_type, one)
