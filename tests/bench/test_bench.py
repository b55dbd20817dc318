"""The command `torch-promote bench`: its output, and its errors for wrong input.

Tests do not check the measured times, which need a quiet machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of, wide
from torch_promote import cli
from torch_promote.bench import Case, Result, Settings, report
from torch_promote.bench.cases import Measured, Prepared
from torch_promote.bench.figures import Overhead, Spread
from torch_promote.cli import bench as cli_bench

__all__ = ["terminal_of_80_columns", "wide"]

QUICK = ("bench", "--rounds", "2")
SPREAD = {"median", "low", "high"}


def check_spread(spread: Any) -> None:
    assert set(spread) == SPREAD
    assert spread["low"] <= spread["median"] <= spread["high"]


# --- JSON


def test_json_says_where_it_was_measured(capsys: Capture) -> None:
    data = json_of(capsys, *QUICK, "--case", "construct, enter, exit", "--threads", "2")
    assert data["device_name"]
    del data["device_name"], data["results"]
    assert data == {
        "torch": torch.__version__,
        "torch_promote": tp.__version__,
        "device": "cpu",
        "threads": 2,
        "rounds": 2,
        "clock": "wall",
        "default_policy": "",
        "interrupted": False,
        "cases": 1,
        "skipped": [],
    }


def test_without_linuxs_list_of_processors_the_platform_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, **_options: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert report([], Settings())["device_name"] == "arm"


def test_json_of_a_region(capsys: Capture) -> None:
    [result] = json_of(capsys, *QUICK, "--case", "enter, exit of one object")["results"]
    check_spread(result.pop("ratio"))
    for times in result.pop("times_ns").values():
        check_spread(times)
    assert result == {
        "suite": "region",
        "case": "enter, exit of one object",
        "ratio_to_hand": None,
        "overheads": {},
        "overheads_ns": {},
        "casts": {},
        "peak_bytes": {},
        "kernels": {},
        "copies": {},
        "compiled": {},
        "instructions": {},
        "target": None,
    }


def test_json_of_a_model(capsys: Capture) -> None:
    [result] = json_of(capsys, *QUICK, "--case", "conv net, forward")["results"]
    contenders = ["stock", "ours", "hand", "already_cast", "plain"]
    for key in ("ratio", "ratio_to_hand"):
        check_spread(result[key])
    assert list(result["times_ns"]) == list(result["casts"]) == list(result["peak_bytes"]) == contenders
    assert list(result["overheads"]) == list(result["overheads_ns"]) == ["hand", "already_cast"]
    for overhead in result["overheads"].values():
        assert set(overhead) == {"spread", "left_out", "reason"}
        assert (overhead["spread"] is None) == bool(overhead["reason"])
    for costs in result["overheads_ns"].values():
        assert set(costs) == {"stock", "ours"}
        for cost in costs.values():
            check_spread(cost)
    assert result["casts"]["stock"] == {"weights": 5, "activations": 1, "gradients": 0}
    assert all(isinstance(peak, int) and peak > 0 for peak in result["peak_bytes"].values())


def test_json_needs_no_rich(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert json_of(capsys, *QUICK, "--case", "call of a decorated function")["results"]
    assert "pip install rich" in error_of(capsys, *QUICK)


# --- text

ONE, HALF = Spread(1.0, 0.9, 1.1), Spread(0.5, 0.25, 0.75)


def _case(suite: str, name: str) -> Case:
    return Case(suite, name, lambda settings: Prepared({}))


FOUND = [
    Result(_case("region", "enter"), HALF, times_ns={"stock": Spread(1999, 0, 0), "ours": Spread(12.34, 0, 0)}),
    Result(
        _case("models", "MLP, forward"),
        ONE,
        HALF,
        overheads={"hand": Overhead(HALF), "already_cast": Overhead(None, 0, "stock - base is within its noise")},
        times_ns={"stock": Spread(5e6, 0, 0), "ours": Spread(1e3, 0, 0), "hand": Spread(4, 0, 0)},
        measured={"stock": Measured({"weights": 40, "activations": 1, "gradients": 2}, 2048)},
    ),
    Result(
        _case("models", "LSTM, forward"),
        ONE,
        overheads={
            "hand": Overhead(None, 0, "stock takes no longer than the base: median 0 ns"),
            "already_cast": Overhead(ONE),
        },
    ),
    Result(_case("models", "MLP, evaluation"), ONE, overheads={"hand": Overhead(HALF)}),
]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cli_bench, "run", lambda cases, settings: iter(FOUND))
    monkeypatch.setattr(cli_bench, "missing", list)
    return None


@pytest.mark.usefixtures("found", "wide")
def test_the_text_has_ratios_first_and_absolute_times_last(capsys: Capture) -> None:
    lines = [re.split(r"  +", line) for line in text_of(capsys, "bench").splitlines()]
    half, one = "0.50 (0.25 to 0.75)", "1.00 (0.90 to 1.10)"
    assert lines[:-1] == [
        ["region"],
        ["case", "ours / stock", "ours", "stock"],
        ["enter", half, "12.3 ns", "2 us"],
        [""],
        ["models"],
        ["case", "ours / stock", "ours / hand", "over hand", "over cast before", "ours", "stock", "hand"],
        ["MLP, forward", one, half, half, "noise", "1 us", "5 ms", "4 ns"],
        ["LSTM, forward", one, "-", "no cost", one, "-", "-", "-"],
        ["MLP, evaluation", one, "-", half, "-", "-", "-", "-"],
        [""],
        ["case: contender", "casts of weights", "of activations", "of gradients", "peak, KiB"],
        ["MLP, forward: stock", "40", "1", "2", "2.0"],
        [""],
    ]
    assert re.fullmatch(rf"torch {re.escape(torch.__version__)}, cpu \(.+\), 1 thread, 31 rounds, CPU time", *lines[-1])


@pytest.mark.usefixtures("found")
def test_the_text_fits_a_narrow_terminal(capsys: Capture) -> None:
    lines = text_of(capsys, "bench", "--threads", "3").splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1].endswith(", 3 threads, 31 rounds, wall-clock time")


@pytest.mark.usefixtures("found")
def test_the_text_names_the_programs_that_were_skipped(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "missing", lambda: ["HF Llama, training"])
    line = "skipped, because transformers is not installed: HF Llama, training"
    assert line in text_of(capsys, "bench").splitlines()
    assert line not in text_of(capsys, "bench", "--suite", "models").splitlines()
    assert line not in text_of(capsys, "bench", "--suite", "programs", "--case", "LSTM*").splitlines()


def test_a_real_table(capsys: Capture) -> None:
    out = text_of(capsys, *QUICK, "--suite", "region")
    assert "ours / stock" in out
    assert "construct, enter, exit, nested" in out


def test_the_list_runs_nothing(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    monkeypatch.setattr(cli_bench, "run", None)
    lines = text_of(capsys, "bench", "--list").splitlines()
    assert re.fullmatch(r"suite +case", lines[0])
    assert re.fullmatch(r"region +construct, enter, exit", lines[1])
    data = json_of(capsys, "bench", "--list", "--suite", "import")
    case = "mm outside of regions, package imported or not"
    assert data == {"cases": [{"suite": "import", "case": case}]}


def test_the_list_of_another_device_needs_no_such_device(capsys: Capture) -> None:
    names = [case["case"] for case in json_of(capsys, "bench", "--list", "--device", "cuda")["cases"]]
    assert "trace, a row of the CPU only" in names
    assert "exp, a row of CUDA only" not in names


def test_cases_are_chosen_by_pattern_in_their_order(capsys: Capture) -> None:
    chosen = json_of(capsys, "bench", "--list", "--case", "*exp*", "--case", "*one object")["cases"]
    assert [case["case"] for case in chosen] == ["enter, exit of one object", "exp, a row of CUDA only"]


def test_help_explains_the_options(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for word in ("ours / stock", "over ...", "for stable figures:", "examples:", "exit status:", *cli_bench.SUITES):
        assert word in text


# --- the picture


@pytest.mark.usefixtures("found")
def test_plot_writes_a_picture_in_addition_to_the_text(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    assert "ours / stock" in text_of(capsys, "bench", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_errors_are_raised_before_the_run(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_bench, "run", None)
    assert "is not a PNG file" in error_of(capsys, "bench", "--plot", str(tmp_path / "bench.gif"))
    assert "cannot write" in error_of(capsys, "bench", "--plot", str(tmp_path / "nowhere" / "bench.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = error_of(capsys, "bench", "--plot", str(tmp_path / "bench.png"))
    assert error == "torch-promote: error: --plot needs matplotlib: pip install matplotlib.\n"


# --- wrong input


@pytest.mark.parametrize("value", ["1", "-3", "many", "2.5", ""])
def test_a_wrong_number_of_rounds(value: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--rounds", value])
    assert end.value.code == 2
    assert f"expected a number of rounds, 2 or more, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--threads 0", "--threads x", "--device xpu", "--suite foo", "--plot"])
def test_invalid_options_are_usage_errors(arguments: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments.split()])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_device_is_an_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = error_of(capsys, "bench", "--device", "cuda")
    assert error == "torch-promote: error: --device cuda: PyTorch finds no CUDA device. Legal: cpu.\n"


def test_a_pattern_without_a_case_gets_the_closest(capsys: Capture) -> None:
    error = error_of(capsys, "bench", "--case", "conv net, foward")
    assert "--case 'conv net, foward' matches no selected case. See --list." in error
    assert "Closest: conv net, forward" in error
    # The case has to be in the selected suites.
    assert "matches no selected case" in error_of(capsys, "bench", "--suite", "ops", "--case", "LSTM*")


# --- the display


def test_progress_goes_to_stderr_and_json_has_none(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_promote.cli.progress._SECONDS_BETWEEN_LINES", 0.0)
    arguments = [*QUICK, "--case", "enter, exit of one object"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert re.search(r"^bench: 1 of 1, enter, exit of one object, ", captured.err)
    assert "bench: 1" not in captured.out
    json_of(capsys, *arguments)  # and nothing on stderr


def test_the_bar_draws_at_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.progress

    from torch_promote.cli import progress as _progress

    made: list[Any] = []

    class Noted(rich.progress.Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            made.append(options["auto_refresh"])
            super().__init__(*columns, **options)

    monkeypatch.setattr(rich.progress, "Progress", Noted)
    for still in (True, False):
        with _progress._bar("bench", 1, still) as step:
            step("done")
    assert made == [False, True]


def test_settings_reach_the_run(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def note(cases: Any, settings: Settings) -> Iterator[Result]:
        seen.append(settings)
        return iter(())

    monkeypatch.setattr(cli_bench, "run", note)
    assert json.loads(text_of(capsys, "bench", "--rounds", "5", "--threads", "3", "--json"))["results"] == []
    assert seen == [Settings("cpu", 5, 3)]
