"""The entries and samples of a parity run, and its worker processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import stand_in_runner
from helpers.planted_bugs import change_results, other_values
from helpers.rows import ROWS, listed
from torch_promote.checking.comparison import compare
from torch_promote.errors import OptionError
from torch_promote.parity import runner
from torch_promote.parity.model import Entry, EntryResult, Options, on_device
from torch_promote.parity.runner import Prepare, WorkerError, entries, run_entries, run_entry
from torch_promote.parity.samples import PAIRS, NotGenerated, Sample, samples
from torch_promote.policy.op_table import registered

CPU = Options("cpu")


# --- entries


def test_entries_have_unique_names_and_a_fixed_order() -> None:
    everything = entries(CPU)
    assert len({entry.name for entry in everything}) == len(everything)
    assert entries(Options("cpu", quick=True)) == everything
    assert {entry.source for entry in everything} == {"row", "promotion", "autocast_lists", "op_db"}
    assert [entry.name for entry in everything if entry.source == "row"] == [row.name for row in ROWS]


@pytest.mark.parametrize("device", ["cpu", "fake-cuda"])
def test_every_row_with_a_policy_is_reached_and_agrees(device: str) -> None:
    options = Options(device, dtypes=("float32",))
    results = [run_entry(Entry(row.name, "row"), options) for row in ROWS if listed(row, options.device_type)]
    assert [result.entry.name for result in results if result.entry.name not in result.rows] == []
    assert [mismatch.text for result in results for mismatch in result.mismatches] == []


def test_no_row_is_left_out_on_both_devices() -> None:
    known = registered("cpu") | registered("cuda")  # an older PyTorch may register nothing of a row
    assert [row.name for row in ROWS if row.name in known and not any(listed(row, d) for d in ("cpu", "cuda"))] == []


def test_options_and_results_can_be_pickled() -> None:
    options = Options("cpu", dtypes=("float32",))
    result = run_entry(Entry("mm", "op_db"), options)
    assert pickle.loads(pickle.dumps((options, result))) == (options, result)


def test_any_device_type_is_compared_with_the_reference() -> None:
    everything = entries(Options("meta", ops=("promotion.*", "mul"), stock_only=True))
    assert [entry.name for entry in everything] == [*PAIRS, "mul"]
    result = run_entry(Entry("mul", "op_db"), Options("meta", ops=("mul",), quick=True, stock_only=True))
    assert (result.mismatches, result.rows) == ((), ())
    assert result.checked["aten.mul.Tensor"] > 0


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


def test_a_sample_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match=r"^mm has no sample 'float32/0/miked'\. Closest: float32/0/mixed, "):
        run_entry(Entry("mm", "op_db"), Options("cpu", sample="float32/0/miked"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(OptionError, match=r"^device 'cuda' needs a GPU, .* Without a GPU, use fake-cuda\.$"):
        entries(Options("cuda"))
    result = run_entry(Entry("geqrf", "op_db"), Options("fake-cuda", dtypes=("float32",)))
    assert (result.refused, result.mismatches) == (result.samples, ())
    assert result.samples > 0


# --- samples


def inputs(name: str, source: Any = "op_db", **options: Any) -> dict[str, Any]:
    chosen = Options(**options)
    with on_device(chosen):
        made = list(samples(Entry(name, source), chosen))
    assert all(isinstance(sample, Sample) for sample in made)
    return {sample.label: (sample.bound[1], sample.bound[2]) for sample in made if not isinstance(sample, NotGenerated)}


@pytest.mark.parametrize(
    ("name", "source"),
    [("aten::mm", "row"), ("torch_16.mm", "autocast_lists"), ("bmm", "op_db"), ("nn.functional.dropout", "op_db")],
)
def test_a_sample_is_the_same_alone(monkeypatch: pytest.MonkeyPatch, name: str, source: Any) -> None:
    change_results(monkeypatch, other_values)
    together = run_entry(Entry(name, source), CPU).mismatches
    labels = sorted({mismatch.sample for mismatch in together if mismatch.kind == "bits"})
    assert len(labels) > 1 or source == "autocast_lists"
    for label in reversed(labels[:12]):
        torch.rand(7)
        alone = run_entry(Entry(name, source), Options("cpu", sample=label))
        assert alone.samples == 1
        assert alone.mismatches == tuple(mismatch for mismatch in together if mismatch.sample == label)


@pytest.mark.parametrize("name", ["add", "linalg.eigh", "nn.functional.ctc_loss", "index_add"])
def test_samples_do_not_depend_on_what_ran_before(name: str) -> None:
    first = inputs(name, dtypes=("float32", "bfloat16"))
    torch.rand(3)
    second = inputs(name, dtypes=("float32", "bfloat16"))
    assert first.keys() == second.keys()
    assert [label for label in first if compare(first[label], second[label])] == []


def test_kinds_of_samples() -> None:
    made = inputs("baddbmm", dtypes=("float32",))
    mixed, plain = made["float32/0/mixed"][0], made["float32/0/plain"][0]
    assert [arg.dtype for arg in mixed] == [torch.float32, torch.bfloat16, torch.float32]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(plain, mixed, strict=True))
    assert inputs("linalg.det", dtypes=("float32",))["float32/0/lower"][0][0].dtype is torch.bfloat16
    assert "float32/0/lower" not in inputs("mm", dtypes=("float32",))
    assert inputs("nn.functional.linear", quick=True).keys() == {
        f"{kind[0]}/{number}/{kind[1]}"
        for number in range(3)
        for kind in (("bfloat16", "plain"), ("float32", "plain"), ("float32", "mixed"))
    }
    assert 0 < len(inputs("add", quick=True, dtypes=("int64",))) <= 3
    for name, source in (("aten::mm", "row"), ("torch_16.mm", "autocast_lists"), ("addmm", "op_db")):
        assert all(label.count("/") == 2 for label in inputs(name, source))
    assert inputs("torch_16.mm", "autocast_lists", dtypes=("float32",)) == {}


def test_samples_on_the_fake_device_are_fake() -> None:
    for name, source in (("promotion.add", "promotion"), ("mm", "op_db"), ("aten::mm", "row")):
        made = inputs(name, source, device="fake-cuda", dtypes=("float32",))
        assert all(isinstance(arg, torch._subclasses.FakeTensor) for args, _ in made.values() for arg in args)
        assert {arg.device.type for args, _ in made.values() for arg in args} == {"cuda"}
    assert {str(kwargs["device"]) for _, kwargs in inputs("zeros", device="fake-cuda").values()} == {"cuda"}


# --- worker processes


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of one process that has imported torch, which takes two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def run(
    jobs: int, *names: str, options: Options = CPU, prepare: Prepare = stand_in_runner.entries
) -> list[EntryResult]:
    """The results by name, as they are in the order of the entries."""
    chosen = stand_in_runner.entries(dataclasses.replace(options, ops=names))
    done = dict(run_entries(chosen, options, jobs, stand_in_runner.run_entry, prepare))
    assert [done[position].entry for position in sorted(done)] == chosen
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
    assert {name: [mismatch.kind for mismatch in found] for name, found in mismatches.items()} == {
        **{name: [] for name in ("good", "good.again")},
        **{name: ["crash"] for name in ("segfault", "abort", "exit", "raising")},
        "mismatching": ["dtype"],
    }
    crashes = {name: found[0] for name, found in mismatches.items() if found}
    reproduce = "torch-promote parity --device cpu --ops exit --autocast-dtype float16 --quick --stock-only"
    assert crashes["exit"].reproduce == reproduce
    assert crashes["exit"].text == "the process that ran it died: exit status 3"
    assert crashes["segfault"].text.startswith("the process that ran it died: SIGSEGV\nFatal Python error: Segm")
    assert "died: SIGABRT\nterminate called without an active exception\n" in crashes["abort"].text
    for crash in (crashes["raising"], run(0, "raising")[0].mismatches[0]):
        assert crash.text.startswith("its run raised an error:\nTraceback (most recent call last):\n")
        assert crash.text.endswith("\nZeroDivisionError: the harness is wrong")


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "started"
    monkeypatch.setenv(stand_in_runner.MARKER, str(marker))
    monkeypatch.setattr(runner, "_SECONDS_TO_STOP", 0.2)
    stubborn = runner.Worker(stand_in_runner.run_entry, stand_in_runner.entries, CPU, tmp_path)
    stubborn.take(0, Entry("stubborn", "op_db"))
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    stubborn.stop()
    assert stubborn._process.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("jobs", [0, 1])
def test_an_error_in_the_options_ends_the_run(jobs: int) -> None:
    with pytest.raises(OptionError, match=r"^wrong has no sample 'x'.$"):
        run(jobs, "wrong")


@pytest.mark.usefixtures("quick_starts")
def test_a_worker_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(WorkerError, match=r"^a worker process died while starting: exit status 7\nno such library$"):
        run(1, "good", prepare=stand_in_runner.cannot_start)


def test_closing_the_run_stops_the_workers() -> None:
    chosen = stand_in_runner.entries(Options(ops=("good*", "mismatching", "gap")))
    running = run_entries(chosen, CPU, 1, stand_in_runner.run_entry, stand_in_runner.entries)
    next(running)
    assert len(multiprocessing.active_children()) == 1
    running.close()
