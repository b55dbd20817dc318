"""`set_module_policy` and related functions: the forward of a module runs in a nested region with its own policy.

This module decides which modules of a model get which policy, from `set_module_policy` or from the tables of a
region's policy; torch_promote/regions/module_forward.py implements the policy.
"""

from __future__ import annotations

import atexit
import collections
import fnmatch
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torch_promote.errors import (
    LONGEST_NAME,
    PolicyError,
    UnusedOverrideWarning,
    did_you_mean,
    explains_arguments,
    say,
    shown,
)
from torch_promote.extension import NumberedTables, fork_safe_lock, number_in_force, numbered
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.integrations.compile import skip_frames
from torch_promote.policy.module_tables import OF_CLASS, spell_table
from torch_promote.policy.op_names import is_pattern
from torch_promote.policy.policy import AppliedPolicy, ModuleHandle, ModulePolicyLike, Policy, PolicyOfModule
from torch_promote.regions.module_forward import (
    ModulePolicy,
    attach,
    attach_table,
    detach,
    detach_table,
    policy_of,
)

#: Selects modules: a qualified name, a pattern of names, or a class.
Key = str | type[nn.Module]

#: The name of the original model in one that torch.compile returned.
_COMPILED = "_orig_mod"

#: Modules whose forward is never called: others call the modules inside them, or use their weights directly.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, NonDynamicallyQuantizableLinear)


@explains_arguments
def set_module_policy(model: nn.Module, policies: Mapping[Any, ModulePolicyLike]) -> SetPolicies:
    """Sets policies for modules of a model. They apply whenever the model is called with autocast on.

    The forward of such a module runs in a region nested in the surrounding one, which may be ours or of
    `torch.autocast`. So does its recomputation under checkpointing. If autocast is off, the policy has no effect. The
    policies of nested modules combine like nested regions. If the surrounding region has a table for the module
    (`Policy.override_modules`), the policy that is set here is nested in it: it wins for ops that both name, and
    autocast is off if one of the two turns it off.

    A policy applies to calls of the module's forward. If a parent uses a child's weights directly, as
    `nn.MultiheadAttention` does with its `out_proj`, the child's policy does not apply.

    The module keeps its class, weights, hooks and state_dict; it gets an attribute `forward`, which opens the region
    and calls the forward of the class, or the attribute `forward` that was there. Other libraries may replace and
    restore that attribute. It does not keep the module alive, as a bound method would. Copies and pickles keep the
    policies, unless the class of the module copies it in a way of its own; modules that torch.ao.quantization puts in
    the place of others have none. Setting a policy again replaces it. torch.compile supports policies. torch.export
    supports "fp32" and "off", and raises for others. torch.jit.script raises, and so does torch.fx if it traces into
    the module.

    Args:
        model: The model.
        policies: Maps keys, which select modules, to policies. A key is
            - a qualified name, as in `model.named_modules()`; "" is the model itself. In a model that torch.compile
              returned, names are as in the original model;
            - a pattern of names: `*`, `?` and `[...]` as in file names match within one part of a name, and `**`
              matches any number of parts, also none: "blocks.*.attn", "**.norm". No pattern selects the model itself,
              so "**" selects all modules inside it;
            - a class, which selects its instances and those of its subclasses.
            Names take precedence over patterns, and patterns over classes. A policy is
            - "fp32": autocast is off inside, and floating inputs on device types whose autocast is on are cast to
              float32, except float64 ones; inputs in lists, tuples and dicts too;
            - "off": autocast is off inside, and inputs are not cast. (`Policy.named("fp32")` and `Policy.named("off")`
              instead leave autocast on: the first casts the arguments of each op, the second casts in no op);
            - a value of `my_autocast`'s `policy`: a `Policy`, a name or the path of a file;
            - a mapping, as `my_autocast`'s `overrides`.

    Returns:
        A handle: its `remove()`, or the end of a `with` block with it, restores the policies that the modules had
        before. `modules` maps the names of the modules to their policies. The policies stay if you drop the handle.

    Raises:
        PolicyError: A key matches no module, two keys of equal precedence give a module different policies, a policy
            does not exist or is not legal, or a module cannot have a policy. No module has been changed.

    Example:
        >>> from torch_promote import my_autocast
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> handle = set_module_policy(model, {"2": "fp32", nn.Linear: {"linear": "float16"}})
        >>> print(module_policies(model))
        Sequential
        |-- 0: Linear  [{linear: float16}]
        `-- 2: Linear  [fp32]
        2 of 4 modules have a policy.
        >>> with my_autocast("cpu"):
        ...     model[:1](torch.ones(1, 3)).dtype, model(torch.ones(1, 3)).dtype
        (torch.float16, torch.float32)
        >>> handle.remove()
        >>> module_policies(model)
        {}

    Source: torch/amp/autocast_mode.py, custom_fwd with cast_inputs=torch.float32 (v2.13), for "fp32".
    """
    chosen = choose(model, policies)
    _checkpoint.install()
    return SetPolicies(model, chosen)


