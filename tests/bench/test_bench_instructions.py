"""The suite `instructions`: its cases, its process under valgrind, and the table of the command."""

from __future__ import annotations

import io
import itertools
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of, wide
from torch_promote.bench import INSTRUCTIONS, Case, Result, Settings, list_cases, run, suite_instructions
from torch_promote.bench import callgrind as counting
from torch_promote.bench.callgrind import CountingProcess, ValgrindError, instructions_of, total_of
from torch_promote.bench.cases import ALREADY_CAST, HAND, OURS, PLAIN, STOCK, Prepared, Target
from torch_promote.cli import bench as cli_bench

__all__ = ["terminal_of_80_columns", "wide"]

TINY = Settings(slice_seconds=0, tiny=True)
CASES = list_cases(TINY, [INSTRUCTIONS])

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")


def test_the_suite_runs_only_if_asked_for() -> None:
    assert INSTRUCTIONS not in {case.suite for case in list_cases(TINY)}
    assert {case.suite for case in CASES} == {INSTRUCTIONS}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name.startswith("compiled") else ())
        for case in CASES
    ],
)
def test_every_case_runs_and_has_what_its_target_compares(case: Case) -> None:
    prepared = case.prepare(TINY)
    times = {name: timer() for name, timer in prepared.timers.items()}
    assert OURS in times
    assert min(times.values()) > 0
    if case.target is not None:
        assert {OURS, case.target.base} <= set(times)
        assert STOCK in times or not case.target.over


def test_figures_of_targets() -> None:
    values = {OURS: 30, STOCK: 40, PLAIN: 20, ALREADY_CAST: 20}
    assert Target(STOCK, 1.0).of(values) == 0.75
    assert Target(PLAIN, 1.0).of(values) == 1.5
    assert Target(ALREADY_CAST, 1.0, over=True).of(values) == 0.5


# --- callgrind's files


def test_the_total_of_a_file() -> None:
    assert (
        total_of("version: 1\npart: 2\n\nevents: Ir\nsummary: 528573\n\nfn=(1) mm\n0 200\ntotals: 528573\n") == 528573
    )
    with pytest.raises(ValgrindError, match=r"no line `summary: \.\.\.`; it starts with 'version: 1'"):
        total_of("version: 1")


class Counter:
    """Writes files like callgrind's, with the value of `count`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.count, self._folder, self._dumps = 0, folder, 0
        monkeypatch.setattr("torch._C._valgrind_toggle", self._start)
        monkeypatch.setattr("torch._C._valgrind_toggle_and_dump_stats", self._dump)

    def _start(self) -> None:
        self.count = 0

    def _dump(self) -> None:
        self._dumps += 1
        (self._folder / f"callgrind.{self._dumps}").write_text(f"events: Ir\nsummary: {self.count}\n")


def test_instructions_of_one_run_exclude_the_surrounding_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run takes 700 instructions, the first one 5,000 more, and the loop around them 90."""
    counter, first = Counter(monkeypatch, tmp_path), 5000
    ran: list[int] = []

    def loop(runs: int) -> None:
        nonlocal first
        ran.append(runs)
        counter.count, first = counter.count + 90 + 700 * runs + first, 0

    assert instructions_of(loop, tmp_path) == 700
    assert ran == [1, 10, 100, 300]
    assert [file.name for file in tmp_path.iterdir()] == ["callgrind.3"]  # for `keep`


