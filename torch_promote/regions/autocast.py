"""`my_autocast`: a region with the behaviour of torch.autocast, on our own dispatch key.

`Region`, its base class and that of `promotion`, comes first: the extension stores the thread's open regions
(csrc/region/region.cpp), and has the methods that enter and leave one (csrc/python/region_bindings.cpp).

Below the class are the checks of the arguments, which are those of torch.autocast (`pack_plain_region` in
csrc/python/region_bindings.cpp accepts the plainest arguments without them), the changes of policy, and the warning for
overrides of ops that other ops hide.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Never, ParamSpec, TypedDict, TypeVar, cast

import torch

from torch_promote import _C
from torch_promote._C import RUNNING_LOOP, TORCH_FUNCTION_MODE, WATCHED, HeldChange, RegionBase, pack_plain_region
from torch_promote.errors import (
    DecoratorError,
    DeviceTypeError,
    DtypeError,
    OptionError,
    PolicyError,
    RegionError,
    UnsupportedDeviceError,
    UnusedOverrideWarning,
    body_of,
    check_decorated,
    check_flag,
    did_you_mean,
    explains_arguments,
    refuse_arguments,
    shown,
)
from torch_promote.extension import DTYPE_NUMBERS, DeviceSpec, RegionSpec, fork_safe_lock, numbered, register_change
from torch_promote.integrations import cast_invalidation, checkpoint
from torch_promote.integrations.asyncio_tasks import guard_tasks, place_of_regions
from torch_promote.integrations.compile import record_enter, record_exit, skip_frames
from torch_promote.policy.dtype_names import FLOAT8_REMEDY, parse_dtype, why_not_cast
from torch_promote.policy.module_tables import module_finder
from torch_promote.policy.op_names import exact_key, spell_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, DeviceTypes, OpPolicy, rows_by_name
from torch_promote.policy.overrides import LEGAL_DEVICES, parse_overrides, select, spell_overrides
from torch_promote.policy.policy import Policy, PolicyLike

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Steps:
    """A context manager that runs each step of one body in a region."""

    # Autocast state belongs to a thread: a suspended body would leave its regions open for the code that runs next. So
    # all of them, its own ones too, are suspended after each step. After the last step, no region is left to end.

    def __init__(self, region: AbstractContextManager[Any]) -> None:
        self._region = region
        self._base = 0
        self._suspended: _C.SuspendedRegions | None = None

    def __enter__(self) -> None:
        self._base = _C.depth()
        if self._suspended is None:
            self._region.__enter__()
        else:
            _C.resume_regions(self._suspended)

    def __exit__(self, *error: object) -> None:
        self._suspended = _C.suspend_regions(self._base)

    def end(self) -> None:
        """Drops the suspended regions and their casts: a traceback may keep this object alive for long."""
        self._suspended = None


def drive(steps: Steps, body: Any) -> Generator[Any, Any, Any]:
    """Runs an object with send, throw and close, each of its steps in `steps`, and passes on what goes in and out."""
    step = functools.partial(body.send, None)
    while True:
        try:
            with steps:
                item = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except BaseException as error:  # includes GeneratorExit: the body's clean-up is another step
            step = functools.partial(body.throw, error)
        else:
            step = functools.partial(body.send, sent)


#: The same as a coroutine, for a coroutine or an awaitable of an asynchronous generator.
_drive_asynchronously = types.coroutine(drive)


def decorate(region: AbstractContextManager[Any], func: Any) -> Any:
    """Returns a function that runs `func` in `region`. Of a coroutine or generator, each step runs in the region."""
    body = body_of(func)
    wrapper: Any
    if inspect.iscoroutinefunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return await _drive_asynchronously(steps, func(*args, **kwargs))
            finally:
                steps.end()

    elif inspect.isasyncgenfunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = func(*args, **kwargs)
            steps = Steps(region)
            step = generator.asend(None)
            try:
                while True:
                    try:
                        item: Any = await _drive_asynchronously(steps, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)
            finally:
                try:
                    await _drive_asynchronously(steps, generator.aclose())
                finally:
                    steps.end()

    elif inspect.isgeneratorfunction(body):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return (yield from drive(steps, func(*args, **kwargs)))
            finally:
                steps.end()

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with region:
                return func(*args, **kwargs)

    # If torch.jit compiles a function with this attribute, it raises the text.
    wrapper.__script_unsupported = "@my_autocast() decorator is not supported in script mode"
    return wrapper


Watcher = Callable[[object], None]
"""A function that receives the owner of a region that has been entered: a `my_autocast` object, or, under `install`, a
torch.autocast object. It is called in the region's thread, from within `__enter__`, and must not raise."""

