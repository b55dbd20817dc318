"""Selects the tests that concern autocast: their code, or that of helpers in the same file, mentions it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["chosen_tests", "files_about_autocast"]

_ABOUT = re.compile("autocast|custom_fwd", re.IGNORECASE)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_about_autocast(tests: Path) -> Iterator[str]:
    """Yields the paths, below `tests`, of all test files that mention autocast."""
    for file in sorted(tests.rglob("test_*.py")):
        if _ABOUT.search(file.read_text(encoding="utf-8", errors="replace")):
            yield file.relative_to(tests).as_posix()


def chosen_tests(file: Path) -> list[str] | None:
    """Returns the names of the test functions that concern autocast; None for all, if the name of the file says so."""
    if _ABOUT.search(file.name):
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    tree = ast.parse(text)
    helpers = {node.name: node for node in tree.body if isinstance(node, _Function | ast.ClassDef)}
    methods: dict[str, list[_Function]] = {}
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            for node in kind.body:
                if isinstance(node, _Function):
                    methods.setdefault(node.name, []).append(node)

    def is_about(node: ast.AST, seen: set[ast.AST]) -> bool:
        if node in seen:
            return False
        seen.add(node)
        if _ABOUT.search("\n".join(lines[_first_line(node) - 1 : node.end_lineno])):  # type: ignore[attr-defined]
            return True
        return any(is_about(used, seen) for used in _used(node, helpers, methods))

    tests = [
        (name, node)
        for name, nodes in [*methods.items(), *((name, [node]) for name, node in helpers.items())]
        for node in nodes
        if name.startswith("test") and isinstance(node, _Function)
    ]
    return sorted({name for name, node in tests if is_about(node, set())})


def _first_line(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])  # type: ignore[attr-defined]


def _used(node: ast.AST, helpers: dict[str, ast.stmt], methods: dict[str, list[_Function]]) -> Iterable[ast.AST]:
    """Functions and classes of the module that a node names, and methods that it takes from `self`.

    Not classes of tests: `isinstance(self, TestOther)` says nothing about the tests of that class.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in helpers and not _holds_tests(helpers[part.id]):
            yield helpers[part.id]
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in ("self", "cls"):
            yield from methods.get(part.attr, ())


def _holds_tests(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(part, _Function) and part.name.startswith("test") for part in node.body
    )
