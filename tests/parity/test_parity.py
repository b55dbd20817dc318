"""Parity: the entries of a run, worker processes, the report, and the command `torch-promote parity`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import stand_in_runner
from helpers.command_line import Capture, cells_of, error_of, terminal_of_80_columns, text_of, wide
from helpers.rows import ROWS, listed
from helpers.stand_in_runner import stand_in
from helpers.subprocesses import environment, run_python
from torch_promote import my_autocast
from torch_promote.checking import expectation
from torch_promote.cli.program import main
from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.parity import runner
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.report import ParityReport, about, merged
from torch_promote.parity.runner import entries, run_entries, run_entry
from torch_promote.reference.ops.infer import NO_RULE

__all__ = ["stand_in", "terminal_of_80_columns", "wide"]  # fixtures

#: The package has a class of this module's name.
crosscheck: Any = importlib.import_module("torch_promote.checking.crosscheck")

CPU = Options("cpu")


# --- entries


@pytest.mark.parametrize(
    ("device", "lower"),
    [
        *(("cpu", "bfloat16"), ("fake-cuda", "float16"), ("fake-xpu", "bfloat16"), ("fake-mps", "float16")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("cpu", "float16"), ("fake-cuda", "bfloat16"))),
    ],
)
def test_every_row_agrees_and_is_reached_where_it_has_a_policy(device: str, lower: str) -> None:
    """Ours with stock, and both with the reference: results, gradients, errors, and casts."""
    # How a policy treats other dtypes is the same code on every accelerator.
    options = Options(
        device, dtypes=("float32", lower) if device in ("fake-xpu", "fake-mps") else (), autocast_dtype=lower
    )
    results = {row: run_entry(Entry(row.name, "row"), options) for row in ROWS}
    with_policy = [row for row in ROWS if listed(row, options.device_type)]
    assert [row.name for row in with_policy if row.name not in results[row].rows] == []
    mismatches = [one for found in results.values() for one in found.mismatches]
    assert [one.text for one in mismatches] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device": "cuda:0"},
            "'cuda:0' is not a device. Legal: cpu, cuda, xpu, mps, fake-cuda, fake-xpu, fake-mps, and with",
        ),
        ({"device": "gpu", "stock_only": True}, "this PyTorch cannot make a tensor on device 'gpu'"),
        ({"device": "meta", "stock_only": True, "ops": ("aten::*",)}, "no op is called 'aten::*'."),
        ({"ops": ("aten::sofmax",)}, "no op is called 'aten::sofmax'. Closest: "),
        ({"ops": ("nn.functional.gellu",)}, "no op is called 'nn.functional.gellu'. Closest: "),
        ({"dtypes": ("floot32",)}, "dtype 'floot32' is not the name of a dtype. Closest: float32. Names are those"),
        ({"ops": ("aten::mm",), "dtypes": ("int8",)}, "no sample of the selected entries has dtype 'int8'. Legal: "),
        ({"ops": ("add", "aten::mm"), "dtypes": ("int8",)}, "no sample of 'aten::mm' has one of the dtypes int8."),
        ({"ops": ("mm", "aten::mm"), "sample": "float32/0/plain"}, "--sample 'float32/0/plain' needs one entry, but"),
        ({"autocast_dtype": "int8"}, "the autocast dtype 'int8' is not a floating dtype."),
        ({"autocast_dtype": "float64"}, "autocast on cpu does not support 'float64'"),
    ],
)
def test_a_selection_that_is_not_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TorchPromoteError, match=f"^{re.escape(message)}"):
        entries(Options(**options))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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
def test_results_do_not_depend_on_the_number_of_processes(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
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


# --- the report

NAMES = ("good", "good.again", "mismatching", "stale", "refused", "gap", "unruled")


def report(*names: str, device: str = "cpu", shard: str = "1/1") -> ParityReport:
    """Returns a report of entries that the stand-in ran in this process."""
    options = Options(device, ops=names)
    index, count = map(int, shard.split("/"))
    chosen = stand_in_runner.entries(options)
    results = {
        place: stand_in_runner.run_entry(chosen[place], options) for place in range(index - 1, len(chosen), count)
    }
    return ParityReport(about(device), options, len(chosen), results, (shard,), seconds=2.5)


def test_totals_add_up() -> None:
    of = report(*NAMES)
    totals = of.totals
    assert totals.pop("calls_checked") == 7 * (7 + torch.get_num_threads())
    assert totals.pop("rows_with_policy") == len(of.rows) + len(of.rows_not_reached)
    # One row: aten::mm; aten::exp has no policy on the CPU.
    assert totals == {
        "rows": 1,
        "entries": 7,
        "entries_chosen": 7,
        "samples": 28,
        "refused": 6 + 4,
        "stock_raised": 0,
        "not_generated": 1,
        "nondeterministic": 3,
        "calls_without_rule": 5,
        "ops_checked": 2,
        "ops_without_rule": 1,
        "mismatches": 1,
        "gaps": 2,
        "stale_gaps": 1,
        "seconds": 2.5,
    }
    assert report("good", device="fake-cuda").rows == ["aten::exp", "aten::mm"]
    assert report("good", device="meta").totals["rows_with_policy"] == 0
    other_way_round = dataclasses.replace(of, results=dict(reversed(of.results.items())))
    assert other_way_round.to_dict() == of.to_dict()


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("good", "refused", "gap", "unruled"), 0),
        (("good", "mismatching"), 1),
        (("good", "stale"), 1),
        (("refused",), 2),
        (("refused", "stale"), 1),
    ],
)
def test_the_exit_status(names: tuple[str, ...], status: int) -> None:
    assert report(*names).status == status
    assert dataclasses.replace(report(*names), interrupted=True).status == 130


# --- JSON, and shards


def test_json_there_and_back(tmp_path: Path) -> None:
    before = report(*NAMES)
    text = json.dumps(before.to_dict())
    before.save(tmp_path / "a.json")
    assert ParityReport.load(tmp_path / "a.json") == before
    data = json.loads(text)
    names = "format torch torch_promote python platform device default_policy options shards interrupted status totals"
    assert list(data) == [*names.split(), "rows_not_reached", "mismatches", "entries"]
    assert list(data["options"]) == ["device", "ops", "dtypes", "sample", "quick", "stock_only", "autocast_dtype"]
    assert list(data["mismatches"][0]) == ["entry", "sample", "kind", "what", "text", "reproduce"]
    fields = "position name source samples refused not_generated mismatches gaps nondeterministic stale rows checked"
    assert list(data["entries"][0]) == [*fields.split(), "no_rule", "stock_raised", "seconds"]
    del data["entries"][0]["samples"]
    for text in (json.dumps(data), "[]", "x"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(OptionError, match=r"a\.json was not written by `torch-promote parity --json`"):
            ParityReport.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda data: data["totals"].update(entries_chosen="7"), "entries_chosen"),
        (lambda data: data["totals"].update(seconds=None), "seconds"),
        (lambda data: data.update(shards=[1]), "[0]"),
        (lambda data: data.update(interrupted="no"), "expected bool, got 'no'"),
        (lambda data: data.update(torch=2.13), "torch"),
        (lambda data: data["entries"][0].update(position="0"), "expected int, got '0'"),
        (lambda data: data["entries"][0].update(rows={"aten::mm": 1}), "rows"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Any], None], place: str) -> None:
    data = report(*NAMES).to_dict()
    damage(data)
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(OptionError, match=r"a\.json was not written by `torch-promote parity --json`") as error:
        ParityReport.load(tmp_path / "a.json")
    assert place in str(error.value)


def test_reports_that_are_not_shards_of_one_run_are_refused() -> None:
    first, second = report(*NAMES, shard="1/2"), report(*NAMES, shard="2/2")
    quick = dataclasses.replace(second.options, quick=True)
    for reports, complaint in (
        ([first], "3 of 7 entries are missing in the shards 1/2."),
        ([first, second, first], "4 entries occur twice in the shards 1/2, 2/2, 1/2."),
        ([first, dataclasses.replace(second, interrupted=True)], "shard 2/2 was interrupted. Run it again."),
        ([first, dataclasses.replace(second, entries=8)], "shard 2/2 has number of entries 8, the first report has 7."),
        ([first, dataclasses.replace(second, options=quick)], "shard 2/2 has options Options("),
        ([first, dataclasses.replace(second, about={**second.about, "torch": "3"})], "2/2 has torch 3, the"),
    ):
        with pytest.raises(OptionError, match=re.escape(complaint)):
            merged(reports)


# --- the command


@pytest.mark.usefixtures("stand_in", "wide")
def test_it_prints_the_report(capsys: Capture) -> None:
    """The report's own tests are in tests/parity."""
    text = text_of(capsys, "parity", "--jobs", "0", "--ops", "good*")
    assert text.startswith("parity: cpu, torch ")
    assert "\nNo mismatch, and no stale known gap.\n" in text
    names = ("good", "mismatching", "stale", "refused", "unruled", "gap")
    assert main(["parity", "--jobs=0", "--device=fake-cuda", "--quick", "--stock-only", "--ops", *names]) == 1
    text = capsys.readouterr().out
    assert "\nMismatches: 1. Stale gaps: 1.\n" in text
    assert "torch-promote parity --device fake-cuda --ops mismatching --sample float32/0/mixed\n" in text
    lines = cells_of(text)
    for line in ("entries 6", "known gaps 2 (differences with a reason)", "aten._strange.default 5", "gap of stale"):
        assert line.split() in lines


