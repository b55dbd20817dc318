"""`my_autocast`: a region with the behaviour of torch.autocast, on our own dispatch key.

base.py has the parts that all regions share; arguments.py checks the arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote._C import UNUSED_OVERRIDES, pack_plain_region
from torch_promote.extension import RegionSpec
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.overrides import spell_overrides
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import (
    Line,
    allows_cache,
    bind_model,
    check_devices,
    line_of,
    policy_change,
    policy_number,
    read_policy,
    warn_of_unused_overrides,
)
from torch_promote.regions.region import Region

__all__ = ["cache_info", "clear_cache", "my_autocast"]


class my_autocast(Region):  # noqa: N801 (the name that people type)
    """A drop-in replacement for `torch.autocast` that runs each op in the dtype that a policy chooses.

    Under the default policy, ops return the same bits as under `torch.autocast`, forward and backward. PyTorch's own
    state (`torch.is_autocast_enabled()`, `torch.get_autocast_dtype()`) also reflects the region. You can nest it inside
    or around regions of `torch.autocast`: the innermost region decides.

    Use it as a context manager, or as a decorator of functions, methods, coroutines, generators and asynchronous
    generators. A coroutine or generator is in the region only while one of its steps runs. You can enter the same
    object any number of times, nested and in several threads.

    Args:
        device_type: "cpu" or "cuda", or a sequence of both. None: "cuda" if it is available, else "cpu".
        dtype: The dtype of lower-precision ops, or its name ("bfloat16", "bf16"). None: the present default of each
            device type, which is `torch.bfloat16` for the CPU and `torch.float16` for CUDA.
        enabled: False makes a region in which autocast is off for these device types.
        cache_enabled: Whether casts of weights are reused within the region. None: as in the code around.
        cache: Which casts are reused. "weights": those that stock reuses, of float32 leaves that require a gradient,
            within the region. "persistent": those of all weights (frozen ones, views, other dtypes), also beyond the
            region's end. "all": those of all weights and of the last activations, within the region. "none": none,
            which is cache_enabled=False; the other modes are cache_enabled=True. None: as cache_enabled says, in the
            mode of the region around, or "weights" outside of regions.
        policy: The cast policy of each op, in this region and in regions nested in it: a `Policy`, the name of one
            ("cuda", "cpu", "fp32_safe", "off", "stock"; see `Policy.named`) or the path of a policy file, which is read
            here. None: the policy of the region around, or outside of regions the default (`set_default_policy`).
        overrides: Cast policies of single ops, on top of the policy: maps an op ("softmax", "softmax.int", "F.softmax",
            `torch.softmax`, "mylib::op", "linalg_*", `torch.ops.aten.mm`, `torch.ops.aten.mm.default`) to a cast policy
            ("lower", which is the region's dtype, "fp32", "promote", "match_self", "keep", "fallthrough", "banned", a
            `CastPolicy`) or to a floating dtype to run the op in, or its name. An op that is named has that policy,
            even if a pattern matches it, too. Nested regions add to the overrides of the region around them.
        model: The model to whose modules the policy's tables for modules apply (`Policy.override_modules`), in this
            region and in nested ones without a policy of their own. The modules are found here; copies of the model,
            also those made inside, are other models. None: those models that `policy.apply_to` was called with.

    Raises:
        DeviceTypeError: A device type is not a str, or a sequence is empty or names one twice. It is a ValueError.
        UnsupportedDeviceError: A device type has no autocast here. It is a RuntimeError.
        DtypeError: dtype is not a floating dtype, nor the name of one. It is a TypeError.
        OptionError: The cache mode does not exist, or contradicts cache_enabled; or a model is given without a policy.
            It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, a policy file is invalid, a policy
            has module tables but there is no model, or a table matches no module. It is a ValueError.

    Warns:
        UnusedOverrideWarning: At the region's end, if an op that overrides name met no call, although another op called
            it with autocast off: `{"mm": "fp32"}` has no effect on `linear`.
        UserWarning: You ask for CUDA where it is not available, or for the CPU with a dtype other than bfloat16 and
            float16. The region is then disabled, as in `torch.autocast`.

    Example:
        >>> x, weight = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
        >>> with my_autocast("cpu"):
        ...     y = x @ weight
        >>> y.dtype
        torch.bfloat16
        >>> @my_autocast("cpu", overrides={"matmul": "fp32"})
        ... def project(x):
        ...     return x @ weight
        >>> project(x).dtype
        torch.float32

    Source: torch/amp/autocast_mode.py, class autocast (v2.13), for the positional arguments, their checks and warnings.
    """

    __slots__ = ("_arguments",)

    _arguments: tuple[Any, ...]  # the fields of _Arguments, without trailing Nones

    def __init__(
        self,
        device_type: str | Sequence[str] | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        cache: str | None = None,
        policy: Policy | str | os.PathLike[str] | None = None,
        overrides: Mapping[Any, Any] | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        allowed = cache_enabled if cache is None else allows_cache(cache, cache_enabled)
        if policy is None and overrides is None and model is None:
            plain = pack_plain_region(device_type, dtype, enabled, cache_enabled, cache)
            if plain is not None:
                self._packed, self._arguments = plain
                return
        if isinstance(dtype, str):
            dtype = parse_dtype(dtype)
        devices = check_devices(device_type, dtype, enabled)
        change, binding, line = 0, None, None
        if overrides is not None or policy is not None or model is not None:
            overrides = dict(overrides) if isinstance(overrides, Mapping) else overrides
            if not torch.compiler.is_dynamo_compiling():  # Dynamo uses only the number
                policy = read_policy(policy)
                line = None if overrides is None else line_of(sys._getframe().f_back)
            binding = None if model is None else bind_model(model, policy)
            number = 0 if binding is None else binding.number
            if torch.compiler.is_dynamo_compiling():
                change = policy_number(policy, overrides, number)
            else:
                self._held = policy_change(policy, overrides, number, line is not None)
                change = self._held.number
        cache_flag = bool(torch.is_autocast_cache_enabled() if allowed is None else allowed)
        self._packed = RegionSpec(devices, cache_flag, None if cache == "none" else cache, change).pack()
        self._arguments = (device_type, dtype, enabled, cache_enabled, cache, policy, overrides, model, binding)
        self._arguments += () if line is None else (line,)

    def _exited(self, flags: int, kind: type[BaseException] | None) -> None:
        super()._exited(flags, kind)
        # After an exception, calls may be missing that the overrides are for.
        if flags > 0 and flags & UNUSED_OVERRIDES and kind is None:
            line = _Arguments(*self._arguments).line
            if line is not None:
                warn_of_unused_overrides(line)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy keeps the defaults that the original read. Numbers of policy changes are not valid in other processes.
        asked = _Arguments(*self._arguments)
        named = None
        if asked.overrides is not None:
            named = {op if isinstance(op, str) else spell_key(op): value for op, value in asked.overrides.items()}
        spec = RegionSpec.unpack(self._packed)._replace(policy_change=0)
        return _rebuild, (spec.pack(), asked._replace(overrides=None, binding=None), named)

    def __repr__(self) -> str:
        asked = _Arguments(*self._arguments)
        first = RegionSpec.unpack(self._packed).devices[0].device_type
        parts = [repr(first if asked.device_type is None else asked.device_type)]
        parts += [f"dtype={asked.dtype}"] if asked.dtype is not None else []
        parts += [] if asked.enabled else ["enabled=False"]
        parts += [f"cache_enabled={asked.cache_enabled}"] if asked.cache_enabled is not None else []
        parts += [f"cache={asked.cache!r}"] if asked.cache is not None else []
        parts += [f"policy={asked.policy!r}"] if asked.policy is not None else []
        parts += [f"overrides={spell_overrides(asked.overrides)}"] if asked.overrides else []
        parts += [f"model={type(asked.model).__name__}"] if asked.model is not None else []
        return f"my_autocast({', '.join(parts)})"


class _Arguments(NamedTuple):
    """The arguments of `my_autocast`, in the order in which a region stores them."""

    device_type: Any
    dtype: torch.dtype | None
    enabled: bool
    cache_enabled: bool | None
    cache: str | None = None
    policy: Any = None
    overrides: Mapping[Any, Any] | None = None
    model: torch.nn.Module | None = None
    binding: Any = None  # has the model's modules follow the policy's tables as long as a region has it
    line: Line | None = None  # that made the region, if it has overrides


def _rebuild(packed: str, asked: _Arguments, overrides: dict[str, Any] | None) -> my_autocast:
    region = my_autocast.__new__(my_autocast)
    region._packed = packed
    binding = None if asked.model is None else bind_model(asked.model, asked.policy)
    if asked.policy is not None or overrides is not None:
        number = 0 if binding is None else binding.number
        region._held = policy_change(asked.policy, overrides, number, asked.line is not None)
        region._packed = RegionSpec.unpack(packed)._replace(policy_change=region._held.number).pack()
    region._arguments = asked._replace(overrides=overrides, binding=binding)
    return region


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
