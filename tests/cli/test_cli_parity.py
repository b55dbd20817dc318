"""`torch-promote parity`: what it prints, and what it says to a wrong command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.command_line import Capture, error_of, terminal_of_80_columns, wide
from helpers.stand_in_runner import stand_in
from torch_promote.cli import progress as _progress
from torch_promote.cli.program import main

__all__ = ["stand_in", "terminal_of_80_columns", "wide"]  # fixtures


def printed(capsys: Capture, *arguments: str, status: int) -> str:
    """What goes to stdout, of a command that writes nothing to stderr, without what changes between machines."""
    assert main(["parity", "--jobs", "0", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    # The mismatch that the stand-in makes has an escape sequence in it.
    text = captured.out.replace("\x1b[31m", "")
    text = re.sub(r"(?m)^(parity: .*), torch \d.*$", r"\1, VERSIONS", text)
    return re.sub(r"(?m)^seconds( +)[\d.]+", r"seconds\1T", text)


# --- what is printed


@pytest.mark.usefixtures("stand_in", "wide")
def test_a_clean_run(capsys: Capture) -> None:
    assert_expected_inline(
        printed(capsys, "--ops", "good*", status=0),
        """\
parity: cpu, VERSIONS

rows checked        2 of 3    with a policy on cpu
entries             2
samples             8         autocast dtype bfloat16
refused             2         samples that raise the same error under both
stock raised        0         where ours returns a result on purpose
without bits        0         samples of nondeterministic ops
calls checked       16 of 16  compared with the reference
ops without a rule  0         of 2 overloads that ran
mismatches          0
known gaps          0         differences with a reason
stale gaps          0
seconds             T

No mismatch, and no stale known gap.
""",
    )


@pytest.mark.usefixtures("stand_in", "wide")
def test_a_run_that_finds_all_there_is_to_find(capsys: Capture) -> None:
    names = ("good", "mismatching", "stale", "refused", "unruled", "gap")
    assert_expected_inline(
        printed(capsys, "--device", "fake-cuda", "--quick", "--stock-only", "--ops", *names, status=1),
        """\
mismatching, sample float32/0/mixed: dtype, ours against stock
    aten.mm.default(float32[2, 3], float32[3, 2])
    expected bfloat16
    got      float32
    reproduce with: torch-promote parity --device fake-cuda --ops mismatching --sample float32/0/mixed

stale known gaps, to be removed from the list:
    gap of stale

known gaps:
    2 times: the kernel reads what it has not written

compared without bits:
    3 samples: atomic additions

samples that PyTorch cannot make:
    refused, float16: RuntimeError: no such kernel

ops without a rule, with the number of calls:
    aten._strange.default 5

parity: fake-cuda, quick, stock only, VERSIONS

rows checked        2 of 3    with a policy on cuda
entries             6
samples             24        autocast dtype float16
refused             9         samples that raise
stock raised        0         where ours returns a result on purpose
without bits        3         samples of nondeterministic ops
calls checked       48 of 53  compared with the reference
ops without a rule  1         of 3 overloads that ran
mismatches          1
known gaps          2         differences with a reason
stale gaps          1
seconds             T

