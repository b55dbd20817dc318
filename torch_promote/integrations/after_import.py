"""Runs a function after a module has been imported, without importing the module."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["run_after_import", "waiting_for"]


class _RunAfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        # Ask the other finders on the list; some of them may wait for the same module.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_then_run(module: ModuleType) -> None:
            exec_module(module)
            self.function()

        loader.exec_module = exec_then_run


def run_after_import(name: str, function: Callable[[], None]) -> None:
    """Runs `function` as soon as the module is imported, or immediately if it already is."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _RunAfterImport(name, function))


def waiting_for() -> list[str]:
    """Returns the modules whose import functions wait for."""
    return [finder.name for finder in sys.meta_path if isinstance(finder, _RunAfterImport)]
