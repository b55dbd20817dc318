"""examples/train_gpt.py as a script: its output, its files, and its exit status."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import environment, run_python

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt
from gpt.data import SYMBOLS
from gpt.model import GPT, Config

EXAMPLES = Path(train_gpt.__file__).parent
STEPS = 20
NAMES = ["fp32", "torch.autocast", "tp.my_autocast"]

# --- the whole of it, once


class Demo:
    """One run of the script as a process."""

    def __init__(self, folder: Path) -> None:
        self.plot = folder / "new folder" / "curves.png"
        self.json = folder / "measured.json"
        script = str(EXAMPLES / "train_gpt.py")
        results = ["--plot", str(self.plot), "--json", str(self.json)]
        self.process = subprocess.run(
            [sys.executable, script, "--steps", str(STEPS), *results],
            env=environment(MPLBACKEND="Agg", COLUMNS="80"),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (self.process.returncode, self.process.stderr) == (0, "")
        self.lines = self.process.stdout.splitlines()
        self.measured: dict[str, Any] = json.loads(self.json.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"))


def test_settings_are_written_down(demo: Demo) -> None:
    settings = {key: value for key, value in demo.measured.items() if key != "variants"}
    parameters = settings.pop("parameters")
    assert 50_000 <= parameters <= 300_000
    assert settings.pop("characters") > 1_000_000
    assert settings == {
        "torch": torch.__version__,
        "torch_promote": tp.__version__,
        "device": "cpu",
        "dtype": "bfloat16",
        "steps": STEPS,
        "seed": 0,
    }


def test_losses_fall_from_that_of_a_guess(demo: Demo) -> None:
    variants = demo.measured["variants"]
    assert list(variants) == NAMES
    for variant in variants.values():
        assert len(variant["losses"]) == STEPS
        assert variant["losses"][0] == pytest.approx(math.log(len(SYMBOLS)), abs=0.2)
        assert variant["losses"][-1] < variant["losses"][0] - 1


def test_every_loss_and_gradient_was_compared_and_is_the_same(demo: Demo) -> None:
    fp32, stock, ours = demo.measured["variants"].values()
    gradients = len(list(GPT(Config(len(SYMBOLS))).parameters()))
    assert ours["tensors_compared"] == fp32["tensors_compared"] == STEPS * (1 + gradients)
    assert (ours["same_bits"], ours["steps_that_differ"], ours["first_difference"]) == (True, 0, None)
    assert ours["losses"] == stock["losses"]
    assert (stock["same_bits"], stock["tensors_compared"]) == (None, 0)
    # The comparison works: float32 differs in every step.
    assert (fp32["same_bits"], fp32["steps_that_differ"]) == (False, STEPS)
    assert fp32["losses"] != stock["losses"]


def test_casts_are_those_of_stock_at_most(demo: Demo) -> None:
    fp32, stock, ours = (variant["casts_per_step"] for variant in demo.measured["variants"].values())
    assert fp32 == 0 < ours <= stock


def test_table_says_what_was_measured(demo: Demo) -> None:
    shown = [line.split() for line in demo.lines]
    last_cells = {NAMES[0]: "no, first at step 1", NAMES[1]: "is stock", NAMES[2]: "yes"}
    for name, variant in demo.measured["variants"].items():
        losses = [f"{variant['losses'][0]:.4f}", f"{variant['losses'][-1]:.4f}"]
        times = [f"{variant['median_step_ms']:.2f}", f"{variant['median_ratio_to_stock']:.2f}"]
        assert [name, *losses, *times, str(variant["casts_per_step"]), *last_cells[name].split()] in shown
    assert demo.measured["variants"]["torch.autocast"]["median_ratio_to_stock"] == 1


def test_says_where_the_results_are(demo: Demo) -> None:
    tensors = demo.measured["variants"]["tp.my_autocast"]["tensors_compared"]
    assert demo.lines[-3:] == [
        f"tp.my_autocast gave the bits of torch.autocast: {tensors:,} tensors compared, "
        f"the loss and every gradient at each of {STEPS} steps.",
        f"The loss curves: {demo.plot}",
        f"All that was measured: {demo.json}",
    ]


def test_plot_is_a_picture(demo: Demo) -> None:
    from matplotlib.image import imread

    height, width, _colors = imread(demo.plot).shape
    assert (height > 400, width > 600) == (True, True)
    # Three colours of curves on white: not an empty frame.
    assert len({tuple(color) for color in imread(demo.plot)[::2, ::2].reshape(-1, 4).round(1)}) > 10


def test_progress_is_shown_where_there_is_no_terminal(demo: Demo) -> None:
    shown = [line for line in demo.lines if line.startswith("step ")]
    assert len(shown) == 10
    losses = [variant["losses"][-1] for variant in demo.measured["variants"].values()]
    together = ", ".join(f"{name} {loss:.3f}" for name, loss in zip(NAMES, losses, strict=True))
    assert shown[-1] == f"step {STEPS} of {STEPS}, loss: {together}"


# --- a planted difference


def test_status_is_1_where_the_bits_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regions = {**train_gpt.regions("cpu", torch.bfloat16)}
    regions["tp.my_autocast"] = lambda: tp.my_autocast("cpu", overrides={"scaled_dot_product_attention": "fp32"})
    monkeypatch.setattr(train_gpt, "regions", lambda device, dtype: regions)
    monkeypatch.setenv("COLUMNS", "200")
    measured = tmp_path / "measured.json"
    assert train_gpt.main(["--steps", "2", "--plot", str(tmp_path / "curves.png"), "--json", str(measured)]) == 1
    ours = json.loads(measured.read_text(encoding="utf-8"))["variants"]["tp.my_autocast"]
    assert (ours["same_bits"], ours["steps_that_differ"]) == (False, 2)
    text = capsys.readouterr().out
    assert "tp.my_autocast did NOT give the bits of torch.autocast: 2 of 2 steps differ, the first is step 1" in text
    assert "yes" not in text


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--device", "cuda"], "--device cuda: this PyTorch sees no CUDA device; "),
        (["--plot", "curves.txt"], "--plot curves.txt: the name has to end in one of: "),
        (["--plot", "curves"], "--plot curves: the name has to end in one of: "),
        (["--plot", "folder.png"], "cannot write folder.png: it is a folder"),
        (["--json", "file/measured.json"], "cannot write file/measured.json: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        train_gpt.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"train_gpt.py: error: {complaint}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_package_that_is_missing_is_named(missing: str) -> None:
    program = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"runpy.run_path({str(EXAMPLES / 'train_gpt.py')!r}, run_name='__main__')"
    )
    process = run_python(program)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"train_gpt.py: error: {missing} is not installed: pip install {missing}\n"