_lock = fork_safe_lock()
_watchers: list[Watcher] = []


@contextmanager
def watch_regions(watcher: Watcher) -> Iterator[None]:
    """Calls a watcher for each region that any thread enters during a block, except for regions of graphs."""
    with _lock:
        _watchers.append(watcher)
        _C.set_regions_watched(True)
    try:
        yield
    finally:
        _remove(watcher)


def _remove(watcher: Watcher) -> None:
    with _lock:
        _watchers.remove(watcher)
        _C.set_regions_watched(bool(_watchers))


skip_frames(_remove)


def tell_watchers(owner: object) -> None:
    """Notifies the watchers that a region has been entered."""
    for watcher in tuple(_watchers):
        watcher(owner)


class Region(RegionBase):
    """A region with a packed `RegionSpec`: a context manager and a decorator."""

    __slots__ = ("__weakref__", "_held")

    _held: HeldChange  # keeps the policy change registered whose number is in _packed, if there is one

    #: Called with each subclass once Dynamo is imported, to make it traceable.
    when_subclassed: ClassVar[Callable[[type[Region]], None] | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Region.when_subclassed is not None:
            Region.when_subclassed(cls)

    def __init__(self, packed: str) -> None:
        self._packed = packed

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a callable; see the class. Its signature stays, also that of a coroutine function or generator."""
        check_decorated(f"with {type(self).__name__}(...):", func, may_suspend=True)
        if isinstance(func, type):
            raise DecoratorError(
                f"{type(self).__name__}(...) cannot decorate the class {func.__qualname__}: the region would be around "
                "its construction alone, and the class would become a function. Decorate its methods, such as forward."
            )
        decorated: Callable[_P, _R] = decorate(self, func)
        return decorated

    def _entered(self, flags: int) -> None:
        """Tells the event loop, torch.export's modes and traces that the region has been entered."""
        if flags & RUNNING_LOOP:
            guard_tasks()
        if flags & TORCH_FUNCTION_MODE:
            record_enter(self._packed)
        if flags & WATCHED:
            tell_watchers(self)

    def _exited(self, flags: int, kind: type[BaseException] | None) -> None:
        """Tells the modes of torch.export that the region has ended. Raises if it was not open."""
        if flags < 0:
            if kind is not GeneratorExit:  # which closes a body between two steps, when its regions are suspended
                raise RegionError(f"{self!r} is not open in {place_of_regions()}")
        elif flags & TORCH_FUNCTION_MODE:
            record_exit(self._packed)


CacheMode = Literal["weights", "persistent", "all", "none"]


class my_autocast(Region):  # noqa: N801 (the name that people type)
    """A drop-in replacement for `torch.autocast` that runs each op in the dtype that a policy chooses.

    Under the default policy, ops return the same bits as under `torch.autocast`, forward and backward. PyTorch's own
    state (`torch.is_autocast_enabled()`, `torch.get_autocast_dtype()`) also reflects the region. You can nest it inside
    or around regions of `torch.autocast`: the innermost region decides.

    Use it as a context manager, or as a decorator of functions, methods, coroutines, generators and asynchronous
    generators. A coroutine or generator is in the region only while one of its steps runs. You can enter the same
    object any number of times, nested and in several threads.

    Args:
        device_type: "cpu", "cuda", "xpu" or "mps", or a sequence of these. None: the accelerator of these that is
            available, else "cpu".
        dtype: The dtype of lower-precision ops, or its name ("bfloat16", "bf16"). None: the present default of each
            device type, which is `torch.bfloat16` for the CPU and `torch.float16` for the others.
        enabled: False makes a region in which autocast is off for these device types.
        cache_enabled: Whether casts of weights are reused within the region. None: as in the code around.
        cache: Which casts are reused. "weights": those that stock reuses, of float32 leaves that require a gradient,
            within the region. "persistent": those of all weights (frozen ones, views, other dtypes), also beyond the
            region's end. "all": those of all weights and of the last activations, within the region. "none": none,
            which is cache_enabled=False; the other modes are cache_enabled=True. None: as cache_enabled says, in the
            mode of the region around, or "weights" outside of regions.
        policy: The cast policy of each op, in this region and in regions nested in it: a `Policy`, the name of one
            ("cuda", "fp32", "fp32_safe", "off", "stock", ...; see `Policy.named`) or the path of a policy file, which
            is read here. None: the policy of the region around, or outside of regions the default
            (`set_default_policy`).
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
        DtypeError: dtype is not a floating dtype of 16 bits or more, nor the name of one. It is a TypeError.
        FlagError: enabled or cache_enabled is not a bool. It is a TypeError.
        OptionError: The cache mode does not exist, or contradicts cache_enabled; or a model is given without a policy.
            It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, a policy file is invalid, a policy
            has module tables but there is no model, or a table matches no module. It is a ValueError.

    Warns:
        UnusedOverrideWarning: An override names an op that other ops call with autocast off, and none of these:
            `{"mm": "fp32"}` has no effect on `linear`. `{"mm.default": "fp32"}`, for direct calls, does not warn.
        UserWarning: You ask for CUDA where it is not available, for another device type with a dtype other than
            bfloat16 and float16 (and float32 under the policy "fp32"), or for bfloat16 on MPS before macOS 14. The
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

    __slots__ = ("_arguments",)

    _arguments: tuple[Any, ...]  # the fields of _Arguments, without trailing Nones

    def __init__(
        self,
        device_type: DeviceTypes | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        cache: CacheMode | None = None,
        policy: PolicyLike | None = None,
        overrides: Mapping[Any, OpPolicy] | None = None,
        model: torch.nn.Module | None = None,
        **misspelt: Never,
    ) -> None:
        if misspelt:
            refuse_arguments(my_autocast.__init__, (), misspelt)
        allowed = cache_enabled if cache is None else allows_cache(cache, cache_enabled)
        if policy is None and overrides is None and model is None:
            plain = pack_plain_region(device_type, dtype, enabled, cache_enabled, cache)
            if plain is not None:
                self._packed, self._arguments = plain
                return
        if isinstance(dtype, str):
            dtype = parse_dtype(dtype)
        dtypes = _PLAIN_DTYPES
        if dtype is torch.float32 and policy in ("fp32", Policy.named("fp32")):
            dtypes = (*dtypes, torch.float32)
        devices = check_devices(device_type, dtype, enabled, dtypes)
        change, binding = 0, None
        if overrides is not None or policy is not None or model is not None:
            overrides = dict(overrides) if isinstance(overrides, Mapping) else overrides
            if not torch.compiler.is_dynamo_compiling():  # Dynamo uses only the number
                policy = read_policy(policy)
            binding = None if model is None else bind_model(model, policy)
            number = 0 if binding is None else binding.number
            if torch.compiler.is_dynamo_compiling():
                change = policy_number(policy, overrides, number)
            else:
                self._held = policy_change(policy, overrides, number)
                if overrides and not sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                    _warn_of_hidden_ops(policy, overrides, devices)
                change = self._held.number
        cache_flag = torch.is_autocast_cache_enabled() if allowed is None else check_flag("cache_enabled", allowed)
        self._packed = RegionSpec(devices, cache_flag, None if cache == "none" else cache, change).pack()
        self._arguments = (device_type, dtype, enabled, cache_enabled, cache, policy, overrides, model, binding)

    @property
    def _asked(self) -> _Arguments:
        return _Arguments(*self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy keeps the defaults that the original read. Numbers of policy changes are not valid in other processes.
        asked = self._asked
        named = None
        if asked.overrides is not None:
            named = {op if isinstance(op, str) else spell_key(op): value for op, value in asked.overrides.items()}
        spec = RegionSpec.unpack(self._packed)._replace(policy_change=0)
        return _rebuild, (spec.pack(), asked._replace(overrides=None, binding=None), named)

    def __repr__(self) -> str:
        asked = self._asked
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


_C.construct_plain_regions(my_autocast, vars(my_autocast)["_arguments"])


class _Arguments(NamedTuple):
    """The arguments of `my_autocast`, in the order in which a region stores them."""

    device_type: Any
    dtype: torch.dtype | None
    enabled: bool
    cache_enabled: bool | None
    cache: CacheMode | None = None
    policy: Any = None
    overrides: Mapping[Any, Any] | None = None
    model: torch.nn.Module | None = None
    binding: Any = None  # has the model's modules follow the policy's tables as long as a region has it


def _rebuild(packed: str, asked: _Arguments, overrides: dict[str, Any] | None) -> my_autocast:
    region = my_autocast.__new__(my_autocast)
    region._packed = packed
    binding = None if asked.model is None else bind_model(asked.model, asked.policy)
    if asked.policy is not None or overrides is not None:
        number = 0 if binding is None else binding.number
        region._held = policy_change(asked.policy, overrides, number)
        region._packed = RegionSpec.unpack(packed)._replace(policy_change=region._held.number).pack()
    region._arguments = asked._replace(overrides=overrides, binding=binding)
    return region


class CacheInfo(TypedDict):
    """What `cache_info` returns."""

    entries: int
    bytes: int
    hits: int
    misses: int
    stale: int
    dropped: int
    persistent_entries: int
    persistent_bytes: int


def cache_info() -> CacheInfo:
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
    return cast(CacheInfo, _C.cache_info())


@explains_arguments
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


# --- arguments


_PLAIN_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

#: Keeps the changes whose numbers are constants of compiled graphs.
_traced: dict[int, _C.HeldChange] = {}

_NO_CACHE = "none"
_CACHES = (*_C.CACHE_MODES, _NO_CACHE)


def check_devices(
    device_type: object, dtype: object, enabled: object, dtypes: tuple[torch.dtype, ...] = _PLAIN_DTYPES
) -> tuple[DeviceSpec, ...]:
    """Returns what the first arguments ask for, checked as by torch.autocast; other `dtypes` disable a region."""
    device_types = (device_type,) if isinstance(device_type, str) else _device_types(device_type)
    checked = []
    for name in device_types:
        checked.append(_check_device(name, dtype, enabled, dtypes))
    return tuple(checked)


def read_policy(policy: PolicyLike | None) -> Policy | str | None:
    """Returns a policy that later changes of a file do not affect. A name stays a name."""
    return policy if policy is None or policy in Policy.names() else Policy.of(policy)


def bind_model(model: object, policy: PolicyLike | None) -> Any:
    """Has the modules of a model follow the tables of a policy as long as the result lives; None without tables."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model is an nn.Module, or None; got {shown(model)} of type {type(model).__name__}.")
    if "_modules" not in model.__dict__:
        raise OptionError(
            f"the model, of type {type(model).__name__}, has no modules yet, as in a copy of a model that has a region "
            f"as an attribute. The modules are found when the region is made: make it where it is entered, or call "
            f"policy.apply_to(model)."
        )
    if policy is None:
        raise OptionError(
            "model names the modules that the tables of policy are for; got a model and no policy. Give both, or "
            "leave model out."
        )
    chosen = Policy.of(policy)
    return _bind(chosen, model) if chosen.modules else None


