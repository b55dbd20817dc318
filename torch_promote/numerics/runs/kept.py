"""Saves the state of objects that a step changes, and restores it in place.

NOTE [ What is kept of an object ]
- Tensors: the values, the gradient's identity and values, `requires_grad`, and the memory that `tensor.data = ...`
  replaces.
- Modules: the parameters, buffers and submodules, their training flags and extra state, and attributes that are
  tensors. Other attributes, such as counters, are left to the program.
- Optimizers, schedulers and scalers: every attribute. `load_state_dict` would cast an optimizer's state to the dtype of
  its weights, and a scaler's `state_dict` does not contain which optimizers it has unscaled.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torch_promote.numerics.runs.kept_tensor import KeptTensor, add_bytes

__all__ = ["STATEFUL", "Keeper", "digest", "is_random"]

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
