"""`make tuned-models` without the frameworks: the data, and a row of a model that is defined here."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from cases import MODELS, Case, declare_ops_of_torchvision
from measure import measure
from real_data import SYMBOLS, digits, masked, text
from torch import nn

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs" / "tuning.md"


def test_digits_are_pictures_of_their_labels() -> None:
    ((images, labels), (_, others)) = digits(2, seed=0)
    assert images.shape == (32, 1, 32, 32)
    assert set(labels.tolist()) <= set(range(10))
    assert not torch.equal(labels, others)
    assert bool((images.amax((1, 2, 3)) > 0.8).all()), "each has a digit on it"
    again, _ = digits(1, seed=0)[0]
    assert torch.equal(again, images)


def test_masked_windows_keep_what_is_hidden_as_labels() -> None:
    windows = text(2, seed=0)
    for (ids, labels), before in zip(masked(windows, len(SYMBOLS), seed=0), windows, strict=True):
        hidden = ids == len(SYMBOLS)
        assert 0.05 < hidden.float().mean() < 0.3
        assert torch.equal(torch.where(hidden, labels, ids), before)
        assert bool((labels[~hidden] == -100).all())


def test_a_row_says_what_was_measured() -> None:
    case = Case(
        "tiny",
        lambda: nn.Sequential(nn.Embedding(len(SYMBOLS), 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, len(SYMBOLS))),
        lambda number, seed: [(ids, ids) for ids in text(number, seed, batch=2, length=8)],
        lambda model, ids: model(ids),
    )
    op, site = measure(case, torch.bfloat16, [("op", 2), ("site", 2)], budget=30, steps=5)
    for row in (op, site):
        assert (row.model, row.dtype) == ("tiny", "bfloat16")
        assert row.before > row.tolerance >= row.after
        assert row.tolerance == pytest.approx(row.before / 2, rel=0.05)
        assert row.held_out is not None
        assert row.met == (row.held_out <= row.tolerance)
        assert 0 < row.without < 0.1
        assert row.runs <= 30
        assert math.isfinite(row.with_policy)
    assert (op.level, op.overrides) == ("op", "`linear`")
    assert re.fullmatch(r"`.+: \w+`|\d of 3 sites", site.overrides)


def test_the_page_has_the_rows_of_all_models() -> None:
    rows = DOCS.read_text(encoding="utf-8").splitlines()
    for case in MODELS:
        for dtype in ("float16", "bfloat16"):
            assert any(row.startswith(f"| {case.name} | {dtype} | ") for row in rows), (case.name, dtype)


def test_without_the_frameworks_it_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the script sets it
    main = runpy.run_path(str(FOLDER / "__main__.py"), run_name="tuned_models")["main"]
    monkeypatch.setitem(main.__globals__, "find_spec", lambda name: None)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tests/tuned_models: error: transformers and timm not installed: make tuned-models\n"


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_model_can_be_tuned(case: Case) -> None:
    declare_ops_of_torchvision()
    pytest.importorskip("timm" if case.name.startswith("timm") else "transformers")
    (row,) = measure(case, torch.bfloat16, [("op", 2)], budget=30, steps=3)
    assert row.after <= row.tolerance
