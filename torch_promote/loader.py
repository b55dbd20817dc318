"""Loads the extension, or raises an error with the reason; and the dispatch key of the extension's kernels."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from torch_promote import building
from torch_promote.errors import ExtensionError

#: The only Autocast key above AutocastCPU and AutocastCUDA. PyTorch itself has no kernels on it.
AUTOCAST_KEY = "AutocastPrivateUse1"


_PACKAGE = __name__.partition(".")[0]
_EXTENSION = f"{_PACKAGE}._C"
_FOLDER = Path(__file__).parent
_NOTE = _FOLDER / "_built_with.json"


def check_extension() -> None:
    """Imports the `torch_promote._C` that fits the running PyTorch, or raises ExtensionError if it is not usable."""
    # NOTE [ Which extension ] in building.py lists where it may be.
    if _key_is_taken():
        backend = torch._C._get_privateuse1_backend_name()
        raise ExtensionError(
            f"the dispatch key {AUTOCAST_KEY} already has kernels: the backend {backend!r} has its own autocast. "
            f"torch_promote registers its wrappers on that key, so one process cannot use both. Import only one of "
            f"them."
        )
    extension = _load_extension()
    if vars(extension).setdefault("_loader", check_extension) is not check_extension:
        raise ExtensionError(
            "this process has imported torch_promote before and deleted it from sys.modules. Its kernels and hooks are "
            "registered with PyTorch for the life of the process, so it cannot be imported again. Keep the modules in "
            "sys.modules, or start a new process; importlib.reload(torch_promote) works."
        )


def _load_extension() -> ModuleType:
    """Returns the extension: the one that this process has, or else the first that fits and loads."""
    if (loaded := sys.modules.get(_EXTENSION)) is not None:
        return loaded
    failures = []
    for path in _extensions_that_fit():
        spec = importlib.util.spec_from_file_location(_EXTENSION, path)
        assert spec is not None
        assert spec.loader is not None
        try:
            if building.is_cut_off(path):
                raise ImportError("the file is cut off")
            extension = importlib.util.module_from_spec(spec)  # loading it registers the wrappers
            spec.loader.exec_module(extension)
        except (ImportError, OSError) as error:
            failures.append(f"{path} does not load with it: {error}")
            if _is_registered():  # another file would register them twice
                break
            continue
        sys.modules[_EXTENSION] = extension
        if package := sys.modules.get(_PACKAGE):
            vars(package)["_C"] = extension
        logging.getLogger(_PACKAGE).debug("torch %s: extension %s", torch.__version__, path)
        return extension
    folder = building.cache_folder()
    place = f"{folder} (TORCH_PROMOTE_BUILD_DIR changes the folder)" if folder else "$TORCH_PROMOTE_BUILD_DIR"
    raise ExtensionError(
        f"torch {torch.__version__} is running, and {'; '.join(failures) or _what_there_is()}. `torch-promote build` "
        f"compiles one for it, which takes a C++ compiler and a few minutes, and keeps it in {place}."
    )


def _extensions_that_fit() -> Iterator[Path]:
    built_with = _built_with()
    if built_with is not None and building.fits(built_with, torch.__version__):
        yield _FOLDER / f"_C{building.SUFFIX}"
    if os.path.isdir(building.cache_folder() or ""):  # reading the sources takes milliseconds
        cached = building.cached_extension(torch.__version__)
        if cached is not None and os.path.exists(cached):
            yield cached
    minor = building.minor_version(torch.__version__)
    if minor is not None and (shipped := building.shipped_extension(minor)).exists():
        yield shipped


def _what_there_is() -> str:
    names = (path.name for path in building.shipped_extension("").parent.glob(f"*{building.SUFFIX}"))
    minors = sorted((name.removesuffix(building.SUFFIX).partition("torch")[2] for name in names), key=_numbers)
    if built_with := _built_with():
        there = f"its extension was built with torch {built_with}"
    elif minors:
        there = f"it has those for the releases of torch {', '.join(minors)}"
    else:
        there = "none has been built"
    return f"torch_promote has no extension for it: {there}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _built_with() -> str | None:
    """Returns the version of PyTorch that the package's own `_C` was built against, or None if there is none."""
    try:
        return str(json.loads(_NOTE.read_text(encoding="utf-8"))["torch"])
    except (OSError, ValueError, KeyError):
        return None


def is_first_import() -> bool:
    """Whether the hooks are still to be registered: `importlib.reload`, or an import after an error, comes again."""
    from torch_promote import _C

    is_first = "_is_imported" not in vars(_C)
    vars(_C)["_is_imported"] = True
    return is_first


def do_once(function: Callable[[], None]) -> None:
    """Calls a function in the first import of the package; in a further one only if it has raised until then."""
    from torch_promote import _C

    if vars(_C).get("_done"):
        return
    function()
    vars(_C)["_done"] = True


def _is_registered() -> bool:
    # The dispatcher reports who registered a kernel; see csrc/dispatch/boxed_wrapper.cpp.
    return f"{AUTOCAST_KEY}: registered at {_PACKAGE}:" in torch._C._dispatch_dump("aten::mm")


def _key_is_taken() -> bool:
    if _is_registered():
        return False
    key = getattr(torch._C.DispatchKey, AUTOCAST_KEY)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return torch._C._dispatch_has_backend_fallback(key) or bool(has_kernel("aten::mm", AUTOCAST_KEY))
