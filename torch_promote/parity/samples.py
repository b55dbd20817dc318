"""The samples of an entry: calls with labels such as `float32/3/mixed`.

A label consists of the dtype of the inputs, the sample's number and its kind:

| kind | inputs |
| --- | --- |
| `plain` | unchanged |
| `mixed` | floating inputs alternate between float32 and the region's dtype |
| `mixed_lower_first` | the same, starting with the region's dtype |
| `lower` | float32 inputs cast to the region's dtype, for an op without samples in that dtype |
| `int16-dim-zero` | entries of `promotion`: the second dtype, and whether each input has dimensions |
| `torch` | entries of the autocast lists: the function's module; the dtype in the label is `listed` |
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.checking.strided_copy import copy_with_strides
from torch_promote.parity import promotion
from torch_promote.parity.autocast_lists import autocast_lists, calls_of
from torch_promote.parity.model import Entry, Options
from torch_promote.parity.op_database import generated, op_database, supported_dtypes
from torch_promote.parity.outcome import Bound
from torch_promote.parity.row_samples import SAMPLES, Make
from torch_promote.parity.row_samples.known import KINDS, MIXED, MIXED_LOWER_FIRST, dtypes_of

__all__ = ["LISTED", "NotGenerated", "Sample", "listed_entries", "sample_dtypes", "samples"]

#: The dtype in the labels of samples from the autocast lists.
LISTED = "listed"
#: The number of samples of an op and dtype in a quick run.
_QUICK = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        label: The label, such as "float32/3/mixed".
        bound: The function and its arguments.
        finish: Maps the results to what is differentiated.
    """

    label: str
    bound: Bound
    finish: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class NotGenerated:
    """PyTorch raised an error while it generated the samples of one dtype.

    Attributes:
        dtype: The dtype's name.
        why: The error.
    """

    dtype: str
    why: str


def samples(entry: Entry, options: Options) -> Iterator[Sample | NotGenerated]:
    """Yields the samples of an entry that the options select, in a fixed order.

    Example:
        >>> [sample.label for sample in samples(Entry("torch_16.mm", "autocast_lists"), Options())]
        ['listed/0/torch', 'listed/0/Tensor']
    """
    made: dict[str, Callable[[str, Options], Iterator[Sample | NotGenerated]]] = {
        "op_db": _from_op_database,
        "autocast_lists": _from_autocast_lists,
        "row": _from_row,
        "promotion": _from_promotion,
    }
    for sample in made[entry.source](entry.name, options):
        if options.sample is None or isinstance(sample, NotGenerated) or sample.label == options.sample:
            yield sample


def sample_dtypes(entry: Entry, options: Options) -> list[str]:
    """Returns the dtypes in the labels of an entry's samples.

    Example:
        >>> sample_dtypes(Entry("aten::mm", "row"), Options())
        ['float32', 'bfloat16', 'float64', 'complex64', 'int64']
    """
    if entry.source == "autocast_lists":
        return [LISTED]
    if entry.source == "promotion":
        return [_name(dtype) for dtype in promotion.DTYPES]
    if entry.source == "row":
        return list(dict.fromkeys(_row_label(kind, options)[0] for kind in KINDS))
    return [_name(dtype) for dtype in supported_dtypes(entry.name, options.device_type)]


def _wanted(dtype: str, options: Options) -> bool:
    if options.sample is not None and options.sample.partition("/")[0] != dtype:
        return False
    return not options.dtypes or dtype in options.dtypes


def _from_op_database(name: str, options: Options) -> Iterator[Sample | NotGenerated]:
    supported = supported_dtypes(name, options.device_type)
    quick = {torch.float32, options.lower} & set(supported) or set(supported[:1])
    quick = set(supported) if options.dtypes else quick
    for dtype in supported:
        if not _wanted(_name(dtype), options) or (options.quick and dtype not in quick):
            continue
        try:
            made = generated(name, dtype, options)
        except Exception as error:
            yield NotGenerated(_name(dtype), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        op = op_database()[name].op
        for number, sample in enumerate(made[:_QUICK] if options.quick else made):
            call = (sample.input, *sample.args), sample.kwargs
            for kind, (args, kwargs) in _kinds(call, dtype, options.lower, supported):
                label = f"{_name(dtype)}/{number}/{kind}"
                yield Sample(label, (op, args, kwargs), sample.output_process_fn_grad)


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
    cast: dict[int, torch.Tensor] = {}

    def to_next(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        if id(tensor) not in cast:
            cast[id(tensor)] = copy_with_strides(tensor, next(turns)).requires_grad_(tensor.requires_grad)
        return cast[id(tensor)]

    return tree_map_only(torch.Tensor, to_next, call)


def listed_entries(lists: dict[str, list[tuple[Any, ...]]]) -> dict[str, tuple[str, int]]:
    """Returns the entries of the autocast lists by name: the name of the list, and the position in it."""
    found: dict[str, tuple[str, int]] = {}
    for list_name, entries in lists.items():
        for index, listed in enumerate(entries):
            name = f"{list_name}.{listed[0]}"
            found[name if name not in found else f"{name}.{index}"] = (list_name, index)
    return found


def _from_autocast_lists(name: str, options: Options) -> Iterator[Sample]:
    if not _wanted(LISTED, options):
        return
    lists = autocast_lists(options.device_type)
    list_name, index = listed_entries(lists)[name]
    seen = set()
    for call in calls_of(list_name, lists[list_name][index]):
        label = f"{LISTED}/{call.number}/{call.where}"
        if label not in seen:  # the calls for both dtypes of the lists are one sample here
            seen.add(label)
            yield Sample(label, (call.function, call.args, call.kwargs))


def _from_row(name: str, options: Options) -> Iterator[Sample]:
    op, _, overload = name.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, op), overload or "default")
    for kind, (number, make_call) in itertools.product(KINDS, enumerate(SAMPLES[name])):
        dtype, kind_name = _row_label(kind, options)
        if not _wanted(dtype, options):
            continue
        seed = zlib.crc32(f"{name} {number}".encode())
        dtypes = dtypes_of(kind, options.lower)
        make = Make(dtypes, options.device_type, fake=options.fake, grad=not options.fake, seed=seed)
        args, kwargs = make_call(make)
        yield Sample(f"{dtype}/{number}/{kind_name}", (function, args, kwargs))


def _from_promotion(name: str, options: Options) -> Iterator[Sample]:
    for dtype in promotion.DTYPES:
        if _wanted(_name(dtype), options):
            for number, (kind, args) in enumerate(promotion.promotion_calls(dtype, options)):
                yield Sample(f"{_name(dtype)}/{number}/{kind}", (promotion.ENTRIES[name], args, {}))


def _row_label(kind: str, options: Options) -> tuple[str, str]:
    """Returns the dtype and the kind in the labels of row samples of one kind."""
    if kind in (MIXED, MIXED_LOWER_FIRST):
        return "float32", "mixed" if kind == MIXED else "mixed_lower_first"
    return _name(dtypes_of(kind, options.lower)[0]), "plain"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
