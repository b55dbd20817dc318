"""Detects registered kernels, the only information that the reference takes from the dispatcher."""

from __future__ import annotations

import torch

__all__ = ["is_registered"]


def is_registered(overload: str, key: str) -> bool:
    """Whether PyTorch has registered a kernel for an overload on a dispatch key.

    Like the set of dtypes, this is a property of the build that no rule can predict, and it reveals no result dtype.
    `infer` uses it to distinguish out= ops with a kernel of their own from those that copy. `autocast_plan` uses it to
    find the rows that this PyTorch registers on a device type, and other ops that autocast handles. The result is not
    cached, since a library may register a kernel at any time.

    Args:
        overload: An overload that exists, such as `aten::add.out`.
        key: A dispatch key's name.

    Example:
        >>> is_registered("aten::mm", "AutocastCPU"), is_registered("aten::relu", "AutocastCPU")
        (True, False)

    Source: aten/src/ATen/core/dispatch/OperatorEntry.h, hasKernelForDispatchKey (v2.13).
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload, key)
