"""The facts of ops and of a call's tensors, and `unnoticed`, which runs ops that nobody observes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from torch_promote import _C
from torch_promote.loader import AUTOCAST_KEY
from torch_promote.policy.overrides import moves_data
from torch_promote.reference.autocast import AutocastState, has_policy
from torch_promote.reference.autocast import tensors_in as tensors_by_path
from torch_promote.reference.dtypes import dtype_name
from torch_promote.regions.promotion_tables import promoting_ops

NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]
"""Tensors among arguments or results, with their names."""


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def find_overload(name: str) -> torch._ops.OpOverload:
    """Returns the overload of a name that the dispatcher spells."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    assert isinstance(found, torch._ops.OpOverload), name
    return found


def has_our_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether `my_autocast` has a kernel for an op, whatever its policy. Not cached, as overrides add some."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(facts_of(op).name, AUTOCAST_KEY))


def tensor_arguments(op: torch._ops.OpOverload, args: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the tensors among a call's arguments, by their paths: `mat2`, `tensors[1]`, `inputs[key]`."""
    return iter(read_arguments(facts_of(op).arguments, args)[0])


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or the results of a call, including those in containers."""
    found: list[torch.Tensor] = []
    for value in values:  # no generator for what most arguments are
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _NO_TENSORS:
            found += [leaf for leaf in leaves((value,)) if leaf is not None]
    return found


def leaves(values: Sequence[Any]) -> Iterator[torch.Tensor | None]:
    """Yields the tensors and the Nones among arguments or results, containers flattened."""
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from leaves(value)
        elif isinstance(value, Mapping):
            yield from leaves(tuple(value.values()))


def asks_for_infinity(args: Iterable[Any]) -> bool:
    """Whether an argument is an infinite number, as that of `masked_fill(mask, -inf)`, or a list with one."""
    numbers = (one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,)))
    return any(isinstance(one, float) and math.isinf(one) for one in numbers)


# --- what a call writes to


class Write(NamedTuple):
    """An argument that an op writes to: a tensor, an optional one, or a list of them."""

    place: int  # its index among the arguments
    name: str
    is_out: bool  # whether the op ignores its content, as that of `out=`
    is_returned: bool  # whether the op returns it as well
    flag: int | None = None  # the place of the bool argument without which the op does not write to it


#: Ops that write to `running_mean` and `running_var` although their schemas do not say so, and the argument that asks
#: for it; "" if they always do.
_STATISTICS = {
    "aten::_batch_norm_impl_index": "training",
    "aten::batch_norm": "training",
    "aten::batch_norm_gather_stats": "",
    "aten::batch_norm_gather_stats_with_counts": "",
    "aten::batch_norm_update_stats": "",
    "aten::cudnn_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::miopen_batch_norm": "training",
    "aten::native_batch_norm": "training",
}
#: Ops whose schemas declare a write to their argument, of which they leave the elements as they are.
_NOT_WRITING = ("aten::record_stream", "aten::retain_grad")


def _writes(schema: Any) -> tuple[Write, ...]:
    """The arguments that an op writes to, as its schema's alias annotations say."""
    if schema.name in _NOT_WRITING:
        return ()
    returned = {alias for one in schema.returns if one.alias_info is not None for alias in one.alias_info.before_set}
    names = [argument.name for argument in schema.arguments]
    flag = _STATISTICS.get(schema.name)
    found = []
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(Write(place, argument.name, argument.is_out, not returned.isdisjoint(alias.before_set)))
        elif flag is not None and argument.name in ("running_mean", "running_var"):
            found.append(Write(place, argument.name, False, False, names.index(flag) if flag else None))
    return tuple(found)


def written(writes: Iterable[Write], args: Sequence[Any]) -> NamedTensors:
    """Returns the tensors that a call writes to, by their paths among its arguments, such as `self[0]`."""
    asked = [one for one in writes if one.flag is None or args[one.flag]]
    return read_arguments([one.name for one in asked], [args[one.place] for one in asked])[0]


def produced(facts: OpFacts, args: Sequence[Any], results: Sequence[Any]) -> NamedTensors:
    """Returns a call's results by index, and the arguments by path that it wrote to and did not return."""
    found: NamedTensors = []
    for value in results:
        if isinstance(value, torch.Tensor):  # without a generator, which would cost each call more
            found.append((str(len(found)), value))
        elif value is not None:
            found.extend((str(i), tensor) for i, tensor in enumerate(tensors_in([value]), len(found)))
    return found + written(facts.unreturned, args) if facts.unreturned else found


_keys: Any = torch._C


def _hidden_from(versions: bool) -> Any:
    """The keys of autocast, modes, transforms and dispatch observers; of autograd and version counters if not kept."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_keys._DisableTorchDispatch())
        stack.enter_context(_keys._DisableAutocast())
        if not versions:
            stack.enter_context(_keys._AutoDispatchBelowADInplaceOrView())
        keys = _keys._dispatch_tls_local_exclude_set()
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "PythonDispatcher"):
        keys = keys.add(getattr(_keys.DispatchKey, name))
    return keys.add(_keys._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY))


_HIDDEN_FROM = {versions: _hidden_from(versions) for versions in (False, True)}


class unnoticed:  # noqa: N801 (used like a function)
    """Hides the ops of a block from autocast, autograd, version counters, modes of PyTorch and dispatch observers."""

    # They must not draw random numbers. With `versions`, what `detach` returns shares the version of its argument.

    __slots__ = ("_functions", "_ops", "_versions")

    def __init__(self, *, versions: bool = False) -> None:
        self._versions = versions

    def __enter__(self) -> None:
        excluded = _keys._dispatch_tls_local_exclude_set() | _HIDDEN_FROM[self._versions]
        if self._versions:  # a kernel of autograd, in which an observer may run, excludes it
            excluded = excluded.remove(_keys.DispatchKey.ADInplaceOrView)
        self._functions = _keys.DisableTorchFunction()
        self._ops = _keys._ForceDispatchKeyGuard(_keys._dispatch_tls_local_include_set(), excluded)
        self._functions.__enter__()
        self._ops.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._ops.__exit__(None, None, None)
        finally:
            self._functions.__exit__(None, None, None)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own data, which may be read now."""
    # Fake and meta tensors have none, DTensor wraps others, functorch's belong to a running transform, and no tensor
    # may be read while a CUDA graph is captured.
    if _C.is_measurable(tensor):
        return True
    if is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch._is_functional_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided, and its storage may be read now."""
    return _C.is_measurable(tensor) or (tensor.layout is torch.strided and not tensor.is_nested and can_be_read(tensor))


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def stored_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements that a tensor stores, as a strided tensor; None without any, or if it cannot be read."""
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


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def has_row(name: str, device_type: str) -> bool:
    """Whether PyTorch's table has a policy for an op on a device type."""
    return has_policy(name, device_type, AutocastState.region(device_type))


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address")  # noqa: B009 (no stub names it)
#: Whether a dispatch key is excluded in this thread.
is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded


def autograd_may_call(facts: OpFacts) -> bool:
    """Whether an op's autograd kernel may call ops before or after the op's own kernel."""
    return torch.is_grad_enabled() and (facts.is_in_place or _saved_tensors_hooks(True) is not None)


@functools.cache
def _promoting_names() -> frozenset[str]:
    return frozenset(op.name for op in promoting_ops() if not op.matmul)


#: Ops that return views, which their schemas do not say.
_UNDECLARED_VIEWS = ("aten::align_tensors", "aten::broadcast_tensors", "aten::meshgrid", "aten::atleast_")
#: Ops that return their argument if there is nothing to do.
_UNLESS_IDLE = ("aten::to", "aten::contiguous")
_CASTS = ("aten::to", "aten::_to_copy", "aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision")
#: Ops whose result has the elements of their argument, although it is no view.
_KEEPING = (
    *_CASTS,
    *("aten::type_as", "aten::clone", "aten::contiguous", "aten::_unsafe_view", "aten::lift", "aten::lift_fresh_copy"),
)
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random"),
        *("uniform", "zero", "_foreach_copy", "_foreach_zero"),
    )
)
#: Ops that write to a part of a tensor, as ops of libraries may, too. The rest may be uninitialized.
_PARTIAL = ("index_copy_", "index_put_", "_index_put_impl_", "index_fill_", "scatter_", "masked_fill_", "put_")
_UNINITIALIZED = re.compile(r"\w+::_*(new_)?empty")
#: Ops with results that no kernel writes to, other than those that only allocate: the positions of these results.
_UNWRITTEN = {
    "aten::mkldnn_rnn_layer": (3,),  # oneDNN's workspace
    "aten::_scaled_dot_product_flash_attention": (6, 7),  # the random state, unused without dropout
    "aten::resize_": (0,),
    "fsdp::all_gather_copy_in": (1,),  # the gathered tensor, of which it writes this rank's part
}
#: The arguments of collectives into which they receive.
_IS_RECEIVED = re.compile(r"\S+ output|c10d::recv\w* tensors").match
_BETWEEN_PROCESSES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")


