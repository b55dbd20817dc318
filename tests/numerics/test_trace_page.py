"""The page of a trace: self-contained, escaped, complete, and readable without scripts."""

from __future__ import annotations

import dataclasses
import html
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.made_up_traces import BF16, info, linear, made_up_call, report_of, small_report
from helpers.parsed_pages import NASTY, Page, assert_escaped, assert_self_contained, without_jinja2, words
from torch_promote.errors import MissingPackageError
from torch_promote.observe.events import CallGroup
from torch_promote.observe.findings import exponent_rows, module_tree
from torch_promote.observe.trace_report import TraceReport, embed_page, make_page

__all__ = ["without_jinja2"]  # a fixture


def test_the_page_has_all_parts_in_its_text() -> None:
    page = Page(make_page(small_report(values=True)))
    parts = {name: words(text) for name, text in page.sections.items()}
    assert [*parts] == ["head", "title", "numbers", "modules", "ops", "casts", "values", "not-seen"]
    assert "Autocast had a policy for 4 of 5 calls and made 5 casts (34 KiB)" in parts["head"]
    assert "torch 2.13.0 1 optimizer step" in parts["head"]
    assert "Calls 5 4 forward, 1 backward Casts 5 1 more from a cache Bytes cast 34 KiB" in parts["numbers"]
    assert "float32 40 % bfloat16 60 %" in parts["numbers"]
    assert "norm float32 island fp32, set by region at /code/train.py:3 1 \N{EN DASH}" in parts["modules"]
    assert "query 2 2 33 KiB" in parts["modules"]
    assert "outside of modules 1 2 32 B" in parts["modules"]
    assert (
        "aten::linear 2 float32 → bfloat16 → bfloat16 3 +1 reused 34 KiB lower_precision_fp PyTorch's table"
        in parts["ops"]
    )
    assert "float32 → bfloat16 [4, 128] 2 casts, 1 KiB again model.py:12 input of aten::linear" in parts["casts"]
    assert "activation, in blocks.0.query , blocks.0.key" in parts["casts"]
    assert 'my_autocast(..., cache="all") 1 cast, 1 KiB These casts of activations would be reused' in parts["casts"]
    assert "aten::mm 1 result, largest 7e+04" in parts["values"]
    assert "In float16: 5 % would overflow , 25 % would be 0, 20 % subnormal." in parts["values"]
    assert "A compiled graph ran 2 times." in parts["not-seen"]


def test_nothing_is_hidden_that_a_script_would_have_to_show() -> None:
    source = make_page(small_report(values=True))
    assert source.count("<script>") == source.count("</script>") == 1
    hidden = re.findall(r"<(\w+)[^>]*\shidden[\s>]", source)
    assert hidden == ["div"]  # the filter, which does nothing without scripts
    assert '<div class="tools" hidden>' in source
    assert "display: none" not in re.sub(
        r"@media[^{]*\{.*?\n\}", "", source.partition("</style>")[0], flags=re.DOTALL
    ).replace(".tools[hidden] { display: none; }", "").replace("summary::-webkit-details-marker { display: none; }", "")


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert_self_contained(make_page(small_report(values=True)))


def test_names_cannot_become_markup() -> None:
    call = linear(f"blocks.{NASTY}", 0, 1)
    call = dataclasses.replace(
        call,
        op=f"{NASTY}::{NASTY}",
        overload=NASTY,
        line=f"/{NASTY}:1",
        said_by=NASTY,
        casts=tuple(dataclasses.replace(cast, argument=NASTY) for cast in call.casts),
        values=small_report(values=True).calls[-1].values,
        composite=False,
    )
    again = dataclasses.replace(call, casts=tuple(dataclasses.replace(cast, earlier=1) for cast in call.casts))
    report = report_of(call, again)
    report.not_seen.append(NASTY)
    report.torch_version = NASTY
    report.device_names.append(NASTY)
    source = make_page(report)
    page = assert_escaped(source, make_page(small_report(values=True)))
    for part in ("head", "modules", "ops", "casts", "values", "not-seen"):
        assert "<script>alert(1)</script>" in page.sections[part], part


def test_a_small_page_and_an_empty_one_are_whole() -> None:
    for report in (report_of(), report_of(made_up_call()), report_of(made_up_call(outputs=(), error=True))):
        page = Page(make_page(report))
        assert {"numbers", "modules", "ops", "casts", "not-seen"} <= page.sections.keys()
        assert "values" not in page.sections


def test_the_page_stays_small_however_much_ran() -> None:
    calls = [
        dataclasses.replace(
            linear(f"model.layers.{number // 4}.mlp.{number % 4}.projection", number, number, number % 2),
            op=f"library::op_{number}",
            line=f"/a/long/path/to/some/project/model_{number}.py:{number}",
        )
        for number in range(2000)
    ]
    source = make_page(report_of(*calls, max_calls=2000))
    assert len(source.encode()) < 2_000_000
    page = Page(source)
    assert "1,400 ops more are not shown" in words(page.sections["ops"])
    assert "modules at the deepest levels are not shown one by one" in words(page.sections["modules"])


def test_a_wheel_has_the_files_of_the_pages() -> None:
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders: dict[str, set[str]] = {}
    for file in (root / "torch_promote" / "numerics").rglob("*.*"):
        if file.suffix not in (".py", ".pyc"):
            folders.setdefault(".".join(file.parent.relative_to(root).parts), set()).add(file.name)
    assert {name: set(files) for name, files in data.items() if name.startswith("torch_promote.numerics")} == folders


