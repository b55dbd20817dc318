"""`cache_info` and `clear_cache`: inspect and empty the cast cache."""

from __future__ import annotations

from torch_promote import _C

__all__ = ["cache_info", "clear_cache"]


def cache_info() -> dict[str, int]:
    """Returns the contents and statistics of this thread's cast cache, and the casts that outlive regions.

    While a region is open in the thread, the cache holds casts of float32 leaves that require a gradient, like stock:
    one for each target dtype. With `cache="persistent"` and `cache="all"` it also holds casts of other weights (frozen
    ones, other dtypes), and with `cache="all"` the last four casts of activations. An entry is
    valid as long as its source is unchanged: same version (`tensor._version`), same storage, same data pointer. It does
    not keep its source alive. The end of the thread's outermost autocast region, ours or PyTorch's, drops all entries,
    and so does `torch.clear_autocast_cache()`. With `cache="persistent"`, casts outlive regions: they are stored with
    the weights and shared by all threads of the process.

    The cache does not detect writes that leave the version unchanged, such as `weight.data.copy_(...)` and writes
    through a NumPy array or another alias. After such a write, call `clear_cache()` if a region is open or casts
    outlive regions. `check_casts` finds such writes.

    Returns:
        `entries` and `bytes` (of their data) in the cache now; since the thread started, the counts of `hits`, `misses`
        (casts made and stored), `stale` (casts dropped because the source had changed) and `dropped` (because the
        source had died); `persistent_entries` and `persistent_bytes` that all weights of the process hold now.

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
    """Drops all casts of the process: of every thread, of suspended regions, and those that outlive regions.

    Call it after a write to a weight that does not increase its version, if a region is open or you have used
    `cache="persistent"`; see `cache_info`.

    Example:
        >>> clear_cache()
        >>> cache_info()["entries"]
        0
    """
    _C.clear_cache()
