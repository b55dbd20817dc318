"""Runs ops hidden from the program: autocast, autograd, modes and observers do not see them."""

from __future__ import annotations

from typing import Any

import torch

from torch_promote import _C
from torch_promote.checking.comparison import is_fake

__all__ = ["can_be_read", "stored_values", "unnoticed"]

_keys: Any = torch._C


def _hidden_from() -> Any:
    """The keys of autocast, autograd, version counters, modes, transforms and dispatch observers."""
    with (
        _keys._DisableTorchDispatch(),
        _keys._DisableAutocast(),
        _keys._AutoDispatchBelowADInplaceOrView(),
    ):
        keys = _keys._dispatch_tls_local_exclude_set()
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "PythonDispatcher"):
        keys = keys.add(getattr(_keys.DispatchKey, name))
    return keys.add(_keys._dispatch_key_parse(_C.dispatch_observer_key()))


_HIDDEN_FROM = _hidden_from()


class unnoticed:  # noqa: N801 (used like a function)
    """Hides the ops of a block from autocast, autograd, version counters, modes of PyTorch and dispatch observers.

    The ops must not use random number generators.

    It is not a generator: a signal handler that raises in contextlib would leave the end of the block to the time at
    which the generator dies, after the ends of the blocks around it.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with torch.autocast("cpu"), unnoticed():
        ...     product = weight[None] @ weight[:, None]
        >>> product.dtype, product.requires_grad
        (torch.float32, False)
    """

    __slots__ = ("_functions", "_ops")

    def __enter__(self) -> None:
        functions = _keys.DisableTorchFunction()
        excluded = _keys._dispatch_tls_local_exclude_set() | _HIDDEN_FROM
        ops = _keys._ForceDispatchKeyGuard(_keys._dispatch_tls_local_include_set(), excluded)
        self._functions, self._ops = functions, ops
        try:
            functions.__enter__()
            ops.__enter__()
        except BaseException:  # pragma: no cover: a signal handler raises
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._ops.__exit__(None, None, None)
        finally:
            self._functions.__exit__(None, None, None)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own data, which may be read now.

    Fake and meta tensors have no data, subclasses such as DTensor wrap other tensors, functorch's tensors belong to a
    running transform, and no tensor may be read while a CUDA graph is captured.

    Example:
        >>> can_be_read(torch.ones(2)), can_be_read(torch.ones(2, device="meta"))
        (True, False)
    """
    if tensor.device.type == "meta" or is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch._is_functional_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def stored_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements of a strided tensor, or the stored elements of a sparse or nested one.

    Returns:
        A strided tensor; None if the tensor is quantized, has no elements, or cannot be read.

    Example:
        >>> with unnoticed():
        ...     stored_values(torch.eye(2).to_sparse())
        tensor([1., 1.])
    """
    if tensor.is_nested and tensor.layout is torch.jagged:
        tensor = tensor._values  # type: ignore[assignment]
    if tensor.is_quantized or not can_be_read(tensor):
        return None
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        if tensor.layout not in _COMPRESSED:
            return None
        tensor = tensor.values()
    return tensor if tensor.numel() else None
