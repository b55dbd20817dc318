"""The demos examples/train_gpt.py and examples/tune_gpt.py: what they measure, their files, and their exit status."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

import torch_promote as tp
import train_gpt
import tune_gpt
from gpt.data import SYMBOLS
from gpt.model import GPT, Config
from helpers.subprocesses import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20


def assert_is_a_picture(path: Path) -> None:
    pixels = imread(path)
    assert (pixels.shape[0] > 400, pixels.shape[1] > 600) == (True, True)
    assert len({tuple(color) for color in pixels[::2, ::2].reshape(-1, 4).round(1)}) > 10  # not an empty frame


# --- train_gpt.py


def test_training_has_stocks_bits_and_no_more_casts(tmp_path: Path) -> None:
    plot, measured = tmp_path / "new folder" / "curves.png", tmp_path / "measured.json"
    command = [sys.executable, EXAMPLES / "train_gpt.py", f"--steps={STEPS}", f"--plot={plot}", f"--json={measured}"]
    variables = environment(MPLBACKEND="Agg")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tp.my_autocast gave the bits of torch.autocast" in done.stdout
    assert_is_a_picture(plot)
    variants: dict[str, Any] = json.loads(measured.read_text(encoding="utf-8"))["variants"]
    assert list(variants) == ["fp32", "torch.autocast", "tp.my_autocast"]
    fp32, stock, ours = variants.values()
    gradients = len(list(GPT(Config(len(SYMBOLS))).parameters()))
    assert ours["tensors_compared"] == fp32["tensors_compared"] == STEPS * (1 + gradients)
    assert (ours["same_bits"], ours["losses"]) == (True, stock["losses"])
    assert (fp32["same_bits"], fp32["steps_that_differ"]) == (False, STEPS), "the comparison sees nothing"
    assert fp32["casts_per_step"] == 0 < ours["casts_per_step"] <= stock["casts_per_step"]
    for variant in variants.values():
        assert variant["losses"][0] == pytest.approx(math.log(len(SYMBOLS)), abs=0.2)
        assert variant["losses"][-1] < variant["losses"][0] - 1


def test_the_status_is_1_if_the_bits_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regions = {**train_gpt.regions("cpu", torch.bfloat16)}
    regions["tp.my_autocast"] = lambda: tp.my_autocast("cpu", overrides={"scaled_dot_product_attention": "fp32"})
    monkeypatch.setattr(train_gpt, "regions", lambda device, dtype: regions)
    monkeypatch.setenv("COLUMNS", "200")
    files = [f"--plot={tmp_path / 'curves.png'}", f"--json={tmp_path / 'measured.json'}"]
    assert train_gpt.main(["--steps", "2", *files]) == 1
    assert "tp.my_autocast did NOT give the bits of torch.autocast: 2 of 2 steps differ" in capsys.readouterr().out


# --- tune_gpt.py


def test_tune_finds_the_ops_that_overflow_and_trains_with_the_saved_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune_gpt, "BATCH", 2)
    monkeypatch.setattr(tune_gpt, "TUNED_BATCHES", 2)
    monkeypatch.setenv("COLUMNS", "200")
    assert tune_gpt.main(["--steps", "10", "--out", str(tmp_path)]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert "The loss is not finite in 10 of 10 steps" in text
    (named,) = re.findall(r"overflow in the op: aten::(\w+), forward,", text)
    assert named in ("exp", "sum")
    # Neither override is enough by itself: the loss overflows in two places.
    overridden = {one.overload.partition(".")[0] for one in tp.Policy.load(tmp_path / "tune_gpt.toml").diff("stock")}
    assert overridden == {"aten::exp", "aten::sum"}
    assert "float16 with tune_gpt.toml stayed within 1% of float32 in each of 10 steps" in text
    assert "<html" in (tmp_path / "tune_gpt.html").read_text(encoding="utf-8")
    assert_is_a_picture(tmp_path / "tune_gpt.png")
