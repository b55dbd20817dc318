"""torch-promote parity and bench with --device cuda-stand-in, in a process that has the device."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

import torch_promote as tp
from torch_promote.checking.pretend_cuda import STAND_IN
from torch_promote.cli.program import main

pytestmark = pytest.mark.usefixtures("stand_in")

Capture = pytest.CaptureFixture[str]


def json_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    assert status == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_parity_compares_bits_forward_and_backward(capsys: Capture) -> None:
    names = ("mm", "softmax", "sgn", "nn.functional.linear", "aten::mm", "aten::layer_norm", "torch_fp16.mm")
    report = json_of(capsys, "parity", "--device", STAND_IN, "--jobs", "0", "--quick", "--ops", *names)
    assert report["options"]["device"] == report["device"] == STAND_IN
    assert report["totals"]["entries"] == len(names)
    assert report["totals"]["samples"] > 30
    assert report["totals"]["mismatches"] == 0


def test_parity_finds_a_planted_wrong_cast(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = functools.partial(tp.my_autocast, overrides={"mm": "fp32"})
    monkeypatch.setattr("torch_promote.parity.entry_run.my_autocast", wrong)
    status = main(["parity", "--device", STAND_IN, "--jobs", "0", "--quick", "--ops", "aten::mm", "--json"])
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
def test_bench_shows_ours_and_stock_side_by_side(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "--device", STAND_IN, "--suite", "caches", "--case", "MLP, eval*persistent*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["case", "ours", "stock", "hand", "plain", "ours,", "bytes", "stock,", "bytes"]
    assert lines[2].split()[-6:] == ["56", "104", "56", "48", "6144", "12480"]


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
