"""PyTorch's bugs in docs/found_in_pytorch.md are still there: each snippet gives what the page says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "found_in_pytorch.md"
FLAGS = doctest.ELLIPSIS

INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def title(section: str) -> str:
    return section.partition("\n")[0]


@pytest.mark.parametrize("section", SECTIONS, ids=title)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_snippet_gives_what_the_page_says(section: str) -> None:
    parser, said = doctest.DocTestParser(), []
    test = parser.get_doctest(INTRODUCTION + section, {}, title(section), str(PAGE), 0)
    assert len(test.examples) > 7, "the introduction's, and some of its own"
    torch._dynamo.reset()
    results = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append, clear_globs=False)
    assert results.failed == 0, "".join(said)


def test_every_section_asks_pytorch_twice_and_the_reference() -> None:
    assert len(SECTIONS) >= 3
    for section in SECTIONS:
        # Of a fake tensor what eager was asked, or of eager the same for other shapes.
        assert ">>> with FakeTensorMode():" in section or section.count("\n>>> batch(") == 2, title(section)
        assert re.search(r">>> (infer|reference|memory_format)\b", section), title(section)
