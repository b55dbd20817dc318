"""The ops that the running PyTorch and its libraries register for autocast, compared with the op table.

The table describes PyTorch 2.13; other versions register other ops. A row falls through on a device type for which the
running PyTorch does not register the op. An op that PyTorch registers, and for which the table has no policy on that
device type, is left to stock.
"""

from __future__ import annotations

import torch

from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.errors import UnsupportedDeviceError
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES, Row, op_table

__all__ = ["missing_rows", "registered", "registered_on_any", "unlisted_ops"]


def registered(device_type: str) -> frozenset[str]:
    """Returns the ops that now have a kernel on the stock autocast key of a device type.

    The result is not cached, since a library may register an op at any time.

    Args:
        device_type: "cpu" or "cuda". A PyTorch build without CUDA registers the CUDA ops too.

    Returns:
        Full names, as in `Row.name`.

    Raises:
        UnsupportedDeviceError: The table has no column for this device type.

    Example:
        >>> "aten::mm" in registered("cpu"), "aten::softmax.int" in registered("cpu")
        (True, False)
    """
    if device_type not in DEVICE_TYPES:
        legal = ", ".join(map(repr, DEVICE_TYPES))
        raise UnsupportedDeviceError(f"the op table has no column for device type {device_type!r}. Legal: {legal}.")
    return _with_kernel(f"Autocast{device_type.upper()}")


def registered_on_any(device_type: str) -> frozenset[str]:
    """Like `registered`, for every device type that has autocast in the running PyTorch.

    Args:
        device_type: "cpu", "cuda", "xpu", "mps". PrivateUse1 is not available: this package uses its autocast key.

    Returns:
        Full names, as in `Row.name`.

    Raises:
        UnsupportedDeviceError: The running PyTorch registers no op for autocast on this device type.

    Example:
        >>> registered_on_any("cpu") == registered("cpu")
        True
    """
    stock_keys = [key for key in torch._C.DispatchKey.__members__ if key.startswith("Autocast") and key != AUTOCAST_KEY]
    kernels = {key.removeprefix("Autocast").lower(): names for key in stock_keys if (names := _with_kernel(key))}
    if device_type not in kernels:
        raise UnsupportedDeviceError(
            f"this PyTorch registers no op for autocast on device type {device_type!r}. "
            f"Legal: {', '.join(map(repr, sorted(kernels)))}."
        )
    return kernels[device_type]


def _with_kernel(key: str) -> frozenset[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, key))


def missing_rows(device_type: str) -> tuple[Row, ...]:
    """Returns the rows with a policy on a device type that the running PyTorch does not register there.

    Args:
        device_type: "cpu" or "cuda".

    Returns:
        Rows, in table order. Empty in the version that the table describes.

    Raises:
        UnsupportedDeviceError: The table has no column for this device type.

    Example:
        >>> all(row.name not in registered("cuda") for row in missing_rows("cuda"))
        True
    """
    names = registered(device_type)
    return tuple(row for row in _rows_with_a_policy(device_type) if row.name not in names)


def unlisted_ops(device_type: str) -> tuple[str, ...]:
    """Returns the ops that the running PyTorch registers on a device type and the table has no policy for.

    Inside our regions, stock autocast still handles these. They include custom ops of libraries.

    Args:
        device_type: "cpu" or "cuda".

    Returns:
        Full names, sorted.

    Raises:
        UnsupportedDeviceError: The table has no column for this device type.

    Example:
        >>> "aten::mm" in unlisted_ops("cpu")
        False
    """
    listed = {row.name for row in _rows_with_a_policy(device_type)}
    return tuple(sorted(registered(device_type) - listed))


def _rows_with_a_policy(device_type: str) -> list[Row]:
    return [row for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough]
