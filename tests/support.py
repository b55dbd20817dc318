"""What the tests share: a picture of the thread's autocast state, and bit-for-bit comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from torch_promote import _C

OUR_KEY = torch._C.DispatchKey.AutocastPrivateUse1


def thread_state() -> dict[str, Any]:
    """All autocast state of this thread that Python can see, PyTorch's and ours."""
    state: dict[str, Any] = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in torch._C._autocast_supported_devices()
    }
    state["cache_enabled"] = torch.is_autocast_cache_enabled()
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
    ours_leaves, ours_tree = tree_flatten(ours)
    stock_leaves, stock_tree = tree_flatten(stock)
    assert ours_tree == stock_tree, f"{what}: structure {ours_tree} against stock's {stock_tree}"
    for index, (a, b) in enumerate(zip(ours_leaves, stock_leaves, strict=True)):
        label = f"{what}[{index}]"
        if not isinstance(b, torch.Tensor):
            assert (type(a), a) == (type(b), b), f"{label}: {a!r} against stock's {b!r}"
            continue
        assert isinstance(a, torch.Tensor), f"{label}: {type(a)} against stock's tensor"
        for attribute in ("dtype", "shape", "device", "layout", "requires_grad"):
            x, y = getattr(a, attribute), getattr(b, attribute)
            assert x == y, f"{label}: {attribute} {x} against stock's {y}"
        if b.layout is torch.strided and not b.is_nested:
            assert a.stride() == b.stride(), f"{label}: strides {a.stride()} against stock's {b.stride()}"
        if is_fake(b):
            continue
        assert same_bits(a, b), f"{label}: the bits differ from stock's"


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits; NaNs are equal if their bits are."""
    if a.layout is not torch.strided or a.is_nested or a.is_quantized:
        return torch.equal(a, b)
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
