"""`my_autocast`: torch.autocast's contract, on a dispatch key of our own.

The state is in the extension (csrc/region.cpp); this module checks what is asked, packs it into one int, and makes the
region usable as a context manager, as a decorator and inside torch.compile and torch.export.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from torch_promote import _C
from torch_promote._compile import GraphRegion
from torch_promote._steps import Awaited, Steps, drive, guard_tasks
from torch_promote.errors import (
    DecoratorError,
    DeviceTypeError,
    DtypeError,
    RegionError,
    UnsupportedDeviceError,
    did_you_mean,
)
from torch_promote.overrides import parse_overrides
from torch_promote.policies import DEVICE_TYPES, CastPolicy

__all__ = ["cache_info", "clear_cache", "my_autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CPU_DTYPES = (torch.bfloat16, torch.float16)

# The layout of a packed spec; csrc/region.h, RegionSpec, reads it.
_BITS_PER_DEVICE = 16
_NAMED = 1 << 8
_ENABLED = 1 << 9
_CACHE_ENABLED = 1 << 32
_OVERRIDES_SHIFT = 40
_NUMBERS = {
    dtype: _C.scalar_type(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}


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
        cache_enabled: Whether casts of trainable float32 leaf tensors are reused within the region. None: as it is now.
        overrides: Other cast policies for some ops, in this region and those nested in it: maps an op ("softmax",
            "aten::softmax.int", `torch.ops.aten.mm`, `torch.ops.aten.mm.default`) to a cast policy ("fp16", "fp32",
            "promote", "keep", "fallthrough", "banned", a `CastPolicy`) or to a floating dtype to run it in. Nested
            regions add to the overrides of the region around them.

    Raises:
        DeviceTypeError: A device type is not a str, or a sequence is empty or names one twice. It is a ValueError.
        UnsupportedDeviceError: A device type has no autocast here. It is a RuntimeError.
        DtypeError: dtype is not a floating torch.dtype. It is a TypeError.
        PolicyError: An op or policy in `overrides` does not exist or is not legal. It is a ValueError.

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

    __slots__ = ("__weakref__", "_arguments", "_devices", "_spec")

    def __init__(
        self,
        device_type: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        overrides: Mapping[Any, Any] | None = None,
    ) -> None:
        spec = _C.pack_cpu_spec(device_type, dtype, enabled, cache_enabled)
        if spec is None:
            spec = _pack_spec(device_type, dtype, enabled, cache_enabled)
        if overrides:
            overrides = dict(overrides) if isinstance(overrides, Mapping) else overrides
            spec |= _overrides_number(overrides) << _OVERRIDES_SHIFT
        self._spec = spec
        self._arguments = (device_type, dtype, enabled, cache_enabled, overrides)

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
            self._export_exit()

    def __call__(self, func: Any) -> Any:
        """Decorates a callable; see the class."""
        if not callable(func):
            raise DecoratorError(
                f"my_autocast(...) decorates a callable, got {type(func).__name__}. Decorate a function, or use it as "
                f"a context manager: `with my_autocast(...):`."
            )
        return _decorate(self, func)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has the defaults that its original found. The number of a set of overrides means something in this
        # process only.
        return _rebuild, (self._spec & ((1 << _OVERRIDES_SHIFT) - 1), self._arguments)

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache_enabled, overrides = self._arguments
        parts = [repr(device_type) if device_type is not None else repr(next(_unpack_devices(self._spec))[0])]
        parts += [f"dtype={dtype}"] if dtype is not None else []
        parts += [] if enabled else ["enabled=False"]
        parts += [f"cache_enabled={cache_enabled}"] if cache_enabled is not None else []
        parts += [f"overrides={_short(overrides)}"] if overrides else []
        return f"my_autocast({', '.join(parts)})"

    # Modes of torch.export and the like, and event loops, are looked at only where the extension saw one.

    def _look_around(self, notes: int) -> None:
        if notes & _C.RUNNING_LOOP:
            guard_tasks()
        if notes & _C.TORCH_FUNCTION_MODE:
            self._export_enter()

    # torch.export records ops above every Autocast key, so a region would leave no trace in the exported graph. Under
    # the stock policy it is recorded as the region of torch.autocast that it is equal to.
    # Source: torch/amp/autocast_mode.py, autocast.__enter__ (v2.13).

    def _export_enter(self) -> None:
        modes = _export_modes()
        if modes and not _C.policy_is_stock():
            _C.exit_region(self)
            raise RegionError(
                f"{self!r} cannot be exported: an exported graph can hold regions of torch.autocast only, and these do "
                f"not know overrides. Export without overrides, or write the casts into the module."
            )
        for mode in modes:
            for name, dtype, enabled in _unpack_devices(self._spec):
                cache_enabled = bool(self._spec & _CACHE_ENABLED)
                mode.__torch_function__(_enter_autocast, (), (name, dtype, enabled, cache_enabled))

    def _export_exit(self) -> None:
        for mode in _export_modes():
            for _ in _unpack_devices(self._spec):
                mode.__torch_function__(_exit_autocast, (), ())


def _pack_spec(device_type: object, dtype: object, enabled: object, cache_enabled: object) -> int:
    """Checks what is asked as torch.autocast does, and returns the packed spec."""
    device_types = (device_type,) if isinstance(device_type, str) else _device_types(device_type)
    if cache_enabled is None:
        cache_enabled = torch.is_autocast_cache_enabled()
    spec = _CACHE_ENABLED if cache_enabled else 0
    for name in device_types:
        dtype_here, enabled_here = _check_device(name, dtype, enabled)
        field = _NUMBERS[dtype_here] | _NAMED | (_ENABLED if enabled_here else 0)
        spec |= field << (_BITS_PER_DEVICE * DEVICE_TYPES.index(name))
    return spec


def _overrides_number(overrides: Mapping[Any, Any]) -> int:
    """Returns the number of a set of overrides in the extension; the same set gets the same number."""
    try:
        return _register(tuple(overrides.items()))
    except (AttributeError, TypeError):  # no mapping, or a value without a hash: nothing legal, and worth its own error
        parse_overrides(overrides)
        raise


# Dynamo calls it while it traces, and keeps the number.
_overrides_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register(items: tuple[tuple[Any, Any], ...]) -> int:
    changes = [
        (row.index, device, _policy_byte(policy))
        for row, policy in parse_overrides(dict(items))
        for device in range(len(DEVICE_TYPES))
    ]
    return _C.register_overrides(changes)


def _policy_byte(policy: CastPolicy | torch.dtype) -> int:
    if isinstance(policy, CastPolicy):
        return _C.POLICY_BYTES[policy.value]
    return _C.POLICY_BYTES["run_in"] + _NUMBERS[policy]


def _unpack_devices(spec: int) -> Iterator[tuple[str, torch.dtype, bool]]:
    """Yields the device type, dtype and enabled flag of each device type that a spec names."""
    for index, name in enumerate(DEVICE_TYPES):
        field = spec >> (_BITS_PER_DEVICE * index)
        if field & _NAMED:
            dtype = next(dtype for dtype, number in _NUMBERS.items() if number == field & 0xFF)
            yield name, dtype, bool(field & _ENABLED)


def _device_types(asked: object) -> Sequence[str]:
    if asked is None:
        return ("cuda",) if torch.cuda.is_available() else ("cpu",)
    if isinstance(asked, Sequence):
        if not asked:
            raise DeviceTypeError("no device type given: the sequence is empty. Name 'cpu', 'cuda' or both.")
        for index, name in enumerate(asked):
            if name in asked[:index]:
                raise DeviceTypeError(f"device type {name!r} is named twice in {list(asked)!r}. Name each once.")
        return asked
    remedy = "As a decorator, write it with parentheses: @my_autocast()." if callable(asked) else ""
    remedy = "Of a torch.device, pass its .type." if isinstance(asked, torch.device) else remedy
    raise DeviceTypeError(
        f"expected a device type of type str (or a sequence of them), got {asked!r} of type {type(asked).__name__}. "
        f"Legal: 'cpu', 'cuda'. {remedy}".rstrip()
    )


def _check_device(name: object, dtype: object, enabled: object) -> tuple[torch.dtype, bool]:
    """Returns the dtype and enabled flag that a region gets for a device type, as torch.autocast would."""
    if not isinstance(name, str):
        raise DeviceTypeError(
            f"expected a device type of type str, got {name!r} of type {type(name).__name__}. Legal: 'cpu', 'cuda'."
        )
    if name not in DEVICE_TYPES:
        raise _unsupported(name)
    if dtype is None:
        dtype = torch.get_autocast_dtype(name)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(
            f"dtype is a torch.dtype, such as torch.bfloat16, or None; got {dtype!r} of type {type(dtype).__name__}."
        )
    if dtype not in _NUMBERS:
        raise DtypeError(
            f"{dtype} is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16."
        )
    if not enabled:
        return dtype, False
    if name == "cuda":
        if torch.cuda.amp.common.amp_definitely_not_available():
            _warn("CUDA is not available or torch_xla is imported. Disabling my_autocast.")
            return dtype, False
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise UnsupportedDeviceError("this CUDA device does not support bfloat16. Use dtype=torch.float16.")
    elif dtype not in _CPU_DTYPES:
        _warn(
            f"my_autocast on the CPU supports torch.bfloat16 and torch.float16, got {dtype}. Disabling my_autocast. To "
            f"run single ops in {dtype}, use overrides={{op: {dtype}}}."
        )
        return dtype, False
    return dtype, True


def _unsupported(name: str) -> UnsupportedDeviceError:
    if torch.amp.is_autocast_available(name):
        remedy = f" torch.autocast({name!r}) serves that device type."
    else:
        remedy = did_you_mean(name, DEVICE_TYPES) or (" Give the type without an index." if ":" in name else "")
    return UnsupportedDeviceError(f"my_autocast has no device type {name!r}. Legal: 'cpu', 'cuda'.{remedy}")


def _warn(message: str) -> None:
    # _warn, _check_device, _pack_spec, __init__, the caller
    warnings.warn(message, stacklevel=5)


def _export_modes() -> list[Any]:
    mode = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    return [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, mode)]


def _decorate(region: my_autocast, func: Any) -> Any:
    body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    wrapper: Any
    if inspect.iscoroutinefunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await Awaited(Steps(region), func(*args, **kwargs))

    elif inspect.isasyncgenfunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = func(*args, **kwargs)
            steps = Steps(region)
            step = generator.asend(None)
            try:
                while True:
                    try:
                        item: Any = await Awaited(steps, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)
            finally:
                await Awaited(steps, generator.aclose())

    elif inspect.isgeneratorfunction(body):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from drive(Steps(region), func(*args, **kwargs)))

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                with GraphRegion(region._spec):
                    return func(*args, **kwargs)
            with region:
                return func(*args, **kwargs)

    # torch.jit looks for this name on functions that it is asked to compile.
    wrapper.__script_unsupported = "@my_autocast() decorator is not supported in script mode"
    return wrapper


def _rebuild(spec: int, arguments: tuple[Any, ...]) -> my_autocast:
    region = my_autocast.__new__(my_autocast)
    overrides = arguments[-1]
    region._spec = spec | (_overrides_number(overrides) << _OVERRIDES_SHIFT if overrides else 0)
    region._arguments = arguments
    return region


def _short(overrides: Mapping[Any, Any]) -> str:
    def name(value: Any) -> str:
        return repr(value.value if isinstance(value, CastPolicy) else value if isinstance(value, str) else str(value))

    return "{" + ", ".join(f"{name(op)}: {name(policy)}" for op, policy in overrides.items()) + "}"


def cache_info() -> dict[str, int]:
    """Returns what this thread's cast cache holds and has done.

    The cache holds casts of float32 leaf tensors that require a gradient, one for each target dtype, while a region is
    open in the thread. An entry serves as long as its source is unchanged: same version (`tensor._version`), same
    storage, same data pointer. It does not keep its source alive. When the outermost region of the thread ends, all go.

    What the version does not see, the cache does not see: `weight.data.copy_(...)` and writes through a NumPy array or
    another alias made with `.data` or `.detach()` in another process leave it as it was. Call `clear_cache()` after
    these, if it is in the middle of a region.

    Returns:
        `entries` and `bytes` (of their data) held now; `hits`, `misses` (casts made and kept), `stale` (dropped because
        the source had changed) and `dropped` (because it had died), counted since the thread began.

    Example:
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
    """Drops every cast that this thread's cache holds.

    Needed in the middle of a region after a change of a weight that does not bump its version; see `cache_info`.

    Example:
        >>> clear_cache()
        >>> cache_info()["entries"]
        0
    """
    _C.clear_cache()