def _bind(policy: Policy, model: torch.nn.Module) -> Any:
    return module_finder().bind(policy, model)


# Has Dynamo break the graph here, and say why.
_bind._torchdynamo_disable = True  # type: ignore[attr-defined]
_bind._torchdynamo_disable_msg = "my_autocast(model=...) changes modules: make the region outside"  # type: ignore[attr-defined]


def allows_cache(cache: object, cache_enabled: object) -> bool:
    """Whether `cache` allows casts to be reused. Installs the hooks that the mode needs."""
    if not isinstance(cache, str) or cache not in _CACHES:
        legal = ", ".join(map(repr, _CACHES))
        got = repr(cache) if isinstance(cache, str) else f"{cache!r} of type {type(cache).__name__}"
        remedy = did_you_mean(cache, _CACHES) if isinstance(cache, str) else ""
        raise OptionError(f"cache says which casts are reused: a str, or None; got {got}. Legal: {legal}.{remedy}")
    allowed = cache != _NO_CACHE
    if cache_enabled is not None and check_flag("cache_enabled", cache_enabled) != allowed:
        raise OptionError(
            f"cache={cache!r} means cache_enabled={allowed}, got cache_enabled={cache_enabled!r} with it. Legal: cache "
            f"alone, or with cache_enabled={allowed}. Leave cache_enabled out."
        )
    if cache in _C.CACHE_MODES[1:]:
        _install_checkpoint_hooks()
        cast_invalidation.watch()
    return allowed


