"""`cache_info` and `clear_cache`: what the cast cache holds, and how to empty it."""

from __future__ import annotations

from torch_promote import _C

__all__ = ["cache_info", "clear_cache"]


def cache_info() -> dict[str, int]:
    """Returns what this thread's cast cache holds and has done, and how many casts outlive regions.

    While a region is open in the thread, the cache holds casts of float32 leaves that require a gradient, like stock:
    one for each target dtype. With `cache="persistent"` and `cache="all"` it also holds casts of other weights (frozen
    ones, other dtypes) and of views of weights, and with `cache="all"` the last four casts of activations. An entry is
    valid as long as its source is unchanged: same version (`tensor._version`), same storage, same data pointer. It does
    not keep its source alive. The end of the thread's outermost autocast region, ours or PyTorch's, drops all entries,
    and so does `torch.clear_autocast_cache()`. The casts that outlive regions, with `cache="persistent"`, are stored
    with the weights themselves and belong to the process.

    The cache does not detect writes that leave the version unchanged, such as `weight.data.copy_(...)` and writes
    through a NumPy array or another alias. After these call `clear_cache()`, in the middle of a region or if there are
    casts that outlive regions.

    Returns:
        `entries` and `bytes` (of their data) held now; `hits`, `misses` (casts made and kept), `stale` (dropped because
        the source had changed) and `dropped` (because it had died), counted since the thread began;
        `persistent_entries` and `persistent_bytes` held now by all weights of the process.

    Example:
        >>> import torch
        >>> from torch_promote import my_autocast
        >>> weight = torch.ones(4, 4, requires_grad=True)
        >>> with my_autocast("cpu"):
        ...     y = torch.ones(4, 4) @ weight
        ...     cache_info()["entries"], cache_info()["bytes"]
        (1, 32)
        >>> cache_info()["entries"]
        0
    """
    return _C.cache_info()


def clear_cache() -> None:
    """Drops every cast that this thread or a suspended region holds, and those of the process that outlive regions.

    Call it after a write to a weight that does not bump its version: in the middle of a region, and at any time after
    you used `cache="persistent"`; see `cache_info`.

    Example:
        >>> clear_cache()
        >>> cache_info()["entries"]
        0
    """
    _C.clear_cache()
