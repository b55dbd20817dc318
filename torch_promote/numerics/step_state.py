"""Saves the state that a step changes, and restores it in place. Repeats a call without a change of random numbers.

NOTE [ What is state ]
Parameters, buffers and gradients of the model; the random number generators of Python, NumPy and PyTorch; objects that
the caller lists; and objects that the step refers to: see `objects_of`. An optimizer that the step reaches in another
way is saved when it steps for the first time.

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
import functools
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_promote.checking.comparison import compare
from torch_promote.errors import OptionError, StepError
from torch_promote.integrations.compile import skip_frames
from torch_promote.observe.ops import facts_of, produced

#: Classes whose attributes are all saved.
_WHOLE = (Optimizer, LRScheduler, torch.amp.GradScaler)
_STATEFUL = (*_WHOLE, nn.Module, torch.Generator, random.Random)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_COLLECTIONS = (list, collections.deque, set)
_ATOMS = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type(None))


_Restore = Callable[[], None]


class StepState:
    """The state before a step, which `restore` restores in place; the step is searched for more than the model's."""

    # One copy, each tensor once, on its device: with AdamW, the memory of the weights, the gradients and two moments.

    def __init__(self, model: nn.Module | None, restore: Iterable[Any] = (), step: Callable[..., Any] | None = None):
        self._parts: dict[str, Any] = {}
        self._saved: list[_Restore] = []  # dicts come before their items
        self._opaque: list[tuple[str, Callable[[], bool]]] = []  # objects that restore themselves, with a check
        self._known: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._add("random number generators", _Process())
        if model is not None:
            self._add("model", model)
        for number, item in enumerate(restore):
            if not self._add(f"restore[{number}]", item):
                raise OptionError(
                    f"restore[{number}] is of type {type(item).__name__}, whose state cannot be restored. Legal: "
                    f"modules, optimizers, tensors, generators, lists, dicts, objects with state_dict and "
                    f"load_state_dict, and objects with get_state and set_state."
                )
        for name, item in objects_of(step) if step is not None else ():
            self._add(name, item)

    def _add(self, name: str, item: Any) -> bool:
        if id(item) in self._known:
            return True
        if isinstance(item, nn.Module):
            lazy = [path for path, one in (*item.named_parameters(), *item.named_buffers()) if is_lazy(one)]
            if lazy:
                raise StepError(
                    f"{name} has lazy parameters, whose initialization by the first call cannot be undone: {lazy[0]}. "
                    f"Call it once on a batch first."
                )
        while name in self._parts:
            name += "'"
        if not self._save(name, item):
            return False
        self._parts[name] = item
        return True

    def _save(self, part: str, item: Any) -> bool:
        if id(item) in self._known:
            return True
        restore = None if isinstance(item, _ATOMS) else _save(item)
        access = _access(item) if restore is None or isinstance(item, nn.Module) else None
        if restore is None and access is None:
            return False
        self._known[id(item)] = item
        if restore is not None:
            self._saved.append(restore)
        if access is not None:
            get, put = access  # the object reads and writes its state as a whole
            kept = copy.deepcopy(get())
            self._saved.append(lambda: put(copy.deepcopy(kept)))
            self._opaque.append((part, lambda: _equal(get(), kept)))
        for inner in _contents(item):
            self._save(part, inner)
        return True

    def watch_optimizers(self) -> Any:
        """Adds optimizers that step for the first time, until the handle's `remove()` is called."""

        def about_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._add(f"{type(optimizer).__name__} that the step uses", optimizer)

        skip_frames(about_to_step)
        return register_optimizer_step_pre_hook(about_to_step)

    def loss_scale(self) -> float:
        """Returns the current scale of the GradScaler in the state, or 1.0 if there is none."""
        for item in self._parts.values():
            if isinstance(item, torch.amp.GradScaler) and item.is_enabled():
                return float(item.get_scale())
        return 1.0

    def use_other_random_numbers(self, which: int = 1) -> None:
        """Seeds all generators, from the state of PyTorch's and `which`, 1, 2, ..., until `restore` is called."""
        seed = int(torch.randint(2**31, ())) ^ (0x5EED * which)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        for item in self._parts.values():
            if isinstance(item, torch.Generator):
                item.manual_seed(seed)
            elif _is_generator(item) and hasattr(item, "bit_generator"):
                item.bit_generator.state = type(item.bit_generator)(seed).state
            elif _is_generator(item):
                item.seed(seed)

    def restore(self) -> None:
        """Restores the state."""
        for restore in self._saved:
            restore()

    def check(self) -> None:
        """Raises StepError, which names them, if objects that restore themselves have not done so."""
        changed = dict.fromkeys(part for part, is_restored in self._opaque if not is_restored())
        if changed:
            raise StepError(
                f"the state before the step could not be restored. Different: {', '.join(changed)}. Pass the changed "
                f"objects in restore=(...)."
            )


