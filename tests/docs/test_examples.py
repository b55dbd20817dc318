"""Every numbered example prints the expected output, and the demos what they measure."""

from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

import float8_gpt
import port_gpt
import torch_promote as tp
import train_gpt
import tune_gpt
from gpt.data import SYMBOLS
from gpt.model import GPT, Config
from helpers.subprocesses import Program, environment, run_together

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Runs a script as the interpreter does.
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""

#: Patterns for lines that each example prints, in this order.
LINES = {
    "01_training_loop.py": ["the same losses, bit for bit: True"],
    "02_overrides.py": [
        "the stock policy * linear torch.bfloat16 * softmax torch.float32",
        "linear kept in float32, softmax not * linear torch.float32 * softmax torch.bfloat16",
        "nested, softmax in float16 * linear torch.float32 * softmax torch.float16",
        "after the nested region * linear torch.float32 * softmax torch.bfloat16",
        "a decorated function * linear torch.float32 * softmax torch.float32",
        "PolicyError: *Closest: softmax*",
        "PolicyError: *no optional dtype argument*",
    ],
    "03_compile.py": ["* torch.float32", "* torch.bfloat16", "* torch.float16", "* torch.float32"],
    "04_distributed.py": ["*loss *"],
    "05_crosscheck.py": [
        "without a rule * 0*",
        "compared with stock *",
        "mismatches * 0*",
        "CrosscheckError: aten.sinh.default(float32[[]32, 8[]]): dtype",
        "*in <module>: torch.sinh(x)",
    ],
    "06_module_policies.py": [
        "no policies *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 bfloat16  lm_head bfloat16",
        "three policies *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 float16  lm_head float32",
        "a copy has them *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 float16  lm_head float32",
        "4 of 15 modules have a policy.",
        "taken off again *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 bfloat16  lm_head bfloat16",
        "PolicyError: no module of the model is named 'lm_haed'. Closest: lm_head. Legal: *",
    ],
    "07_custom_op.py": [
        "*blend requires inputs of one dtype, got torch.bfloat16 and torch.float32",
        "* torch.float32, *the weight's gradient torch.float32",
        "* torch.bfloat16, *the weight's gradient torch.float32",
        "* torch.float64, *the weight's gradient torch.float32",
        "* torch.float16*",
        "* torch.float32*",
    ],
    "08_promotion.py": [
        "torch *float32 float32 float32 float16",
        "jax *float32 float32 float32 float32",
        "numpy *float32 float64 float64 float32",
        "gradient torch.bfloat16",
        "strict   aten::mul.Tensor: the promotion rule*",
        "*torch.float32",
        "lint*: 0-dim precision loss",
        "lint*: int to low-precision float",
        "lint*: int overflow by wrapping scalar",
        "*torch.bfloat16",
    ],
    "09_tune.py": [
        "aten::sum in the model: local inf, *",
        "overrides {'aten::sum': 'fp32'} after * runs: minimum",
        "with the file: *, in float32: *",
    ],
    "10_float8.py": [
        "in float8: 0, 30% of the FLOPs; met: True",
        "aten::linear in 2: local error 9.3e-01*",
        "*in 4: local error * out_features is 10, which 16 does not divide",
        "last loss *",
    ],
}


