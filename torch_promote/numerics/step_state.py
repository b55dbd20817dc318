"""Saves, restores and compares the state that a step changes.

NOTE [ What is state ]
Parameters, buffers and gradients of the model; the random number generators of Python, NumPy and PyTorch; objects that
the caller lists; and objects that the step refers to: see `found_in`. An optimizer that the step reaches in another way
is found at its first step. kept.py describes the saved state of an object.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import hashlib
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_promote.errors import OptionError, StepError
from torch_promote.integrations.compile import skip_frames
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = [
    "STATEFUL",
    "Keeper",
    "KeptTensor",
    "StepState",
    "add_bytes",
    "digest",
    "found_in",
    "is_random",
    "iterators_in",
]


# ---The saved state of a tensor, and hashes of tensors.


class KeptTensor:
    """The state of a tensor at construction. The gradient's values are saved together with the gradient."""

    __slots__ = ("_gradient", "_is_leaf", "_memory", "_requires_grad", "_tensor", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._memory = tensor.detach() if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) else None
        self._values = _elements(tensor.detach()).clone()
        self._gradient = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        """Restores the tensor."""
        tensor, memory = self._tensor, self._memory
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if self._is_leaf and tensor.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached in place
                    tensor.detach_()
            if memory is not None and _place(tensor) != _place(memory):
                tensor.data = memory
            _elements(tensor).copy_(self._values)
        if self._is_leaf:
            if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient


def add_bytes(found: Any, tensor: torch.Tensor) -> None:
    """Adds a tensor's dtype, shape and bits to a hash."""
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}".encode())
    data = tensor.detach()
    data = data.to_local() if hasattr(data, "to_local") else data
    if data.is_meta:
        return
    if data.layout is torch.sparse_coo:
        data = data.coalesce()
        add_bytes(found, data.indices())
        data = data.values()
    if data.is_quantized:
        data = data.int_repr()
    if data.layout is not torch.strided:
        data = data.to_dense()
    data = data.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.numel():
        found.update(data.view(torch.uint8).numpy())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.dtype, tensor.device, tensor.shape)
    return (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.layout)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element once: PyTorch does not copy into an expanded tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    repeated = [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor[tuple(slice(0, 1) if one else slice(None) for one in repeated)] if any(repeated) else tensor


# ---Saves the state of objects that a step changes, and restores it in place.
#
# NOTE [ What is kept of an object ]
# - Tensors: the values, the gradient's identity and values, `requires_grad`, and the memory that `tensor.data = ...`
#  replaces.
# - Modules: the parameters, buffers and submodules, their training flags and extra state, and attributes that are
#  tensors. Other attributes, such as counters, are left to the program.
# - Optimizers, schedulers and scalers: every attribute. `load_state_dict` would cast an optimizer's state to the dtype
#  of its weights, and a scaler's `state_dict` does not contain which optimizers it has unscaled.


#: Classes whose attributes are all saved.
_WHOLE = (Optimizer, LRScheduler, torch.amp.GradScaler)
#: Types whose state is saved if a step refers to an instance.
STATEFUL = (*_WHOLE, nn.Module, torch.Generator, random.Random)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_SEQUENCES = (list, collections.deque)
_ATOMS = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type(None))


class Keeper:
    """Saves objects and their parts, each once, and restores them."""

    def __init__(self) -> None:
        self._restorers: list[Callable[[], None]] = []
        self._known: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused

    def knows(self, one: Any) -> bool:
        """Whether the object is saved."""
        return id(one) in self._known

    def ids(self) -> set[int]:
        """The ids of the saved objects, as `digest` adds them to `seen`."""
        return {key for key, one in self._known.items() if not isinstance(one, tuple)}

    def keep(self, one: Any) -> bool:
        """Saves an object. Returns False if it has no state that can be saved."""
        if id(one) in self._known:
            return True
        if isinstance(one, _ATOMS):
            return False
        restorer = _restorer(one)
        if restorer is None:
            return False
        self._known[id(one)] = one
        self._restorers.append(restorer)
        for _, part in _parts(one):
            self.keep(part)
        return True

    def restore(self) -> None:
        """Restores everything in the order of saving: dicts before their items."""
        for restorer in self._restorers:
            restorer()


