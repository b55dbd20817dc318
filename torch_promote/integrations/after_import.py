"""Runs a function after a module has been imported, without importing the module."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


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
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            exec_module = loader.exec_module

            def exec_then_run(module: ModuleType) -> None:
                exec_module(module)
                self.function()

            loader.exec_module = exec_then_run
        return spec


def run_after_import(name: str, function: Callable[[], None]) -> None:
    """Runs `function` as soon as the module is imported, or immediately if it already is."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _RunAfterImport(name, function))
