"""Regions under torch.export.

Export records ops above the Autocast keys, so an exported graph would contain no sign of a region. A region under the
stock policy is therefore recorded as the equivalent region of torch.autocast.

Source: torch/amp/autocast_mode.py, autocast.__enter__ and __exit__ (v2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from torch_promote import _C
from torch_promote.errors import RegionError
from torch_promote.extension import RegionSpec


def record_enter(packed: str) -> None:
    """Records the start of a region, which has been entered, with the active modes of torch.export.

    Raises RegionError if the current policy is not stock's, since an exported graph cannot represent the region then.
    """
    modes = _export_modes()
    if modes and not _C.policy_is_stock():
        refuse_policy()
    for mode in modes:
        spec = RegionSpec.unpack(packed)
        for device in spec.devices:
            mode.__torch_function__(_enter_autocast, (), (*device, spec.cache_enabled))


def record_exit(packed: str) -> None:
    """Records the end of a region with the active modes of torch.export."""
    for mode in _export_modes():
        for _ in RegionSpec.unpack(packed).devices:
            mode.__torch_function__(_exit_autocast, (), ())


def refuse_policy() -> None:
    """Raises the error of `record_enter`."""
    raise RegionError(
        "a region with overrides (of ops or modules) or a promotion rule cannot be exported: an exported graph can "
        "only contain regions of torch.autocast, which have neither. Export without them, or write the casts into the "
        "module."
    )


def _export_modes() -> list[Any]:
    mode = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    return [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, mode)]
