"""The pages on promotion equal the code's output, and the generator detects differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import promotion_page as document
import promotion_rules_page as rules_document
from pages import rendered

PAGE = Path(__file__).parents[2] / "docs" / "promotion.md"
RULES_PAGE = Path(__file__).parents[2] / "docs" / "promotion_rules.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert document.render(text) == text, "run python docs/generators/promotion_page.py"


def test_the_page_of_the_rules_is_up_to_date() -> None:
    text = RULES_PAGE.read_text(encoding="utf-8")
    assert rendered(text, rules_document.BLOCKS) == text, "run python docs/generators/promotion_rules_page.py"


def test_the_page_of_the_rules_shows_code_that_runs() -> None:
    shown = re.findall(r"```python\n(.*?)```", RULES_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(shown) == 1
    names: dict[str, object] = {}
    exec(shown[0], names)
    assert {"careful", "wider"} <= names.keys()


def test_the_check_fails_on_a_page_that_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(text.replace("Result: float32 of shape [3]", "Result: float64 of shape [3]"), encoding="utf-8")
    assert document.main([str(page), "--check"]) == 1
    assert "is out of date. Run python docs/generators/promotion_page.py." in capsys.readouterr().err
    assert document.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert document.main([str(page), "--check"]) == 0


def test_a_page_that_lost_a_block_is_refused() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("<!-- end: strides -->", "")
    with pytest.raises(ValueError, match="the page's blocks are not those of BLOCKS: strides"):
        document.render(text)


def test_what_is_printed_does_not_depend_on_the_default_dtype() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert document.render(text) == text
        rules = RULES_PAGE.read_text(encoding="utf-8")
        assert rendered(rules, rules_document.BLOCKS) == rules
    finally:
        torch.set_default_dtype(before)


def test_every_puzzle_of_the_page_is_what_pytorch_does() -> None:
    ones = {
        "int32[3] + 5.5": torch.ones(3, dtype=torch.int32) + 5.5,
        "int8[3] * int64[]": torch.ones(3, dtype=torch.int8) * torch.tensor(1),
        "int8[3] * float64[]": torch.ones(3, dtype=torch.int8) * torch.tensor(1.0, dtype=torch.float64),
        "int32[3] + int64[]": torch.ones(3, dtype=torch.int32) + torch.tensor(1),
        "uint8[2] + 1000": torch.zeros(2, dtype=torch.uint8) + 1000,
        "bfloat16[3] + float16[3]": torch.ones(3, dtype=torch.bfloat16) + torch.ones(3, dtype=torch.float16),
        "int64[3] / 5": torch.ones(3, dtype=torch.int64) / 5,
    }
    assert tuple(ones) == document.PUZZLES
    for puzzle, result in ones.items():
        assert document.why(puzzle, default_dtype=torch.float32).dtype is result.dtype
    assert ones["uint8[2] + 1000"].tolist() == [232, 232]
