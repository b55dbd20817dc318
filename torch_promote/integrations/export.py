"""Regions under torch.export.

Export records ops above every Autocast key, so a region would leave no trace in the exported graph. Under the stock
policy it is recorded as the region of torch.autocast that it is equal to.

Source: torch/amp/autocast_mode.py, autocast.__enter__ and __exit__ (v2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from torch_promote import _C
from torch_promote.errors import RegionError
from torch_promote.regions.arguments import has_cache, unpack_devices

__all__ = ["record_enter", "record_exit"]


def record_enter(spec: str) -> None:
    """Records the start of a region, which has been entered, with the modes of torch.export that are active.

    Raises:
        RegionError: The policy in force is not stock's, so the exported graph could not hold it.
    """
    modes = _export_modes()
    if modes and not _C.policy_is_stock():
        raise RegionError(
            "a region with overrides or with a promotion rule cannot be exported: an exported graph can hold regions "
            "of torch.autocast only, and these know neither. Export without them, or write the casts into the module."
        )
    for mode in modes:
        for name, dtype, enabled in unpack_devices(spec):
            mode.__torch_function__(_enter_autocast, (), (name, dtype, enabled, has_cache(spec)))


def record_exit(spec: str) -> None:
    """Records the end of a region."""
    for mode in _export_modes():
        for _ in unpack_devices(spec):
            mode.__torch_function__(_exit_autocast, (), ())


def _export_modes() -> list[Any]:
    mode = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    return [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, mode)]
