"""Copies of the sources with a separate build of the extension, for commands that build it with other options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["SourceCopyError", "build_extension", "copy_sources"]


class SourceCopyError(Exception):
    """The sources cannot be copied, or the extension does not compile."""


def copy_sources(root: Path, copy: Path) -> set[str]:
    """Makes `copy` equal to the sources, without what git ignores; what was built there stays.

    Unchanged files are not touched, so that they are not recompiled. A file that was changed in the copy is restored
    with the time of now, so that it is.

    Args:
        root: The root of the sources.
        copy: The folder of the copy. It may be in an ignored folder of the sources.

    Returns:
        The names of the copied files, relative to the root.

    Raises:
        SourceCopyError: The root is not a git repository.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise SourceCopyError(f"{root} has to be a git repository, which says what belongs to the sources")
    names = {name for name in listed.stdout.split("\0") if name and (root / name).is_file()}
    note = copy / ".copied"
    before = set(note.read_text(encoding="utf-8").split("\n")) if note.exists() else set()
    for name in before - names:
        (copy / name).unlink(missing_ok=True)
    for name in names:
        source, target = root / name, copy / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    note.write_text("\n".join(sorted(names)), encoding="utf-8")
    return names


def build_extension(copy: Path, compiler_flags: str, linker_flags: str) -> None:
    """Builds the extension of a copy, in the copy.

    Args:
        copy: The folder of the copy.
        compiler_flags: Further options of the compiler.
        linker_flags: Further options of the linker.

    Raises:
        SourceCopyError: It does not compile.
    """
    env = {**os.environ, "TORCH_PROMOTE_CXXFLAGS": compiler_flags, "TORCH_PROMOTE_LDFLAGS": linker_flags}
    env.pop("TORCH_PROMOTE_EXTENSION", None)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env=env, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SourceCopyError(f"the extension does not compile with {compiler_flags}:\n{done.stdout}{done.stderr}")
