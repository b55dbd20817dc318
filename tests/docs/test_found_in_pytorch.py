"""Each section of docs/found_in_pytorch.md asks PyTorch and the reference; test_doc_blocks.py runs the snippets."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "found_in_pytorch.md"
_, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def title(section: str) -> str:
    return section.partition("\n")[0]


def test_every_section_asks_pytorch_twice_and_the_reference() -> None:
    assert len(SECTIONS) >= 3
    for section in SECTIONS:
        # Of a fake tensor what eager was asked, or of eager the same for other shapes.
        assert ">>> with FakeTensorMode():" in section or section.count("\n>>> batch(") == 2, title(section)
        assert re.search(r">>> (infer|reference|memory_format)\b", section), title(section)