def test_in_a_notebook_the_page_is_in_a_frame_of_its_own() -> None:
    source = small_report()._repr_html_()
    page = Page(source)
    assert page.tags == ["iframe"]
    assert dict(page.attributes)["sandbox"] == "allow-scripts"
    assert dict(page.attributes)["srcdoc"] == make_page(small_report())


def test_without_jinja2_the_error_says_what_to_install(without_jinja2: None, tmp_path: Any) -> None:
    with pytest.raises(MissingPackageError, match=r"needs jinja2: pip install jinja2"):
        small_report().save(tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []
    assert embed_page(small_report()) == f"<pre>{html.escape(str(small_report()))}</pre>"


# --- the parts


def test_the_tree_has_the_modules_between_and_marks_the_outermost_islands() -> None:
    norm = made_up_call("aten::native_layer_norm", "", module="a.norms.10")
    other = dataclasses.replace(norm, module="a.norms.2")
    report = report_of(norm, other, linear("a.b", 0, 1), made_up_call())
    tree = module_tree(report.by_module())
    (root,) = tree.nodes
    assert (root.path, root.group.calls, [child.name for child in root.children]) == ("a", 3, ["b", "norms"])
    assert [child.path for child in root.children[1].children] == ["a.norms.2", "a.norms.10"]
    assert (root.children[1].island, [child.island for child in root.children[1].children]) == ("no policy", ["", ""])
    assert (tree.islands, tree.left_out) == (1, 0)
    assert tree.outside is not None


def test_very_deep_modules_are_left_out() -> None:
    tree = module_tree([CallGroup(".".join("m" * 300), calls=1)])
    assert tree.left_out == 250
    assert "250 modules at the deepest levels" in make_page(report_of(made_up_call(module=".".join("m" * 300))))


def test_without_a_lower_precision_there_are_no_islands() -> None:
    report = report_of(made_up_call(module="a"), made_up_call(module="b"))
    assert module_tree(report.by_module()).islands == 0


def test_histograms_leave_out_views_composite_ops_and_results_without_values() -> None:
    values = small_report(values=True).calls[-1].values
    calls = [
        made_up_call("aten::mm", "", values=values),
        made_up_call("aten::view", "", values=values),
        made_up_call("aten::add_", "Tensor", values=values),
        made_up_call("aten::linear", "", composite=True, values=values),
        made_up_call("nobody::knows", "", values=values),
        made_up_call("aten::arange", "", values=(dataclasses.replace(values[0], count=0, exponents=()),)),
    ]
    found = exponent_rows(calls)
    assert found is not None
    assert [row.op for row in found.rows] == ["aten::add_.Tensor", "aten::mm", "nobody::knows"]
    assert (found.rows[0].above, found.rows[0].below, found.rows[0].subnormal) == (0.05, 0.25, 0.2)
    assert found.low <= -30 < 16 < found.low + found.width
    assert exponent_rows([made_up_call()]) is None


def test_an_island_says_which_policy_made_it() -> None:
    page = Page(
        make_page(report_of(linear("a", 0, 1), small_report().calls[0], made_up_call(inputs=(info("x", BF16),))))
    )
    assert "fp32, set by region at /code/train.py:3" in words(page.sections["modules"])


def test_the_page_of_a_traced_step(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with tp.trace(model, values=True) as report:
        with tp.my_autocast("cpu"):
            loss = torch.nn.functional.mse_loss(model(torch.ones(2, 4, 16)), torch.ones(2, 4, 16))
        loss.backward()
    source = make_page(report)
    assert len(source) < 300_000
    parts = {name: words(text) for name, text in Page(source).sections.items()}
    assert words(parts["head"]).endswith("made before.") or "none of them twice." in parts["head"]
    assert "self_attn" in parts["modules"]
    assert "aten::linear" in parts["ops"]
    assert "In float16:" in parts["values"]
    report.save(tmp_path / "run.json")
    assert TraceReport.load(tmp_path / "run.json")._repr_html_() == embed_page(report)


def test_memory_that_nobody_has_written_has_no_histogram() -> None:
    with tp.trace(values=True) as report:
        kept = torch.empty(8), torch.empty_like(torch.ones(8)), torch.ones(8).new_empty(8), torch.zeros(8).exp()
    assert len(kept) == 4
    found = exponent_rows(report.calls)
    assert found is not None
    assert not [row.op for row in found.rows if "empty" in row.op]
    assert "aten::exp" in [row.op for row in found.rows]


def test_a_cell_is_one_box() -> None:
    """On a narrow screen a cell is a grid of its label and one box: a second box would start a new line."""

    class Cells(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.boxes: list[list[str]] = []
            self.depth = 0

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            if tag == "td" and dict(attributes).get("data-label"):
                self.boxes.append([])
                self.depth = 1
            elif self.depth:
                if self.depth == 1:
                    self.boxes[-1].append(tag)
                self.depth += 1

        def handle_endtag(self, tag: str) -> None:
            self.depth -= bool(self.depth)

        def handle_data(self, data: str) -> None:
            if self.depth == 1 and data.strip():
                self.boxes[-1].append(data)

    cells = Cells()
    cells.feed(make_page(small_report()))
    assert len(cells.boxes) > 10
    assert [boxes for boxes in cells.boxes if len(boxes) > 1] == []
