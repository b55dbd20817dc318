"""torch-promote parity and bench with --device cuda-stand-in, in a process that has the device."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

import torch_promote as tp
from torch_promote.cli.program import main
from torch_promote.checking.autocast_in_force import STAND_IN

pytestmark = pytest.mark.usefixtures("stand_in")

Capture = pytest.CaptureFixture[str]


def json_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    assert status == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_parity_compares_bits_forward_and_backward(capsys: Capture) -> None:
    names = ("mm", "softmax", "sgn", "nn.functional.linear", "aten::mm", "aten::layer_norm", "torch_fp16.mm")
    report = json_of(capsys, "parity", "--device", "cuda", "--jobs", "0", "--quick", "--ops", *names)
    assert report["options"]["device"] == "cuda"
    assert report["totals"]["entries"] == len(names)
    assert report["totals"]["samples"] > 30
    assert report["totals"]["mismatches"] == 0


def test_parity_finds_a_planted_wrong_cast(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = functools.partial(tp.my_autocast, overrides={"mm": "fp32"})
    monkeypatch.setattr("torch_promote.parity.entry_run.my_autocast", wrong)
    status = main(["parity", "--device", "cuda", "--jobs", "0", "--quick", "--ops", "aten::mm", "--json"])
    mismatches = json.loads(capsys.readouterr().out)["mismatches"]
    assert status == 1
    assert ("dtype", "ours against stock") in {(found["kind"], found["what"]) for found in mismatches}


def test_bench_counts_kernels_and_bytes(capsys: Capture) -> None:
    report = json_of(capsys, "bench", "--device", STAND_IN, "--case", "mm, two activations cast, 4 x 4, *")
    assert report["clock"] == "kernels"
    [without_grad, *_] = report["results"]
    assert without_grad["kernels"] == {"ours": 3, "stock": 3, "hand": 3, "plain": 1, "already_cast": 1}
    assert without_grad["peak_bytes"]["ours"] == without_grad["peak_bytes"]["stock"] == 3 * 4 * 4 * 2
    assert (without_grad["ratio"], without_grad["times_ns"]) == (None, {})


@pytest.mark.usefixtures("no_cast_checks")
def test_bench_splits_the_casts(capsys: Capture) -> None:
    case = "MLP, forward and backward"
    [result] = json_of(capsys, "bench", "--device", STAND_IN, "--suite", "models", "--case", case)["results"]
    # 20 weights and biases, the input, the output for the loss; the gradients of these.
    assert result["casts"]["ours"] == result["casts"]["stock"] == {"weights": 40, "activations": 2, "gradients": 41}
    copies = result["copies"]["stock"]
    assert (copies["forward"], copies["backward"]) == (
        {"narrowing": 41, "widening": 1},
        {"narrowing": 1, "widening": 40},
    )
    assert copies["cast_kernels"] == copies["kernels"] == 83
    # Weights of 32 x 32, biases, input and output, in four and two bytes, there and back.
    assert copies["moved_bytes"] == (20 * (32 * 32 + 32) * 2 + 32 * 32 * 3) * (4 + 2)
    assert copies["allocated_bytes"] > copies["moved_bytes"] / 2


@pytest.mark.usefixtures("no_cast_checks")
def test_bench_has_a_line_for_each_contender_and_mode(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "--device", STAND_IN, "--suite", "caches", "--case", "MLP, eval*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert words[2][:6] == ["contender", "all", "copies", "cast", "w", "a"]
    assert lines[3] == 'MLP, evaluation loop, cache="weights"'
    weights, stock = words[5], words[4]
    assert weights[1:] == stock[1:]
    persistent = words[lines.index('MLP, evaluation loop, cache="persistent"') + 2]
    assert persistent[:9] == ["ours", "328", "8", "8", "0", "8", "0", "8+0", "0+0"]
    assert lines[-1].endswith(STAND_IN)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--plot", "bench.png"], "--plot draws times, and cuda-stand-in has none. Remove one of them."),
        (["--suite", "import"], "suite import times two processes, and cuda-stand-in counts kernels."),
    ],
)
def test_bench_refuses_what_needs_times(capsys: Capture, options: list[str], text: str) -> None:
    assert main(["bench", "--device", STAND_IN, *options]) == 2
    assert text in capsys.readouterr().err
