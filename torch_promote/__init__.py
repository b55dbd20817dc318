"""PyTorch autocast on a dispatch key of its own.

Use `my_autocast` like `torch.autocast`. It gives the same bits, also works in cases in which stock autocast fails, and
shows the cast policy of every op, which you can override.

Names that a training loop does not need are loaded when they are first used. The errors are in `torch_promote.errors`,
all of them subclasses of `TorchPromoteError`; reports and types for annotations are in `torch_promote.types`; the
reference is `torch_promote.reference`; the command is `torch-promote`.

Example:
    >>> import torch, torch_promote as tp
    >>> with tp.my_autocast("cpu"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
"""

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from torch_promote import errors
from torch_promote.errors import PolicyError, TorchPromoteError
from torch_promote.errors import raise_no_attribute as _raise_no_attribute


def _is_command() -> bool:
    """Whether this process is the command and has not parsed its command line yet; see cli/program.py."""
    module = sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return module or getattr(sys.modules.get("_torch_promote_hooks"), "is_command", False)


if TYPE_CHECKING or not _is_command():
    from torch_promote.loader import check_extension, do_once, is_first_import

    check_extension()  # the imports below need the extension

    from torch_promote.integrations import cast_invalidation as _cast_invalidation
    from torch_promote.integrations import compile as _compile
    from torch_promote.integrations import higher_order_ops as _higher_order_ops
    from torch_promote.policy.op_table import CastPolicy
    from torch_promote.policy.policy import Policy
    from torch_promote.regions.autocast import Region as _Region
    from torch_promote.regions.autocast import cache_info, clear_cache, my_autocast
    from torch_promote.regions.defaults import (
        default_policy,
        register_policy,
        registered_policies,
        set_default_policy,
        use_environment,
    )
    from torch_promote.regions.promotion import promotion

    if is_first_import():
        _compile.install(_Region, my_autocast, promotion)
        _cast_invalidation.install()
        _higher_order_ops.install()

if TYPE_CHECKING:
    from torch_promote import reference, types
    from torch_promote.checking.check_casts import check_casts
    from torch_promote.checking.check_ranks import check_ranks
    from torch_promote.checking.crosscheck import crosscheck
    from torch_promote.checking.why import why
    from torch_promote.numerics.compare import compare
    from torch_promote.numerics.find_nonfinite import find_nonfinite
    from torch_promote.numerics.tune import tune
    from torch_promote.reading.monitor import monitor
    from torch_promote.reading.trace import trace
    from torch_promote.reading.trace_report import diff, load
    from torch_promote.reference.promotion_rules import make_rule
    from torch_promote.regions.installation import (
        install,
        installed,
        stock_autocast,
    )
    from torch_promote.regions.module_policies import (
        module_policies,
        remove_module_policy,
        set_module_policy,
    )

__version__ = "0.1.0"

__all__ = [
    "CastPolicy",
    "Policy",
    "PolicyError",
    "TorchPromoteError",
    "__version__",
    "cache_info",
    "check_casts",
    "check_ranks",
    "clear_cache",
    "compare",
    "crosscheck",
    "default_policy",
    "diff",
    "errors",
    "find_nonfinite",
    "install",
    "installed",
    "load",
    "make_rule",
    "module_policies",
    "monitor",
    "my_autocast",
    "promotion",
    "reference",
    "register_policy",
    "registered_policies",
    "remove_module_policy",
    "set_default_policy",
    "set_module_policy",
    "stock_autocast",
    "trace",
    "tune",
    "types",
    "why",
]

#: Modules that a training loop does not need, with the names that are loaded from them on first access.
_LAZY_MODULES = (
    ("torch_promote.checking.check_casts", "check_casts"),
    ("torch_promote.checking.check_ranks", "check_ranks"),
    ("torch_promote.checking.crosscheck", "crosscheck"),
    ("torch_promote.checking.why", "why"),
    ("torch_promote.reference.promotion_rules", "make_rule"),
    ("torch_promote.numerics.find_nonfinite", "find_nonfinite"),
    ("torch_promote.reading.monitor", "monitor"),
    ("torch_promote.reading.trace", "trace"),
    ("torch_promote.reading.trace_report", "diff load"),
    ("torch_promote.numerics.compare", "compare"),
    ("torch_promote.numerics.tune", "tune"),
    ("torch_promote.regions.installation", "install installed stock_autocast"),
    (
        "torch_promote.regions.module_policies",
        "module_policies remove_module_policy set_module_policy",
    ),
)
_LAZY = {name: module for module, names in _LAZY_MODULES for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("reference", "types"):
        return importlib.import_module(f"torch_promote.{name}")
    if name == "TraceReport":  # which was a name of this module before
        return getattr(importlib.import_module("torch_promote.types"), name)
    if name in _LAZY:
        globals()[name] = found = getattr(importlib.import_module(_LAZY[name]), name)
        return found
    return _raise_no_attribute(__name__, __all__, name)


def __dir__() -> list[str]:
    return __all__


def _use_environment() -> None:
    """Applies the environment variables. Installs last, so that after an error torch.autocast stays PyTorch's."""
    use_environment()
    if os.environ.get("TORCH_PROMOTE_CHECK_CASTS"):
        importlib.import_module("torch_promote.checking.check_casts").use_environment()
    if os.environ.get("TORCH_PROMOTE_CROSSCHECK_REPORTS"):
        importlib.import_module("torch_promote.checking.crosscheck").use_environment()
    if os.environ.get("TORCH_PROMOTE_TRACED"):
        importlib.import_module("torch_promote.numerics.traced_process").use_environment()
    if os.environ.get("TORCH_PROMOTE_ERRORS"):  # `torch-promote run` sets it
        atexit.register(_explain_run)
    if os.environ.get("TORCH_PROMOTE_MONITOR"):
        importlib.import_module("torch_promote.reading.monitor").use_environment()
    if os.environ.get("TORCH_PROMOTE_AUTOCAST"):
        importlib.import_module("torch_promote.regions.installation").use_environment()


def _explain_run() -> None:
    """Says at the end of a program of `torch-promote run` what did not act, and what cures the error that ended it."""
    importlib.import_module("torch_promote.regions.installation").say_unused_overrides()
    if isinstance(getattr(sys, "last_value", None), Exception):  # that nothing caught
        importlib.import_module("torch_promote.reading.raised_errors").say_at_exit()


# Last, so that the package is complete if this raises and the program goes on; the next import then raises again.
if not _is_command():
    do_once(_use_environment)