class OpFacts:
    """What the package knows of an op. `facts_of` returns it, computed once."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        aliases = [one.alias_info is not None and not one.alias_info.is_write for one in schema.returns]
        self.op: torch._ops.OpOverload = op
        self.name: str = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.op_name: str = schema.name
        self.overload: str = schema.overload_name
        self.arguments: tuple[str, ...] = tuple(argument.name for argument in schema.arguments)
        self.writes: tuple[Write, ...] = _writes(schema)
        self.unreturned: tuple[Write, ...] = tuple(one for one in self.writes if not one.is_returned)
        self.is_uninitialized: bool = _UNINITIALIZED.match(schema.name) is not None  # whether it only allocates memory
        # The positions of results whose memory no kernel writes to.
        self.unwritten: tuple[int, ...] = (0,) if self.is_uninitialized else _UNWRITTEN.get(self.name, ())
        # Whether it computes nothing: it marks a place, or asks about types, as nn.Module.to() does.
        self.is_ignored: bool = (
            op.namespace in ("prim", "profiler") or schema.name == "aten::_has_compatible_shallow_copy_type"
        )
        # Whether it writes to its first argument.
        self.is_in_place: bool = schema.is_mutable and schema.name.endswith("_")
        self.is_detach: bool = schema.name in ("aten::detach", "aten::detach_")
        self.is_random: bool = torch.Tag.nondeterministic_seeded in op.tags
        self.is_cast: bool = schema.name in _CASTS  # whether it changes the dtype of a tensor and nothing else
        # Whether its kernel copies elements to a tensor that may have another dtype.
        self.is_copy: bool = schema.name in _COPIES
        declared = any(aliases) and schema.name not in _UNLESS_IDLE
        # Whether it returns a view of an argument, whose elements another call has computed.
        self.is_view: bool = declared or schema.name.startswith(_UNDECLARED_VIEWS)
        # Whether it returns views of arguments or, as `to` may, the argument.
        self.shares: bool = bool(aliases) and all(aliases)
        # Whether its result has the elements of its argument, perhaps in another dtype.
        self.keeps_elements: bool = schema.name in _KEEPING or (self.is_view and self.name != "aten::view.dtype")
        # Whether it ignores the old content of the tensor that it writes to.
        self.overwrites: bool = schema.name in _OVERWRITING
        # The arguments whose content it ignores. The schemas of collectives do not say what they write.
        self.ignored: frozenset[str] = frozenset(
            [one.name for one in self.writes if one.is_out or (self.overwrites and one.place == 0)]
            + [name for name in self.arguments if op.namespace == "c10d" and _IS_RECEIVED(f"{schema.name} {name}")]
        )
        # Whether it may write to a part of a tensor alone.
        self.writes_part: bool = op.namespace != "aten" or schema.name.removeprefix("aten::") in _PARTIAL
        self.communicates: bool = op.namespace in _BETWEEN_PROCESSES  # whether every process must call it equally often
        # Whether it returns its argument's data, or memory of the same dtype, and computes nothing.
        self.moves_data: bool = op.namespace == "fsdp" or moves_data(self.name)
        # Whether its results are computed in this process.
        self.computes: bool = not (self.communicates or self.moves_data) and bool(schema.returns or self.writes)
        # Whether it returns or writes tensors. Others ask for something, such as item() and is_pinned().
        self.has_results: bool = bool(self.writes) or any("Tensor" in str(one.type) for one in schema.returns)
        # Whether it may call other ops instead of a kernel, each of which is dispatched.
        self.may_be_composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
            self.name, "CompositeImplicitAutograd"
        )
        self._is_composite: dict[str, bool] = {}

    def is_composite(self, device_type: str) -> bool:
        """Whether it has no kernel for a device type, and calls other ops instead, each of which is dispatched."""
        found = self._is_composite.get(device_type)
        if found is None:
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            key = torch._C._dispatch_key_for_device(device_type)
            found = has_kernel(self.name, "CompositeImplicitAutograd") and not has_kernel(self.name, key)
            self._is_composite[device_type] = found
        return found

    def promotes(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Whether the op promotes inputs of these dtypes."""
        return self.name in _promoting_names() and len(set(dtypes)) > 1


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def facts_of(op: torch._ops.OpOverload | str) -> OpFacts:
    """Returns the facts of an overload, or of one with a full name."""
    if not isinstance(op, str):
        return OpFacts(op)
    try:
        return facts_of(find_overload(op))
    except (AttributeError, RuntimeError, KeyError, ValueError, TypeError):  # of another PyTorch release or program
        return facts_of(torch.ops.aten.mul.Tensor)  # nothing but that it computes its results is assumed of it