def _install_checkpoint_hooks() -> None:
    checkpoint.install()


# Dynamo calls it while it traces.
_install_checkpoint_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _device_types(asked: object) -> Sequence[str]:
    if asked is None:
        return (default_device_type(),)
    if isinstance(asked, Sequence):
        if not asked:
            raise DeviceTypeError(f"no device type given: the sequence is empty.{LEGAL_DEVICES}")
        for index, name in enumerate(asked):
            if name in asked[:index]:
                raise DeviceTypeError(f"device type {name!r} is named twice in {list(asked)!r}. Name each once.")
        return asked
    remedy = "As a decorator, write it with parentheses: @my_autocast()." if callable(asked) else ""
    remedy = "For a torch.device, pass `.type`." if isinstance(asked, torch.device) else remedy
    remedy = "The dtype is the second argument: dtype=..." if isinstance(asked, torch.dtype) else remedy
    raise DeviceTypeError(
        f"expected a device type of type str (or a sequence of them), got {shown(asked)} of type "
        f"{type(asked).__name__}.{LEGAL_DEVICES} {remedy}".rstrip()
    )


def default_device_type() -> str:
    """Returns the device type of a region that names none: the accelerator that is available, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


# Dynamo calls it while it traces.
default_device_type._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_device(name: object, dtype: object, enabled: object, dtypes: tuple[torch.dtype, ...]) -> DeviceSpec:
    """Returns what a region asks for on a device type, as torch.autocast would."""
    if not isinstance(name, str):
        raise DeviceTypeError(
            f"expected a device type of type str, got {shown(name)} of type {type(name).__name__}.{LEGAL_DEVICES}"
        )
    if name not in DEVICE_TYPES:
        raise _unsupported(name)
    if dtype is None:
        dtype = torch.get_autocast_dtype(name)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(
            f"dtype is a torch.dtype, such as torch.bfloat16, its name, or None; got {shown(dtype)} of type "
            f"{type(dtype).__name__}."
        )
    if dtype not in DTYPE_NUMBERS:
        raise DtypeError(
            f"{dtype} is not a floating dtype, so ops cannot be cast to it. Use torch.bfloat16 or torch.float16."
        )
    if not enabled:
        return DeviceSpec(name, dtype, check_flag("enabled", enabled))
    if (why := why_not_cast(dtype)) is not None:
        raise DtypeError(f"{why}. Use torch.bfloat16 or torch.float16. {FLOAT8_REMEDY}")
    if name == "cuda":
        if torch.cuda.amp.common.amp_definitely_not_available():
            _warn("CUDA is not available or torch_xla is imported. Disabling my_autocast.")
            return DeviceSpec(name, dtype, False)
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise UnsupportedDeviceError("this CUDA device does not support bfloat16. Use dtype=torch.float16.")
        if dtype in _PLAIN_DTYPES:
            _C.cuda_allows(dtype)
    elif dtype not in dtypes:
        every = " To run every op in float32, add policy='fp32'." if dtype is torch.float32 else ""
        _warn(
            f"my_autocast on {_IN_WORDS[name]} supports torch.bfloat16 and torch.float16, got {dtype}. Disabling "
            f"my_autocast. To run single ops in {dtype}, use overrides={{op: {dtype}}}.{every}"
        )
        return DeviceSpec(name, dtype, False)
    elif name == "mps" and dtype is torch.bfloat16 and _lacks_bfloat16_on_mps():
        _warn("my_autocast on MPS supports torch.bfloat16 from macOS 14 on. Disabling my_autocast.")
        return DeviceSpec(name, dtype, False)
    return DeviceSpec(name, dtype, check_flag("enabled", enabled))


_IN_WORDS = {"cpu": "the CPU", "xpu": "XPU", "mps": "MPS"}


def _lacks_bfloat16_on_mps() -> bool:
    # PyTorch before 2.12 runs on macOS 13. Without MPS, as for fake tensors, the version is not known.
    return torch.backends.mps.is_available() and not torch.backends.mps.is_macos_or_newer(14, 0)


_lacks_bfloat16_on_mps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unsupported(name: str) -> UnsupportedDeviceError:
    if ":" in name:
        remedy = " Give the type without an index."
    elif name in torch._C._autocast_supported_devices():
        remedy = f" torch.autocast({name!r}) serves that device type."
    elif name.lower() in {"gpu", "nvidia", "rocm", "hip", "intel", "apple", "metal"}:
        remedy = " The device types of GPUs are 'cuda' (also for ROCm), 'xpu' (Intel) and 'mps' (Apple)."
    else:
        # "tpu" does not mean "cpu".
        remedy = did_you_mean(name.lower(), DEVICE_TYPES) if len(name) > 3 or name.lower() in DEVICE_TYPES else ""
    return UnsupportedDeviceError(f"my_autocast has no device type {name!r}.{LEGAL_DEVICES}{remedy}")


def _warn(message: str) -> None:
    # _warn, _check_device, check_devices, __init__, the caller
    warnings.warn(message, stacklevel=5)


# --- changes of policy


def policy_change(policy: object, overrides: Mapping[Any, Any] | None, tables: int = 0) -> _C.HeldChange:
    """Returns what a region does to the policy, with the number of its tables; equal arguments get one number."""
    chosen = None if policy is None else Policy.of(policy)  # type: ignore[arg-type]
    if chosen is not None and not tables:
        tables = number_of_applied(chosen)
    try:
        asked = None if overrides is None else tuple(overrides.items())
        change = _register(chosen, asked, tables, 0 if asked is None else _C.op_definitions())
    except (AttributeError, TypeError):  # not a mapping, or a value without a hash, which has an error of its own
        parse_overrides(overrides)  # type: ignore[arg-type]
        raise  # pragma: no cover: an error of the mapping's own methods
    if torch._guards.TracingContext.try_get() is not None:
        _traced.setdefault(change.number, change)
    return change


def policy_number(policy: object, overrides: Mapping[Any, Any] | None, tables: int = 0) -> int:
    """Returns the number of `policy_change`. Dynamo calls it while it traces, and keeps the number."""
    return policy_change(policy, overrides, tables).number


policy_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def number_of_applied(policy: Policy) -> int:
    """Returns the number of a policy's tables for the models that `apply_to` was called with; 0 if it has no tables."""
    if not policy.modules:
        return 0
    found = numbered(policy.modules, None)
    if not found.applied:
        shown = ", ".join(repr(name) for name, _ in policy.modules)
        raise PolicyError(
            f"the policy has tables for modules ({shown}), and no model to find them in. Legal: "
            f"my_autocast(..., policy=policy, model=model); or call policy.apply_to(model) before, as for install, "
            f"set_default_policy and policies of modules. To leave the tables out, use policy.without_modules()."
        )
    return found.number


