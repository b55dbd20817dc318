"""The dispatch key of the package's kernels, and how higher-order operators (cond, flex_attention, ...) treat it.

Such an operator has its own dispatch table in Python, in which PyTorch makes it fall through on AutocastCPU,
AutocastCUDA and others. Without an entry for our key, the operator would raise.
"""

from __future__ import annotations

import torch

__all__ = ["AUTOCAST_KEY", "pass_over"]


#: The only Autocast key above AutocastCPU and AutocastCUDA. PyTorch itself has no kernels on it.
AUTOCAST_KEY = "AutocastPrivateUse1"


def pass_over(key: str) -> None:
    """Makes every higher-order operator, including those defined later, fall through on a dispatch key.

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
        if number not in operator.py_kernels:  # another library may have registered a kernel
            operator.fallthrough(number)