Mismatches: 1. Stale gaps: 1.
""",
    )


@pytest.mark.usefixtures("stand_in", "wide")
def test_many_mismatches_are_counted(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_promote.cli.parity_report._SHOWN", 0)
    text = printed(capsys, "--ops", "mismatching", status=1)
    assert text.startswith("1 more mismatches (use --json to see them): mismatching 1\n")


@pytest.mark.usefixtures("stand_in")
def test_rows_that_a_whole_run_does_not_reach_are_listed(capsys: Capture) -> None:
    assert "rows not reached:\n    aten::bmm\n" in printed(capsys, status=1)
    assert "rows not reached" not in printed(capsys, "--ops", "good", status=0)
    assert "rows not reached" not in printed(capsys, "--shard", "1/2", status=0)


@pytest.mark.usefixtures("stand_in")
def test_what_an_op_prints_is_not_in_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--ops", "noisy", "--jobs", "1", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["totals"]["samples"] == 4
    assert captured.err == ""


@pytest.mark.usefixtures("stand_in")
def test_what_an_op_prints_in_this_process_goes_to_stderr(capsys: Capture) -> None:
    assert main(["parity", "--ops", "noisy", "--jobs", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["totals"]["samples"] == 4
    assert captured.err == "printed by an op\n"


@pytest.mark.usefixtures("stand_in")
def test_progress_goes_to_stderr_now_and_then(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert main(["parity", "--ops", "mismatching", "good*", "--jobs", "0"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d+ s", "T", line) for line in lines] == [
        "parity: 1 of 3, mismatches: 0, T, about T left",
        "parity: 2 of 3, mismatches: 1, T, about T left",
        "parity: 3 of 3, mismatches: 1, T, about T left",
    ]
    assert main(["parity", "--ops", "good", "--jobs", "0", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("stand_in")
def test_progress_is_a_bar_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["parity", "--ops", "good*", "--jobs", "0"]) == 0
    captured = capsys.readouterr()
    assert "2/2" in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", captured.err)
    assert "\u2501" in captured.err
    assert "2/2" not in captured.out


# --- a wrong command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--ops mmm", "no entry is called 'mmm'. Closest: mm, bmm, minimum."),
        ("--ops mm sofmax", "no entry is called 'sofmax'. Closest: softmax, fmax, log_softmax."),
        (
            "--device cdua",
            "'cdua' is not a device. Legal: cpu, cuda, fake-cuda, and with --stock-only every device "
            "type of this PyTorch. Closest: cuda.",
        ),
        ("--dtypes flaot32", "'flaot32' is not a dtype of PyTorch. Closest: float32, float, cfloat."),
        ("--autocast-dtype int8", "the autocast dtype 'int8' is not a floating dtype."),
        ("--ops mm --jobs 0 --sample float32/9/plain", "mm has no sample 'float32/9/plain'."),
        ("--sample float32/0/plain", "--sample 'float32/0/plain' needs one entry,"),
        ("--shard 3/2", "--shard '3/2' is not a valid shard. Expected I/N with I from 1 to N, such as 1/4."),
        ("--shard 0/2", "--shard '0/2' is not a valid shard."),
        ("--shard half", "--shard 'half' is not a valid shard."),
        ("--ops bmm --shard 9/9", "--shard 9/9 is empty: there are 1 entries."),
        ("--jobs many", "--jobs 'many' is not a number of processes. Expected an integer, 0 or more."),
        ("--jobs -1", "--jobs '-1' is not a number of processes."),
        ("--json /no/such/folder/a.json", "cannot write /no/such/folder/a.json:"),
        ("--junit /", "cannot write /:"),
        ("--merge /no/such/file", "cannot read /no/such/file:"),
        (
            "--merge a.json --quick",
            "--merge runs nothing, so the only other options that it accepts are --json and --junit.",
        ),
        ("--merge a.json --jobs 2", "--merge runs nothing, so the only"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(capsys: Capture, arguments: str, complaint: str) -> None:
    assert error_of(capsys, "parity", *arguments.split()).startswith(f"torch-promote: error: {complaint}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: Capture) -> None:
    assert error_of(capsys, "parity", "--device", "cuda") == (
        "torch-promote: error: device 'cuda' needs a GPU, but PyTorch finds none. Without a GPU, use fake-cuda.\n"
    )


@pytest.mark.usefixtures("stand_in")
def test_nothing_checked_is_not_a_pass(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert main(["parity", "--ops", "refused", "--jobs", "0", "--json", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith("\n\nNothing was checked.\n")
    assert captured.err == (
        "torch-promote: error: nothing was checked: PyTorch has no sample for this selection that it can run.\n"
    )
    assert json.loads(file.read_text())["status"] == 2
    assert main(["parity", "--merge", str(file)]) == 2


@pytest.mark.usefixtures("stand_in")
def test_without_rich_there_is_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # importing it now fails
    assert "pip install rich" in error_of(capsys, "parity", "--ops", "good")
    assert main(["parity", "--ops", "good", "--jobs", "0", "--json"]) == 0
