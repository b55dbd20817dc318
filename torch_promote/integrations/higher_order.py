"""Makes higher-order operators (cond, flex_attention, ...) fall through on our dispatch key.

Such an operator has a dispatch table of its own, in Python, in which PyTorch lets it fall through on AutocastCPU,
AutocastCUDA and others. On a key that is not in the table it raises, where an ordinary op would fall through.
"""

from __future__ import annotations

import torch

__all__ = ["pass_over"]


def pass_over(key: str) -> None:
    """Makes every higher-order operator, those still to be defined included, fall through on a dispatch key.

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
        if number not in operator.py_kernels:  # somebody else may have registered a kernel
            operator.fallthrough(number)
