"""Definitions that test files of another release import, and that the installed PyTorch no longer has."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["names_from"]


@contextmanager
def names_from(sources: Path) -> Iterator[set[str]]:
    """Makes names that the installed PyTorch lacks importable from files below `sources`.

    `from torch.testing._internal.common_cuda import tf32_is_not_fp32` takes the statements that bind the name from
    that module of the sources, and executes them with the globals of the installed module. No module is changed.

    Args:
        sources: PyTorch's sources: the folder that holds `test` and `torch`.

    Yields:
        The names that were taken, with their modules: "torch.testing._internal.common_cuda.tf32_is_not_fp32".
    """
    original = builtins.__import__
    taken: set[str] = set()

    def importing(name: str, *arguments: Any, **named: Any) -> ModuleType:
        module = original(name, *arguments, **named)
        values = dict(zip(("globals", "locals", "fromlist"), arguments, strict=False), **named)
        importer, fromlist = (values.get("globals") or {}).get("__file__"), values.get("fromlist")
        if not fromlist or importer is None or not Path(importer).is_relative_to(sources):
            return module
        found = {one: _definition(sources, module, one) for one in fromlist if one != "*" and not hasattr(module, one)}
        completed = {one: names[one] for one, names in found.items() if names is not None}
        if not completed:
            return module
        taken.update(f"{module.__name__}.{one}" for one in completed)
        stand_in = ModuleType(module.__name__)
        vars(stand_in).update(vars(module), **completed)
        return stand_in

    builtins.__import__ = importing
    try:
        yield taken
    finally:
        builtins.__import__ = original


def _definition(sources: Path, module: ModuleType, name: str) -> dict[str, Any] | None:
    """The globals of the statements of the sources that bind the name; None if there are no such statements."""
    path = sources.joinpath(*module.__name__.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.__name__.partition(".")[0] == "torch" and file.is_file():
            tree = ast.parse(file.read_text(encoding="utf-8"))
            statements = [node for node in tree.body if name in _bound(node)]
            if statements:
                program = compile(ast.Module(statements, []), str(file), "exec")
                return _executed(program, {**vars(module), "__file__": str(file)}, sources, module)
    return None


def _executed(program: CodeType, namespace: dict[str, Any], sources: Path, module: ModuleType) -> dict[str, Any]:
    try:
        exec(program, namespace)
    except NameError as error:  # the definition uses another name that has gone
        used = _definition(sources, module, error.name)
        if used is None or error.name in namespace:
            raise
        return _executed(program, {**namespace, error.name: used[error.name]}, sources, module)
    return namespace


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
