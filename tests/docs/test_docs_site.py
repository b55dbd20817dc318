"""README.md and the site: links and anchors exist, the navigation has every page, the API reference every name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import performance_plot
import site_hooks
import torch_promote as tp
from helpers.doc_blocks import ROOT

PAGES = [*(ROOT / name for name in site_hooks.ROOT_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
NAVIGATION = re.findall(r"^ +- [^:\n]+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
#: Written by a run on a GPU, where there is one.
NOT_ON_THE_SITE = {"gpu.md"}


def without_code(text: str) -> str:
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda match: match[0].replace("](", "] ("), text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, which GitHub and mkdocs (mkdocs.yml, slugify) both give them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", without_code(page.read_text(encoding="utf-8")))
    for target, anchor in links:
        if target.startswith(("https:", "http:")):
            continue
        file = page if target == "" else (page.parent / target)
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: {target}#{anchor}"


def test_the_navigation_has_each_page_once() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - NOT_ON_THE_SITE
    assert sorted(NAVIGATION) == sorted(pages | set(site_hooks.ROOT_PAGES.values()))


def test_the_api_reference_has_each_public_name_once() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: torch_promote\.(\w+)$", text, re.MULTILINE)
    assert sorted(documented) == sorted({*tp.__all__} - {"__version__"})


def test_the_plot_is_that_of_the_tables() -> None:
    assert performance_plot.main(["--check"]) == 0


def test_the_readmes_figures_are_those_of_the_pages() -> None:
    figures = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Figures\n")[2].partition("\n## ")[0]
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("performance.md", "parity.md"))
    numbers = re.findall(r"\b\d+\.\d+\b(?!\.)|\b\d+,\d{3}\b", figures.replace("2.13.0", ""))
    assert len(numbers) >= 7
    assert [number for number in numbers if number not in pages] == []


#: Texts of PyTorch that the page explains.
PYTORCHS = {"expected m1 and m2 to have the same dtype"}


def test_each_error_of_the_troubleshooting_page_exists() -> None:
    """The text of a heading occurs in the session below it, or in the package, or is PyTorch's."""
    files = [*(ROOT / "torch_promote").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a text that goes on in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = [
        (text, section)
        for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]
        for text in re.findall(r"`([^`]{12,})`", section.partition("\n")[0])
    ]
    assert len(texts) > 12
    for text, section in texts:
        sessions = "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
        assert text in sessions or text in code or text in PYTORCHS, text
