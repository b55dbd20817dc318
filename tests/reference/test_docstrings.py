"""Citations of PyTorch in the reference's docstrings and comments: each names a file, a function and a version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_promote import reference

ROOT = Path(reference.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: One file and function of PyTorch, as `c10/core/ScalarType.h, canCast (v2.13)`.
CITATION = r"[\w.-]+(?:/[\w.-]+)+\.\w+, (?:TORCH_(?:META|IMPL)_FUNC2?\(\w+(?:, \w+)?\)|~?\w+(?:::\w+)*) \(v\d+\.\d+\)"
CITATIONS = re.compile(rf"{CITATION}(?:; {CITATION})*\.")


def cited(text: str) -> Iterator[str]:
    """What follows each `Source: ` in docstrings and in comments on lines of their own, on one line."""
    documented = ast.Module, ast.FunctionDef, ast.ClassDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    for block in re.findall(r"(?:^ *#.*\n)+", text, re.MULTILINE):
        texts.append(re.sub(r"^ *#:? ?", "", block, flags=re.MULTILINE))
    for words in texts:
        for found in re.findall(r"Source: (.*?)(?:\n\s*\n|\Z)", words, re.DOTALL):
            yield " ".join(found.split())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sources_name_a_file_a_function_and_a_version(file: Path) -> None:
    assert [source for source in cited(file.read_text(encoding="utf-8")) if not CITATIONS.fullmatch(source)] == []