# --- the state of one object


def _contents(item: Any) -> Iterator[Any]:
    """The objects in an object that are saved separately."""
    if isinstance(item, nn.Module):
        for named in (item._parameters, item._buffers, item._modules):
            yield named if type(named) in _DICTS else tuple(named.values())  # torch.jit modules
        yield from _tensor_attributes(item).values()
    elif isinstance(item, _WHOLE):
        yield vars(item)
    elif type(item) in _DICTS:
        yield from item.values()
        yield from (key for key in item if isinstance(key, torch.Tensor))
    elif isinstance(item, list | tuple | collections.deque):
        yield from item
    elif isinstance(item, torch.Tensor) and item.is_leaf and item.grad is not None:
        yield item.grad


def _tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _save(item: Any) -> _Restore | None:
    """A function that restores an object, without its contents. None if only the object can, by methods of its own."""
    if isinstance(item, torch.Tensor):
        return _save_tensor(item)
    if isinstance(item, nn.Module):
        return _save_module(item)
    if isinstance(item, (*_WHOLE, tuple)):
        return lambda: None
    if type(item) in _DICTS:
        return _save_dict(item)
    return _save_collection(item) if type(item) in _COLLECTIONS else None


def _save_tensor(tensor: torch.Tensor) -> _Restore:
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    memory = tensor.detach() if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) else None
    values = _elements(tensor.detach()).clone()
    gradient = tensor.grad if is_leaf else None

    def restore() -> None:
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if is_leaf and tensor.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached in place
                    tensor.detach_()
            if memory is not None and _location(tensor) != _location(memory):
                tensor.data = memory
            _elements(tensor).copy_(values)
        if is_leaf:
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient

    return restore


