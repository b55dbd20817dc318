"""The values of a parity run: options, entries and results, all of which can be pickled; and the devices to run on."""

from __future__ import annotations

import contextlib
import logging
import shlex
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.reference.dtypes import dtype_name

#: In the error for a sample with a tensor that is not dense, on a device without them.
DENSE_ONLY = "has dense tensors only"

Source = Literal["op_db", "row", "promotion"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. Raises DtypeError for a name that is not that of a dtype."""

    device: str = "cpu"  # one of `DEVICES`; with `stock_only`, any device type of the running PyTorch
    ops: tuple[str, ...] = ()  # globs for the names of entries; empty for all
    dtypes: tuple[str, ...] = ()  # names of the samples' dtypes, such as "float32"; empty for all
    # The label of the only sample to run, such as "float32/3/mixed"; `ops` must select one entry.
    sample: str | None = None
    quick: bool = False  # run a selection of the samples
    stock_only: bool = False  # compare PyTorch with the reference, without ours
    autocast_dtype: str | None = None  # the regions', such as "bfloat16"; None for the device's default

    def __post_init__(self) -> None:
        """Makes short names of dtypes, such as "bf16", those of PyTorch, and lists tuples."""
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "dtypes", tuple(dtype_name(parse_dtype(name)) for name in self.dtypes))
        if self.autocast_dtype is not None:
            object.__setattr__(self, "autocast_dtype", dtype_name(parse_dtype(self.autocast_dtype)))

    @property
    def device_type(self) -> str:
        """The device type of the tensors and of the regions."""
        return self.device.removeprefix("fake-")

    @property
    def has_policies(self) -> bool:
        """Whether the op table has a column for the device type. Without one, samples run with autocast off."""
        return self.device_type in DEVICE_TYPES

    @property
    def fake(self) -> bool:
        """Whether the tensors are fake."""
        return self.device.startswith("fake")

    @property
    def lower(self) -> torch.dtype:
        """The regions' dtype; by default PyTorch's: bfloat16 on the CPU, float16 elsewhere."""
        if self.autocast_dtype is not None:
            return parse_dtype(self.autocast_dtype)
        return torch.float16 if self.device_type in DEVICE_TYPES[1:] else torch.bfloat16

    @property
    def full(self) -> bool:
        """Whether entries run with all their samples."""
        return not self.quick and not self.dtypes and self.sample is None and self.autocast_dtype is None


@dataclass(frozen=True, slots=True)
class Entry:
    """A source of samples: an op of the op database, a row of the op table, or an op for pairs of dtypes."""

    name: str  # unique, such as "nn.functional.linear", "aten::mm" or "promotion.add"
    source: Source


@dataclass(frozen=True, slots=True)
class SampleMismatch:
    """One difference in one sample."""

    entry: str  # its name
    sample: str  # its label, such as "float32/3/mixed"
    # "dtype", "shape", "strides", "casts", "bits", "error", or another attribute that differs; "samples" if PyTorch
    # could not generate samples; "crash" if the entry's process died.
    kind: str
    # The two sides: "ours against stock", "reference against stock" or "reference against ours"; "PyTorch" for the kind
    # "samples".
    what: str
    text: str  # the op, its arguments, the expected and the actual value
    reproduce: str  # the command that runs this sample alone

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.sample else ""
        first = f"{self.entry}{sample}: {self.kind}, {self.what}"
        return "\n    ".join([first, *self.text.splitlines(), f"reproduce with: {self.reproduce}"])


@dataclass(slots=True)
class EntryResult:
    """The result of one entry. It fills while the samples run."""

    entry: Entry
    samples: int = 0  # how many ran
    refused: int = 0  # samples for which stock and ours both raise
    # Dtypes for which PyTorch could not generate samples on this device, with its errors.
    not_generated: dict[str, str] = field(default_factory=dict)
    mismatches: tuple[SampleMismatch, ...] = ()  # those that no known gap explains
    gaps: Counter[str] = field(default_factory=Counter)  # how many differences each known gap explains, by reason
    # How many samples were compared without their bits, by reason.
    nondeterministic: Counter[str] = field(default_factory=Counter)
    # Known gaps that name this entry and explain nothing in it, although all its samples ran.
    stale: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # of the op table, whose policy applied to a call
    checked: Counter[str] = field(default_factory=Counter)  # calls that were compared with the reference, by op
    no_rule: Counter[str] = field(default_factory=Counter)  # calls that no rule of the reference covers, by op
    stock_raised: int = 0  # samples for which stock raises and ours gives a result on purpose
    seconds: float = 0.0


def row_name(op: str) -> str:
    """Returns the name that the op table has for an overload."""
    return op.replace(".", "::", 1).removesuffix(".default")


def command_for(entry: Entry, options: Options, sample: str | None = None) -> str:
    """Returns the command that runs an entry of a run with these options again, or one of its samples."""
    sample = sample or options.sample
    words = ["torch-promote", "parity", "--device", options.device, "--ops", entry.name]
    if sample is not None:  # --sample takes neither --dtypes nor --quick
        words += ["--sample", sample]
    elif options.dtypes:
        words += ["--dtypes", *options.dtypes]
    words += ["--autocast-dtype", options.autocast_dtype] if options.autocast_dtype is not None else []
    words += ["--quick"] * (options.quick and sample is None) + ["--stock-only"] * options.stock_only
    return shlex.join(words)


# --- devices

_ONLY_WITH_A_GPU = (
    "Torch not compiled with ",  # CUDA, XPU
    "PyTorch is not linked with support for ",
    "Found no NVIDIA driver",
    "from the 'MPS' backend",
    "An unexpected device type was provided ",
)


def asks_for_a_gpu(error: Exception | None) -> bool:
    """Whether an error says that there is no GPU, or none in this build: a real kernel was called."""
    return error is not None and any(text in str(error) for text in _ONLY_WITH_A_GPU)


@contextlib.contextmanager
def on_device(options: Options) -> Iterator[None]:
    """The context of an entry's samples: one thread, a forked random state, and fake tensors for a fake device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a sum depend on how threads split it
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[0] if options.device == "cuda" else []))
        if options.fake:
            stack.enter_context(pretend_cuda())
            # It prints a traceback whenever a meta kernel raises, which samples provoke on purpose.
            logger = logging.getLogger("torch._subclasses.fake_tensor")
            stack.enter_context(mock.patch.object(logger, "disabled", True))
            stack.enter_context(FakeTensorMode())
        yield


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda" and "mps", stock's and ours, be enabled where there is no such GPU, for fake tensors."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", _no))
            stack.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", _yes))
        if not torch.backends.mps.is_available():  # PyTorch before 2.12 asks, and raises
            stack.enter_context(mock.patch.object(torch.backends.mps, "is_macos_or_newer", _yes))
        yield


# Functions, not mocks: a call of a mock takes longer than a region.
def _no() -> bool:
    return False


def _yes(*_: object, including_emulation: bool = True) -> bool:
    return True
