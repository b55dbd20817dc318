"""Tables of a policy for modules, on the modules of a model.

They hold where the policy of a region is in force: torch_promote/native/module_tables.py. torch_promote/modules/
module_forward.py, NOTE [ Tables on a module ], has what a module gets for it. It has that while something may need it:
a region object with the model, the handle of `apply_to`, or an open checkpoint of a forward in such a region.

NOTE [ The end of a binding ]
When a binding dies, Python calls the callbacks of its weak references, the last one first, and ignores a
KeyboardInterrupt in them. So the last one is a method in C, in which Python handles no signal: it notes the death. The
others detach what has died. There are two, so that the second finishes what an interrupt ended in the first. Garbage
collection may call them in the middle of a change, whose end then detaches.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from torch_promote.errors import PolicyError
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.modules.module_forward import attach_table, detach_table
from torch_promote.modules.module_policies import choose
from torch_promote.modules.module_policy import ModulePolicy
from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.native.module_tables import keep, note_applied, number_of
from torch_promote.policy.module_tables import Tables, spell_table
from torch_promote.policy.policy import Policy

__all__ = ["AppliedPolicy", "Binding", "apply", "bind"]

_lock = fork_safe_lock()
_is_changing = False
_lives: set[_Life] = set()
_dead: collections.deque[_Life] = collections.deque()


class _Life(weakref.ref["Binding"]):
    """A reference to a binding, with what is left to do when that is dead."""

    __slots__ = ("number", "others", "policies")
    number: int
    policies: Mapping[nn.Module, ModulePolicy]
    others: tuple[weakref.ref[Binding], ...]


class Binding:
    """Has modules follow the tables with a number, as long as the object lives.

    Attributes:
        number: The number.
        policies: The modules, which it does not keep alive, and their policies.
    """

    __slots__ = ("__weakref__", "number", "policies")

    def __init__(self, number: int, policies: Mapping[nn.Module, ModulePolicy]) -> None:
        self.number = number
        self.policies = weakref.WeakKeyDictionary(policies)
        # The order matters: NOTE [ The end of a binding ].
        others = weakref.ref(self, _detach), weakref.ref(self, _detach)
        life = _Life(self, _dead.append)
        life.number, life.policies, life.others = number, self.policies, others
        _lives.add(life)
        with _changing():
            for module, policy in policies.items():
                attach_table(module, number, policy)


def _detach(_: object) -> None:
    with _changing():
        pass


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """Around a change of the tables on modules, by one thread at a time. Detaches what is dead, before and after it."""
    global _is_changing
    with _lock:
        if _is_changing:  # garbage collection in the middle of a change, whose end detaches
            yield
            return
        _is_changing = True
        try:
            _detach_dead()
            yield
            _detach_dead()
        finally:
            _is_changing = False


def _detach_dead() -> None:
    while _dead:
        life = _dead[0]  # it stays until all is done
        for module, policy in list(life.policies.items()):
            detach_table(module, life.number, policy)
        _lives.discard(life)
        _dead.popleft()


def bind(policy: Policy, model: Any, *, alone: bool = True) -> Binding:
    """Has modules of a model follow the tables of a policy, as long as the result lives.

    Args:
        policy: The policy.
        model: The model.
        alone: Whether the tables are for this model alone, and not for all models that `apply` was called with.

    Raises:
        PolicyError: As `set_module_policy`.
    """
    chosen = choose(model, _values(policy.modules))
    _checkpoint.install()
    binding = Binding(number_of(policy.modules, model if alone else None), chosen)
    keep(binding.number, binding)
    return binding


def _values(tables: Tables) -> dict[str, str | dict[str, str]]:
    """Tables as `set_module_policy` takes them."""
    return {name: table if isinstance(table, str) else spell_table(table) for name, table in tables}


class AppliedPolicy:
    """The handle that `Policy.apply_to` returns, which undoes it. Also a context manager that does so.

    Attributes:
        policy: The policy.
        modules: The modules that its tables select, by name, and their policies.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self._binding: Binding | None = bind(policy, model, alone=False)
        found = self._binding.policies
        named = {name: found[module].value for name, module in model.named_modules() if module in found}
        self.modules: Mapping[str, Any] = MappingProxyType(named)
        note_applied(policy.modules, 1)
        _applied.add(self)
        self._model = weakref.ref(model, lambda _: self.remove())

    def remove(self) -> None:
        """Undoes `apply_to`. Repeating it does nothing. Each call of `apply_to` has a handle of its own."""
        with _lock:
            if self not in _applied:
                return
            _applied.remove(self)
            note_applied(self.policy.modules, -1)
        self._binding = None

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self.policy!r} applied to {len(self.modules)} modules>"


#: Those that hold, whether or not the program keeps the handle.
_applied: set[AppliedPolicy] = set()


def apply(policy: Policy, model: nn.Module) -> AppliedPolicy:
    """`Policy.apply_to`."""
    if not policy.modules:
        raise PolicyError(
            f"apply_to applies the tables of a policy to modules, and {policy!r} has none. Add some: "
            f"policy.override_modules({{name: overrides}})."
        )
    return AppliedPolicy(policy, model)
