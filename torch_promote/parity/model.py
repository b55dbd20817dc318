"""The values of a parity run: what is asked for, what there is to run, and what came of it. All can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = ["DEVICES", "Entry", "EntryResult", "Options", "SampleMismatch", "named_dtype"]

#: Where samples run under stock and ours: "fake-cuda" is CUDA at the level of dtypes, shapes and strides, with no GPU.
DEVICES = ("cpu", "cuda", "fake-cuda")

Source = Literal["op_db", "autocast_lists", "row", "promotion"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked for.

    Attributes:
        device: "cpu", "cuda" or "fake-cuda"; with `stock_only` any device type that the running PyTorch has.
        ops: Globs over the names of entries; none means all.
        dtypes: Names of the dtypes of samples, as in "float32"; none means all.
        sample: The one sample to run, as in "float32/3/mixed"; `ops` then selects one entry.
        quick: Run a choice of samples.
        stock_only: Check PyTorch against the reference, and leave ours out.
        autocast_dtype: The regions' dtype, as in "bfloat16"; None means the device's default.
    """

    device: str = "cpu"
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    sample: str | None = None
    quick: bool = False
    stock_only: bool = False
    autocast_dtype: str | None = None

    @property
    def device_type(self) -> str:
        """The device type of the tensors, and of the regions where there are any."""
        return self.device.removeprefix("fake-")

    @property
    def has_policies(self) -> bool:
        """Whether the op table has a column for the device type. Samples of others run with autocast off."""
        return self.device_type in DEVICE_TYPES

    @property
    def fake(self) -> bool:
        """Whether tensors are fake."""
        return self.device.startswith("fake")

    @property
    def lower(self) -> torch.dtype:
        """The regions' dtype. The default is PyTorch's: bfloat16 on the CPU, float16 on CUDA.

        Example:
            >>> Options("fake-cuda").lower, Options("cpu", autocast_dtype="float16").lower
            (torch.float16, torch.float16)
        """
        if self.autocast_dtype is not None:
            return named_dtype(self.autocast_dtype)
        return torch.float16 if self.device_type == "cuda" else torch.bfloat16

    @property
    def full(self) -> bool:
        """Whether an entry runs with all its samples."""
        return not self.quick and not self.dtypes and self.sample is None and self.autocast_dtype is None


@dataclass(frozen=True, slots=True)
class Entry:
    """What is sampled: an op of PyTorch's op database, an entry of its autocast lists, a row, an op by pairs of dtypes.

    Attributes:
        name: As in "nn.functional.linear", "torch_16.mm" or "aten::mm"; no two entries share one.
        source: "op_db", "autocast_lists", "row" or "promotion".
    """

    name: str
    source: Source


@dataclass(frozen=True, slots=True)
class SampleMismatch:
    """One thing that differs in one sample.

    Attributes:
        entry: The entry's name.
        sample: The sample, as in "float32/3/mixed".
        kind: "dtype", "shape", "strides", "casts", "bits", "error", or another attribute that differs; "samples" where
            PyTorch could not make its own.
        what: "ours against stock", "reference against stock" or "reference against ours"; "PyTorch" of its samples.
        text: The op, its arguments, what was expected and what came.
        reproduce: The command that runs this sample alone.
    """

    entry: str
    sample: str
    kind: str
    what: str
    text: str
    reproduce: str


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What came of one entry.

    Attributes:
        entry: The entry.
        samples: How many samples ran.
        refused: How many of them stock and ours both raise for.
        not_generated: What PyTorch could not make samples of on this device: dtype -> why.
        mismatches: What differs and is not explained.
        gaps: What differs and is known: reason -> how often.
        nondeterministic: Samples that were compared without their bits: reason -> how many.
        stale: Known gaps that name this entry and explained nothing in it, though all its samples ran.
        rows: The rows of the op table whose policy applied to a call.
        checked: Calls that were compared with the reference, by op.
        no_rule: Calls that no rule of the reference covers, by op.
        stock_raised: How many samples stock raises for and ours, on purpose, does not.
        seconds: How long it took.
    """

    entry: Entry
    samples: int = 0
    refused: int = 0
    not_generated: Mapping[str, str] = field(default_factory=dict)
    mismatches: tuple[SampleMismatch, ...] = ()
    gaps: Mapping[str, int] = field(default_factory=dict)
    nondeterministic: Mapping[str, int] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    rows: frozenset[str] = frozenset()
    checked: Mapping[str, int] = field(default_factory=dict)
    no_rule: Mapping[str, int] = field(default_factory=dict)
    stock_raised: int = 0
    seconds: float = 0.0


def named_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name.

    Raises:
        OptionError: There is no such dtype.

    Example:
        >>> named_dtype("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
    raise OptionError(f"there is no dtype {name!r}.{did_you_mean(name, known)}")
