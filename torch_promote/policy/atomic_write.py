"""Writes a file as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str, errors: str = "strict") -> None:
    """Writes a file in UTF-8. Whoever reads it meanwhile sees the old content or the new, never a part.

    An existing file keeps its mode, and a symbolic link stays: the file that it points to is replaced.

    Args:
        path: The file.
        text: Its new content; line ends are written as they are.
        errors: What to do with what UTF-8 has no code for, as for `open`.

    Raises:
        OSError: The file cannot be written. It is then as before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(file := Path(folder, "new.txt"), "all of it")
        ...     file.read_text(), len(list(Path(folder).iterdir()))
        ('all of it', 1)
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        with open(beside, "x", encoding="utf-8", errors=errors, newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
