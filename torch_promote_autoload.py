"""The environment variable TORCH_PROMOTE_AUTOCAST, which runs regions of torch.autocast as ours without code changes.

PyTorch calls `autoload` at the end of every `import torch` (entry point of the group `torch.backends`). So unless the
variable is set, this module only imports modules that PyTorch has already imported.
"""

import contextlib
import os
import sys
import warnings

__all__ = ["autoload"]


def autoload() -> None:
    """Imports torch_promote, which installs itself, if the environment variable is set.

    An error would make `import torch` fail, so every error becomes one warning, and torch.autocast stays PyTorch's.
    """
    asked = os.environ.get("TORCH_PROMOTE_AUTOCAST", "")
    if asked in ("", "0") and not os.environ.get("TORCH_PROMOTE_TRACED"):  # `torch-promote trace --stock` sets that
        return
    if asked not in ("", "0", "1"):
        _warn(f"TORCH_PROMOTE_AUTOCAST is {asked!r}. Legal: 1 (torch_promote runs the regions of torch.autocast), 0.")
        return
    if "torch_promote" in sys.modules:  # it is importing torch, and installs itself at its end
        return
    try:
        import torch_promote  # noqa: F401
    except KeyboardInterrupt:  # from the user
        raise
    except BaseException as error:  # any failure of a broken installation, including sys.exit()
        import traceback

        text = "".join(traceback.format_exception_only(error)).strip()
        _warn(f"{text} Correct this, or unset TORCH_PROMOTE_AUTOCAST.")


def _warn(reason: str) -> None:
    text = f"torch_promote is not in use, and torch.autocast stays PyTorch's. {reason}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:  # warnings are errors here, as with python -W error
        with contextlib.suppress(Exception):
            sys.stderr.write(f"RuntimeWarning: {text}\n")