@pytest.mark.usefixtures("stand_in")
def test_what_an_op_prints_is_not_in_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--ops", "noisy", "--jobs", "1", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["totals"]["samples"] == 4
    assert captured.err == ""


# the real samples


def test_a_planted_bug_is_found_and_its_line_reproduces_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    def flipped(*arguments: Any) -> my_autocast:
        return my_autocast(*arguments, overrides={"bmm": "fp32"})

    with monkeypatch.context() as planted:
        planted.setattr(runner, "my_autocast", flipped)
        assert main(["parity", "--ops", "mm", "bmm", "--dtypes", "float32", "--jobs", "0"]) == 1
        out = capsys.readouterr().out
        lines = re.findall(r"(?m)^ +reproduce with: (torch-promote .*)$", out)
        assert lines
        assert all(" --ops bmm " in line for line in lines)
        assert re.search(r"(?m)^ *bmm, sample float32/\d+/\w+: dtype, ours against stock$", out)
        again = shlex.split(lines[0])[1:]
        assert main([*again, "--jobs", "0"]) == 1
        assert lines[0] in capsys.readouterr().out
    assert main([*again, "--jobs", "0"]) == 0
    assert ["samples", "1"] in [line[:2] for line in cells_of(capsys.readouterr().out)]


def test_list(capsys: Capture) -> None:
    everything = json.loads(text_of(capsys, "parity", "--list", "--json"))
    assert {entry["source"] for entry in everything} == {"row", "promotion", "op_db"}
    assert len({entry["name"] for entry in everything}) == len(everything)
    shards = [json.loads(text_of(capsys, "parity", "--list", "--shard", f"{n}/3", "--json")) for n in (1, 2, 3)]
    assert sorted(itertools.chain(*shards), key=everything.index) == everything
    assert text_of(capsys, "parity", "--list", "--ops", "aten::mm", "bmm") == (
        "entry     source\naten::mm  row\nbmm       op_db\n\nentries: 2 (op_db 1, row 1)\n"
    )


