"""Tables and sentences for a given width: every word is whole, nothing is left out, and lines are not too long."""

from __future__ import annotations

from collections import Counter

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torch_promote.text_layout import html_table, lay_out, text_table, wrapped

WIDTHS = [60, 80, 100, 200, None]

words = st.text("ab.:_/-(1", min_size=1, max_size=14)
cells = st.lists(words, max_size=6).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.integers(1, 9))
    header = [f"c{number} {draw(words)}" for number in range(columns)]
    rows = draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), max_size=6))
    return header, rows


def lines_of(*arguments: object, **options: object) -> list[str]:
    return ["".join(piece.text for piece in line) for line in lay_out(*arguments, **options)]  # type: ignore[arg-type]


@given(tables(), st.sampled_from(WIDTHS), st.data())
def test_each_word_of_each_cell_is_whole(
    table: tuple[list[str], list[list[str]]], width: int | None, data: st.DataObject
) -> None:
    header, rows = table
    prose = data.draw(st.sets(st.sampled_from(header)))
    note = data.draw(st.none() | st.sampled_from(header[1:])) if len(header) > 1 else None
    lines = lines_of(header, rows, width, prose=prose, note=note)
    shown = Counter(word for line in lines for word in line.split())
    wanted = Counter(word for row in rows for cell in row for word in cell.split())
    assert wanted <= shown
    assert all(line == line.rstrip() for line in lines)
    if width is not None and note is None:
        # Cells that may not wrap, the labels among them, can be longer than a line.
        longest = max((len(cell) for row in [header, *rows] for cell in row), default=0)
        assert max(map(len, lines), default=0) <= max(width, 2 * longest + 40)


@given(st.lists(words).map(" ".join), st.integers(20, 100))
def test_sentences_break_at_blanks(text: str, width: int) -> None:
    lines = wrapped(text, width, "  ", "    ")
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


HEADER = ("case", "ours / stock", "over hand", "ours", "stock")
ROWS = [
    ("construct, enter, exit", "0.50 (0.48 to 0.52)", "no cost", "4.97 us", "9.90 us"),
    ("an MLP of many small layers", "1.01 (1.00 to 1.02)", "0.33 (0.30 to 0.40)", "12.3 ns", "1.2 ms"),
]


def test_columns_that_do_not_fit_get_a_table_of_their_own() -> None:
    assert_expected_inline(
        "\n".join(lines_of(HEADER, ROWS, 60)),
        """\
case                ours / stock         over hand
construct, enter,   0.50 (0.48 to 0.52)  no cost
  exit
an MLP of many      1.01 (1.00 to 1.02)  0.33 (0.30 to 0.40)
  small layers

case                         ours     stock
construct, enter, exit       4.97 us  9.90 us
an MLP of many small layers  12.3 ns  1.2 ms""",
    )
    assert len(lines_of(HEADER, ROWS)) == 3


def test_a_label_of_one_long_word_stands_above_its_row_and_notes_below() -> None:
    rows = [("binary_cross_entropy_with_logits", "fallthrough", ""), ("mm", "fp32", "calls norm.ScalarOpt_dtype")]
    assert_expected_inline(
        "\n".join(lines_of(("aten op", "cpu", "notes"), rows, 40, note="notes")),
        """\
aten op                      cpu
binary_cross_entropy_with_logits
                             fallthrough
mm                           fp32
  calls norm.ScalarOpt_dtype""",
    )


def test_labels_that_do_not_tell_rows_apart_are_repeated_with_the_next_column() -> None:
    rows = [("linear", "block.0", "1" * 30, "2" * 30), ("linear", "block.1", "3" * 30, "4" * 30)]
    lines = lines_of(("op", "module", "local", "impact"), rows, 60)
    assert [line.split()[:2] for line in lines if line.startswith("linear")] == [
        ["linear", f"block.{i}"] for i in "0101"
    ]


def test_headers_stand_on_the_last_line() -> None:
    assert_expected_inline(
        "\n".join(lines_of(("device", "rows that count"), [("cpu", "127")], 14)),
        """\
        rows
        that
device  count
cpu     127""",
    )


def test_columns_of_numbers_are_flush_right() -> None:
    assert text_table(["op", "n"], [["mm", "1,200"], ["exp", "-"]]).splitlines()[2] == "exp      -"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_one_cell_is_a_line_across(width: int | None) -> None:
    assert lines_of(("a", "b"), [("a title across all columns",), ("1", "2")], width)[1] == "a title across all columns"


def test_html_is_escaped() -> None:
    text = html_table(["<a>"], [["<b>"], ["&"]], "<c>", "<d>")
    assert "&lt;a&gt;" in text
    assert "&lt;b&gt;" in text
    assert "&amp;" in text
    assert "&lt;c&gt;" in text
    assert "&lt;d&gt;" in text