def choose(model: nn.Module, policies: Mapping[Any, ModulePolicyLike]) -> dict[nn.Module, ModulePolicy]:
    """Returns the policy of each module that keys select. Arguments and errors are those of `set_module_policy`."""
    names = _names(model)
    if not isinstance(policies, Mapping):
        raise PolicyError(
            f"policies must be a mapping of modules to policies, got {type(policies).__name__}. Write {{key: policy}}, "
            f'such as {{"": "fp32"}} for the whole model.'
        )
    chosen: dict[nn.Module, tuple[int, Key, ModulePolicy]] = {}
    for key, value in policies.items():
        modules, rank = _find(names, key), 2 if _is_class(key) else int(is_pattern(key))
        try:
            policy = ModulePolicy(value)
        except PolicyError as error:
            raise PolicyError(f"{_spell(key)}: {error}") from None
        for module in modules:
            known = chosen.get(module)
            if known is not None and known[0] == rank and known[2] != policy:
                raise PolicyError(
                    f"{_show(names[module][0])} gets two policies, {known[2]} from {_spell(known[1])} and {policy} "
                    f"from {_spell(key)}. Name the module itself, or change one of the two."
                )
            if known is None or rank < known[0]:
                chosen[module] = (rank, key, policy)
    for module in chosen:
        _check_can_have_policy(module, names[module][0])
    return {module: policy for module, (_, _, policy) in chosen.items()}


@explains_arguments
def module_policies(model: nn.Module) -> dict[str, PolicyOfModule]:
    """Returns the policies of a model's modules.

    Args:
        model: The model.

    Returns:
        Maps qualified names, in the order of `model.named_modules()`, to policies as in `set_module_policy`. Mappings
        contain the names of ops and cast policies. A module with several names is listed under the first. `print`
        shows a tree of the modules with a policy and their parents.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
        >>> _ = set_module_policy(model, {"0": "off", nn.Softmax: {torch.ops.aten.softmax: "lower"}})
        >>> module_policies(model)
        {'0': 'off', '1': {'aten::softmax': 'lower'}}
        >>> print(module_policies(model))
        Sequential
        |-- 0: Linear  [off]
        `-- 1: Softmax  [{aten::softmax: lower}]
        2 of 3 modules have a policy.
    """
    _check_model(model)
    named = ((name, policy_of(module)) for name, module in model.named_modules())
    policies = {name: policy.value for name, policy in named if policy is not None}
    return _PrintedAsTree(policies, _tree(model, len(policies)))


class _PrintedAsTree(dict[str, PolicyOfModule]):
    def __init__(self, policies: Mapping[str, PolicyOfModule], tree: str) -> None:
        super().__init__(policies)
        self._tree = tree

    def __str__(self) -> str:
        return self._tree


@explains_arguments
def remove_module_policy(model: nn.Module, key: Key | None = None) -> None:
    """Removes the policies of modules. A `module.forward` that another library captured stays valid.

    Args:
        model: The model.
        key: Selects modules, as in `set_module_policy`. None: all.

    Raises:
        PolicyError: The key matches no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> _ = set_module_policy(model, {nn.Linear: "fp32"})
        >>> remove_module_policy(model, "1")
        >>> module_policies(model)
        {'0': 'fp32'}
    """
    _check_model(model)
    for module in list(model.modules()) if key is None else _find(_names(model), key):
        detach(module)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyError(f"model must be an nn.Module, got {type(model).__name__}. The model is the first argument.")


