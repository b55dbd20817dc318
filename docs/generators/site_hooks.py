"""What the site has beyond docs/*.md: the changelog and its neighbour as pages, and the files that pages link to.

mkdocs.yml names this module as a hook, and as an extension of griffe, which reads docstrings for mkdocstrings. In the
sources, links are those that work on GitHub. The hook rewrites those that point out of docs/, and those of the pages of
the root.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["ROOT_PAGES", "ExampleSections", "on_files", "on_page_markdown", "rewrite_links"]

Extension: Any
try:
    Extension = importlib.import_module("griffe").Extension
except ImportError:  # nothing builds the site here
    Extension = object

_ROOT = Path(__file__).parents[2]

#: Files of the repository's root, and the pages that they are on the site.
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}

#: Where the site has the other files that pages link to.
_SOURCES = "source"

#: The target of a link of Markdown, or of a picture in HTML.
_LINK = re.compile(r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!https?:|#|mailto:)([^)"\s#]+)((?:#[^)\s]*)?)(?=[)"])""")


class ExampleSections(Extension):  # type: ignore[misc]
    """Lets the API reference show the section `Example:` of a docstring as code: griffe knows only `Examples:`."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the docstring of an object that griffe has found."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def rewrite_links(text: str, folder: str) -> tuple[str, set[str]]:
    """Makes the links of a page links of the site.

    Args:
        text: The page, as Markdown.
        folder: The page's folder in the repository: "docs", or "" for its root.

    Returns:
        The text, and the files outside of docs/ that it links to, as paths from the root.

    Example:
        >>> rewrite_links("[a](../examples/x.py), [b](../CHANGELOG.md), [c](casts.md#limits)", "docs")
        ('[a](source/examples/x.py), [b](changelog.md), [c](casts.md#limits)', {'examples/x.py'})
    """
    files: set[str] = set()

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target in ROOT_PAGES:
            return ROOT_PAGES[target] + match[2]
        if target.startswith("docs/"):
            return target.removeprefix("docs/") + match[2]
        files.add(target)
        page = ".md" if (_ROOT / target).is_dir() else ""
        return f"{_SOURCES}/{target}{page}{match[2]}"

    return _LINK.sub(rewrite, text), files


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the root, and the files that any page links to. A folder becomes a list of its files."""
    from mkdocs.structure.files import File

    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= rewrite_links(Path(file.abs_src_path).read_text(encoding="utf-8"), "docs")[1]
    for name, page in ROOT_PAGES.items():
        text, found = rewrite_links((_ROOT / name).read_text(encoding="utf-8"), "")
        linked |= found
        files.append(File.generated(config, page, content=text))
    for path in sorted(linked):
        source = _ROOT / path
        if source.is_dir():
            inside = sorted(file for file in source.iterdir() if file.suffix == ".py")
            links = [f"- [{file.name}]({source.name}/{file.name})\n" for file in inside]
            files.append(File.generated(config, f"{_SOURCES}/{path}.md", content=f"# {path}\n\n{''.join(links)}"))
            linked |= {f"{path}/{file.name}" for file in inside}
    for path in sorted(linked):
        if (_ROOT / path).is_file():
            files.append(File.generated(config, f"{_SOURCES}/{path}", abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of the pages in docs/. Those of the root's pages have been rewritten."""
    return markdown if page.file.generated_by else rewrite_links(markdown, "docs")[0]
