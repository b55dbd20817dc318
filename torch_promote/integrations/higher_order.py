"""Higher-order operators (cond, flex_attention, ...) on dispatch keys that PyTorch does not count among theirs.

Such an operator has a table of its own, in Python, and PyTorch fills in that it passes over AutocastCPU, AutocastCUDA
and others. A key that is not in the table is an error, where an ordinary op would pass over it.
"""

from __future__ import annotations

import torch

__all__ = ["pass_over"]


def pass_over(key: str) -> None:
    """Has every higher-order operator, those still to be defined included, pass over a dispatch key.

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
        if number not in operator.py_kernels:  # a kernel that somebody has given it stays
            operator.fallthrough(number)
