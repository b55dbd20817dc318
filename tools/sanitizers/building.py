"""Builds the extension with a sanitizer, in a copy of the sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.source_copies import build_extension, copy_sources

__all__ = ["FLAGS", "ROOT", "build"]

ROOT = Path(__file__).resolve().parents[2]

_FOR_ALL = ("-O1", "-g", "-fno-omit-frame-pointer")
#: The compiler's options by sanitizer.
FLAGS: dict[str, tuple[str, ...]] = {
    "address": (
        *_FOR_ALL,
        "-fsanitize=address,undefined",
        # Python's own options contain -fwrapv, which makes overflow defined, so that it would not be reported.
        "-fno-wrapv",
        # A report does not end the process: the tests after it run too.
        "-fsanitize-recover=address",
        # The check of virtual calls needs type information that libtorch does not export.
        "-fno-sanitize=vptr",
        # Checks indices and empty optionals. Changes no layout, so libtorch does not have to be built with it.
        "-D_GLIBCXX_ASSERTIONS",
        # GCC documents false positives of this warning in instrumented code.
        "-Wno-error=maybe-uninitialized",
    ),
    "thread": (
        *_FOR_ALL,
        "-fsanitize=thread",
        # TSan does not know fences. PyTorch's headers have one, and `any_casts` has one; docs/reliability.md.
        "-Wno-tsan",
    ),
}


def build(sanitizer: str, folder: Path, change: Callable[[Path], None] | None = None) -> None:
    """Copies the sources to a folder and compiles the extension there. Recompiles only what has changed.

    Args:
        sanitizer: A key of `FLAGS`.
        folder: The copy, which has its own build folder.
        change: Changes the copy before it is compiled. The next build undoes that.

    Raises:
        SourceCopyError: The sources are not in git, or do not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy_sources(ROOT, folder)
    if change is not None:
        change(folder)
    flags = " ".join(FLAGS[sanitizer])
    build_extension(folder, flags, flags)