def _tree(model: nn.Module, having: int) -> str:
    total = len(list(model.modules()))
    return "\n".join([_title(model), *_branches(model), f"{having} of {total} modules have a policy."])


def _branches(module: nn.Module) -> list[str]:
    shown = [(name, child) for name, child in module.named_children() if any(map(policy_of, child.modules()))]
    lines = []
    for name, child in shown:
        last = child is shown[-1][1]
        lines.append(f"{'`-- ' if last else '|-- '}{name}: {_title(child)}")
        lines += [("    " if last else "|   ") + line for line in _branches(child)]
    return lines


def _title(module: nn.Module) -> str:
    policy = policy_of(module)
    return type(module).__name__ + (f"  [{policy}]" if policy is not None else "")


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Maps every module to all its names, without the modules that torch.compile returned."""
    _check_model(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _COMPILED not in module._modules:
            names.setdefault(module, []).append(_original(name))
    return names


def _original(name: str) -> str:
    """The name without the parts that torch.compile added."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def _is_class(key: Key) -> bool:
    return not isinstance(key, str) or key.startswith(OF_CLASS)


def _is_instance(module: nn.Module, name: str) -> bool:
    """Whether a module is of the class with a name, "Linear" or "torch.nn.modules.linear.Linear", or a subclass."""
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def _find(names: Mapping[nn.Module, list[str]], key: Key) -> list[nn.Module]:
    """Returns the modules that a key selects, without those whose forward is never called."""
    if isinstance(key, str):
        found = [] if len(key) > LONGEST_NAME else _selected(_original(key), names)
    elif isinstance(key, type) and issubclass(key, nn.Module):
        found = [module for module in names if isinstance(module, key)]
    else:
        remedy = f" Write it as a str: '{key}'." if isinstance(key, int) else ""
        if isinstance(key, nn.Module) and key in names:
            remedy = f" The name of this module is {names[key][0]!r}."
        legal = "a key is the name of a module, a pattern of names, or a subclass of nn.Module"
        raise PolicyError(f"{legal}, got {shown(key)}.{remedy}")
    called = [module for module in found if not isinstance(module, _NEVER_CALLED) and _has_forward(module)]
    if called:
        return called
    if found:
        kinds = ", ".join(sorted({type(module).__name__ for module in found}))
        raise PolicyError(
            f"{_spell(key)} selects only modules whose forward is never called ({kinds}). Select the modules inside "
            f"them, or their parent."
        )
    raise PolicyError(_no_match(names, key))


def _selected(key: str, names: Mapping[nn.Module, list[str]]) -> list[nn.Module]:
    if _is_class(key):
        return [module for module in names if _is_instance(module, key.removeprefix(OF_CLASS))]
    return [module for module, own in names.items() if any(matches(name, key) for name in own)]


#: How many names of modules an error shows.
_NAMES_SHOWN = 8


def _no_match(names: Mapping[nn.Module, list[str]], key: Key) -> str:
    kinds = {kind.__name__ for module in names for kind in type(module).__mro__[:-1]}
    if not isinstance(key, str) or _is_class(key):
        asked = key.removeprefix(OF_CLASS) if isinstance(key, str) else key.__name__
        types = sorted({type(module).__name__ for module in names})
        legal = ", ".join(types[:_NAMES_SHOWN]) + ", ..." * (len(types) > _NAMES_SHOWN)
        return f"no module of the model is of type {asked}.{did_you_mean(asked, sorted(kinds))} Its types: {legal}."
    name = key.rpartition(".")[2]
    of_nn = isinstance(own := getattr(nn, name, None), type) and issubclass(own, nn.Module)
    if of_nn or name in kinds:
        return (
            f"no module of the model is named {key!r}, which is a class. To select modules by their class, pass "
            f"the class: set_module_policy(model, {{{f'nn.{name}' if of_nn else name}: ...}})."
        )
    known = [name for own in names.values() for name in own if name]
    more = f", and {len(known) - _NAMES_SHOWN} others" if len(known) > _NAMES_SHOWN else ""
    closest = f"{did_you_mean(key, known)} Legal: {', '.join(known[:_NAMES_SHOWN])}{more}." if known else ""
    hint = " In a pattern, * matches within one part of a name; ** matches any number of parts." if "*" in key else ""
    return f"no module of the model is named {key!r}.{closest}{hint}"


