"""The benchmarks: each suite runs, and its contenders compute the same results."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import cuda_stand_in
import torch_promote as tp
from benchmarks import callgrind
from benchmarks.__main__ import main
from benchmarks.cases import LOW, OURS, STOCK, Settings
from benchmarks.programs import PROGRAMS, program
from benchmarks.suites import calls

ROOT = Path(__file__).parents[1]
TINY = Settings(rounds=2, slice_seconds=0, tiny=True)
#: The contenders that each result of a suite has, and those that it may have.
CONTENDERS: dict[str, tuple[set[str], set[str]]] = {
    "region": ({"stock", "ours"}, set()),
    "ops": ({"stock", "ours"}, {"already_cast", "plain"}),
    "models": ({"stock", "ours", "already_cast", "plain"}, set()),
    "caches": ({"stock", "ours", "already_cast", "plain"}, set()),
    "programs": ({"stock", "ours"}, set()),
    "compile": ({"stock", "ours"}, set()),
    "float8": ({"stock", "ours"}, set()),
}


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--tiny", "--rounds", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("no_cast_checks")
@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("region", "*"),
        ("ops", "*[!6], with*"),
        ("ops", "policy*"),
        ("models", "*forward"),
        ("caches", '*"all"'),
        ("programs", '*checkpoints, cache="persistent"'),
        ("compile", "MLP, step, region around"),
        ("float8", "product*"),
        pytest.param("float8", "*rowwise, over torchao", marks=pytest.mark.slow),  # Inductor compiles two blocks
    ],
)
def test_a_suite_runs(capsys: pytest.CaptureFixture[str], suite: str, case: str) -> None:
    # Inductor calls PyTorch's kernels, and compiles no C++.
    with inductor_config.patch(fallback_by_default=suite == "compile"):
        report = report_of(capsys, "--suite", suite, "--case", case)
    always, sometimes = CONTENDERS[suite]
    assert (report["clock"], report["rounds"], report["interrupted"]) == ("cpu", 2, False)
    assert report["results"]
    for result in report["results"]:
        assert result["suite"] == suite
        assert always <= set(result["times_ns"]) <= always | sometimes
        assert all(0 < time["low"] <= time["median"] <= time["high"] for time in result["times_ns"].values())
        assert result["ratio"]["median"] > 0
        counted = suite in ("models", "caches", "programs", "compile")
        assert set(result["peak_bytes"]) == (set(result["times_ns"]) if counted else set())
        assert set(result["compiled"]) == (set(result["times_ns"]) if suite == "compile" else set())
    if suite in ("models", "caches", "programs"):
        assert result["casts"][STOCK].keys() == {"weights", "activations", "gradients"}


@pytest.mark.slow  # PyTorch's import takes 20 seconds under valgrind
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    [result] = report_of(capsys, "--suite", "instructions", "--case", "mm, nothing to cast")["results"]
    assert set(result["instructions"]) == {"stock", "ours", "plain"}
    assert all(5_000 < count < 50_000 for count in result["instructions"].values())


def test_the_count_of_a_run_is_free_of_what_surrounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def dump() -> None:
        (tmp_path / f"{callgrind._NAME}.1").write_text(f"events: Ir\nsummary: {100 + 7 * sum(runs)}\n")

    monkeypatch.setattr(torch._C, "_valgrind_toggle", runs.clear)
    monkeypatch.setattr(torch._C, "_valgrind_toggle_and_dump_stats", dump)
    assert callgrind._instructions_of(runs.append, tmp_path) == 7


@pytest.mark.skipif(cuda_stand_in.why_not() is not None, reason=cuda_stand_in.why_not() or "")
def test_kernels_and_bytes_are_counted_on_the_stand_in_device() -> None:
    case = "mm, two activations cast, 4 x 4, without grad"
    options = ["--device", "cuda-stand-in", "--suite", "ops", "--case", case, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    [result] = report["results"]
    assert report["clock"] == "kernels"
    assert result["kernels"] == {"ours": 3, "stock": 3, "plain": 1, "already_cast": 1}
    assert result["peak_bytes"][OURS] == result["peak_bytes"][STOCK] == 3 * 4 * 4 * 2
    assert (result["ratio"], result["times_ns"]) == (None, {})
    assert result["casts"][STOCK] == {"weights": 0, "activations": 2, "gradients": 0}
    assert result["moved_bytes"][STOCK] == 2 * 16 * (4 + 2)


def test_cases_and_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "region        construct, enter, exit\n" in listed
    assert "compiled" not in listed
    for wrong in (["--case", "no such*"], ["--suite", "compile", "--device", "cuda-stand-in"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert main(["--suite", "region", "--case", "call of*", "--rounds", "2"]) == 0
    assert "call of a decorated function" in capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_at_every_call_and_frees_its_gradients(name: str) -> None:
    first, second = program(name, TINY), program(name, TINY)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    first.step(functools.partial(tp.stock_autocast, "cpu", LOW))()
    assert all(weight.grad is None for weight in first.weights)


# Equivalents of a call compute what the call computes under autocast

CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_cast_inputs_give_what_autocast_gives(name: str) -> None:
    call, make_names = CALLS[name]
    names = make_names(TINY)

    def values(statement: str, region: Any = nullcontext) -> list[torch.Tensor]:
        with region():
            found = eval(statement, dict(names))
        return [found] if isinstance(found, torch.Tensor) else list(found)

    stock = values(call.statement, functools.partial(tp.stock_autocast, "cpu", LOW))
    ours = values(call.statement, functools.partial(tp.my_autocast, "cpu", LOW))
    assert [(a.dtype, torch.equal(a, b)) for a, b in zip(ours, stock, strict=True)] == [(b.dtype, True) for b in stock]
    # The gradients of cast inputs come in the dtype of the inputs.
    before = values(call.already_cast or call.plain)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(before, stock, strict=True))