# files and shards


@pytest.mark.usefixtures("stand_in")
def test_shards_in_files_are_merged(capsys: Capture, tmp_path: Path) -> None:
    names = ("good*", "mismatching", "gap")
    files = [str(tmp_path / f"{index}.json") for index in (1, 2)]
    statuses = [
        main(["parity", "--ops", *names, "--jobs", "0", "--shard", f"{index}/2", "--json", file])
        for index, file in enumerate(files, start=1)
    ]
    assert statuses == [0, 1]
    assert ["entries", "2", "(of", "4,", "shard", "1/2)"] in cells_of(capsys.readouterr().out)
    assert main(["parity", "--merge", *files]) == 1
    assert "--ops mismatching --sample float32/0/mixed\n" in capsys.readouterr().out  # one line on a terminal, too
    assert main(["parity", "--merge", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert main(["parity", "--ops", *names, "--jobs", "0", "--json"]) == 1
    whole = json.loads(capsys.readouterr().out)
    for seconds_of in (data, whole):
        seconds_of["totals"].pop("seconds")
    assert data == {**whole, "shards": ["1/2", "2/2"]}
    assert error_of(capsys, "parity", "--merge", files[0]) == (
        "torch-promote: error: 2 of 4 entries are missing in the shards 1/2.\n"
    )


# as a process


def test_interrupted_it_stops_its_workers_and_tells_what_it_has(capsys: Capture, tmp_path: Path) -> None:
    marker, file = tmp_path / "pid", tmp_path / "a.json"
    arguments = ["parity", "--ops", "good", "slow", "good.again", "--jobs", "1", "--json", str(file)]
    command = [
        sys.executable,
        "-c",
        f"import sys; from helpers import stand_in_runner; sys.exit(stand_in_runner.main({arguments}))",
    ]
    pipe = subprocess.PIPE
    variables = environment(**{stand_in_runner.MARKER: str(marker)})
    # A group of its own, all of which gets the signal, as all in front of a terminal gets Ctrl-C.
    process = subprocess.Popen(command, env=variables, text=True, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        while not (marker.exists() and (text := marker.read_text())):
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    assert "\nInterrupted after 1 of 3 entries.\n" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int(text), 0)
    data = json.loads(file.read_text())
    assert (data["status"], data["interrupted"], [entry["name"] for entry in data["entries"]]) == (130, True, ["good"])
    assert error_of(capsys, "parity", "--merge", str(file)) == (
        "torch-promote: error: shard 1/1 was interrupted. Run it again.\n"
    )


def test_without_what_the_samples_need_it_says_so() -> None:
    code = "import sys; sys.modules['expecttest'] = None; from torch_promote.cli.program import main"
    process = run_python(f"{code}; sys.exit(main(['parity']))")
    assert (process.returncode, process.stdout, process.stderr) == (
        2,
        "",
        "torch-promote: error: PyTorch's samples need expecttest, which is not installed: "
        "pip install numpy expecttest.\n",
    )


@pytest.mark.parametrize("plant", ["rules", "observer"])
@pytest.mark.parametrize("only", [[], ["--stock-only"]])
def test_a_run_that_checks_no_call_is_no_pass(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, plant: str, only: list[str]
) -> None:
    """There is no rule for any op, or no call is observed."""
    arguments = ["parity", "--ops", "aten::mm", "--dtypes", "float32", "--jobs", "0", *only]
    assert main(arguments) == 0
    capsys.readouterr()
    if plant == "rules":
        monkeypatch.setattr(expectation, "infer", lambda *args: NO_RULE)
    else:
        monkeypatch.setattr(crosscheck, "observe_dispatch", lambda checker: contextlib.nullcontext())
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "\nNothing was checked.\n" in captured.out
    assert captured.err.startswith("torch-promote: error: nothing was checked")
    assert captured.err.count("\n") == 1


@pytest.mark.usefixtures("stand_in", "wide")
def test_a_file_that_cannot_be_written_costs_no_table(capsys: Capture) -> None:
    assert main(["parity", "--ops", "good*", "mismatching", "--jobs", "0", "--json", "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert "\nMismatches: 1." in captured.out
    assert captured.err == "torch-promote: error: cannot write /dev/full: No space left on device.\n"