def matches(name: str, key: str) -> bool:
    """Whether a name or a pattern, as in `set_module_policy`, selects the module with a name."""
    if not is_pattern(key):
        return name == key
    return bool(name) and _match_parts(name.split("."), key.split("."))


def _match_parts(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        if patterns[1:2] == ["**"]:  # means the same once, and would take exponential time
            return _match_parts(parts, patterns[1:])
        return any(_match_parts(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _match_parts(parts[1:], patterns[1:])


def _check_can_have_policy(module: nn.Module, name: str) -> None:
    why = None
    if isinstance(module, torch.jit.ScriptModule):
        why = "it is a TorchScript module, whose forward is not Python. Set policies before torch.jit.script"
    elif isinstance(module, torch.fx.GraphModule):
        why = "it is a graph module, which recreates its class. Set policies before tracing, or on its modules"
    elif any(is_kind(module.forward) for is_kind in _STEPWISE):
        why = "its forward is a generator or a coroutine. Decorate it with my_autocast(...), which applies in each step"
    if why is not None:
        raise PolicyError(f"{_show(name)} ({type(module).__name__}) cannot have a policy: {why}.")


_STEPWISE = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _has_forward(module: nn.Module) -> bool:
    own = inspect.getattr_static(type(module), "forward")  # getattr fails for TorchScript modules
    return own is not nn.Module.forward or "forward" in vars(module)


def _show(name: str) -> str:
    return repr(name) if name else "the model"


def _spell(key: Key) -> str:
    return repr(key) if isinstance(key, str) else key.__name__


_lock = fork_safe_lock()
_is_changing = False
#: Changes to make: `attach_table` or `detach_table`, the number of tables, and the policies of modules.
_changes: collections.deque[tuple[Callable[..., None], int, Mapping[nn.Module, ModulePolicy]]] = collections.deque()


class Binding:
    """Has modules follow the tables with a number, as long as the object lives. It does not keep the modules alive."""

    __slots__ = ("__weakref__", "number", "policies", "tables")

    def __init__(self, tables: NumberedTables, policies: Mapping[nn.Module, ModulePolicy]) -> None:
        self.tables: NumberedTables = tables
        self.number: int = tables.number
        number = self.number
        tables.bindings.add(self)
        self.policies: weakref.WeakKeyDictionary[nn.Module, ModulePolicy] = weakref.WeakKeyDictionary(policies)
        weakref.finalize(self, _change, detach_table, number, self.policies).atexit = False
        _change(attach_table, number, policies)


def _change(change: Callable[..., None], number: int, policies: Mapping[nn.Module, ModulePolicy]) -> None:
    """Changes the tables on modules, one thread at a time."""
    # Garbage collection may end a binding in the middle of a change. The end of that change then detaches it.
    global _is_changing
    _changes.append((change, number, policies))
    with _lock:
        if _is_changing:
            return
        _is_changing = True
        try:
            while _changes:
                change, number, policies = _changes.popleft()
                for module, policy in list(policies.items()):
                    change(module, number, policy)
        finally:
            _is_changing = False


def bind(policy: Policy, model: Any, *, alone: bool = True) -> Binding:
    """Has modules follow the tables of a policy as long as the result lives: of this model, or those of `apply`."""
    tables = {name: table if isinstance(table, str) else spell_table(table) for name, table in policy.modules}
    chosen = choose(model, tables)
    _checkpoint.install()
    return Binding(numbered(policy.modules, model if alone else None), chosen)


def _by_name(model: nn.Module, policies: Mapping[nn.Module, ModulePolicy]) -> Mapping[str, PolicyOfModule]:
    named = {name: policies[module].value for name, module in model.named_modules() if module in policies}
    return MappingProxyType(named)


class SetPolicies(ModuleHandle):
    """The handle that `set_module_policy` returns, which restores the policies from before.

    Attributes:
        modules: The modules that it has given a policy, by name, and their policies.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[nn.Module, ModulePolicy]) -> None:
        self.modules: Mapping[str, PolicyOfModule] = _by_name(model, chosen)
        self._set: weakref.WeakKeyDictionary[nn.Module, tuple[ModulePolicy, ModulePolicy | None]]
        self._set = weakref.WeakKeyDictionary()
        for module, policy in chosen.items():
            own = ModulePolicy(policy.value)  # this handle and this module alone have this object
            self._set[module] = own, policy_of(module)
            attach(module, own)

    def remove(self) -> None:
        """Restores the policies from before. Repeating it does nothing.

        Where a later call has replaced this one's policy, that stays. If handles are removed in another order than that
        of their calls, a module has the policy of the last call whose handle has not been removed.
        """
        with _lock:
            for module, (own, before) in list(self._set.items()):
                own.below = weakref.ref(module), before
                if policy_of(module) is own:
                    while before is not None and before.below is not None and before.below[0]() is module:
                        before = before.below[1]
                    detach(module)
                    attach(module, before)
            self._set.clear()

    def __repr__(self) -> str:
        return f"<policies of {len(self.modules)} modules>"


class _Applied(AppliedPolicy):
    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self._binding: Binding | None = bind(policy, model, alone=False)
        self.modules: Mapping[str, PolicyOfModule] = _by_name(model, self._binding.policies)
        self._binding.tables.applied += 1
        _applied.add(self)
        self._model = weakref.ref(model, lambda _: self.remove())

    def remove(self) -> None:
        """Undoes `apply_to`. Repeating it does nothing. Each call of `apply_to` has a handle of its own."""
        with _lock:
            if self._binding is None:
                return
            _applied.remove(self)
            self._binding.tables.applied -= 1
            self._binding = None

    def __repr__(self) -> str:
        return f"<{self.policy!r} applied to {len(self.modules)} modules>"


#: Those that hold, whether or not the program keeps the handle.
_applied: set[_Applied] = set()


def apply(policy: Policy, model: nn.Module) -> AppliedPolicy:
    """`Policy.apply_to`."""
    if not policy.modules:
        raise PolicyError(
            f"apply_to applies the tables of a policy to modules, and {policy!r} has none. Add some: "
            f"policy.override_modules({{name: overrides}})."
        )
    return _Applied(policy, model)


# --- policies of a whole program, which names no model

# NOTE [ Tables without a model ]
# `torch-promote run --policy F` and TORCH_PROMOTE_POLICY give a policy to a program that does not know it. Its tables
# are for one model. That is found at the first call of a module under the policy: names start from the outermost module
# that runs, or from the one module in it in which all of them are found, such as the model in a wrapper. A module runs
# in each frame of a method of it, as in `training_step` of a trainer's module or `decode` of an autoencoder. Other
# modules of the same class, with modules of the same names, follow the tables as well, such as a moving average.
# `nn.Module.__call__` is replaced for this: a hook for all modules comes too late for the module that is called, and
# torch.compile warns of it.


class _Follower:
    """Applies the tables of a policy to the models that run."""

    def __init__(self, policy: Policy, model: str) -> None:
        self._policy = policy
        self._model = model  # the name of the class of the model; "" if names start from the outermost module
        self.tables: NumberedTables = numbered(policy.modules, None)
        self.tables.applied += 1
        self._keys = [key for key, _ in policy.modules]
        self.seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._applied: weakref.WeakKeyDictionary[nn.Module, AppliedPolicy] = weakref.WeakKeyDictionary()
        # The class of the models, and the names of their modules.
        self._kind: tuple[type[nn.Module], list[list[str]]] | None = None
        self._warned: set[type[nn.Module]] = set()  # those outermost modules in which the names are not found
        self._error: PolicyError | None = None  # the last that was raised

    def called(self, module: nn.Module) -> PolicyError | None:
        """Called before the first call of a module under the policy: returns what makes the tables ambiguous."""
        running = [one for one in _running_modules() if one is not module]
        outermost = running[-1] if running else module
        names = _names(outermost)
        roots = self._roots(outermost, names)
        for root in roots:
            kind = type(root), [*_names(root).values()]
            if not self._model and (len(roots) > 1 or (self._kind or kind) != kind):
                shown = [f"{type(one).__name__} ({names[one][0]!r})".removesuffix(" ('')") for one in roots]
                text = self._ambiguous(*[(self._kind or kind)[0].__name__] * (len(roots) == 1), *shown[:2])
                self._error = PolicyError(text)
                return self._error  # at each call: a program that catches it does not go on without the policy
            self._kind = kind
            if root not in self._applied:
                self._applied[root] = apply(self._policy, root)
        self.seen.add(module)
        self.seen.update(outermost.modules())
        cls = type(next(iter(names)))  # not what torch.compile has made of it
        if not roots and cls not in self._warned and next(outermost.parameters(), None) is not None:
            self._warned.add(cls)
            if not self._model:  # otherwise, modules beside the model are expected
                warnings.warn(self._not_found(cls.__name__, names), UnusedOverrideWarning, stacklevel=4)
        return None

    def _roots(self, outermost: nn.Module, names: Mapping[nn.Module, list[str]]) -> list[nn.Module]:
        """The modules from which the names of the tables start, without those inside of another one."""
        if self._model:
            return [module for module in names if _is_instance(module, self._model)]
        found: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for module in names:
            if module not in inside and self._has_all(module):
                found.append(module)
                inside.update(module.modules())
        return found

    def _has_all(self, module: nn.Module) -> bool:
        own = _names(module)
        paths = {path for each in own.values() for path in each}
        exact = [key for key in self._keys if not _is_class(key) and not is_pattern(key)]
        others = [key for key in self._keys if key not in exact]
        return paths.issuperset(exact) and all(_selected(key, own) for key in others)

    def _ambiguous(self, one: str, other: str) -> str:
        of_other = other.partition(" ")[0]
        remedy = f"Say which one is meant by its class: --model {of_other}, or TORCH_PROMOTE_MODEL={of_other}."
        if one.partition(" ")[0] == of_other:
            remedy = "In the program, say which one is meant: policy.apply_to(model)."
        return (
            f"the policy has tables for modules ({self._spelled()}), and the program runs two models that have them: "
            f"{one} and {other}. {remedy}"
        )

    def _not_found(self, name: str, names: Mapping[nn.Module, list[str]]) -> str:
        missing = next((key for key in self._keys if not _selected(key, names)), "")
        known = [type(one).__name__ for one in names] if _is_class(missing) else []
        known = known or [one for own in names.values() for one in own]
        return (
            f"the policy's tables for modules ({self._spelled()}) are not applied to {name}, which does not have "
            f"{missing!r}.{did_you_mean(missing.removeprefix(OF_CLASS), known)} Names start from the outermost module "
            f"that runs, or from one module in it."
        )

    def at_exit(self) -> None:
        """Says that the tables were not applied to a model, if that has not been said."""
        if self._error is not None and getattr(sys, "last_value", None) is not self._error:  # the program caught it
            say(f"torch_promote: {self._error}")
        if self._kind is not None:
            return
        text = ""
        if self._model and self._warned:
            shown = ", ".join(sorted(one.__name__ for one in self._warned))
            text = f"No module of the class {self._model} ran under the policy. Outermost modules that ran: {shown}."
        elif not self._warned and "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["stats"]:
            text = "Models are not found inside of compiled functions: compile the model itself."
        if text:
            say(f"torch_promote: the tables for modules ({self._spelled()}) had no effect. {text}")

    def _spelled(self) -> str:
        shown = [repr(key) for key in self._keys[:3]]
        return ", ".join([*shown, "..."] if self._keys[3:] else shown)


def _running_modules() -> Iterator[nn.Module]:
    """The modules of which this thread runs a method, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and "_modules" in module.__dict__:
                yield module
        frame = frame.f_back  # type: ignore[assignment]


_follower: _Follower | None = None


def _find_model(module: nn.Module) -> PolicyError | None:
    """Called before a call of a module."""
    if torch.compiler.is_compiling():  # Dynamo traces this
        return None
    follower = _follower
    if follower is not None and number_in_force() == follower.tables.number and module not in follower.seen:
        with _lock:
            return follower.called(module)
    return None


def follow(policy: Policy, model: str = "") -> None:
    """Has the models of a class, or all that run, follow a policy's tables: see NOTE [ Tables without a model ]."""
    global _follower
    _follower = _Follower(policy, model)
    atexit.register(_follower.at_exit)
    _replace_call()


@functools.cache
def _replace_call() -> None:
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (error := _find_model(self)) is not None:
            raise error  # here: a traceback has one line of this package
        return original(self, *args, **kwargs)

    skip_frames(_find_model)
    skip_frames(call, inner=False)
    nn.Module.__call__ = call  # type: ignore[method-assign]
