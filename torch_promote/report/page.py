"""Reports as pages: HTML files that work without a network and without JavaScript, rendered by Jinja2.

The template page.html.j2 gets the `Content` of a report, and escapes all texts.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from torch_promote.report.base import (
    NUMERIC,
    Branch,
    Cell,
    Content,
    Fact,
    Tree,
    module_name,
    short_line,
    spell,
    texts_of,
    visible_columns,
)
from torch_promote.report.plot import to_svg

_FRAME_HEIGHT = 640
#: The most modules of a tree, and its deepest level.
_MOST_NODES, _DEEPEST = 1_200, 50
#: The rows of a table that are visible at first, and the values of a counting cell.
_FIRST_ROWS, _FIRST_VALUES = 24, 3
#: The most rows of a table, and the most lines of a list.
_MOST_ROWS, _MOST_LINES = 1_000, 200
#: Above this length, a verdict is set smaller, a number with such a remark is a row, and a name breaks.
_LONGEST_TITLE, _LONGEST_NOTE, _LONGEST_WORD = 110, 60, 28  # a name: as long as a page of 400 pixels has room for
#: A fact that is a tile: a number, with a total and a unit.
_NUMBER = re.compile(r"(?:< )?-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?: of \d[\d,]*)?(?: %)?(?: [A-Za-z]\w*)?|inf|nan")
#: The parts of a long name, which may break between them: those that are still long are divided by the next pattern.
_BREAKS = r"(?s).+?(?:(?:[./]|::)+|\Z)", r"(?s).+?(?:_+|\Z)", rf"(?s).{{1,{_LONGEST_WORD}}}"


def render(content: Content) -> str:
    """Returns a report as a page."""
    return _environment().get_template("page.html.j2").render(content=content)


def render_frame(content: Content) -> str:
    """Returns the page in a frame for a notebook, so that its styles and scripts do not affect the notebook."""
    return (
        f'<iframe srcdoc="{html.escape(render(content))}" sandbox="allow-scripts" title="{html.escape(content.title)}" '
        f'loading="lazy" style="width:100%;height:{_FRAME_HEIGHT}px;border:0"></iframe>'
    )


@dataclass
class Node:
    """A module in a tree, with those in it."""

    path: str
    name: str  # the last part of the path
    branch: Branch | None = None  # None if it only contains others
    children: list[Node] = field(default_factory=list)


def nodes_of(tree: Tree) -> tuple[list[Node], int]:
    """Returns the outermost modules of a tree, and the number of modules left out (the deepest ones)."""
    by_path: dict[str, Node] = {}
    roots: list[Node] = []
    for branch in tree.branches:
        parts = branch.path.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in by_path:
                node = by_path[path] = Node(path, parts[end - 1])
                (by_path[".".join(parts[: end - 1])].children if end > 1 else roots).append(node)
        by_path[branch.path].branch = branch
    kept, level, depth = 0, roots, 0
    while level:
        kept, depth = kept + len(level), depth + 1
        below = [child for node in level for child in node.children]
        if kept + len(below) > _MOST_NODES or depth == _DEEPEST:
            for node in level:
                node.children = []
            break
        level = below
    return roots, len(by_path) - kept


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bar_parts=_bar_parts,
        breakable=_breakable,
        columns=lambda table: visible_columns(table, "page"),
        dtype_class=_dtype_class,
        kind=lambda part: type(part).__name__,
        nodes=nodes_of,
        module_name=module_name,
        short_line=short_line,
        slug=lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-"),
        sort_key=_sort_key,
        spell=spell,
        svg=lambda chart: Markup(to_svg(chart)),
        texts=texts_of,
        tiles_and_rows=_tiles_and_rows,
        prose=_prose,
    )
    environment.globals.update(
        numeric=NUMERIC,
        first_rows=_FIRST_ROWS,
        first_values=_FIRST_VALUES,
        longest_title=_LONGEST_TITLE,
        most_rows=_MOST_ROWS,
        most_lines=_MOST_LINES,
    )
    return environment


def _sort_key(cell: Cell) -> str:
    """The text of data-sort, as JavaScript's Number() reads it. None sorts below 0, NaN with infinity."""
    if cell is None:
        return "-1"
    if not isinstance(cell, float | int):
        return next((text for text, _ in texts_of(cell)), "")
    if isinstance(cell, float) and not cell < float("inf"):
        return "Infinity"
    return str(cell)


def _dtype_class(name: str) -> str:
    """The CSS class of a dtype's colour."""
    known = ("float64", "float32", "bfloat16", "float16", "float8", "complex", "heat")
    return next((one for one in known if name.startswith((one, f"b{one}"))), "other")


def _tiles_and_rows(facts: Sequence[Fact]) -> list[tuple[str, list[Fact]]]:
    """Numbers become tiles, and words the rows of a list; all are rows, in order, if most are words."""
    tiles = [one for one in facts if _NUMBER.fullmatch(one[1]) and len(one[-1]) <= _LONGEST_NOTE]
    if 2 * len(tiles) < len(facts):
        tiles = []
    found = [("tiles", tiles), ("facts", [fact for fact in facts if fact not in tiles])]
    return sorted(((style, some) for style, some in found if some), key=lambda one: facts[0] not in one[1])


def _bar_parts(tree: Tree) -> list[str]:
    """The names of what a tree's bars are made of, for its legend; "infinite" if a bar shows infinity."""
    bars = [bar for branch in tree.branches for bar in branch.bars]
    infinite = ["infinite"] * any(bar.get("heat", 0.0) > 1 for bar in bars)
    return list(dict.fromkeys(name for bar in bars for name, part in bar.items() if part)) + infinite


def _breakable(text: str) -> Markup:
    """Escapes a text, and lets long names in it break: see `_BREAKS`."""
    words = (map(escape, _parts_of(word, _BREAKS)) for word in re.split(r"(\s+)", text))
    return Markup("").join(Markup("<wbr>").join(parts) for parts in words)


def _parts_of(name: str, breaks: Sequence[str]) -> list[str]:
    if len(name) <= _LONGEST_WORD:
        return [name]
    return [one for part in re.findall(breaks[0], name) for one in _parts_of(part, breaks[1:])]


def _prose(text: str) -> Markup:
    """Escapes a text, with arrows for "->", breaks in long names, and marked numbers: a browser would break "1e-3"."""
    parts = re.split(r"(\d[\d.]*(?:e-\d+| %))", text.replace(" -> ", " \N{RIGHTWARDS ARROW} "))
    marked = (
        Markup('<span class="part">{}</span>').format(part) if place % 2 else _breakable(part)
        for place, part in enumerate(parts)
    )
    return Markup("").join(marked)
