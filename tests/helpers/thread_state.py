"""The autocast state of a thread, for tests that compare it before and after."""

from __future__ import annotations

from typing import Any

import torch

from torch_promote import _C

OUR_KEY = torch._C.DispatchKey.AutocastPrivateUse1


def thread_state() -> dict[str, Any]:
    """All autocast state of this thread that Python can see, PyTorch's and ours."""
    state: dict[str, Any] = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in torch._C._autocast_supported_devices()
    }
    state["cache_enabled"] = torch.is_autocast_cache_enabled()
    state["cache_mode"] = _C.cache_mode()
    state["our key included"] = torch._C._dispatch_tls_is_dispatch_key_included(OUR_KEY)
    state["our key excluded"] = torch._C._dispatch_tls_is_dispatch_key_excluded(OUR_KEY)
    state["regions"] = _C.depth()
    # There is no getter for the nesting depth.
    state["nesting"] = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return state
