"""The pages on promotion equal the code's output, and the generator detects differences."""

from __future__ import annotations

from pathlib import Path

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
