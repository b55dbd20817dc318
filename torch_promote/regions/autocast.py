"""`my_autocast`: torch.autocast's contract, on a dispatch key of our own.

The state is in the extension (csrc/region/region.cpp). What is asked for is checked and packed in
arguments.py; decorating is in decorate.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import DecoratorError, RegionError
from torch_promote.integrations.asyncio_tasks import guard_tasks
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_names import find_op, name_op
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import (
    allows_cache,
    pack_spec,
    read_policy,
    unpack_devices,
    with_cache_mode,
    with_policy,
)
from torch_promote.regions.decorate import decorate

__all__ = ["my_autocast"]


class my_autocast:  # noqa: N801 (the name that people type)
    """Runs ops in the dtype that a policy chooses for each: a drop-in for `torch.autocast`.

    Under the default policy an op gives what it gives under `torch.autocast`, bit for bit, forward and backward. What
    PyTorch's own state says (`torch.is_autocast_enabled()`, `torch.get_autocast_dtype()`) holds inside the region too,
    and regions of `torch.autocast` may be nested in it or around it: the innermost decides.

    Use it as a context manager or as a decorator, of functions, methods, coroutines, generators and asynchronous
    generators; of those that run in steps the region holds in the steps only. One object can be entered any number of
    times, nested and in several threads.

    Args:
        device_type: "cpu" or "cuda", or a sequence of both. None: "cuda" if it is available, else "cpu".
        dtype: What lower-precision ops run in. None: the present default of each device type, which is
            `torch.bfloat16` for the CPU and `torch.float16` for CUDA.
        enabled: False makes a region in which autocast is off for these device types.
        cache_enabled: Whether casts of weights are reused within the region. None: as it is now.
        cache: Which casts are reused. "weights": those that stock reuses, of float32 leaves that require a gradient,
            within the region. "persistent": those of all weights (frozen ones, views, other dtypes), also beyond the
            region's end. "all": those of all weights and of the last activations, within the region. "none": none,
            which is cache_enabled=False; the other modes are cache_enabled=True. None: as cache_enabled says, in the
            mode of the region around, or "weights" outside of regions.
        policy: What is done with each op, in this region and those nested in it: a `Policy`, the name of one ("cuda",
            "cpu", "fp32_safe", "off", "stock"; see `Policy.named`) or the path of a policy file, which is read here.
            None: the policy of the region around, or outside of regions the default (`set_default_policy`).
        overrides: Other cast policies for some ops, on top of the policy: maps an op ("softmax", "softmax.int",
            "mylib::op", "linalg_*", `torch.ops.aten.mm`, `torch.ops.aten.mm.default`) to a cast policy ("fp16", "fp32",
            "promote", "match_self", "keep", "fallthrough", "banned", a `CastPolicy`) or to a floating dtype to run it
            in. Nested regions add to the overrides of the region around them.

    Raises:
        DeviceTypeError: A device type is not a str, or a sequence is empty or names one twice. It is a ValueError.
        UnsupportedDeviceError: A device type has no autocast here. It is a RuntimeError.
        DtypeError: dtype is not a floating torch.dtype. It is a TypeError.
        OptionError: There is no such cache, or cache_enabled says the contrary. It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, or a policy file is wrong. It is a
            ValueError.

    Warns:
        UserWarning: CUDA is asked for and not available, or the CPU with a dtype other than bfloat16 and float16. The
            region is then disabled, as in `torch.autocast`.

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

    __slots__ = ("__weakref__", "_arguments", "_spec")

    def __init__(
        self,
        device_type: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        cache: str | None = None,
        policy: Policy | str | os.PathLike[str] | None = None,
        overrides: Mapping[Any, Any] | None = None,
    ) -> None:
        cached = cache_enabled if cache is None else allows_cache(cache, cache_enabled)
        spec = _C.pack_cpu_spec(device_type, dtype, enabled, cached)
        if spec is None:
            spec = pack_spec(device_type, dtype, enabled, cached)
        if cache is not None:
            spec = with_cache_mode(spec, cache)
        if overrides is not None or policy is not None:
            overrides = dict(overrides) if isinstance(overrides, Mapping) else overrides
            if not torch.compiler.is_dynamo_compiling():  # which keeps the number alone
                policy = read_policy(policy)
            spec = with_policy(spec, policy, overrides)
        self._spec = spec
        self._arguments = (device_type, dtype, enabled, cache_enabled, cache, policy, overrides)

    def __enter__(self) -> my_autocast:
        notes = _C.enter_region(self, self._spec)
        if notes:
            self._look_around(notes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        notes = _C.exit_region(self)
        if notes:
            if notes < 0:
                if kind is GeneratorExit:
                    return  # a body that is closed between two of its steps, when its regions were off the thread
                raise RegionError(
                    f"{self!r} is not open in this thread, so it cannot be ended here. A region belongs to the thread "
                    f"that entered it; enter one in each thread."
                )
            record_exit(self._spec)

    def __call__(self, func: Any) -> Any:
        """Decorates a callable; see the class."""
        if not callable(func):
            raise DecoratorError(
                f"my_autocast(...) decorates a callable, got {type(func).__name__}. Decorate a function, or use it as "
                f"a context manager: `with my_autocast(...):`."
            )
        return decorate(self, self._spec, func)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has the defaults that its original found.
        *arguments, overrides = self._arguments
        named = None if overrides is None else [(name_op(op), policy) for op, policy in overrides.items()]
        return _rebuild, (with_policy(self._spec, None, None), arguments, named)

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache_enabled, cache, policy, overrides = self._arguments
        parts = [repr(device_type) if device_type is not None else repr(next(unpack_devices(self._spec))[0])]
        parts += [f"dtype={dtype}"] if dtype is not None else []
        parts += [] if enabled else ["enabled=False"]
        parts += [f"cache_enabled={cache_enabled}"] if cache_enabled is not None else []
        parts += [f"cache={cache!r}"] if cache is not None else []
        parts += [f"policy={policy!r}"] if policy is not None else []
        parts += [f"overrides={_short(overrides)}"] if overrides else []
        return f"my_autocast({', '.join(parts)})"

    def _look_around(self, notes: int) -> None:
        if notes & _C.RUNNING_LOOP:
            guard_tasks()
        if notes & _C.TORCH_FUNCTION_MODE:
            try:
                record_enter(self._spec)
            except BaseException:
                _C.exit_region(self)
                raise


# What __init__, __enter__ and __exit__ do in the plainest cases is done in C too: csrc/python/region_type.cpp.
_C.take_short_ways(my_autocast)


def _rebuild(spec: str, arguments: Sequence[Any], named: Sequence[tuple[Any, Any]] | None) -> my_autocast:
    region = my_autocast.__new__(my_autocast)
    overrides = None if named is None else {find_op(name): policy for name, policy in named}
    region._spec = with_policy(spec, arguments[-1], overrides)
    region._arguments = (*arguments, overrides)
    return region


def _short(overrides: Mapping[Any, Any]) -> str:
    def name(value: Any) -> str:
        return repr(value.value if isinstance(value, CastPolicy) else value if isinstance(value, str) else str(value))

    return "{" + ", ".join(f"{name(op)}: {name(policy)}" for op, policy in overrides.items()) + "}"