def _location(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.dtype, tensor.device, tensor.shape)
    return (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.layout)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element once: PyTorch does not copy into an expanded tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    repeated = [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor[tuple(slice(0, 1) if one else slice(None) for one in repeated)] if any(repeated) else tensor


def _save_module(module: nn.Module) -> _Restore:
    training, tensors, attributes = module.training, _tensor_attributes(module), dict(vars(module))

    def restore() -> None:
        module.training = training
        for name in {*tensors, *_tensor_attributes(module)}:
            if name in attributes:
                vars(module)[name] = attributes[name]
            else:
                del vars(module)[name]

    return restore


def _save_dict(item: dict[Any, Any]) -> _Restore:
    items = list(item.items())
    if any(isinstance(value, torch.Tensor) and hasattr(value, "to_local") for _, value in items):
        return lambda: None  # fully_shard swaps these tensors itself

    def restore() -> None:
        if [(id(key), id(value)) for key, value in item.items()] != [(id(key), id(value)) for key, value in items]:
            item.clear()
            item.update(items)

    return restore


def _save_collection(item: Any) -> _Restore:
    contents = list(item)

    def restore() -> None:
        if [id(one) for one in item] != [id(one) for one in contents]:
            item.clear()
            (item.update if isinstance(item, set) else item.extend)(contents)

    return restore


def _access(item: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """An object's functions that read its state, and write it; those of a module read and write its extra state."""
    numpy = sys.modules.get("numpy")
    if isinstance(item, type):
        return None
    if isinstance(item, nn.Module):
        has_more = type(item).get_extra_state is not nn.Module.get_extra_state
        return (item.get_extra_state, item.set_extra_state) if has_more else None
    if isinstance(item, random.Random):
        return item.getstate, item.setstate
    if numpy is not None and type(item) is numpy.ndarray:
        return lambda: item, lambda kept: item.__setitem__(..., kept)
    if numpy is not None and isinstance(item, numpy.random.Generator):
        bits = item.bit_generator
        return lambda: bits.state, lambda kept: setattr(bits, "state", kept)
    for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(item, get, None)) and callable(getattr(item, put, None)):
            return getattr(item, get), getattr(item, put)
    return None


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal. Objects that cannot be compared count as equal."""
    if type(ours) is not type(theirs):
        return False
    if type(ours) in _DICTS:
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple | collections.deque):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    with contextlib.suppress(Exception):  # an object that pickle cannot read
        if isinstance(ours, (torch.Tensor, *_ATOMS)):
            return not compare(ours, theirs)
        return pickle.dumps(ours) == pickle.dumps(theirs)
    return True


class _Process:
    """The random number generators of the process, and whether autograd records."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")
        self._on_gpu = torch.cuda.is_initialized()  # at the start: the step may initialize it

    def get_state(self) -> tuple[Any, ...]:
        return (
            random.getstate(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if self._on_gpu else None,
            None if self._numpy is None else self._numpy.random.get_state(),
            torch.is_grad_enabled(),
        )

    def set_state(self, state: tuple[Any, ...]) -> None:
        python, cpu, on_gpu, of_numpy, with_gradients = state
        random.setstate(python)
        torch.set_rng_state(cpu)
        if self._on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        if self._numpy is not None:
            self._numpy.random.set_state(of_numpy)
        torch.set_grad_enabled(with_gradients)


# --- random numbers

#: The state of the generators: the CPU's, the GPUs', and those among a call's arguments.
RandomState = tuple[torch.Tensor, list[torch.Tensor] | None, list[torch.Tensor]]


def random_state(args: Iterable[Any] = ()) -> RandomState:
    """Returns the state of PyTorch's generators, and of those among a call's arguments."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, [one.get_state() for one in args if isinstance(one, torch.Generator)]


def set_random_state(state: RandomState, args: Iterable[Any] = ()) -> None:
    """Sets the state of PyTorch's generators, and of those among a call's arguments."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    own = (one for one in args if isinstance(one, torch.Generator))
    for generator, its in zip(own, state[2], strict=False):  # only one of the runs may pass a generator
        generator.set_state(its)


def repeat(op: torch._ops.OpOverload, args: Sequence[Any], convert: Callable[[str, Any], Any]) -> list[torch.Tensor]:
    """Repeats a call with each argument converted, and restores the generators; returns what `produced` finds."""
    before = random_state()
    try:
        given = [
            (one, value.clone_state() if isinstance(value, torch.Generator) else convert(one.name, value))
            for one, value in zip(op._schema.arguments, args, strict=True)
        ]
        positional = [value for argument, value in given if not argument.kwarg_only]
        results = op(*positional, **{argument.name: value for argument, value in given if argument.kwarg_only})
    finally:
        set_random_state(before)
    several = results if isinstance(results, list | tuple) else [results]
    return [one for _, one in produced(facts_of(op), [value for _, value in given], several)]


# --- the objects to which a step refers


def objects_of(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the objects with state to which a function refers, with the function's names for them."""
    # From its closure, the globals that it names, a bound method's object, arguments of `functools.partial`, functions
    # of the same module that it calls, and one level into lists, dicts and objects.
    for name, item in _references(step):
        if isinstance(item, _STATEFUL) or _is_generator(item):
            yield name, item


def is_compiled(step: Callable[..., Any], model: nn.Module) -> bool:
    """Whether the model, or an object to which a function refers, was returned by torch.compile."""
    for item in (model, step, *(item for _, item in _references(step))):
        if hasattr(item, "_torchdynamo_orig_callable"):
            return True
        if isinstance(item, nn.Module) and any(
            "_orig_mod" in one._modules or one._compiled_call_impl is not None for one in item.modules()
        ):
            return True
    return False


def _is_generator(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(item, (torch.Generator, random.Random, *of_numpy))


def _references(step: Any) -> Iterator[tuple[str, Any]]:
    """The objects to which a function refers, and those one level inside of them, without classes and modules."""
    for name, value in _variables(step, set()):
        for inner, item in _one_level(name, value):
            if not isinstance(item, type | types.ModuleType):
                yield inner, item


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
    scope = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an unassigned variable
            scope[name] = cell.cell_contents
    for name, value in scope.items():
        yield name, value
        is_own = inspect.isfunction(value) and value.__globals__ is function.__globals__
        if is_own or isinstance(value, types.MethodType):
            yield from _variables(value, seen)


def _names(code: types.CodeType) -> Iterable[str]:
    """The names that code uses, including those of nested functions."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names(constant)))
    return found


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif not isinstance(value, (*_STATEFUL, type, types.ModuleType, types.FunctionType)):
        yield from ((f"{name}.{key}", item) for key, item in list(getattr(value, "__dict__", {}).items()))
