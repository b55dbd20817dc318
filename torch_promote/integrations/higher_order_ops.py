"""Higher-order operators on the dispatch keys of this package: they fall through, but for flex_attention.

The kernel of flex_attention replaces PyTorch's on AutocastCPU and AutocastCUDA, which cast query, key and value
whatever the policy is. See NOTE [ An op for flex_attention ].
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


def let_operators_fall_through(key: str) -> None:
    """Makes every higher-order operator (flex_attention, ...), also later ones, fall through on a dispatch key."""
    # Such an operator has its own dispatch table in Python, in which PyTorch makes it fall through on AutocastCPU,
    # AutocastCUDA and others. Without an entry for our key, the operator would raise.
    # Source: torch/_ops.py, HigherOrderOperator.__init__ (v2.13).
    by_default = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    number = torch._C._dispatch_key_parse(key)
    if number in by_default:
        return
    by_default.append(number)
    for operator in torch._ops._higher_order_ops.values():
        if number not in operator.py_kernels:  # another library may have registered a kernel
            operator.fallthrough(number)


# --- flex_attention

_OPERATOR = "flex_attention"
_KEY = torch._C._dispatch_key_parse(AUTOCAST_KEY)
_STOCK_KEYS = tuple(torch._C._dispatch_key_parse(f"Autocast{name.upper()}") for name in DEVICE_TYPES)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def install() -> None:
    """Makes operators fall through on our key, and registers the kernel, now or when PyTorch's module is imported."""
    let_operators_fall_through(AUTOCAST_KEY)
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
