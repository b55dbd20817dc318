"""`torch-promote find-nan`: exit status 1 and a report if a program makes an inf or NaN by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.autoloading import entry_point, folder
from helpers.command_line import Capture
from helpers.traced_commands import TRAINING, command_run, warm
from torch_promote.cli import find_nan
from torch_promote.numerics.traced_process import Record, Request

__all__ = ["entry_point", "folder", "warm"]  # fixtures

#: Before step 2: the logarithm of a negative number.
NAN = "step == 2 and torch.log(torch.ones(2) - step)"


@pytest.fixture
def script(folder: Path, warm: None) -> Path:
    (folder / "train.py").write_text(TRAINING)
    return folder


def test_a_clean_program(script: Path, capfd: Capture) -> None:
    status, out, err = command_run(capfd, "find-nan", "--json", "nan.json", "train.py", "2")
    assert (status, out) == (0, "ended\n")
    assert err.startswith("no inf or NaN (except benign ones) in ")
    assert json.loads((script / "nan.json").read_text())["origin"] is None


def test_an_origin(script: Path, capfd: Capture) -> None:
    status, out, err = command_run(capfd, "find-nan", "--json", "nan.json", "train.py", "4", NAN)
    assert (status, out) == (1, "ended\n")
    assert "aten::log" in err
    assert err.endswith("torch-promote: wrote nan.json\n")
    origin = json.loads((script / "nan.json").read_text())["origin"]
    assert (origin["op"], origin["kind"], origin["phase"]) == ("aten::log", "mathematics", "forward")


def test_the_next_step(capfd: Capture) -> None:
    record = Record(1, 0, None, 1, found=True, text="the report", override="aten::mm.default")
    hint = "torch-promote: to see whether float32 cures it, run it again with --override mm.default=fp32\n"
    for tried, expected in (
        ([], hint),
        (["softmax=fp32"], hint),
        (["softmax=fp32,mm=fp32"], ""),
        (["mm.default=fp16"], ""),
    ):
        find_nan._say_next(record, tried)
        assert capfd.readouterr().err == expected
    find_nan._say_next(Record(1, 0, None, 1, found=False), [])
    assert capfd.readouterr().err == ""


def test_an_overflow_names_the_override_to_try(script: Path, capfd: Capture) -> None:
    code = "step == 1 and torch.mm(torch.full((2, 2), 300.0).half(), torch.full((2, 2), 300.0).half())"
    status, _, err = command_run(capfd, "find-nan", "train.py", "2", code)
    assert status == 1
    assert err.endswith("run it again with --override mm.default=fp32\n")


def test_raise_at_first(script: Path, capfd: Capture) -> None:
    """The error comes from the line, and the report is written."""
    code = NAN.replace("step == 2 and ", "print(step, flush=True) or step == 2 and ")
    status, out, err = command_run(capfd, "find-nan", "--raise-at-first", "--json", "nan.json", "train.py", "4", code)
    assert (status, out) == (1, "0\n1\n2\n")
    assert "Traceback" in err
    assert "NonfiniteError" in err
    assert json.loads((script / "nan.json").read_text())["origin"]["op"] == "aten::log"


@pytest.mark.parametrize(
    ("steps", "status"), [("2:3", 1), pytest.param("3:", 0, marks=pytest.mark.slow), pytest.param(":2", 0)]
)
def test_steps(script: Path, capfd: Capture, steps: str, status: int) -> None:
    assert command_run(capfd, "find-nan", "--steps", steps, "train.py", "4", NAN)[:2] == (status, "ended\n")


@pytest.mark.slow
def test_the_programs_own_status_comes_first(script: Path, capfd: Capture) -> None:
    status, _, err = command_run(capfd, "find-nan", "train.py", "4", f"{NAN}; step == 3 and sys.exit(7)")
    assert status == 7
    assert "aten::log" in err


def test_a_worker_does_not_report_what_its_parent_found(script: Path, capfd: Capture) -> None:
    code = (
        f"{NAN}; import multiprocessing as m; "
        "worker = m.get_context('fork').Process(target=torch.ones, args=(2,)); worker.start(); worker.join()"
    )
    status, _, err = command_run(capfd, "find-nan", "--json", "nan.json", "train.py", "4", code)
    assert status == 1
    assert sorted(file.name for file in script.glob("nan*")) == ["nan.json"]
    assert "torch-promote: process" not in err


@pytest.mark.slow
def test_an_override_cures(script: Path, capfd: Capture) -> None:
    """The command can be asked whether an override helps."""
    code = (
        'exec(\'with torch.autocast("cpu", dtype=torch.float16): '
        "torch.matmul(torch.full((2, 2), 300.0), torch.full((2, 2), 300.0))')"
    )
    assert command_run(capfd, "find-nan", "train.py", "1", code)[0] == 1
    assert command_run(capfd, "find-nan", "--override", "matmul=fp32", "train.py", "1", code)[0] == 0


# --- without a program


def run_with(monkeypatch: pytest.MonkeyPatch, status: int, records: list[Record]) -> list[Request]:
    asked: list[Request] = []

    def run_program(arguments: object, what: str, request: Request) -> tuple[int, int, dict[int, Record]]:
        assert what == "find-nan"
        asked.append(request)
        return status, 1, {one.process: one for one in records}

    monkeypatch.setattr(find_nan, "run_program", run_program)
    return asked


def record(process: int, found: bool | None, rank: int | None = None) -> Record:
    return Record(process, 0, rank, 3, None, found, f"text {process}", {"process": process})


@pytest.mark.parametrize(
    ("status", "found", "expected"), [(0, False, 0), (0, True, 1), (3, True, 3), (3, False, 3), (-2, True, 130)]
)
def test_exit_statuses(
    folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, status: int, found: bool, expected: int
) -> None:
    run_with(monkeypatch, status, [record(1, found)])
    assert command_run(capfd, "find-nan", "x.py") == (expected, "", "text 1\n")


def test_ranks(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An origin on any rank counts. A worker without one is not reported."""
    run_with(monkeypatch, 0, [record(1, False), record(2, False, 0), record(3, True, 1), record(4, False)])
    status, _, err = command_run(capfd, "find-nan", "--json", "nan.json", "x.py")
    assert status == 1
    assert [line for line in err.splitlines() if "wrote" not in line] == [
        *("torch-promote: rank 0", "text 2", "torch-promote: rank 1", "text 3"),
    ]
    assert sorted(file.name for file in folder.glob("nan*")) == ["nan.rank0.json", "nan.rank1.json"]
    assert json.loads((folder / "nan.rank1.json").read_text()) == {"process": 3}


