"""The entries and samples of a parity run, and its worker processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from typing import Any

import pytest
import torch

from helpers import stand_in_runner
from helpers.rows import ROWS, listed
from torch_promote.errors import OptionError
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.runner import entries, run_entries, run_entry

CPU = Options("cpu")


# --- entries


def test_entries_have_unique_names_and_a_fixed_order() -> None:
    everything = entries(CPU)
    assert len({entry.name for entry in everything}) == len(everything)
    assert entries(Options("cpu", quick=True)) == everything
    assert {entry.source for entry in everything} == {"row", "promotion", "op_db"}
    assert [entry.name for entry in everything if entry.source == "row"] == [row.name for row in ROWS]


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_every_row_with_a_policy_is_reached_and_agrees(device: str) -> None:
    options = Options(device, dtypes=("float32",))
    results = [run_entry(Entry(row.name, "row"), options) for row in ROWS if listed(row, options.device_type)]
    assert [result.entry.name for result in results if result.entry.name not in result.rows] == []
    assert [mismatch.text for result in results for mismatch in result.mismatches] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "'gpu' is not a device. Legal: cpu, cuda, fake-cuda, and with --stock-only every device"),
        ({"device": "cuda:0"}, "device 'cuda:0' has an index. Use the device type only: cuda."),
        ({"device": "gpu", "stock_only": True}, "this PyTorch cannot make a tensor on device 'gpu'"),
        ({"device": "meta", "stock_only": True, "ops": ("aten::*",)}, "no entry is called 'aten::*'."),
        ({"ops": ("aten::mn",)}, "no entry is called 'aten::mn'. Closest: aten::mv, aten::mm, aten::tan."),
        ({"dtypes": ("floot32",)}, "'floot32' is not a dtype of PyTorch. Closest: float32, float, cfloat."),
        ({"ops": ("aten::mm",), "dtypes": ("int8",)}, "no sample of the selected entries has dtype 'int8'. Legal: "),
        ({"ops": ("add", "aten::mm"), "dtypes": ("int8",)}, "no sample of 'aten::mm' has one of the dtypes int8."),
        ({"ops": ("mm", "aten::mm"), "sample": "float32/0/plain"}, "--sample 'float32/0/plain' needs one entry, but"),
        ({"autocast_dtype": "int8"}, "the autocast dtype 'int8' is not a floating dtype."),
        ({"autocast_dtype": "float64"}, "autocast on the CPU does not support 'float64'"),
    ],
)
def test_a_selection_that_is_not_possible(options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        entries(Options(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(OptionError, match=r"^device 'cuda' needs a GPU, .* Without a GPU, use fake-cuda\.$"):
        entries(Options("cuda"))
    result = run_entry(Entry("geqrf", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert (result.refused, result.mismatches) == (result.samples, ())
    assert result.samples > 0


# --- worker processes


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of one process that has imported torch, which takes two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def run(jobs: int, *names: str, options: Options = CPU) -> list[EntryResult]:
    """The results, in the order of the entries."""
    chosen = stand_in_runner.entries(dataclasses.replace(options, ops=names))
    done = dict(run_entries(chosen, options, jobs, stand_in_runner.run_entry, stand_in_runner.entries))
    assert [done[position].entry for position in sorted(done)] == chosen
    assert multiprocessing.active_children() == []
    return [done[position] for position in sorted(done)]


@pytest.mark.usefixtures("quick_starts")
def test_results_do_not_depend_on_the_number_of_processes() -> None:
    names = ("good*", "mismatching", "stale", "refused", "gap")
    here = run(0, *names)
    assert len(here) == 6
    assert run(1, *names) == run(2, *names) == here
    # A worker starts with a thread for each core, and has to change that.
    assert {result.checked["threads"] for result in here} == {1}


@pytest.mark.usefixtures("quick_starts")
def test_a_dead_worker_costs_its_entry_and_no_other() -> None:
    options = Options("cpu", quick=True, stock_only=True, autocast_dtype="float16")
    results = run(2, "good*", "segfault", "abort", "exit", "raising", "mismatching", options=options)
    mismatches = {result.entry.name: result.mismatches for result in results}
    crashes = {name: found[0] for name, found in mismatches.items() if found}
    kinds = {name: crash.kind for name, crash in crashes.items()}
    assert kinds == {**dict.fromkeys(("segfault", "abort", "exit", "raising"), "crash"), "mismatching": "dtype"}
    reproduce = "torch-promote parity --device cpu --ops exit --autocast-dtype float16 --quick --stock-only"
    assert crashes["exit"].reproduce == reproduce
    assert crashes["exit"].text == "the process that ran it died: exit status 3"
    assert crashes["segfault"].text.startswith("the process that ran it died: SIGSEGV\nFatal Python error: Segm")
    assert "died: SIGABRT\nterminate called without an active exception\n" in crashes["abort"].text
    for crash in (crashes["raising"], run(0, "raising")[0].mismatches[0]):
        assert crash.text.startswith("its run raised an error:\nTraceback (most recent call last):\n")
        assert crash.text.endswith("\nZeroDivisionError: the harness is wrong")
