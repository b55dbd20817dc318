"""The samples of an entry: calls with labels such as `float32/3/mixed`.

A label consists of the dtype of the inputs, the sample's number and its kind:

| kind | inputs |
| --- | --- |
| `plain` | unchanged |
| `mixed` | floating inputs alternate between float32 and the region's dtype |
| `mixed_lower_first` | the same, starting with the region's dtype |
| `lower` | float32 inputs cast to the region's dtype, for an op without samples in that dtype |
| `int16-dim-zero` | pairs of dtypes: the second dtype, and whether each input has dimensions |

The samples of an op and dtype depend on nothing else: each pair has its own seed, and all samples are generated before
the first one runs.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torch_promote.checking.comparison import copy_with_strides
from torch_promote.parity.model import DENSE_ONLY, Entry, Options
from torch_promote.parity.row_samples import KINDS, MIXED, MIXED_LOWER_FIRST, SAMPLES, Make, dtypes_of
from torch_promote.reference.dtypes import dtype_name

#: A function with its positional and keyword arguments.
Bound = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: The number of samples of an op and dtype in a quick run.
_QUICK = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample."""

    label: str  # such as "float32/3/mixed"
    bound: Bound
    finish: Callable[[Any], Any] | None = None  # maps the results to what is differentiated


@dataclass(frozen=True, slots=True)
class NotGenerated:
    """PyTorch raised an error while it generated the samples of one dtype."""

    dtype: str
    why: str


def samples(entry: Entry, options: Options) -> Iterator[Sample | NotGenerated]:
    """Yields the samples of an entry that the options select, in a fixed order."""
    sources: dict[str, Callable[[str, Options], Iterator[Sample | NotGenerated]]] = {
        "op_db": _from_op_database,
        "row": _from_row,
        "promotion": _from_pairs,
    }
    for sample in sources[entry.source](entry.name, options):
        if isinstance(sample, NotGenerated) or (
            options.sample in (None, sample.label) and _wanted(sample.label.partition("/")[0], options)
        ):
            yield sample


def sample_dtypes(entry: Entry, options: Options) -> list[str]:
    """Returns the dtypes in the labels of an entry's samples."""
    if entry.source == "promotion":
        return [dtype_name(dtype) for dtype in _DTYPES]
    if entry.source == "row":
        return list(dict.fromkeys(_row_label(kind, options)[0] for kind in KINDS))
    return [dtype_name(dtype) for dtype in _supported_dtypes(entry.name, options)]


def _wanted(dtype: str, options: Options) -> bool:
    if options.sample is not None and options.sample.partition("/")[0] != dtype:
        return False
    return not options.dtypes or dtype in options.dtypes


# --- PyTorch's op database, which PyTorch's own tests use


