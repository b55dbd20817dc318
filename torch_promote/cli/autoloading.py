"""Whether PyTorch loads torch_promote in a Python process that has TORCH_PROMOTE_AUTOCAST=1."""

from __future__ import annotations

import importlib.metadata
import os

__all__ = ["why_not_loaded"]

_GROUP, _MODULE = "torch.backends", "_torch_promote_hooks"


def why_not_loaded() -> str | None:
    """Returns why `import torch` does not load torch_promote, and what to do; None if it does.

    It looks in sys.path.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD keeps PyTorch from loading it. Unset that variable."
    if not any(point.module == _MODULE for point in importlib.metadata.entry_points(group=_GROUP)):
        return (
            f"the installed package has no entry point in the group {_GROUP}, or is not installed. Install it in this "
            "environment, in the source checkout: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    return None