def device_of(tensors: Iterable[torch.Tensor]) -> str:
    """The type of the device whose kernel runs: that of the first tensor that is not on the CPU."""
    found = "cpu"
    for tensor in tensors:
        found = tensor.device.type
        if found != "cpu":
            break
    return found


#: Above these, an argument is recorded by its digest.
_MOST_ENTRIES, _MOST_CHARACTERS = 64, 200
#: The types of most arguments without tensors. A check of these is faster than that of an abstract class or a union.
_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout))
_ENTRIES = frozenset((type(None), bool, int))  # of lists that are recorded as they are


def read_arguments(names: Sequence[str], args: Sequence[Any]) -> tuple[NamedTensors, tuple[tuple[str, Any], ...]]:
    """Returns the tensors among a call's arguments by their paths, and the other arguments as `Call.arguments`."""
    tensors: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, Any]] = []
    for name, value in zip(names, args, strict=False):
        kind = type(value)
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif kind in _NO_TENSORS:
            others.append((name, value if kind in _ENTRIES else argument_of(value)))
        elif kind is list and len(value) <= _MOST_ENTRIES and _ENTRIES.issuperset(map(type, value)):
            others.append((name, tuple(value)))
        elif isinstance(value, list | tuple | Mapping):
            found = list(tensors_by_path(name, value))
            tensors.extend(found)
            if not found:
                others.append((name, argument_of(value)))
        elif not isinstance(value, torch.Generator):  # what it draws is recorded as its state
            others.append((name, argument_of(value)))
    return tensors, tuple(others)


