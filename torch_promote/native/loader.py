"""Loads the extension, or raises an error that says why it cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.errors import ExtensionError

__all__ = ["built_with", "check_extension", "do_once", "keep_package"]

_PACKAGE = __name__.partition(".")[0]
_NOTE = Path(__file__).parent.with_name("_built_with.json")
_REBUILD = (
    "Build it again in this environment: pip install --no-build-isolation --force-reinstall --no-deps torch-promote"
)


def check_extension() -> None:
    """Imports `torch_promote._C` and checks that it can be used.

    If this process has imported the package before and deleted it from `sys.modules`, puts the modules of then back.

    Raises:
        ExtensionError: The extension is missing, was built against another PyTorch, or another package owns the
            dispatch key AutocastPrivateUse1.
    """
    built = built_with()
    running = torch.__version__
    if built is None:
        raise ExtensionError(f"torch_promote._C has not been built; running torch {running}. {_REBUILD}")
    if built != running:
        raise ExtensionError(
            f"torch_promote._C was built with torch {built}, but torch {running} is running. {_REBUILD}"
        )
    if _key_is_taken():
        backend = torch._C._get_privateuse1_backend_name()
        raise ExtensionError(
            f"the dispatch key {AUTOCAST_KEY} already has kernels: the backend {backend!r} brings an autocast of its "
            f"own. torch_promote registers its wrappers on that key, so the two cannot be used in one process. "
            f"Import one of them."
        )
    try:
        from torch_promote import _C  # loading it registers the wrappers
    except ImportError as error:
        raise ExtensionError(
            f"torch_promote._C, built with torch {built}, does not load with torch {running}: {error}. {_REBUILD}"
        ) from error
    kept = vars(_C).get("_package")
    if kept is not None:
        _put_back(kept)


def keep_package() -> bool:
    """Keeps this package for the life of the process. Returns whether this is its first import.

    What it registers with PyTorch, asyncio and Python's import system can be neither registered twice nor removed. So a
    second import has to use the modules of the first one, which have the state of what is registered.
    """
    from torch_promote import _C

    is_first = "_package" not in vars(_C)
    vars(_C).setdefault("_package", sys.modules[_PACKAGE])
    return is_first


def do_once(function: Callable[[], None]) -> None:
    """Calls a function in the first import of the package; in a further one only if it has raised until then."""
    from torch_promote import _C

    if not vars(_C).get("_done"):
        function()
        vars(_C)["_done"] = True


def _put_back(module: ModuleType) -> None:
    sys.modules[module.__name__] = module
    for name, value in list(vars(module).items()):
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
            _put_back(value)


def _key_is_taken() -> bool:
    # The dispatcher says who registered a kernel; csrc/dispatch/registration.cpp.
    if f"{AUTOCAST_KEY}: registered at {_PACKAGE}:" in torch._C._dispatch_dump("aten::mm"):
        return False
    key = getattr(torch._C.DispatchKey, AUTOCAST_KEY)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return torch._C._dispatch_has_backend_fallback(key) or bool(has_kernel("aten::mm", AUTOCAST_KEY))


def built_with() -> str | None:
    """Returns the version of PyTorch that the extension was built against, or None if it has not been built."""
    try:
        return str(json.loads(_NOTE.read_text(encoding="utf-8"))["torch"])
    except (OSError, ValueError, KeyError):
        return None