@functools.lru_cache(maxsize=1024)
def _register(
    policy: Policy | None, overrides: tuple[tuple[Any, Any], ...] | None, tables: int, defined: int
) -> _C.HeldChange:
    """Registers a change. `defined` counts definitions of ops, on which it depends what the names select."""
    changes = [] if policy is None else list(policy.changes)
    for name, value in parse_overrides(dict(overrides or ())):
        changes += [(name, device_type, value) for device_type in DEVICE_TYPES]
    if changes or tables:
        checkpoint.install()
    return register_change(changes, policy is not None, tables or None)


# --- overrides of ops that other ops hide

#: Ops that composite ops of the op table call with autocast off, and these composite ops.
_HIDDEN_BY = {
    "mm": ("linear", "matmul"),
    "addmm": ("linear",),
    "bmm": ("matmul",),
    "mv": ("matmul",),
    "dot": ("matmul",),
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "_convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
    "native_layer_norm": ("layer_norm",),
    "native_group_norm": ("group_norm",),
    "_fused_rms_norm": ("rms_norm",),
    "nll_loss_forward": ("nll_loss",),
}

#: Regions that this package makes have no author who could change their overrides.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _warn_of_hidden_ops(policy: object, overrides: Mapping[Any, Any], devices: tuple[DeviceSpec, ...]) -> None:
    base = Policy.stock() if policy is None else Policy.of(policy)  # type: ignore[arg-type]
    for text in _hidden_ops(base, tuple(overrides.items()), devices, _C.op_definitions()):
        warnings.warn(text, UnusedOverrideWarning, stacklevel=3)


