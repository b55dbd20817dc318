"""The plot is a PNG with the results; errors about it are raised before anything is timed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torch_promote.bench.cases import Case, Prepared, Settings
from torch_promote.bench.figures import Spread
from torch_promote.bench.plot import PlotError, check_plot, draw, save_plot
from torch_promote.bench.results import Result

FAST, SLOW, EVEN = Spread(0.5, 0.4, 0.6), Spread(1.5, 1.4, 1.6), Spread(1.0, 0.9, 1.1)


def result(suite: str, name: str, *, ratio: Spread | None = None, to_hand: Spread | None = None) -> Result:
    return Result(Case(suite, name, lambda settings: Prepared({})), ratio, to_hand)


RESULTS = [
    result("region", "enter", ratio=FAST),
    result("region", "without a ratio"),
    result("ops", "mm", ratio=SLOW, to_hand=EVEN),
    result("ops", "neg", to_hand=EVEN),
]


def test_the_file_is_a_png_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = tmp_path / "bench.png"
    save_plot(file, RESULTS, Settings())
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = imread(file).shape
    assert (height > 300, width > 1000) == (True, True)
    colors = {bytes(color) for color in (imread(file)[..., :3] * 255).round().astype("uint8").reshape(-1, 3)}
    assert {bytes.fromhex("1b7f79"), bytes.fromhex("c8553d")} <= colors  # of what is faster and of what is slower


def test_a_panel_for_each_suite_and_a_row_for_each_case() -> None:
    panels = draw(RESULTS, Settings(rounds=7)).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["region", "ops"]
    labels = [[label.get_text() for label in panel.get_yticklabels()] for panel in panels]
    assert labels == [["enter"], ["mm", "neg *"]]
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["0.50"], ["1.50", "1.00"]]


def test_dots_are_medians_bars_are_quartiles_and_there_is_a_line_at_one() -> None:
    _, panel = draw(RESULTS, Settings()).axes
    line, *marks = ([float(x) for x in mark.get_xdata()] for mark in panel.lines)
    assert line == [1.0, 1.0]
    assert marks == [[1.4, 1.6], [1.5], [0.9, 1.1], [1.0]]
    low, high = panel.get_xlim()
    assert low < 0.4 < 1.6 < high


def test_the_title_says_where_it_was_measured() -> None:
    import torch

    title = draw(RESULTS, Settings(rounds=7, threads=3)).get_suptitle()
    assert torch.__version__ in title
    assert re.search(r"threads: 3, rounds: 7$", title)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"^there is nothing to plot: no case has a ratio\.$"):
        save_plot(tmp_path / "bench.png", [result("region", "without a ratio")], Settings())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_when_the_run_ends(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "bench.png"
    with pytest.raises(PlotError, match=re.escape(f"cannot write {file}: No such file or directory.")):
        save_plot(file, RESULTS, Settings())


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=re.escape("--plot needs matplotlib: pip install matplotlib.")):
        check_plot(tmp_path / "bench.png")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bench.jpg", "is not a PNG file. Expected a name that ends in .png."),
        ("bench", "is not a PNG file."),
        ("nowhere/bench.png", "No such file or directory."),
        ("folder.png", "Is a directory."),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PlotError, match=re.escape(complaint)):
        check_plot(tmp_path / name)


def test_checking_neither_makes_nor_changes_a_file(tmp_path: Path) -> None:
    check_plot(tmp_path / "new.png")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.PNG").write_bytes(b"old")
    check_plot(tmp_path / "old.PNG")
    assert (tmp_path / "old.PNG").read_bytes() == b"old"
