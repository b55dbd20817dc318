"""torch-promote parity with --device cuda, in a process that has the stand-in device."""

from __future__ import annotations

import functools
import json

import pytest

import torch_promote as tp
from torch_promote.cli.program import main

pytestmark = pytest.mark.usefixtures("stand_in")

Capture = pytest.CaptureFixture[str]


def test_parity_finds_a_planted_wrong_cast(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = functools.partial(tp.my_autocast, overrides={"mm": "fp32"})
    monkeypatch.setattr("torch_promote.parity.runner.my_autocast", wrong)
    status = main(["parity", "--device", "cuda", "--jobs", "0", "--quick", "--ops", "aten::mm", "--json"])
    mismatches = json.loads(capsys.readouterr().out)["mismatches"]
    assert status == 1
    assert ("dtype", "ours against stock") in {(found["kind"], found["what"]) for found in mismatches}