@functools.cache
def op_database() -> dict[str, Any]:
    """Returns the entries of the op database by name, variants such as "std_mean.unbiased" included."""
    # Importing PyTorch's test helpers freezes the flags of torch.backends for the whole process.
    with mock.patch("torch.backends.disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def _supported_dtypes(name: str, options: Options) -> list[torch.dtype]:
    return sorted(op_database()[name].supported_dtypes(options.device_type), key=str)


def _from_op_database(name: str, options: Options) -> Iterator[Sample | NotGenerated]:
    op, supported = op_database()[name], _supported_dtypes(name, options)
    quick = {torch.float32, options.lower} & set(supported) or set(supported[:1])
    for dtype in supported:
        left_out = options.quick and not options.dtypes and dtype not in quick
        if left_out or not _wanted(dtype_name(dtype), options):
            continue
        try:
            made = _generated(op, dtype, options)
        except Exception as error:
            yield NotGenerated(dtype_name(dtype), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        for number, sample in enumerate(made[:_QUICK] if options.quick else made):
            call = (sample.input, *sample.args), sample.kwargs
            for kind, (args, kwargs) in _kinds(call, dtype, options.lower, supported):
                label = f"{dtype_name(dtype)}/{number}/{kind}"
                yield Sample(label, (op.op, args, kwargs), sample.output_process_fn_grad)


def _generated(op: Any, dtype: torch.dtype, options: Options) -> list[Any]:
    """Returns PyTorch's samples of one op and dtype; inputs that can require grad do.

    Fake samples are generated on the CPU, where PyTorch can read their values, and do not require grad: in a build
    without the device, a fake tensor that requires grad ends the process.
    """
    import numpy as np  # as the module of PyTorch's samples does

    grad = not options.fake and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed = zlib.crc32(f"{op.full_name} {dtype}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    # Not op.sample_inputs, which walks the stack for each sample to find the name of the test.
    if not options.fake:
        return list(op.sample_inputs_func(op, options.device_type, dtype, grad))
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        made = list(op.sample_inputs_func(op, "cpu", dtype, grad))
    for sample in made:
        moved = tree_map(partial(_on_fake, options.device_type), (sample.input, sample.args, sample.kwargs))
        sample.input, sample.args, sample.kwargs = moved
    return made


def _on_fake(device_type: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return device_type if str(value) == "cpu" else value
    if value.layout is not torch.strided:
        raise NotImplementedError(f"fake-{device_type} {DENSE_ONLY}, not the layout {value.layout}")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device_type)


def _kinds(
    call: Any, dtype: torch.dtype, lower: torch.dtype, supported: list[torch.dtype]
) -> Iterator[tuple[str, Any]]:
    yield "plain", call
    if dtype is not torch.float32:
        return
    count = sum(isinstance(leaf, torch.Tensor) and leaf.dtype is dtype for leaf in tree_leaves(call))
    if count > 1:
        yield "mixed", _by_turns(call, (dtype, lower))
    if count and lower not in supported:
        yield "lower", _by_turns(call, (lower,))


def _by_turns(call: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Casts the float32 tensors of a call to the dtypes in turn. A tensor that occurs twice is cast once."""
    turns = itertools.cycle(dtypes)

    @functools.cache  # by the tensor's identity
    def to_next(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return copy_with_strides(tensor, next(turns)).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, to_next, call)


# --- the rows of the op table


def _from_row(name: str, options: Options) -> Iterator[Sample]:
    op, _, overload = name.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, op), overload or "default")
    for kind, (number, make_call) in itertools.product(KINDS, enumerate(SAMPLES[name])):
        dtype, kind_name = _row_label(kind, options)
        seed = zlib.crc32(f"{name} {number}".encode())
        dtypes = dtypes_of(kind, options.lower)
        make = Make(dtypes, options.device_type, fake=options.fake, grad=not options.fake, seed=seed)
        yield Sample(f"{dtype}/{number}/{kind_name}", (function, *make_call(make)))


def _row_label(kind: str, options: Options) -> tuple[str, str]:
    """Returns the dtype and the kind in the labels of row samples of one kind."""
    if kind in (MIXED, MIXED_LOWER_FIRST):
        return "float32", "mixed" if kind == MIXED else "mixed_lower_first"
    return dtype_name(dtypes_of(kind, options.lower)[0]), "plain"


# --- pairs of dtypes: the op database mixes no integer dtypes, so only these reach every cell of the promotion table

#: The entries, and the function of two tensors that each calls. The ops promote in different ways.
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "promotion.add": torch.add,  # the common dtype
    "promotion.true_divide": torch.true_divide,  # integers give the default dtype
    "promotion.lt": torch.lt,  # computes in the common dtype, returns bool
    "promotion.where": lambda a, b: torch.where(a.to(torch.bool), a, b),  # without TensorIterator's wrapped numbers
    "promotion.cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),  # autocast promotes it too
}
#: The dtypes of pairs.
_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
#: A tensor with dimensions, and a 0-dim tensor, which promotion gives less weight.
_SHAPES = {"dim": (2, 3), "zero": ()}


def _from_pairs(name: str, options: Options) -> Iterator[Sample]:
    for dtype in _DTYPES:
        for number, (other, first, second) in enumerate(itertools.product(_DTYPES, _SHAPES, _SHAPES)):
            pair = _filled(dtype, _SHAPES[first], options), _filled(other, _SHAPES[second], options)
            label = f"{dtype_name(dtype)}/{number}/{dtype_name(other)}-{first}-{second}"
            yield Sample(label, (PAIRS[name], pair, {}))


def _filled(dtype: torch.dtype, shape: tuple[int, ...], options: Options) -> torch.Tensor:
    if options.fake:
        return torch.empty(shape, dtype=dtype, device=options.device_type)
    return torch.full(shape, 2, device="cpu").to(dtype).to(options.device_type)