def digest(one: Any, seen: set[int]) -> str:
    """Returns a hash of an object's current state, without the parts in `seen`, and adds its parts to `seen`."""
    found = hashlib.blake2b(digest_size=16)
    _add(found, one, seen)
    return found.hexdigest()


def is_random(one: Any) -> bool:
    """Whether an object is a random number generator of PyTorch, Python or NumPy."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(one, (torch.Generator, random.Random, *of_numpy))


# --- the parts of an object


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, nn.Module):
        for name, kind in (("parameters", one._parameters), ("buffers", one._buffers), ("modules", one._modules)):
            yield name, kind if type(kind) in _DICTS else tuple(kind.values())  # torch.jit modules
        yield from _tensors_of(one).items()
    elif isinstance(one, _WHOLE):
        yield "attributes", vars(one)
    elif type(one) in _DICTS:
        for number, (key, value) in enumerate(one.items()):
            yield repr(key) if isinstance(key, _ATOMS) else str(number), value
            if isinstance(key, torch.Tensor):
                yield "key", key
    elif isinstance(one, (*_SEQUENCES, tuple)):
        for number, value in enumerate(one):
            yield str(number), value
    elif isinstance(one, torch.Tensor) and one.is_leaf and one.grad is not None:
        yield "grad", one.grad


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are tensors, but neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


# --- restoring


def _restorer(one: Any) -> Callable[[], None] | None:
    if isinstance(one, torch.Tensor):
        return KeptTensor(one).restore
    if isinstance(one, nn.Module):
        return _of_module(one)
    if isinstance(one, (*_WHOLE, tuple)):
        return lambda: None  # its parts are restored separately
    if type(one) in _DICTS:
        return _of_dict(one)
    if type(one) in (*_SEQUENCES, set):
        return _of_collection(one)
    return _of_state(one)


def _of_module(module: nn.Module) -> Callable[[], None]:
    training, tensors = module.training, _tensors_of(module)
    before = {name: vars(module)[name] for name in vars(module)}
    has_more = type(module).get_extra_state is not nn.Module.get_extra_state
    more = copy.deepcopy(module.get_extra_state()) if has_more else None

    def restore() -> None:
        module.training = training
        for name in {*tensors, *_tensors_of(module)}:
            if name in before:
                vars(module)[name] = before[name]
            else:
                vars(module).pop(name, None)
        if has_more:
            module.set_extra_state(copy.deepcopy(more))

    return restore


def _of_dict(one: dict[Any, Any]) -> Callable[[], None]:
    items = list(one.items())
    if any(isinstance(value, torch.Tensor) and hasattr(value, "to_local") for _, value in items):
        return lambda: None  # fully_shard swaps these tensors itself

    def restore() -> None:
        now = list(one.items())
        if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items, strict=True)):
            one.clear()
            one.update(items)

    return restore


def _of_collection(one: Any) -> Callable[[], None]:
    items = list(one)

    def restore() -> None:
        if len(one) != len(items) or any(a is not b for a, b in zip(one, items, strict=True)):
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(items)

    return restore


def _of_state(one: Any) -> Callable[[], None] | None:
    """For objects whose state is read and written as a whole, including arrays and random number generators."""
    access = _access(one)
    if access is None:
        return None
    get, put = access
    kept = copy.deepcopy(get())
    return lambda: put(copy.deepcopy(kept))


def _access(one: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Functions that read an object's state, and write it."""
    if isinstance(one, type):
        return None
    if isinstance(one, random.Random):
        return one.getstate, one.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(one) is numpy.ndarray:
        return lambda: one, lambda kept: one.__setitem__(..., kept)
    if numpy is not None and isinstance(one, numpy.random.Generator):
        bits = one.bit_generator
        return lambda: bits.state, lambda kept: setattr(bits, "state", kept)
    for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(one, get, None)) and callable(getattr(one, put, None)):
            return getattr(one, get), getattr(one, put)
    return None


