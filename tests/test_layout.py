"""The layout of the tests: shared code is in helpers, and paths of test files in texts exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def test_no_test_file_imports_from_another() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    names = "|".join(file.stem for file in files if file.stem.startswith("test_"))
    imports = re.compile(rf"^\s*(?:from|import) (?:\w+\.)*(?:{names})\b", re.MULTILINE)
    assert [str(file) for file in files if imports.search(file.read_text(encoding="utf-8"))] == []


def test_paths_that_texts_name_exist() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    for folder in ("docs", "tests", "tools", "torch_promote", "csrc", "examples"):
        texts += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".md", ".py", ".toml", ".cpp", ".h")]
    named = [
        (file.relative_to(ROOT), path)
        for file in texts
        for path in re.findall(r"(?<![\w/])(?:tests|tools)/[\w/.]*\w(?![\w*])", file.read_text(encoding="utf-8"))
    ]
    assert len(named) > 10
    assert [(str(file), path) for file, path in named if not (ROOT / path).exists()] == []
