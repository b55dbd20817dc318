"""Pages of reports: HTML files that work without a network and without JavaScript.

A page's template extends base.html.j2. It gets plain values, and all of them are escaped.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from torch_promote import text_layout
from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.observe import places
from torch_promote.policy.files import write_atomically
from torch_promote.policy.policy import Policy
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import percent, size
from torch_promote.text_layout import are_numbers, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FAINT",
    "INK",
    "STR",
    "Chart",
    "CountAxis",
    "Layout",
    "LogAxis",
    "Mark",
    "Tile",
    "cut_list",
    "decorate",
    "embed",
    "figure_of",
    "fitted_table",
    "from_plain",
    "label_of",
    "list_of",
    "new_figure",
    "number",
    "numbers",
    "read_json",
    "render_page",
    "report_text",
    "save_as",
    "shorten",
    "spell_number",
    "spell_op",
    "spell_policy_name",
    "spell_tolerance",
    "to_json",
    "to_plain",
    "wrapped",
    "write_empty",
]


# ---Shared by the plots of reports: figures for notebooks, style, and labels.


INK, FAINT = "#1f2933", "#d9dee3"
_LONGEST = 44


def new_figure(inches: tuple[float, float]) -> Figure:
    """Returns an empty figure that a notebook shows, without pyplot.

    Args:
        inches: Its width and height.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingPackageError("the plots of a report need matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=inches, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def figure_of(axes: Axes) -> Figure:
    """Returns the figure of the axes."""
    return axes.get_figure()  # type: ignore[return-value]  # a SubFigure, if the caller passed axes of one


def decorate(axes: Axes, title: str) -> None:
    """Sets the title and the common style of axes."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def write_empty(axes: Axes, text: str) -> Figure:
    """Writes a text into empty axes, and returns their figure."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=9, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure_of(axes)


def label_of(path: str) -> str:
    r"""Returns a module's path as a label, with dollar signs escaped: matplotlib would start a formula.

    Example:
        >>> label_of("blocks.$0"), len(label_of("x" * 100))
        ('blocks.\\$0', 44)
    """
    short = path if len(path) <= _LONGEST else f"...{path[3 - _LONGEST :]}"
    return short.replace("$", r"\$")


# ---Charts on logarithmic axes: positions in an SVG image that a template draws.


WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 54, 446, 14, 276
_LANE = 34.0
_MOST_TICKS = 7
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class LogAxis:
    """An axis of errors. Zero and infinity get separate lanes at its ends if needed.

    Args:
        values: The values that have to fit.
        start: Where the axis starts in the image.
        end: Where it ends.
        scale: Further values to fit between the lanes: those of the other axis, if both have the same scale.

    Example:
        >>> axis = LogAxis([0.0, 1e-3, 1e-1], 0, 134)
        >>> axis.place(0.0), axis.place(1e-3), axis.place(1e-2)
        (0, 34.0, 84.0)
        >>> axis.ticks
        [(0, '0'), (34.0, '10⁻³'), (84.0, '10⁻²'), (134.0, '10⁻¹')]
    """

    def __init__(self, values: Iterable[float], start: float, end: float, *, scale: Iterable[float] = ()) -> None:
        known = list(values)
        powers = [math.log10(value) for value in [*known, *scale] if 0 < value < math.inf]
        self.low, self.high = math.floor(min(powers, default=0.0)), math.ceil(max(powers, default=1.0))
        self.high += self.low == self.high
        sign = 1 if end > start else -1
        self._zero, self._infinity = start, end
        zero, infinite = any(value <= 0 for value in known), any(not value < math.inf for value in known)
        self._start = start + sign * _LANE * zero
        self._end = end - sign * _LANE * infinite
        step = math.ceil((self.high - self.low) / _MOST_TICKS)
        self.ticks = [
            *([(self._zero, "0")] if zero else []),
            *((self.place_power(power), spell_power(power)) for power in range(self.low, self.high + 1, step)),
            *([(self._infinity, "inf")] if infinite else []),
        ]

    def place(self, value: float) -> float:
        """Returns the position of a value in the image."""
        if not value < math.inf:
            return self._infinity
        if value <= 0:
            return self._zero
        return self.place_power(math.log10(value))

    def place_power(self, power: float) -> float:
        """Returns the position of a power of ten in the image."""
        share = (power - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)


class CountAxis:
    """An axis of numbers from 0, with more room for small numbers.

    Args:
        most: The largest number.
        start: The position of 0 in the image.
        end: The position of the largest number.

    Example:
        >>> [label for _, label in CountAxis(60, 0, 100).ticks]
        ['0', '1', '2', '5', '10', '20', '60']
    """

    def __init__(self, most: int, start: float, end: float) -> None:
        self._start, self._scale = start, (end - start) / math.log1p(max(most, 1))
        steps = [round(digit * 10**power) for power in range(7) for digit in (1, 2, 5)]
        shown = [0, *(step for step in steps if step * 1.9 <= most), max(most, 1)]
        self.ticks = [(self.place(number), f"{number:,}") for number in shown]

    def place(self, number: float) -> float:
        """Returns the position of a number in the image."""
        return round(self._start + math.log1p(number) * self._scale, 1)


def spell_power(power: int) -> str:
    """Returns a power of ten: "1", "10⁻³"."""
    return "1" if power == 0 else "10" if power == 1 else f"10{str(power).translate(_RAISED)}"


@dataclass(frozen=True)
class Mark:
    """A point.

    Attributes:
        x: Its position in the image.
        y: Its position in the image.
        kind: "passed" or "failed".
        title: The tooltip.
    """

    x: float
    y: float
    kind: str
    title: str


@dataclass
class Chart:
    """A chart.

    Attributes:
        title: Its title.
        note: A sentence that explains it.
        x_label: The name of the axis below.
        y_label: The name of the axis on the left.
        x_ticks: Positions and labels of the axis below.
        y_ticks: Positions and labels of the axis on the left.
        marks: The points.
        best: The path of a line through the best points; "" for none.
        limit: The path of the line that shows the tolerance; "" for none.
        limit_label: Its label.
        limit_y: The position of the label.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[Mark] = field(default_factory=list)
    best: str = ""
    limit: str = ""
    limit_label: str = ""
    limit_y: float = 0.0
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


# ---Records as JSON-compatible values, and back. Infinite numbers and NaN become strings.


Record = TypeVar("Record")


def to_plain(value: Any) -> Any:
    """Returns a record and its contents as JSON-compatible values.

    Example:
        >>> to_plain({"errors": (0.5, float("inf"), float("nan")), "dtype": torch.float16})
        {'errors': [0.5, 'inf', 'nan'], 'dtype': 'float16'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Policy):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    return value


def number(value: Any) -> float:
    """Returns a number that `to_plain` may have converted to a string.

    Raises:
        TypeError: The value is something else.

    Example:
        >>> number("-inf"), number(2)
        (-inf, 2.0)
    """
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("inf", "-inf", "nan")):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)


def numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a mapping; see `number`."""
    return {key: number(value) for key, value in data.items()}


def from_plain(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Returns the record from the data of `to_plain`. Its fields are numbers, texts, and tuples and mappings of them.

    Args:
        kind: The record's class, a dataclass.
        data: The data that `to_plain` returned.

    Raises:
        KeyError, TypeError: A field is missing, or not a number.
    """
    fields = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = data[item.name]
        if value is not None:
            value = _reader(str(item.type))(value)
        fields[item.name] = value
    return kind(**fields)


def _reader(annotation: str) -> Any:
    if annotation.startswith("float"):
        return number
    if annotation.startswith("Mapping[str, float]"):
        return numbers
    return tuple if annotation.startswith("tuple[str") else lambda value: value


# ---Saves reports: the file extension selects the format, and files are replaced atomically.


def save_as(
    path: str | os.PathLike[str], what: str, formats: Mapping[str, Callable[[], str]], meanings: Mapping[str, str]
) -> None:
    """Writes a file.

    Args:
        path: The file.
        what: The object that is saved, for errors: "the trace".
        formats: Maps file extensions to functions that return the content. Longer extensions must come first.
        meanings: The purpose of each format, by extension, for errors.

    Raises:
        OptionError: The extension is unknown, or the file cannot be written. An existing file is then unchanged.
    """
    target = Path(os.fspath(path))
    make = next((make for ending, make in formats.items() if target.name.lower().endswith(ending)), None)
    cannot = f"cannot save {what} as {str(target)!r}:"
    if make is None:
        legal = ", ".join(f"{ending} ({meaning})" for ending, meaning in meanings.items())
        raise OptionError(f"{cannot} the file extension selects the format. Legal: {legal}.")
    if target.is_dir():
        raise OptionError(f"{cannot} it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise OptionError(f"{cannot} there is no folder {str(target.parent)!r}. Create it first.")
    text = make()
    try:
        write_atomically(target, text, errors="backslashreplace")
    except OSError as error:
        raise OptionError(f"{cannot} {error.strerror or error}.") from error


def to_json(data: Any) -> str:
    r"""Returns the content of a .json file.

    Example:
        >>> to_json({"calls": [1, 2]})
        '{"calls":[1,2]}\n'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def read_json(
    path: str | os.PathLike[str], what: str, form: str, version: int, read: Callable[[dict[str, Any]], Any]
) -> Any:
    """Reads a file that `save_as` wrote as .json.

    Args:
        path: The file.
        what: The content, for errors: "trace".
        form: The required "format".
        version: The required "version".
        read: Makes the report from the data.

    Returns:
        The result of `read`.

    Raises:
        OptionError: The file cannot be read, is not such a report, or was written by an incompatible version.
    """
    name = os.fspath(path)
    cannot, saved = f"cannot read the {what} {name!r}:", 'Pass a file that report.save("NAME.json") wrote.'
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{cannot} {error.strerror or error}. {saved}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{cannot} it is not JSON ({error}). {saved}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != form:
        events = isinstance(data, dict) and "traceEvents" in data
        why = "it is a trace for Perfetto" if events else f'its "format" is {found!r}, not {form!r}'
        raise OptionError(f"{cannot} {why}. {saved}")
    if data.get("version") != version:
        raise OptionError(
            f"{cannot} its version is {data.get('version')!r}, and this torch_promote reads version {version}. Read it "
            f"with the torch_promote that wrote it, or create it again."
        )
    try:
        return read(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise OptionError(
            f"{cannot} it is incomplete or was changed ({type(error).__name__}: {error}). {saved}"
        ) from error


# ---Formats numbers, policies, ops and modules for the reports of `compare` and `tune`.


_NONE = "-"


def spell_number(value: float | None) -> str:
    """Spells an error with two digits.

    Example:
        >>> [spell_number(one) for one in (0.0, 1.2e-5, 0.0123, 4.0, 1234.5, 3e7, float("inf"), None)]
        ['0', '1.2e-5', '0.012', '4', '1234', '3e+7', 'inf', '-']
    """
    if value is None:
        return _NONE
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{'-' if power[0] == '-' else '+'}{power[1:].lstrip('0')}"


def spell_tolerance(value: float) -> str:
    """Spells a tolerance in the usual notation: "1e-3", "0.05".

    Example:
        >>> spell_tolerance(1e-3), spell_tolerance(0.05), spell_tolerance(1.25e-6)
        ('1e-3', '0.05', '1.25e-6')
    """
    text = f"{value:g}"
    if abs(value) < 0.005 and value:
        text = f"{value:.3e}".replace("e-0", "e-")
        digits, _, power = text.partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{power}"
    return text


def spell_op(name: str) -> str:
    """Returns the name of an op or a site without PyTorch's namespace.

    Example:
        >>> spell_op("aten::softmax.int"), spell_op("lib::gelu"), spell_op("blocks.0: aten::exp")
        ('softmax.int', 'lib::gelu', 'blocks.0: exp')
    """
    return name.replace("aten::", "")


def spell_policy_name(policy: Policy) -> str:
    """Returns a policy in a few words.

    Example:
        >>> stock = Policy.stock()
        >>> [spell_policy_name(one) for one in (Policy.named("off"), stock, stock.override({"mm.default": "fp32"}))]
        ['fp32', 'stock', 'stock with 1 change']
    """
    tables = ""
    if policy.modules:
        tables = f" and {len(policy.modules)} table{'s' if len(policy.modules) != 1 else ''} for modules"
    for name in Policy.names():
        if Policy.named(name).changes == policy.changes:
            return ("fp32" if name == "off" else name) + tables
    overloads = len({overload for overload, _, _ in policy.changes})
    return f"stock with {overloads} change{'s' if overloads != 1 else ''}{tables}"


def shorten(name: str, width: int) -> str:
    """Cuts a name to a width. A path loses whole parts at its beginning if that is sufficient.

    Example:
        >>> shorten("model.layers.11.self_attn.q_proj", 20), shorten("a" * 30, 10)
        ('...self_attn.q_proj', 'aaaaaaa...')
    """
    if len(name) <= width:
        return name
    parts = name.split(".")
    while len(parts) > 1:
        parts = parts[1:]
        if len(kept := "..." + ".".join(parts)) <= width:
            return kept
    return f"{name[: width - 3]}..."


class _Node(Protocol):
    children: list[Any]


Node = TypeVar("Node", bound=_Node)
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MOST, _DEEPEST = 1_200, 50


def count(number: int, noun: str) -> str:
    """Spells a number of things: "1 call", "1,200 calls"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def most_of(counted: Counter[str], shorten: Callable[[str], str] = str) -> str:
    """Returns the most frequent text and the number of others: "float32 -> float16 (+2)"; "" if there is none."""
    if not counted:
        return ""
    (text, _), *others = counted.most_common()
    return f"{shorten(text)} (+{len(others)})" if others else shorten(text)


def short_dtype(name: str) -> str:
    """Returns a short name of a dtype.

    Example:
        >>> short_dtype("bfloat16"), short_dtype("int64")
        ('bf16', 'int64')
    """
    return _SHORT.get(name, name)


def make_tree(paths: Iterable[str], make: Callable[[str, str], Node]) -> tuple[list[Node], dict[str, Node]]:
    """Makes the nodes of paths and of their parents.

    Args:
        paths: Paths of modules; "" has no node.
        make: Makes a node from a path and its last part. A node has a list `children`.

    Returns:
        The outermost nodes, sorted so that "blocks.2" comes before "blocks.10"; and all nodes, by path.
    """
    by_path: dict[str, Node] = {}
    roots: list[Node] = []
    for whole in sorted(paths, key=_natural):
        for path in prefixes(whole) if whole else ():
            if path not in by_path:
                outer, _, name = path.rpartition(".")
                node = by_path[path] = make(path, name)
                (by_path[outer].children if outer else roots).append(node)
    return roots, by_path


def prefixes(path: str) -> Iterator[str]:
    """Yields the parents of a path, and the path itself.

    Example:
        >>> list(prefixes("blocks.0.attn"))
        ['blocks', 'blocks.0', 'blocks.0.attn']
    """
    parts = path.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _natural(path: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in path.split(".")]


def cut_tree(roots: list[Node], total: int) -> int:
    """Removes the deepest nodes if there are too many or too deep ones for a page.

    Args:
        roots: The outermost nodes.
        total: The number of nodes.

    Returns:
        The number of removed nodes.
    """
    kept, level, depth = 0, roots, 0
    while level:
        kept, depth = kept + len(level), depth + 1
        below = [child for node in level for child in node.children]
        if kept + len(below) > _MOST or depth == _DEEPEST:
            for node in level:
                node.children = []
            break
        level = below
    return total - kept


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
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "numerics"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        dtype_class=_dtype_class,
        number=_number,
        percent=percent,
        short_line=functools.partial(places.shorten, folders=False),
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


# ---Reports as text, in which no word or number is broken.
#
# `str(report)` has at most 80 columns, and cuts names that are longer than that. A command prints a report as wide
# as the terminal, and cuts nothing.


class Layout(NamedTuple):
    """How a report is laid out.

    Attributes:
        width: The width of a line, in characters. None: lines are not wrapped.
        cuts: Whether names that are longer than a line are cut.
    """

    width: int | None
    cuts: bool = False


#: What `str` of a report has.
STR = Layout(80, cuts=True)

_REPORT_TEXT_MOST_SENTENCES = 10
_NARROWEST = 10


def report_text(title: str, verdict: str, parts: Iterable[Sequence[str]], layout: Layout = STR) -> str:
    """Returns a report.

    Args:
        title: The first line.
        verdict: What the report shows, in a sentence or two.
        parts: The lines of each part; empty parts are left out.
        layout: The layout of the title and the verdict.
    """
    lines = [*wrapped(title, layout), *wrapped(verdict, layout)]
    for part in parts:
        lines += ["", *part] if part else []
    return "\n".join(lines)


def wrapped(text: str, layout: Layout = STR, indent: str = "", indent_after: str | None = None) -> list[str]:
    """Returns a text in lines, which break at blanks alone."""
    after = indent if indent_after is None else indent_after
    if layout.cuts and layout.width is not None:
        text = " ".join(shorten(word, layout.width - len(after)) for word in text.split())
    return text_layout.wrapped(text, layout.width, indent, after)


def list_of(title: str, sentences: Sequence[str], layout: Layout = STR) -> list[str]:
    """Returns sentences under a title; nothing without any."""
    if not sentences:
        return []
    more = len(sentences) - _REPORT_TEXT_MOST_SENTENCES
    shown = [*sentences[:_REPORT_TEXT_MOST_SENTENCES], *([f"... and {more:,} more"] if more > 0 else [])]
    return [title, *(line for sentence in shown for line in wrapped(sentence, layout, "  ", "    "))]


def fitted_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    most: int,
    noun: str,
    layout: Layout = STR,
    prose: Collection[str] = (),
) -> list[str]:
    """Returns the first rows of a table, and how many more there are.

    Args:
        header: The names of the columns.
        rows: The rows. If there are none, nothing is returned.
        most: The maximum number of rows shown.
        noun: What a row is.
        layout: The layout. If it cuts, it cuts long names, and no numbers.
        prose: The names of columns that may wrap, if it does not cut.
    """
    if not rows:
        return []
    shown = [list(row) for row in rows[:most]]
    if layout.cuts and layout.width is not None:
        _cut(header, shown, layout.width)
    lines = text_table(header, shown, None if layout.cuts else layout.width, prose).splitlines()
    left = len(rows) - most
    return lines + ([f"... and {count(left, f'more {noun}')}"] if left > 0 else [])


def _cut(header: Sequence[str], shown: list[list[str]], width: int) -> None:
    whole = [tuple(row) for row in shown]
    names = [column for column in range(len(header)) if not are_numbers([row[column] for row in whole])]
    while (over := max(map(len, text_table(header, shown).splitlines())) - width) > 0:
        widths = {column: max(len(row[column]) for row in shown) for column in names}
        widest = max(names, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            break
        # Narrow the widest column first, to the width of the next.
        second = max([_NARROWEST, *(width for column, width in widths.items() if column != widest)])
        to = max(widths[widest] - over, min(second, widths[widest] - 1))
        # Cut the whole name: `shorten` would take the dots of an earlier cut for those of a path.
        for row, names_of_row in zip(shown, whole, strict=True):
            row[widest] = shorten(names_of_row[widest], to)