def run(script: Path, *arguments: str, ranks: int = 1) -> list[str]:
    """Returns the lines that a script prints, in as many processes as torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    variables = [environment(RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(ranks)]
    # Most optimizers and checkpoints import Dynamo.
    programs = [Program(SCRIPT, str(script), *arguments, env=env, compiler=True) for env in variables]
    lines: list[str] = []
    for done in run_together(programs):
        assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
        lines += done.stdout.splitlines()
    return lines


def losses(lines: list[str]) -> list[float]:
    return [float(match.group(1)) for line in lines if (match := re.search(r"loss (\d+\.\d+)$", line))]


@pytest.mark.parametrize("name", sorted({*LINES, *(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))}))
def test_example(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / name
    ranks, arguments = (2, ("--steps", "5", "--strategy", "ddp")) if "distributed" in name else (1, ())
    lines = run(script, *arguments, ranks=ranks)
    pytest.LineMatcher(lines).fnmatch_lines(LINES[name])
    if name in ("03_compile.py", "04_distributed.py"):
        assert len(losses(lines)) >= 3
        assert losses(lines) == sorted(losses(lines), reverse=True), "it learns"
    if "distributed" in name:  # DDP and FSDP2 give the same results: both sum the same two gradients
        assert run(script, "--steps", "5", "--strategy", "fsdp2", ranks=2) == lines
    if "compile" in name:
        without = script.read_text(encoding="utf-8").replace("@torch.compile(", "@(lambda **_: lambda f: f)(")
        (tmp_path / name).write_text(without, encoding="utf-8")
        assert run(tmp_path / name) == lines
    if "tune" in name:
        tuned, full = (float(part.rpartition(" ")[2]) for part in lines[4].split(","))
        assert abs(tuned - full) < 2e-3


# --- the demos

STEPS = 12


def assert_is_a_picture(path: Path) -> None:
    pixels = imread(path)
    assert (pixels.shape[0] > 400, pixels.shape[1] > 600) == (True, True)
    assert len({tuple(color) for color in pixels[::2, ::2].reshape(-1, 4).round(1)}) > 10  # not an empty frame


def test_training_has_stocks_bits_and_no_more_casts(tmp_path: Path) -> None:
    plot, measured = tmp_path / "new folder" / "curves.png", tmp_path / "measured.json"
    arguments = [str(EXAMPLES / "train_gpt.py"), f"--steps={STEPS}", f"--plot={plot}", f"--json={measured}"]
    done = Program(SCRIPT, *arguments, env=environment(MPLBACKEND="Agg"), compiler=True).wait(timeout=240)
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


@pytest.mark.parametrize(("factor", "status"), [(1000.0, 0), (0.5, 1)])
def test_float8_runs_in_the_layers_that_tune_allows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float, status: int
) -> None:
    """With a tolerance of 1000 times bfloat16's error, float8 fits everywhere; with half of it, not even bfloat16."""
    monkeypatch.setattr(float8_gpt, "BATCH", 2)
    monkeypatch.setattr(float8_gpt, "TUNED_BATCHES", 2)
    monkeypatch.setattr(float8_gpt, "FACTOR", factor)
    assert float8_gpt.main(["--steps", "10", "--budget", "30", "--out", str(tmp_path)]) == status
    text, errors = capsys.readouterr()
    if status:
        assert errors.startswith("float8_gpt.py: error: the policy does not meet the tolerance even before")
        return
    assert errors == ""
    assert "float8, tuned: the last loss is within 1% of bfloat16's" in text
    layers = dict(re.findall(r"^(blocks\S*|head)  +(float8|bfloat16) ", text, re.MULTILINE))
    assert layers.pop("head") == "bfloat16"  # its 97 features do not fit
    assert list(layers.values()) == ["float8"] * 12
    assert '"float8:rowwise"' in (tmp_path / "float8_gpt.toml").read_text(encoding="utf-8")
    assert "<html" in (tmp_path / "float8_gpt.html").read_text(encoding="utf-8")
    assert_is_a_picture(tmp_path / "float8_gpt.png")
    with pytest.raises(SystemExit, match="2"):
        float8_gpt.main(["--steps", "0"])


@pytest.mark.parametrize("bug", ["none", "scale", "swapped"])
def test_the_demo_of_a_port_finds_the_planted_bug(bug: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "match.html"
    assert port_gpt.main(["--bug", bug, "--html", str(page)]) == (bug != "none")
    printed = " ".join(capsys.readouterr().out.split())
    if bug == "none":
        assert "all outputs match" in printed
    else:
        assert "scaled_dot_product_attention in blocks.1.attention, model.py:45 has no counterpart" in printed
        assert port_gpt.BUGS[bug] in printed
    assert "layers.1.qkv" in page.read_text()