@functools.lru_cache(maxsize=256)
def _hidden_ops(
    base: Policy, overrides: tuple[tuple[Any, Any], ...], devices: tuple[DeviceSpec, ...], defined: int
) -> tuple[str, ...]:
    """Returns a text for each override of an op that others hide. What names select depends on `defined`."""
    overridden = {name.partition(".")[0] for name, _ in parse_overrides(dict(overrides))}
    texts = []
    for key, given in overrides:
        op = spell_key(key).removeprefix("aten::")
        outer = _HIDDEN_BY.get(op, ())
        if not outer or any(f"aten::{one}" in overridden for one in outer):
            continue
        value, _ = select(key, given)
        acting = [one for one in outer if _runs_otherwise(base, one, value, devices)]
        if acting:
            shown = ", ".join(acting)
            texts.append(
                f"the override of {op} acts on direct calls of {op} alone: {shown} may call it with autocast off. Name "
                f"in the overrides: {shown}. For direct calls, name {op}.default."
            )
    return tuple(texts)


def _runs_otherwise(base: Policy, op: str, value: object, devices: tuple[DeviceSpec, ...]) -> bool:
    """Whether a composite op has a policy, so that it runs the ops inside without autocast, and it is not `value`."""
    rows = [exact_key(name) for name in rows_by_name() if name.partition(".")[0] == f"aten::{op}"]
    for device_type, lower, enabled in devices:
        dtypes: dict[Any, Any] = {CastPolicy.lower_precision_fp: lower, CastPolicy.fp32: torch.float32}
        for policy in {base.lookup(row, device_type) for row in rows} if enabled else ():
            if policy not in (None, CastPolicy.fallthrough) and dtypes.get(policy, policy) != dtypes.get(value, value):
                return True
    return False
