"""examples/tune_gpt.py with small batches: its output, its files, and its exit status."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import environment

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt.tuned_report
import tune_gpt
from gpt.data import Batches
from gpt.smoothed_loss import smoothed_loss
from gpt.tuned_report import deviations

STEPS = 10


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, list[str], str]:
    """Returns the status of the script, its lines, and what it wrote to stderr."""
    monkeypatch.setattr(tune_gpt, "BATCH", 2)
    monkeypatch.setattr(tune_gpt, "TUNED_BATCHES", 2)
    monkeypatch.setenv("COLUMNS", "200")
    status = tune_gpt.main(["--steps", str(STEPS), *arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_finds_the_ops_that_overflow_and_trains_with_the_saved_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "new folder"
    status, lines, errors = run(capsys, monkeypatch, "--out", str(out))
    text = "\n".join(lines)
    assert (status, errors) == (0, "")
    # float16 goes wrong in each step, and find_nonfinite names an op that tune then overrides.
    assert f"The loss is not finite in {STEPS} of {STEPS} steps (the first: inf)" in text
    assert f"GradScaler skipped {STEPS} of them." in text
    (named,) = re.findall(r"overflow in the op: aten::(\w+), forward,", text)
    assert named in ("exp", "sum")
    # Neither override is enough by itself: the loss overflows in two places.
    overridden = {one.overload.partition(".")[0] for one in tp.Policy.load(out / "tune_gpt.toml").diff("stock")}
    assert overridden == {"aten::exp", "aten::sum"}
    # The table, the verdict, and the files.
    rows = {line[:14]: line[14:].split() for line in lines if line.startswith("float") and "  " in line[:18]}
    assert [row[:2] for row in rows.values()] == [[str(STEPS), "0"], [str(STEPS), str(STEPS)], [str(STEPS), "0"]]
    assert lines[-2].startswith(f"float16 with tune_gpt.toml stayed within 1% of float32 in each of {STEPS} steps: ")
    files = [out / f"tune_gpt.{suffix}" for suffix in ("toml", "html", "png")]
    assert lines[-1].endswith(f" s. The policy, tune's report and the plot: {files[0]}, {files[1]}, {files[2]}")
    assert sorted(out.iterdir()) == sorted(files)
    assert "<html" in files[1].read_text(encoding="utf-8")
    assert_is_a_picture(files[2])


def assert_is_a_picture(path: Path) -> None:
    from matplotlib.image import imread

    height, width, _colors = imread(path).shape
    assert (height > 400, width > 600) == (True, True)
    assert len({tuple(color) for color in imread(path)[::2, ::2].reshape(-1, 4).round(1)}) > 10


def test_status_is_1_where_a_loss_is_not_within_the_tolerance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The training with the policy leaves the tolerance after tune has verified it."""
    real = tune_gpt.train

    def train_worse(runs, reference, batches, steps):  # type: ignore[no-untyped-def]
        for number in real(runs, reference, batches, steps):
            if number == 4 and len(runs) == 2:
                runs[1].losses[-1] *= 1.5
            yield number

    monkeypatch.setattr(tune_gpt, "train", train_worse)
    status, lines, _ = run(capsys, monkeypatch, "--out", str(tmp_path))
    assert status == 1
    assert lines[-2].startswith(f"float16 with tune_gpt.toml did NOT stay within 1% of float32: 1 of {STEPS} steps ")
    assert lines[-2].endswith("are outside, and the largest deviation is 50%, at step 4.")


def test_an_error_of_tune_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the larger head and with one character there is no overflow, and nothing to tune."""
    monkeypatch.setattr(tune_gpt, "HEAD_GAIN", 1.0)
    monkeypatch.setattr(tune_gpt, "Batches", lambda corpus, batch, length, *rest: Batches(corpus, 1, 8, *rest))
    status, lines, errors = run(capsys, monkeypatch, "--out", str(tmp_path), "--tolerance", "0.5")
    assert status == 1
    assert f"All {STEPS} losses are finite." in "\n".join(lines)
    assert errors.startswith("tune_gpt.py: error: NothingToTuneError: ")


def test_the_loss_is_the_one_that_pytorch_has() -> None:
    logits, targets = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    flat = logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat, targets.flatten(), label_smoothing=0.1)
    expected += 1e-4 * flat.logsumexp(-1).square().mean()
    torch.testing.assert_close(smoothed_loss(logits, targets), expected)


def test_a_deviation_of_nan_is_infinite() -> None:
    failed, tried = doctest.testmod(gpt.tuned_report)
    assert (failed, tried > 3) == (0, True)
    runs = [type("", (), {"losses": losses})() for losses in ([1.0, float("inf"), 2.0], [1.0, 1.0, 4.0])]
    assert deviations(*runs) == [0.0, float("inf"), 0.5]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--tolerance", "1"], "--tolerance must be between 0 and 1, got 1.0"),
        (["--out", "file/folder"], "cannot write into file/folder: "),
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
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        tune_gpt.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tune_gpt.py: error: {complaint}")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_the_whole_demo_as_a_process(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, str(Path(tune_gpt.__file__)), "--out", str(tmp_path)],
        env=environment(MPLBACKEND="Agg"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "stayed within 1% of float32 in each of 300 steps" in process.stdout