# --- hashes


def _add(found: Any, one: Any, seen: set[int]) -> None:
    if isinstance(one, _ATOMS):
        found.update(repr(one).encode())
        return
    if id(one) in seen:
        found.update(b"seen")
        return
    found.update(type(one).__name__.encode())
    if not (isinstance(one, (torch.Tensor, nn.Module, *_WHOLE, tuple)) or type(one) in (*_DICTS, *_SEQUENCES, set)):
        access = _access(one)
        if access is not None:
            seen.add(id(one))
            _add_state(found, access[0]())
        return
    if isinstance(one, torch.Tensor):
        add_bytes(found, one)
    elif isinstance(one, set):
        found.update(repr(sorted(map(repr, one))).encode())
    elif isinstance(one, nn.Module):
        found.update(str(one.training).encode())
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            _add_state(found, one.get_extra_state())
    if not isinstance(one, tuple):  # some tuples are temporary objects
        seen.add(id(one))
    for name, part in _parts(one):
        found.update(name.encode())
        _add(found, part, seen)


def _add_state(found: Any, state: Any) -> None:
    """Adds a state that is a temporary object, whose parts are therefore not in `seen`."""
    if type(state) in (*_DICTS, *_SEQUENCES, tuple) or isinstance(state, torch.Tensor):
        for name, part in _parts(state):
            found.update(name.encode())
            _add_state(found, part)
        if isinstance(state, torch.Tensor):
            add_bytes(found, state)
        return
    with contextlib.suppress(Exception):  # an object without access to its content
        found.update(pickle.dumps(state))


# ---Finds the objects that a step refers to: objects with state, and iterators, whose state cannot be restored.


def found_in(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the objects with state that a function refers to, with the function's names for them.

    It searches the function's closure, the globals that its code names, the object of a bound method, arguments of
    `functools.partial`, functions of the same module that it calls, and one level into lists, dicts and objects.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> def make():
        ...     optimizer = torch.optim.SGD([weight])
        ...     return lambda: optimizer.step()
        >>> [name for name, _ in found_in(make())]
        ['optimizer']
    """
    for name, value in _variables(step, set()):
        for inner, one in _one_level(name, value):
            if (isinstance(one, STATEFUL) or is_random(one)) and not isinstance(one, type):
                yield inner, one


def iterators_in(step: Callable[..., Any]) -> list[str]:
    """Returns the names of iterators that a function refers to. Items drawn from them cannot be drawn again.

    Example:
        >>> batches = iter([1, 2])
        >>> iterators_in(lambda: next(batches))
        ['batches']
    """
    return [
        inner
        for name, value in _variables(step, set())
        for inner, one in _one_level(name, value)
        if isinstance(one, Iterator) and not isinstance(one, type)
    ]


def _variables(step: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(step) in seen:
        return
    seen.add(id(step))
    if isinstance(step, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(step.args))
        yield from step.keywords.items()
        yield from _variables(step.func, seen)
        return
    owner = getattr(step, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield "self", owner
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not inspect.isfunction(function):
        call = getattr(type(step), "__call__", None)  # noqa: B004
        if inspect.isfunction(call) and not isinstance(step, type):
            yield from _variables(call.__get__(step), seen)
        return
    scope = {**_globals(function), **_cells(function)}
    for name, value in scope.items():
        yield name, value
        is_own = inspect.isfunction(value) and value.__globals__ is function.__globals__
        if is_own or isinstance(value, types.MethodType):
            yield from _variables(value, seen)


def _globals(function: types.FunctionType) -> dict[str, Any]:
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def _names(code: types.CodeType) -> Iterable[str]:
    """The names that code uses, including those of nested functions."""
    found = dict.fromkeys(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found.update(dict.fromkeys(_names(one)))
    return found


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an unassigned variable
            continue
    return found


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in list(value.items()))
    elif not isinstance(value, (*STATEFUL, type, nn.Module, types.ModuleType, types.FunctionType)):
        yield from ((f"{name}.{key}", one) for key, one in list(getattr(value, "__dict__", {}).items()))


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
