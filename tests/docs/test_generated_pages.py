"""The pages on promotion equal the code's output, and the generator detects differences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import promotion_page as document

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.float64])
def test_the_pages_are_up_to_date(default_dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        assert document.main(["--check"]) == 0
    finally:
        torch.set_default_dtype(before)


def test_the_check_fails_on_a_page_that_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {name: (DOCS / name).read_text(encoding="utf-8") for name in document.PAGES}
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("\nu1 u1 u1", "\nu1 u1 u2"), encoding="utf-8")
    assert document.main(["--check"], tmp_path) == 1
    assert "promotion.md" in capsys.readouterr().err
    assert document.main([], tmp_path) == 0
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in texts} == texts


def test_a_page_that_lost_a_block_is_refused() -> None:
    text = (DOCS / "promotion.md").read_text(encoding="utf-8").replace("<!-- end: strides -->", "")
    with pytest.raises(ValueError, match="should be"):
        document.rendered(text, document.PAGES["promotion.md"])
