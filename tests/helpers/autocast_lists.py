"""PyTorch's own lists of autocast ops, which its tests of autocast use, and the calls that their entries describe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

_TORCH_C: Any = torch._C
#: The first word of a list's name -> the modules of its functions. Methods of Tensor are looked up too.
_MODULES: dict[str, tuple[Any, ...]] = {
    "torch": (torch,),
    "nn": (_TORCH_C._nn,),
    "linalg": (_TORCH_C._linalg,),
    "fft": (_TORCH_C._fft,),
    "special": (_TORCH_C._special,),
    "methods": (),
    "banned": (_TORCH_C._nn,),
}


@dataclass(frozen=True)
class ListedCall:
    """One call of one entry, in a region of one dtype; its label, and what the list says of it."""

    label: str
    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lower: torch.dtype
    expected: torch.dtype
    banned: bool


def autocast_lists(device_type: str) -> dict[str, list[tuple[Any, ...]]]:
    """Returns the lists of a device type by name, with new tensors from a fixed seed."""
    # Importing PyTorch's test helpers freezes the flags of torch.backends for the whole process.
    with mock.patch("torch.backends.disable_global_flags"):
        from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
    kind = AutocastTestLists if device_type == "cuda" else AutocastCPUTestLists
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return vars(kind(torch.device(device_type)))


def calls_of(list_name: str, entry: tuple[Any, ...]) -> Iterator[ListedCall]:
    """Yields the calls that an entry describes. The lists differ in format; each part is identified by its type."""
    op, *parts = entry
    family, _, rest = list_name.partition("_")
    equation = tuple(part for part in parts if isinstance(part, str))
    argument_sets = [equation + part for part in parts if isinstance(part, tuple)]
    kwargs = next((part for part in parts if isinstance(part, dict)), {})
    dtypes = [part for part in parts if isinstance(part, torch.dtype)]
    functions = [(where, getattr(where, op)) for where in (*_MODULES[family], torch.Tensor) if hasattr(where, op)]
    assert functions, entry
    for (where, function), (number, args) in itertools.product(functions, enumerate(argument_sets)):
        # Two sets of arguments are one for each dtype. Stock's promote only accepts the region's dtype.
        halves = (torch.bfloat16, torch.float16)
        lowers = (halves[number],) if len(argument_sets) == 2 else halves
        if "need_autocast_promote" in rest and len(argument_sets) == 1:
            lowers = (torch.float16,)
        for lower in lowers:
            expected = dtypes[0] if dtypes else lower if rest in ("fp16", "16") else torch.float32
            label = f"{list_name}: {where.__name__}.{op}, arguments {number}, {lower}"
            yield ListedCall(label, op, function, args, kwargs, lower, expected, family == "banned")
