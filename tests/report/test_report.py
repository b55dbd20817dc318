"""`Report`: one content, rendered as text, page, plot and JSON."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import tomllib
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from matplotlib.text import Text

from helpers.subprocesses import output_of
from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.policy.policy import Policy
from torch_promote.report import base, page, plot, terminal
from torch_promote.report.base import Branch, Chart, Code, Column, Content, Listing, Report, Series, Table, Tree
from torch_promote.report.codec import decode, decode_record, encode, place_of

INF = math.inf


@dataclass(frozen=True)
class Row:
    """A record of a report."""

    name: str
    error: float
    dtype: torch.dtype | None = None


@dataclass(repr=False)
class Example(Report):
    """A report with all kinds of parts."""

    NOUN: ClassVar[str] = "example"
    FORMAT: ClassVar[str] = "torch_promote example"

    rows: tuple[Row, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    noise: Mapping[str, float] = field(default_factory=dict)
    policy: Policy | None = None

    def content(self) -> Content:
        """All parts."""
        columns = (Column("op", "name"), Column("dtypes", "dtypes"), Column("error", "number"), "calls", "empty")
        dtypes = {"float32, int64 -> bfloat16": 2, "float32": 1}
        names, errors = [row.name for row in self.rows], [row.error for row in self.rows]
        numbers, heat = range(len(errors)), (Column("local", "number"), Column("impact", "number"))
        sizes = [1024.0 * len(name) for name in names]
        bars = Branch("blocks.0", (3,), ({"float32": 1, "bfloat16": 2},), "float32 island", "fp32")
        trials = Series("passed", errors, numbers, "passed"), Series("best", errors, numbers, mark="steps")
        times = [Series(name, [1, 0, 2], [0, 1, 2], name) for name in ("float32", "float16")]
        parts = (
            Table("Ops", columns, [(f"aten::{row.name}", dtypes, row.error, 1234, None) for row in self.rows], most=2),
            Table("On the page", ["module"], [("blocks.0",)], where="page"),
            Listing("Notes", [f"note {number}" for number in range(12)]),
            Code("Policy", '"aten::mm" = "fp32"'),
            Tree("Modules", (Column("calls", "count"),), [bars, Branch("", (1,), ({},))]),
            Tree(
                "Heat", heat, [Branch("head", (0.5, None), ({"heat": 0.5}, {"heat": 0.0}))], ("Local error", "Impact")
            ),
            Chart("Bars", "bars", [Series("once", sizes), Series("repeated", sizes, color="bfloat16")], names),
            Chart("Heat map", "heat", [Series("local", errors), Series("impact", errors)], names),
            Chart("Trials", "scatter", trials, x_scale="count", y_scale="log", lines=[("tolerance $1", 0.1)]),
            Chart("Over time", "stacked", times, spans=[("forward", 0, 2), ("backward", 2, 3)]),
            Chart(
                *("Exponents", "histograms", [Series("aten::mm", [5, 2], [-3, 2], note="largest 4")]),
                spans=[("float16", -24, 16)],
                where="page",
            ),
        )
        facts = [("casts", "12"), ("bytes", "1.5 KiB", "3 more from a cache")]
        return Content("example: of <all> parts", "An error of 1e-3 & more.", facts, parts, good=False)


def example() -> Example:
    rows = (Row("mm", 1e-3, torch.float16), Row("softmax_" + "x" * 120, INF), Row("$exp$", 0.0))
    return Example(rows, Counter({"mm": 2}), {"loss": math.nan}, Policy.stock().override({"mm.default": "fp32"}))


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects the ids and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loaded += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        if tag not in ("meta", "input", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.remove(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_text_shows_facts_tables_and_lists_within_100_columns() -> None:
    text = str(example())
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    assert lines[:2] == ["example: of <all> parts", "An error of 1e-3 & more."]
    # Of three rows, two are shown; of twelve notes, ten.
    for shown in (
        "1.5 KiB (3 more from a cache)",
        "fp32 -> bf16; 1 more",
        "1,234",
        "... 1 more",
        "note 9",
        "... 2 more",
    ):
        assert shown in text
    for hidden in ("note 10", "empty", "blocks.0"):
        assert hidden not in text
    assert text.count("x") >= 120, "a long name is wrapped, not cut"
    assert "softmax_" + "x" * 120 in terminal.to_text(example().content(), 300)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (50, ["op note", "square two words", "model.layers.0.self_attn.q_proj a", "b.c"]),
        (38, ["op note", "square two", "words", "model.layers.0.self_attn.q_proj a", "b.c"]),
        (33, ["op note", "square two words", "model.layers.0. a", "self_attn.q_proj b.c"]),
        (
            9,
            [
                "op square",
                "note",
                "two",
                "words",
                "op model.",
                "layers.0.",
                "self_",
                "attn.",
                "q_proj",
                "note a",
                "b.c",
            ],
        ),
    ],
)
def test_a_table_breaks_between_words_then_in_long_paths_then_becomes_a_text(width: int, lines: list[str]) -> None:
    path = "model.layers.0.self_attn.q_proj"
    table = Table("", [Column("op", "name"), "note"], [("square", "two words"), (path, "a\nb.c")])
    shown = terminal.to_text(table, width).splitlines()
    assert [line.split() for line in shown] == [line.split() for line in lines]


def test_long_names_in_the_heading_facts_and_lists_break_after_separators() -> None:
    path = "very_long_folder_name/of_a_project_with_long_names/train.py:4"
    content = Content("", f"overflow in {path}", [("line", path, "a note")], [Listing("Why", [f"See {path}."])])
    assert terminal.to_text(content, 40).split("\n")[1:] == [
        "overflow in very_long_folder_name/",
        "of_a_project_with_long_names/train.py:4",
        "",
        "line  very_long_folder_name/",
        "      of_a_project_with_long_names/",
        "      train.py:4 (a note)",
        "",
        "Why",
        "  See very_long_folder_name/",
        "  of_a_project_with_long_names/train.",
        "  py:4.",
    ]


def test_on_a_narrow_terminal_rows_of_one_name_have_one_heading() -> None:
    rows = [("square", "float16 -> float32"), ("square", "float32"), ("mul", "float32")]
    lines = terminal.to_text(Table("", [Column("op", "name"), "dtypes"], rows), 20).splitlines()
    assert [line.strip() for line in lines] == [
        "op square",
        *("dtypes float16 ->", "float32", "dtypes float32"),
        "op mul",
        "dtypes float32",
    ]


@pytest.mark.parametrize("width", range(20, 60))
def test_a_dtype_and_what_it_becomes_are_on_one_line(width: int) -> None:
    columns = Column("cast", "dtypes"), Column("module", "name"), "casts"
    table = Table("", columns, [("float32 -> float16", "layers.0.mlp", 4), ("float16 -> float32", "(model)", 4)])
    text = terminal.to_text(table, width)
    assert "fp32 -> fp16" in text
    assert "fp16 -> fp32" in text


def test_the_page_is_balanced_escaped_and_loads_nothing() -> None:
    text = page.render(example().content())
    found = Tags(text)
    assert not found.open
    assert not found.loaded
    assert len(found.ids) == len(set(found.ids))
    assert "of &lt;all&gt; parts" in text
    for shown in ("softmax_", "note 11", "blocks", "float32 island", '"aten::mm" = "fp32"', "tolerance $1", "$exp$"):
        assert shown in found.text, shown
    assert text.count("<svg") == 5


@pytest.mark.parametrize("where", ["title", "cell", "label", "path", "line", "code"])
def test_names_cannot_become_markup(where: str) -> None:
    def tags(text: str) -> list[str]:
        texts = dict.fromkeys(("title", "cell", "label", "path", "line", "code"), "plain") | {where: text}
        parts = (
            Table(texts["title"], [Column(texts["label"], "name"), "b"], [(texts["cell"], {texts["cell"]: 2, "c": 1})]),
            Tree("tree", (Column("calls", "count"),), [Branch(texts["path"], (1,), ({"float32": 1},), text, text)]),
            Listing("lines", [texts["line"]]),
            Code("code", texts["code"]),
            Chart("chart", "bars", [Series(texts["label"], [1.0])], labels=[texts["label"]]),
        )
        return Tags(page.render(Content(texts["title"], texts["line"], [(texts["label"], texts["cell"])], parts))).tags

    nasty = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>&amp;"
    assert {*tags(nasty)} - {"wbr"} == {*tags("plain")}
    assert tags(nasty).count("script") == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("blocks.1.down", ["blocks.1.down"]),  # short enough for a column of any width
        ("model.decoder.layers.11.encoder_attn", ["model.", "decoder.", "layers.", "11.", "encoder_attn"]),
        ("aten::native_layer_norm_backward", ["aten::", "native_layer_norm_backward"]),
        ("/home/very_long_folder/train.py:41", ["/home/", "very_long_folder/", "train.", "py:41"]),
        ("_scaled_dot_product_flash_attention", ["_scaled_", "dot_", "product_", "flash_", "attention"]),
        ("x" * 60, ["x" * 28, "x" * 28, "xxxx"]),
        ("<b>." + "y" * 30, ["&lt;b&gt;.", "y" * 28, "yy"]),
    ],
)
def test_a_long_name_breaks_between_its_words(name: str, parts: list[str]) -> None:
    table, code = Table("", [Column("op", "name")], [(name,)]), Code("", name)
    text = page.render(Content("", f"in {name}", [("op", name)], [table, code]))
    shown = "<wbr>".join(parts)
    assert text.count(f"<code>{shown}</code>") == 2
    assert f">in {shown}</h1>" in text
    assert f"<b>{shown}</b>" in text


@pytest.mark.parametrize(
    ("facts", "lists"),
    [
        ([("casts", "12"), ("overflows", "square in blocks.1.norm")], ["tiles", "facts"]),
        (
            [("casts", "12"), ("inf", "4 of 9", "first: aten::square, forward, norm, train.py:11, step 0: 0.4 % inf")],
            ["tiles", "facts"],
        ),
        ([("overflows", "square in blocks.1.norm"), ("casts", "12")], ["facts", "tiles"]),
        ([("casts", "12"), ("ops", "aten::linear, aten::mm"), ("dtypes", "float32 -> float16")], ["facts"]),
        ([("casts", "12")], ["tiles"]),
        ([("op", "aten::square"), ("module", "blocks.1.norm"), ("checked calls", "53")], ["facts"]),
        ([("op", "mm"), ("module", "blocks.0"), ("line", "a.py:4"), ("policy", "none"), ("calls", "53")], ["facts"]),
        ([("runs", "20 of 60"), ("error", "inf"), ("proved", "minimum"), ("torch", "2.13.0")], ["tiles", "facts"]),
        ([("bytes", "1.5 KiB"), ("error", "1.2e-5"), ("time", "< 0.1 %"), ("results", "73 % bfloat16")], ["tiles"]),
        ([], []),
    ],
)
def test_numbers_are_tiles_and_words_are_rows(facts: list[base.Fact], lists: list[str]) -> None:
    text = page.render(Content("", "", facts))
    assert re.findall('<dl class="(.*?)">', text) == lists
    assert text.count("<dt>") == len(facts)


def test_bars_have_a_legend() -> None:
    legends = re.findall('<p class="legend">(.*?)</p>', page.render(example().content()), re.DOTALL)
    of_dtypes, of_heat = (Tags(f"<p>{legend}</p>").text for legend in legends)
    assert of_dtypes == "float32bfloat16"
    assert of_heat == "smalllarge, on a logarithmic scale"
    infinite = Tree("t", [Column("error")], [Branch("a", (INF,), ({"heat": 1.5},))], ["error"])
    assert "heat infinite" in page.render(Content("", "", parts=[infinite])).partition('class="legend"')[2]


@pytest.mark.parametrize("kind", ["bars", "stacked", "scatter", "histograms"])
def test_texts_of_charts_do_not_collide(kind: Any) -> None:
    """Neither in the image of a page nor in a plot: legends, titles, notes, and names of axes and lines."""
    numbers = [0.0, 1.0, 2.0, 3.0]
    names = "float32", "float16", "bfloat16"
    series = [
        Series(name, [9.0, 4.0, 2.0, 9.0], numbers, name, note="< 0.1 % become 0, 20 % subnormal") for name in names
    ]
    labels = [f"model.decoder.layers.{number}.encoder_attn.out_proj" for number in range(4)] * (kind == "bars")
    chart = Chart("A title", kind, series, labels, x_label="call", spans=[("float16", 0, 2), ("float32", 2, 4)])
    for figure in (plot.draw([chart]), plot._figure_of_page(chart)):
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_window_extent().width]
        assert len(boxes) > 6
        bad = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.shrunk(0.98, 0.9).overlaps(other)]
        assert bad == []


def test_charts_in_the_page_take_its_colours() -> None:
    for chart in (part for part in example().content().parts if isinstance(part, Chart)):
        svg = plot.to_svg(chart)
        xml.etree.ElementTree.fromstring(svg.replace("xlink:href", "href"))
        assert "currentColor" in svg
        assert "#1f2933" not in svg
        assert svg == plot.to_svg(chart), "the same in each run"


def test_dtypes_that_repeat_are_shown_once() -> None:
    assert base.spell("float32 -> bfloat16 -> bfloat16; 1 more", "dtypes") == "fp32 -> bf16; 1 more"


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (12, "bytes", "12 B"),
        (1536, "bytes", "1.5 KiB"),
        (52_428_800, "bytes", "50 MiB"),
        (1200, "count", "1,200"),
        ("/home/a/train.py:41", "line", "train.py:41"),
        ({"float32, int64 -> bfloat16": 3, "float32": 1}, "dtypes", "fp32 -> bf16; 1 more"),
        (1 / 3, "percent", "33 %"),
        (1 / 300, "percent", "0.3 %"),
        (1 / 9000, "percent", "< 0.1 %"),
        (0.0, "percent", "0 %"),
        (0.0, "number", "0"),
        (1.2e-5, "number", "1.2e-5"),
        (0.0123, "number", "0.012"),
        (1234.5, "number", "1234"),
        (3e7, "number", "3e+7"),
        (math.inf, "number", "inf"),
    ],
)
def test_a_value_is_written_as_its_column_says(value: base.Cell, kind: base.Kind, text: str) -> None:
    assert base.spell(value, kind) == text


def test_a_heat_map_has_a_colour_beyond_the_scale_for_infinity() -> None:
    assert base.heat_shares([1e-3, 1.0, math.inf, 0.0]) == [0.05, 1.0, 1.5, 0.0]
    assert base.heat_shares([math.inf, math.nan]) == [1.5, 0.0]


def test_plot_draws_the_charts_and_shows_itself_in_a_notebook() -> None:
    figure = example().plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Bars", "Heat map", "Trials", "Over time"]
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_module_that_only_contains_others_is_in_the_tree() -> None:
    branches = [Branch(path, (), ()) for path in ("blocks.0", "blocks.1", "head")]
    nodes, left_out = page.nodes_of(Tree("", (), branches))
    assert [(node.path, [child.name for child in node.children]) for node in nodes] == [
        ("blocks", ["0", "1"]),
        ("head", []),
    ]
    assert left_out == 0


def test_an_empty_report_has_all_forms() -> None:
    empty = Example()
    assert "An error" in str(empty)
    assert "<svg" in page.render(empty.content())
    assert empty.plot().axes


@pytest.mark.parametrize("value", [example(), Example()], ids=["full", "empty"])
def test_a_report_can_be_saved_and_loaded(value: Example, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    value.save(file)
    loaded = Example.load(file)
    assert encode(loaded) == encode(value)
    assert loaded.rows == value.rows
    assert loaded.policy == value.policy


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (float, "much"),
        (float, True),
        (int, 1.5),
        (int, True),
        (str, 1),
        (torch.dtype, "ones"),
        (tuple[str, ...], "text"),
        (tuple[str, int], ["a"]),
        (Row, {"name": "mm"}),
        (int | None, "1"),
    ],
)
def test_decode_rejects(kind: object, data: object) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        decode(kind, data)


def test_an_error_of_decode_knows_its_place() -> None:
    with pytest.raises(TypeError, match=r"expected int, got '2'") as error:
        decode_record({"sites": list[int]}, {"sites": [1, "2"], "more": None})
    assert place_of(error.value) == "sites[1]"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", None, "Legal: .html (a page), .json (to read it again)"),
        ("none/a.json", None, "there is no folder"),
        ("a.json", "{", "it is not JSON"),
        ("a.json", '{"min": NaN}', "it is not JSON (JSON has no NaN)"),
        ("a.json", "[1]", 'its "format" is None'),
        ("a.json", '{"format": "torch_promote example", "version": 7}', "its version is 7"),
        ("a.json", '{"format": "torch_promote example", "version": 1}', "it is incomplete or was changed"),
        ("b.json", None, os.strerror(errno.ENOENT)),
    ],
)
def test_errors_of_files(name: str, content: str | None, error: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError) as raised:
        Example.load(file) if content is not None or name == "b.json" else Example().save(file)
    assert error in str(raised.value)


def test_a_missing_package_is_named_and_a_notebook_gets_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "torch_promote.report.page")
    with pytest.raises(MissingPackageError, match="jinja2 is not installed: pip install"):
        base.load_renderer("page")
    assert example()._repr_html_().startswith("<pre>example: of &lt;all&gt; parts")


def test_import_does_not_load_the_packages_of_the_renderers() -> None:
    code = "import sys, torch_promote; print(sorted({'rich', 'jinja2', 'matplotlib'} & set(sys.modules)))"
    assert output_of(code) == "[]\n"


def test_a_wheel_has_the_files_of_the_pages() -> None:
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = {path.name for path in (root / "torch_promote" / "report").glob("*.*") if path.suffix != ".py"}
    assert set(data["torch_promote.report"]) == files
