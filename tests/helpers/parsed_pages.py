"""Pages of reports, parsed: their texts by section, and checks that hold for every page."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from torch_promote.observe import pages as template

__all__ = ["NASTY", "Page", "assert_escaped", "assert_self_contained", "without_jinja2", "words"]

VOID = {"meta", "input", "br", "link", "img"}
URLS = {"src", "href", "action", "data", "poster", "srcset", "xlink:href"}
HANDLER = re.compile(r"^on")


class Page(HTMLParser):
    """Checks that tags are balanced, and collects texts and attributes. `sections` maps ids of sections to texts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.sections: dict[str, str] = {}
        self.section = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            name = self.section or ("title" if "title" in self.open else "head")
            self.sections[name] = f"{self.sections.get(name, '')} {data}"


def words(text: str) -> str:
    return " ".join(text.split())


def assert_self_contained(source: str) -> None:
    """Nothing is loaded from elsewhere, and there is one script."""
    page = Page(source)
    assert not [value for name, value in page.attributes if name in URLS]
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|XMLHttpRequest|import\(", source)
    assert not {"link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert source.count("<script>") == source.count("</script>") == 1


NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}{% raw %}</style>&amp;"


def assert_escaped(source: str, plain: str) -> Page:
    """A page whose names are `NASTY` has no tag and no attribute that a plain page has not."""
    page, other = Page(source), Page(plain)
    assert set(page.tags) <= set(other.tags)
    assert page.tags.count("script") == 1
    assert {name for name, _ in page.attributes} <= {name for name, _ in other.attributes}
    assert not [name for name, _ in page.attributes if HANDLER.match(name)]
    assert source.count("<script>") == 1
    assert "{{ 7 * 7 }}" in source
    return page


@pytest.fixture
def without_jinja2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """jinja2 cannot be imported. Import it to use it."""
    real = builtins.__import__

    def other(name: str, *args: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", other)
    template._environment.cache_clear()
    yield
    template._environment.cache_clear()
