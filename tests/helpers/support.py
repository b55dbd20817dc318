"""What the tests share: a picture of the thread's autocast state, and comparison as an assertion."""

from __future__ import annotations

from typing import Any

import torch

from torch_promote import _C
from torch_promote.checking.comparison import compare

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


def assert_same(ours: Any, stock: Any, what: str = "result") -> None:
    """Fails unless two results are equal in structure, dtype, shape, strides and bits.

    Results are tensors or nested containers of them. Fake tensors have no bits; everything else of them is compared.
    """
    differences = compare(ours, stock, what)
    assert not differences, "\n".join(f"{difference}, as stock has" for difference in differences)