def argument_of(value: Any) -> Any:
    """Returns an argument that is no tensor as JSON has it, with tuples for lists."""
    if value is None or isinstance(value, int):  # bool, too
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, list | tuple) and len(value) <= _MOST_ENTRIES:
        return tuple([argument_of(one) for one in value])
    if isinstance(value, list | tuple):
        return f"{len(value)} entries, digest {_digest_of(repr(value))}"
    text = str(value) if isinstance(value, str | complex | torch.device | torch.layout | torch.memory_format) else ""
    if not text and not isinstance(value, str):
        return type(value).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{len(text)} characters, digest {_digest_of(text)}"


def _digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_wrapped(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a torch.func transform wraps one of a call's tensors. The transform calls ops on the tensors inside."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a leaf that requires a gradient, or a view of one."""
    owner = base_of(tensor)
    return isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of which another is a view, or that tensor."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as numbers: of a symbolic one, which has no hash, that of the tensor that is traced; -1 if it has none."""
    found = (one if type(one) is int else getattr(one.node, "hint", None) for one in sizes)
    return tuple(one if isinstance(one, int) else -1 for one in found)


def cast_key(tensor: torch.Tensor, to: torch.dtype | None) -> tuple[Any, ...]:
    """A key that identifies a cast of a tensor. An observer may get copies of a tensor, which share its storage."""
    shared: Any = None
    if tensor.layout is torch.strided and not tensor.is_nested:
        try:
            # Not untyped_storage(): Python code could write through it, so the cache would drop the casts.
            shared = _address(tensor), tensor.storage_offset(), tensor.stride()
        except RuntimeError:  # a wrapper has no storage
            shared = None
    shape = () if tensor.is_nested else tuple(tensor.shape)
    key = shared, tensor.dtype, to, shape
    try:
        hash(key)
    except TypeError:  # of symbolic sizes
        return shared and (shared[0], *hints(shared[1:2]), hints(shared[2])), tensor.dtype, to, hints(shape)
    return key


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; for a sparse or nested tensor, of its stored elements."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        try:
            return tensor.nbytes
        except RuntimeError:  # of symbolic sizes
            return math.prod(hints(tensor.shape)) * tensor.itemsize
    with unnoticed():
        stored = stored_values(tensor)
        return 0 if stored is None else stored.nbytes


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data: a fake tensor, or one on the meta device."""
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def is_traced() -> bool:
    """Whether torch.compile, which calls ops of its own then, or torch.jit.trace, which records ours, is tracing."""
    guards = torch._guards  # the second context is that of all of a compilation, such as of Inductor's patterns
    compiles = guards.TracingContext.try_get() is not None or guards.CompileContext.try_get() is not None
    return compiles or torch._C._get_tracing_state() is not None
