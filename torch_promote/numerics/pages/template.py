"""Pages of reports: HTML files that work without a network and without JavaScript.

A page's template extends base.html.j2. It gets plain values, and all of them are escaped.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_promote.errors import MissingPackageError
from torch_promote.numerics.observing.places import shorten
from torch_promote.numerics.pages.spelling import spell_number, spell_op, spell_tolerance
from torch_promote.numerics.report.findings import count, percent, size

__all__ = ["Tile", "cut_list", "embed", "render_page"]

_HEIGHT_IN_A_NOTEBOOK = 640
_MOST_SENTENCES = 200


@dataclass(frozen=True)
class Tile:
    """A number at the top of a page.

    Attributes:
        label: Its name.
        value: The number.
        note: A remark about it.
    """

    label: str
    value: str
    note: str = ""


def cut_list(sentences: Sequence[str]) -> list[str]:
    """Returns the first sentences, and the number of further ones."""
    more = len(sentences) - _MOST_SENTENCES
    return [*sentences[:_MOST_SENTENCES], *([f"... and {more:,} more"] if more > 0 else [])]


def render_page(template: str, what: str, content: Mapping[str, Any]) -> str:
    """Returns a page.

    Args:
        template: The template's path in torch_promote/numerics: "report/page.html.j2".
        what: The subject of the page, for errors: "a trace".
        content: The values for the template.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    try:
        environment = _environment()
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the page of {what} needs jinja2: pip install jinja2. The other formats work without it."
        ) from error
    return str(environment.get_template(template).render(**content))


def embed(title: str, make: Callable[[], str], text: Callable[[], str]) -> str:
    """Returns a page in a frame for a notebook, so that its styles and scripts do not affect the notebook.

    Args:
        title: The frame's title.
        make: Returns the page.
        text: Returns the report as text, for use without jinja2.
    """
    try:
        page = make()
    except MissingPackageError:
        return f"<pre>{html.escape(text())}</pre>"
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="{html.escape(title)}" loading="lazy" '
        f'style="width:100%;height:{_HEIGHT_IN_A_NOTEBOOK}px;border:0"></iframe>'
    )


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        dtype_class=_dtype_class,
        number=_number,
        percent=percent,
        short_line=functools.partial(shorten, folders=False),
        short_op=spell_op,
        size=size,
        sort_key=_sort_key,
        tolerance=spell_tolerance,
        whole_numbers=_whole_numbers,
    )
    environment.globals.update(count=count)
    return environment


def _whole_numbers(text: str) -> str:
    """Escapes a text and marks numbers with an exponent, because a browser would break "1e-3" after the sign."""
    from markupsafe import Markup, escape

    parts = re.split(r"(\d[\d.]*e-\d+)", text)
    marked = (
        Markup('<span class="part">{}</span>').format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )
    return Markup("").join(marked)


def _dtype_class(name: str) -> str:
    """The CSS class of a dtype's colour."""
    known = ("float64", "float32", "bfloat16", "float16", "float8")
    return name if name in known else "complex" if "complex" in name else "other"


def _number(value: float | None) -> str:
    return "–" if value is None else spell_number(value)  # noqa: RUF001 (a dash)


def _sort_key(value: float | None) -> str:
    """A number for data-sort, as JavaScript's Number() reads it. Unknown values sort below 0, NaN with infinity."""
    if value is None:
        return "-1"
    return "Infinity" if value != value or value == float("inf") else repr(value)
