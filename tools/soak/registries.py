"""Every registry and cache of torch_promote that may grow with what a program makes, and its size.

Those in C++ note themselves (csrc/policy/registry_sizes.h). Those in Python are found: every container of a module and
every cache of a function.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch_promote as tp
from torch_promote import _C

__all__ = ["LIMITS", "containers", "limit_of", "registry_sizes"]

_SIZED = (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def registry_sizes() -> dict[str, int]:
    """Returns the number of entries of each registry, by name: those in C++, and those of modules that are loaded."""
    sizes: dict[str, int] = dict(_C.registry_sizes())
    info = tp.cache_info()
    sizes["casts"], sizes["persistent casts"] = info["entries"], info["persistent_entries"]
    for name, container in containers():
        sizes[name] = _size(container)
    return sizes


def containers() -> Iterator[tuple[str, Any]]:
    """Yields the containers and function caches of the package's modules, with their names without "torch_promote."."""
    seen = set()
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("torch_promote.") or not isinstance(module, ModuleType):
            continue
        for name, value in sorted(vars(module).items(), key=lambda item: item[0]):
            if not name.startswith("__") and _is_of(module, value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name.partition('.')[2]}.{name}", value


def _is_of(module: ModuleType, value: Any) -> bool:
    if isinstance(value, functools._lru_cache_wrapper):
        return value.__wrapped__.__module__ == module.__name__
    return isinstance(value, _SIZED)


def _size(container: Any) -> int:
    """The number of entries, with those of the containers in it."""
    if isinstance(container, functools._lru_cache_wrapper):
        return container.cache_info().currsize
    inner = list(container.values()) if hasattr(container, "values") else []
    return len(container) + sum(len(value) for value in inner if isinstance(value, _SIZED))


#: The most entries of the registries that drop old ones, where a number in their code says so.
LIMITS = {
    "policy changes": 16384 + 2048,  # csrc/policy/policy_registry.h
    "policy tables": 1024 + 128 + 16,  # and those that have holders
    "compositions": 16384,
    "written storages": 1 << 16,  # csrc/cache/write_log.cpp
    "lines of first casts": 256,  # csrc/cache/check.cpp: twice those of living casts, and 64
    # torch_promote/regions/promotion_tables.py: 16, and those that somebody holds
    **dict.fromkeys(("promotion rules", "promoting.hooks._known", "promoting.hooks._numbers"), 32),
    "reference.promotion_rules.user._builds": 32,
    # Keyed by a floating dtype.
    **{f"reference.promotion_rules.{name}_rule.{name}_rule": 8 for name in ("jax", "numpy", "strict", "torch")},
    "regions.unused_overrides._lines": 4096,
    "regions.unused_overrides._registries": 3 * 4096,
    "native.module_tables._numbers": 1025,
    **dict.fromkeys((f"native.module_tables.{name}" for name in ("_tables", "_of_any", "_applied")), 512),
    "native.module_tables._kept": 2 * 512,
}


def limit_of(name: str) -> int | None:
    """Returns the most entries that a registry keeps; None if it has as many as the program has objects."""
    found = dict(containers()).get(name)
    of_cache = found.cache_parameters()["maxsize"] if isinstance(found, functools._lru_cache_wrapper) else None
    return LIMITS.get(name, of_cache)