def test_a_file_that_cannot_be_written_after_all(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nan.rank1.json").mkdir()
    run_with(monkeypatch, 0, [record(2, False, 0), record(3, False, 1)])
    status, _, err = command_run(capfd, "find-nan", "--json", "nan.json", "x.py")
    assert status == 1
    assert err.splitlines()[-3:] == [
        "torch-promote: rank 1",
        "text 3",
        "torch-promote: error: nan.rank1.json cannot be written: Is a directory.",
    ]
    assert json.loads((folder / "nan.rank0.json").read_text()) == {"process": 2}


def test_no_report(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, 0, [])
    status, _, err = command_run(capfd, "find-nan", "x.py")
    assert status == 1
    assert err.startswith("torch-promote: the program left no report: ")
    run_with(monkeypatch, 0, [record(1, None)])
    status, _, err = command_run(capfd, "find-nan", "--steps", "4:", "x.py")
    assert status == 1
    assert err == (
        "torch-promote: the program ended after 3 optimizer steps, so those of --steps 4: never came. "
        "A step that GradScaler skips does not count.\n"
    )


def test_what_is_asked(folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_with(monkeypatch, 0, [record(1, False)])
    assert command_run(capfd, "find-nan", "--raise-at-first", "--steps", "5:7", "x.py", "--json")[0] == 0
    [request] = asked
    assert (request.options, request.first, request.end) == ({"raise_at_first": True}, 5, 7)
    assert request.finds_nonfinite
