"""Loads the extension, or raises an error with the reason; and its dispatch key, on which its kernels are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from torch_promote.errors import ExtensionError

__all__ = ["AUTOCAST_KEY", "built_with", "check_extension", "do_once", "is_first_import", "pass_over"]


#: The only Autocast key above AutocastCPU and AutocastCUDA. PyTorch itself has no kernels on it.
AUTOCAST_KEY = "AutocastPrivateUse1"


def pass_over(key: str) -> None:
    """Makes every higher-order operator (cond, flex_attention, ...), also later ones, fall through on a dispatch key.

    Such an operator has its own dispatch table in Python, in which PyTorch makes it fall through on AutocastCPU,
    AutocastCUDA and others. Without an entry for our key, the operator would raise.

    Args:
        key: The key's name, such as "AutocastPrivateUse1".

    Source: torch/_ops.py, HigherOrderOperator.__init__ (v2.13).
    """
    by_default = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    number = torch._C._dispatch_key_parse(key)
    if number in by_default:
        return
    by_default.append(number)
    for operator in torch._ops._higher_order_ops.values():
        if number not in operator.py_kernels:  # another library may have registered a kernel
            operator.fallthrough(number)


_PACKAGE = __name__.partition(".")[0]
_NOTE = Path(__file__).with_name("_built_with.json")
_REBUILD = (
    "Build it again in this environment, in the source checkout: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)


def check_extension() -> None:
    """Imports `torch_promote._C` and checks that it is usable.

    Raises:
        ExtensionError: The extension is missing, was built against another PyTorch, or another package owns the
            dispatch key AutocastPrivateUse1. Or the package was imported before, and deleted from `sys.modules`.
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
            f"the dispatch key {AUTOCAST_KEY} already has kernels: the backend {backend!r} has its own autocast. "
            f"torch_promote registers its wrappers on that key, so one process cannot use both. Import only one of "
            f"them."
        )
    try:
        from torch_promote import _C  # loading it registers the wrappers
    except ImportError as error:
        raise ExtensionError(
            f"torch_promote._C, built with torch {built}, does not load with torch {running}: {error}. {_REBUILD}"
        ) from error
    if vars(_C).setdefault("_loader", check_extension) is not check_extension:
        raise ExtensionError(
            "this process has imported torch_promote before and deleted it from sys.modules. Its kernels and hooks are "
            "registered with PyTorch for the life of the process, so it cannot be imported again. Keep the modules in "
            "sys.modules, or start a new process; importlib.reload(torch_promote) works."
        )


def is_first_import() -> bool:
    """Whether the hooks of the package are still to be registered with PyTorch, asyncio and Python's import system.

    They are registered once: `importlib.reload`, and an import after one that failed, run the package again.
    """
    from torch_promote import _C

    is_first = "_is_imported" not in vars(_C)
    vars(_C)["_is_imported"] = True
    return is_first


def do_once(function: Callable[[], None], errors: type[Exception]) -> None:
    """Calls a function in the first import of the package; in a further one only if it has raised until then.

    Args:
        function: The function.
        errors: Errors that end `python -m torch_promote` with status 2 and one line. For the script
            `torch-promote`, _torch_promote_hooks.py does that.
    """
    from torch_promote import _C

    if vars(_C).get("_done"):
        return
    try:
        function()
    except errors as error:
        # Whether this process is `python -m torch_promote`, which is importing the package.
        has_not_looked_for_it = sys.argv[:1] == ["-m"]
        if not (has_not_looked_for_it and _PACKAGE in sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]):
            raise
        print(f"torch-promote: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    vars(_C)["_done"] = True


def _key_is_taken() -> bool:
    # The dispatcher reports who registered a kernel; see csrc/dispatch/boxed_wrapper.cpp.
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
