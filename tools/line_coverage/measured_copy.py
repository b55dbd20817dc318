"""The copy of the sources that is measured, with an extension that counts the executed lines.

It is a whole copy, since many tests start Python in the root of the sources: all of them use this extension, and the
extension of the checkout stays as it is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from helpers.source_copies import build_extension

__all__ = ["CoverageError", "build_counting_extension", "make_repository", "objects_of"]

HERE = Path(__file__).resolve().parent
#: -O0, so that each line has instructions of its own. Threads count without losing counts of each other.
_COUNTING = "-O0 -g --coverage -fprofile-update=atomic"


class CoverageError(Exception):
    """Something that the command needs is missing or failed."""


def make_repository(copy: Path, names: Iterable[str]) -> None:
    """Makes the copy a git repository that tracks these files: tests ask git which files the sources have."""
    git = ("git", "-C", str(copy))
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "read-tree", "--empty"], check=True)
    subprocess.run([*git, "update-index", "--add", "-z", "--stdin"], input="\0".join(names), text=True, check=True)


def build_counting_extension(copy: Path) -> None:
    """Builds the extension of the copy.

    Raises:
        SourceCopyError, CoverageError: It does not compile.
    """
    writer = copy / "build" / "write_counts.o"
    writer.parent.mkdir(exist_ok=True)
    command = [os.environ.get("CXX", "c++"), "-c", "-fPIC", str(HERE / "write_counts.cpp"), "-o", str(writer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CoverageError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    build_extension(copy, _COUNTING, f"--coverage '{writer}'")


def objects_of(copy: Path) -> Path:
    """Returns the folder of the extension's objects, in which it writes its counts."""
    folders = {file.parent for file in (copy / "build").rglob("*.gcno")}
    if len(folders) != 1:
        raise CoverageError(f"{copy} has {len(folders)} builds of the extension. Delete the folder, and run the tests")
    return folders.pop()