def test_the_process_counts_the_cases_that_it_reads(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One instruction for each call of torch.exp: a run makes one, in an open region where the contender has one."""
    counter, exp = Counter(monkeypatch, tmp_path), torch.exp
    in_region: list[bool] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        in_region.append(torch.is_autocast_enabled("cpu"))
        return exp(x)

    monkeypatch.setattr(torch, "exp", counted)
    monkeypatch.setattr(torch.backends.mkldnn, "set_flags", lambda _enabled: None)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("exp, a row of CUDA only\ncount\n" * 2))
    suite_instructions.serve()
    ready, *answers = capsys.readouterr().out.splitlines()
    assert ready == counting.READY
    assert answers[::2] == [counting.PREPARED] * 2
    answers = answers[1::2]
    assert [json.loads(answer) for answer in answers] == [{OURS: 1.0, STOCK: 1.0, PLAIN: 1.0}] * 2
    assert {file.name for file in tmp_path.iterdir()} == {OURS, STOCK, PLAIN}
    assert [is_open for is_open, _ in itertools.groupby(in_region)] == [True, False] * 2


# --- the process


def _program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)


ANSWERS = """
import sys
print("something else", flush=True)
print("ready", flush=True)
for line in sys.stdin:
    if line == "fails\\n":
        sys.exit("Traceback: planted")
    print("something else\\nprepared", flush=True)
    sys.stdin.readline()
    print('{"ours": 3.5, "stock": 7}', flush=True)
"""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Programs in place of valgrind's."""
    _program(tmp_path, "valgrind", ANSWERS)
    _program(tmp_path, "callgrind_control", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_one_process_counts_all_cases(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Noted(counting.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, arguments: Any, **options: Any) -> None:
            started.append((arguments, options.get("env")))
            super().__init__(arguments, **options)

    monkeypatch.setattr(counting.subprocess, "Popen", Noted)
    target = Target(STOCK, 0.6)
    cases = [Case(INSTRUCTIONS, name, lambda settings: Prepared({}), target) for name in ("mm", "exp")]
    found = list(run(cases, Settings()))
    assert [result.instructions for result in found] == [{OURS: 3.5, STOCK: 7}] * 2
    data = found[0].as_dict()
    assert data["target"] == {"base": STOCK, "at_most": 0.6, "over": False, "measured": 0.5}
    assert (data["times_ns"], data["ratio"]) == ({}, None)
    (arguments, environment), *switches = started
    assert arguments[:2] == ["valgrind", "--tool=callgrind"]
    assert [switch[:2] for switch, _ in switches] == [
        ["callgrind_control", "--instr=on"],
        ["callgrind_control", "--instr=off"],
    ] * 2
    assert (environment["PYTHONHASHSEED"], environment["OMP_NUM_THREADS"]) == ("0", "1")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has instructions that valgrind lacks")
def test_inductors_code_runs_under_valgrind(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = "subprocess.check_output([os.environ['CXX'], 'a b', '-march=native'], text=True)"
    _program(pretended, "valgrind", f"import os, subprocess, sys\nsys.exit({compiled})")
    monkeypatch.setenv("CXX", "/bin/echo ccache")
    with CountingProcess() as process, pytest.raises(ValgrindError, match=r"ccache a b -march=native -march=haswell"):
        process.count("mm")


def test_the_files_of_each_contender_are_kept(pretended: Path) -> None:
    counted = "import pathlib\nfor name in ('ours', 'stock'):\n    pathlib.Path(sys.argv[-1], name).write_text(name)\n"
    _program(pretended, "valgrind", ANSWERS.replace("import sys\n", f"import sys\n{counted}"))
    kept = pretended / "new" / "folder"
    with CountingProcess(kept) as process:
        process.count("mm")
    assert {file.name: file.read_text() for file in kept.iterdir()} == {
        "mm, ours.callgrind": "ours",
        "mm, stock.callgrind": "stock",
    }


def test_a_process_that_ends_says_why(pretended: Path) -> None:
    with CountingProcess() as process, pytest.raises(ValgrindError, match=r"status 1:\nTraceback: planted$"):
        process.count("fails")


def test_a_process_that_cannot_be_switched_on(pretended: Path) -> None:
    _program(pretended, "callgrind_control", "import sys; sys.exit('no such process')")
    with (
        CountingProcess() as process,
        pytest.raises(ValgrindError, match=r"callgrind_control --instr=on \d+ failed: no such process"),
    ):
        process.count("mm")


def test_compiled_steps_are_compiled_before_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler: it takes a minute. The slow tests run the cases."""
    runs = dict.fromkeys((STOCK, OURS), 0)

    def step(name: str) -> None:
        runs[name] += 1

    def steps(model: str, place: object, trains: bool, settings: Settings) -> dict[str, Callable[[], None]]:
        assert settings.tiny or model == "MLP"
        return {name: partial(step, name) for name in runs}

    monkeypatch.setattr(suite_instructions, "compiled_steps", steps)
    cases = [case for case in list_cases(Settings(slice_seconds=0), [INSTRUCTIONS]) if case.name.startswith("compiled")]
    for case in cases:
        prepared = case.prepare(Settings(slice_seconds=0))
        assert runs == dict.fromkeys((STOCK, OURS), suite_instructions._COMPILING_RUNS)
        prepared.timers[OURS]()
        assert runs[OURS] > runs[STOCK] == suite_instructions._COMPILING_RUNS
        runs.update(dict.fromkeys(runs, 0))
    assert cases


@needs_valgrind
@pytest.mark.slow
def test_two_runs_agree_and_calls_without_casts_meet_their_targets(capsys: Capture, tmp_path: Path) -> None:
    names = ("mm, nothing to cast", "exp, a row of CUDA only")
    chosen = [argument for name in names for argument in ("--case", name)]
    first, second = (
        json_of(capsys, "bench", "--suite", INSTRUCTIONS, *chosen, *options)["results"]
        for options in ([], ["--callgrind", str(tmp_path)])
    )
    assert [result["case"] for result in first] == list(names)
    for one, other in zip(first, second, strict=True):
        assert {OURS, STOCK} < set(one["instructions"])
        for contender, count in one["instructions"].items():
            assert count > 1000
            assert other["instructions"][contender] == pytest.approx(count, rel=0.005)
            file = tmp_path / f"{one['case']}, {contender}.callgrind"
            assert total_of(file.read_text()) > count
        assert 0.9 < one["target"]["measured"] <= one["target"]["at_most"] + 0.005


# --- the command

FOUND = [
    Result(
        Case(INSTRUCTIONS, "mm", lambda settings: Prepared({}), Target(STOCK, 1.0)),
        instructions={OURS: 10333.4, STOCK: 10440, PLAIN: 9900},
    ),
    Result(
        Case(INSTRUCTIONS, "MLP", lambda settings: Prepared({}), Target(ALREADY_CAST, 0.5, over=True)),
        instructions={OURS: 5339490, STOCK: 5441572, ALREADY_CAST: 4893356},
    ),
    Result(Case(INSTRUCTIONS, "boxed", lambda settings: Prepared({})), instructions={OURS: 16044, HAND: 43009}),
]


@pytest.mark.usefixtures("wide")
def test_the_table_has_targets_beside_what_was_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "run", lambda cases, settings: iter(FOUND))
    monkeypatch.setattr(cli_bench, "check_valgrind", lambda: None)
    lines = [re.split(r"  +", line.rstrip()) for line in text_of(capsys, "bench", "--suite", INSTRUCTIONS).splitlines()]
    heads = ["case", "ours / stock", "target", "measured", "ours", "stock", "hand", "cast before", "plain"]
    assert lines[:-1] == [
        [INSTRUCTIONS],
        heads,
        ["mm", "0.990", "ours / stock: 1.00", "0.990", "10,333", "10,440", "-", "-", "9,900"],
        ["MLP", "0.981", "over cast before: 0.50", "0.814", "5,339,490", "5,441,572", "-", "4,893,356", "-"],
        ["boxed", "-", "16,044", "-", "43,009", "-", "-"],
        [""],
    ]
    assert lines[-1][0].endswith(": instructions in a run")


def test_without_valgrind_the_command_names_the_remedy(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = error_of(capsys, "bench", "--suite", INSTRUCTIONS)
    assert "needs valgrind and callgrind_control, which is not on the PATH" in error
    assert "apt-get install valgrind" in error
    assert "mm, nothing to cast" in text_of(capsys, "bench", "--suite", INSTRUCTIONS, "--list", "--json")


def test_a_pytorch_without_valgrinds_requests(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, pretended: Path
) -> None:
    monkeypatch.setattr("torch._C._valgrind_supported_platform", lambda: False)
    assert "was built without them" in error_of(capsys, "bench", "--suite", INSTRUCTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", INSTRUCTIONS, "--device", "cuda"], "suite instructions counts on the CPU, not on cuda"),
        (["--suite", INSTRUCTIONS, "--plot", "a.png"], "--plot draws times, and suite instructions has none"),
        (["--callgrind", "kept"], "--callgrind keeps the files of suite instructions"),
    ],
)
def test_contradicting_options_are_errors(capsys: Capture, arguments: list[str], message: str) -> None:
    assert message in error_of(capsys, "bench", *arguments)
