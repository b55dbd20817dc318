"""Copies of the sources: what is copied, what is left untouched, and what is restored."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.source_copies import SourceCopyError, copy_sources


def test_the_copy_has_what_git_does_not_ignore(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "root" / "build" / "copy"
    (root / "room").mkdir(parents=True)
    copy.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for name, text in ((".gitignore", "/build/\n*.so\n"), ("room/a.py", "1"), ("b.py", "2"), ("room/c.so", "3")):
        (root / name).write_text(text, encoding="utf-8")

    def copied() -> dict[str, str]:
        copy_sources(root, copy)
        files = [file for file in copy.rglob("*") if file.is_file() and file.name not in (".copied", ".gitignore")]
        return {file.relative_to(copy).as_posix(): file.read_text(encoding="utf-8") for file in files}

    assert copied() == {"room/a.py": "1", "b.py": "2"}
    (copy / "room" / "built.so").write_text("4", encoding="utf-8")
    times = (copy / "b.py").stat()
    (root / "room" / "a.py").write_text("5", encoding="utf-8")
    assert copied() == {"room/a.py": "5", "b.py": "2", "room/built.so": "4"}
    assert (copy / "b.py").stat().st_mtime_ns == times.st_mtime_ns
    (copy / "b.py").write_text("planted", encoding="utf-8")
    planted = (copy / "b.py").stat().st_mtime_ns
    assert copied()["b.py"] == "2"
    assert (copy / "b.py").stat().st_mtime_ns >= planted  # so that it is compiled again
    (root / "b.py").unlink()
    assert copied() == {"room/a.py": "5", "room/built.so": "4"}


def test_sources_outside_of_git_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceCopyError, match="has to be a git repository"):
        copy_sources(tmp_path, tmp_path / "copy")
