"""What PyTorch registers kernels for: the one question that the reference has for the dispatcher."""

from __future__ import annotations

import torch

__all__ = ["is_registered"]


def is_registered(overload: str, key: str) -> bool:
    """Whether PyTorch has registered a kernel for an overload on a dispatch key.

    Which ops a build has, and on which keys, is a fact about that build, as which dtypes exist is: no rule can say it,
    and it gives no dtype away. `infer` needs it to tell an out= op with a kernel of its own from one that copies,
    `autocast_plan` to tell which rows of the op table this PyTorch knows on a device, and what else autocast casts.
    The dispatcher is asked at every call: a library may register a kernel of its own at any time.

    Args:
        overload: An overload that exists, such as `aten::add.out`.
        key: A dispatch key's name.

    Example:
        >>> is_registered("aten::mm", "AutocastCPU"), is_registered("aten::relu", "AutocastCPU")
        (True, False)

    Source: aten/src/ATen/core/dispatch/OperatorEntry.h, hasKernelForDispatchKey (v2.13).
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload, key)
