"""The entries of a parity run, and the run of one entry.

Each sample runs three times: under stock autocast in a crosscheck, under ours, and under ours in a crosscheck. Both
runs of ours are compared with stock. The crosscheck compares every call with the reference.
"""

from __future__ import annotations

import fnmatch
import functools
import time
from collections.abc import Iterator

import torch

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.parity.autocast_lists import autocast_lists
from torch_promote.parity.devices import check_device, on_device
from torch_promote.parity.entry_run import EntryRun
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch, named_dtype
from torch_promote.parity.op_database import op_database
from torch_promote.parity.promotion import ENTRIES
from torch_promote.parity.samples import LISTED, NotGenerated, listed_entries, sample_dtypes, samples
from torch_promote.policy.op_table import op_table, schema_of

__all__ = ["Entry", "EntryResult", "Options", "SampleMismatch", "entries", "run_entry"]


def entries(options: Options) -> list[Entry]:
    """Returns the entries that the options select: rows, pairs of dtypes, autocast lists, the op database.

    Args:
        options: The options of the run.

    Returns:
        The entries, always in the same order.

    Raises:
        OptionError: An op glob, dtype or device matches nothing, or `sample` is given for several entries.

    Example:
        >>> [entry.name for entry in entries(Options("cpu", ops=("aten::mm", "mm")))]
        ['aten::mm', 'mm']
    """
    check_device(options.device, stock_only=options.stock_only)
    everything = _all_entries(options.device)
    names = [entry.name for entry in everything]
    for glob in options.ops:
        if not fnmatch.filter(names, glob):
            raise OptionError(f"no entry is called {glob!r}.{did_you_mean(glob, names)}")
    chosen = [e for e in everything if not options.ops or any(fnmatch.fnmatchcase(e.name, g) for g in options.ops)]
    _check_dtypes(chosen, options)
    if options.sample is not None and len(chosen) != 1:
        raise OptionError(f"--sample {options.sample!r} needs one entry, but {len(chosen)} are selected. Name one op.")
    if options.dtypes:
        chosen = [entry for entry in chosen if not set(options.dtypes).isdisjoint(sample_dtypes(entry, options))]
        kept = [entry.name for entry in chosen]
        for glob in options.ops:
            if not fnmatch.filter(kept, glob):
                raise OptionError(f"no sample of {glob!r} has one of the dtypes {', '.join(options.dtypes)}.")
    return chosen


def _check_dtypes(chosen: list[Entry], options: Options) -> None:
    if options.autocast_dtype is not None and not named_dtype(options.autocast_dtype).is_floating_point:
        raise OptionError(f"the autocast dtype {options.autocast_dtype!r} is not a floating dtype.")
    if options.device == "cpu" and options.lower not in _CPU_DTYPES:
        raise OptionError(
            f"autocast on the CPU does not support {options.autocast_dtype!r}: regions would be disabled. Legal: "
            f"bfloat16, float16."
        )
    if not options.dtypes:
        return
    known = {dtype for entry in chosen for dtype in sample_dtypes(entry, options)}
    for name in options.dtypes:
        if name != LISTED:
            named_dtype(name)
        if name not in known:
            raise OptionError(
                f"no sample of the selected entries has dtype {name!r}. Legal: {', '.join(sorted(known))}."
            )


#: Other dtypes disable a region on the CPU, stock's and ours.
_CPU_DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def _all_entries(device: str) -> tuple[Entry, ...]:
    pairs = tuple(Entry(name, "promotion") for name in ENTRIES)
    from_database = tuple(Entry(name, "op_db") for name in op_database())
    options = Options(device)
    if not options.has_policies:
        return (*pairs, *from_database)
    rows = [Entry(row.name, "row") for row in op_table() if schema_of(row) is not None]
    with on_device(options):
        listed = [Entry(name, "autocast_lists") for name in listed_entries(autocast_lists(options.device_type))]
    return (*rows, *pairs, *listed, *from_database)


def run_entry(entry: Entry, options: Options) -> EntryResult:
    """Runs the samples of one entry.

    Args:
        entry: One of `entries(options)`.
        options: The options of the run.

    Returns:
        The result.

    Raises:
        OptionError: The entry has no sample with the label in the options.

    Example:
        >>> result = run_entry(Entry("aten::mm", "row"), Options("cpu", dtypes=("float32",)))
        >>> result.samples, result.mismatches, sorted(result.rows)
        (6, (), ['aten::mm'])
    """
    started = time.perf_counter()
    run = EntryRun(entry, options)
    with on_device(options):
        for sample in samples(entry, options):
            if isinstance(sample, NotGenerated):
                run.add_not_generated(sample)
            else:
                run.add(sample)
        if options.sample is not None and not run.samples and not run.not_generated:
            raise OptionError(_no_such_sample(entry, options))
    return run.result(time.perf_counter() - started)


def _no_such_sample(entry: Entry, options: Options) -> str:
    known = list(_labels(entry, Options(options.device, autocast_dtype=options.autocast_dtype)))
    assert options.sample is not None
    return f"{entry.name} has no sample {options.sample!r}.{did_you_mean(options.sample, known)}"


def _labels(entry: Entry, options: Options) -> Iterator[str]:
    for sample in samples(entry, options):
        if not isinstance(sample, NotGenerated):
            yield sample.label
