"""Gives flex_attention a kernel on the dispatch key of `my_autocast`. See NOTE [ An op for flex_attention ].

The kernel replaces PyTorch's kernels of flex_attention on AutocastCPU and AutocastCUDA, which cast query, key and value
whatever the policy is.
"""

from __future__ import annotations

import functools
from operator import or_
from typing import Any

import torch
from torch import Tensor

from torch_promote.integrations.compile import run_after_import, skip_frames
from torch_promote.loader import AUTOCAST_KEY
from torch_promote.policy.op_table import DEVICE_TYPES

_OPERATOR = "flex_attention"
_KEY = torch._C._dispatch_key_parse(AUTOCAST_KEY)
_STOCK_KEYS = tuple(torch._C._dispatch_key_parse(f"Autocast{name.upper()}") for name in DEVICE_TYPES)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def install() -> None:
    """Registers the kernel, now or when PyTorch's module is imported."""
    run_after_import(f"torch._higher_order_ops.{_OPERATOR}", _register)


def _register() -> None:
    operator: Any = torch._ops._higher_order_ops[_OPERATOR]
    # As in PyTorch's kernels, and for MPS, where PyTorch raises. For XPU, PyTorch leaves autocast on for ops inside.
    # Our key stays on, too: a promotion rule may act on them.
    keys_off = [torch._C.DispatchKeySet(key) for key in _STOCK_KEYS if operator.non_fallthrough_keys.has(key)]
    no_autocast = functools.reduce(or_, keys_off)

    @operator.py_impl(_KEY)  # type: ignore[untyped-decorator]
    def kernel(*args: Any) -> Any:
        if not all(map(_is_excluded, _STOCK_KEYS)):  # autograd's kernel calls the operator again
            args = (*_cast(*args[:3]), *args[3:])
        with torch._C._ExcludeDispatchKeyGuard(no_autocast):
            keys = torch._ops._compute_keyset(args, {}, operator.non_fallthrough_keys).remove(_KEY)
            return operator.dispatch(keys.highestPriorityTypeId(), *args)

    skip_frames(kernel)


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keeps_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # PyTorch's kernels keep no casts
    try:
        return torch.ops.aten.flex_attention(query, key, value)  # type: ignore[no-any-return]
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
