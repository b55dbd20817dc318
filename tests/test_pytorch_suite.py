"""`make test-pytorch` (tests/pytorch_suite/): the selection of tests, the comparison, and the whole command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).with_name("pytorch_suite")


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the folder, by their names."""
    monkeypatch.syspath_prepend(str(FOLDER))

    class Modules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(name)

    return Modules()


# --- the choice of tests


CHOICE = """
import torch
def opens(): return torch.autocast("cpu")
def plain(): pass
class Region: kind = torch.autocast
class TestA:
    def _run(self): opens()
    def setUp(self): opens()
    def test_direct(self):
        with torch.autocast("cpu"): pass
    def test_by_function(self): opens()
    def test_by_method(self): self._run()
    def test_by_class(self): Region()
    def test_custom(self): torch.amp.custom_fwd()
    def test_nested_name(self):
        def opens_not(): plain()
    @skip("autocast is absent")
    def test_decorated(self): pass
    def test_in_data(self): self.AUTOCAST_TESTS
    def test_other(self): plain()
    def test_of_a_class_of_tests(self): isinstance(self, TestA)
def test_function(): opens()
"""


def test_tests_are_chosen_that_mention_autocast_or_use_what_does(suite: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(CHOICE)
    chosen = {"by_class", "by_function", "by_method", "custom", "decorated", "direct", "function", "in_data"}
    assert suite.selection.chosen_tests(file) == sorted(f"test_{name}" for name in chosen)


def test_a_file_about_autocast_is_taken_whole(suite: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_jit_autocast.py"
    file.write_text(CHOICE)
    assert suite.selection.chosen_tests(file) is None
    (tmp_path / "test_b.py").write_text("import math")
    assert list(suite.selection.files_about_autocast(tmp_path)) == ["test_jit_autocast.py"]


@pytest.mark.parametrize(
    ("name", "is_chosen"),
    [
        ("test_amp", True),
        ("test_amp_cpu_float32", True),
        ("test_amp[cpu]", True),
        ("test_ampere", False),
        ("test_am", False),
    ],
)
def test_what_pytorch_appends_to_a_name_is_passed_over(suite: Any, name: str, is_chosen: bool) -> None:
    assert suite.recording_plugin.is_chosen(name, ["test_amp"]) == is_chosen
    assert suite.recording_plugin.is_chosen(name, None)


# --- names that the installed PyTorch lacks


OLD_AMP = """
GONE = False
try:
    import math
    GONE = math.pi > 3 and autocast is not None
except ImportError: pass
USES_GONE = not GONE
def gone_function(): return autocast
autocast = "not the installed one"
"""


def test_a_name_that_pytorch_no_longer_has_comes_from_the_sources(suite: Any, tmp_path: Path) -> None:
    import torch

    (tmp_path / "test").mkdir()
    (tmp_path / "torch" / "amp").mkdir(parents=True)
    (tmp_path / "torch" / "amp" / "__init__.py").write_text(OLD_AMP)
    test = {"__file__": str(tmp_path / "test" / "test_a.py")}
    program = "from torch.amp import GONE, USES_GONE, autocast as kept"
    with suite.names_of_sources.names_from(tmp_path) as taken:
        exec(program, test)
        assert (test["GONE"], test["USES_GONE"], test["kept"]) == (True, False, torch.amp.autocast)
        assert taken == {"torch.amp.GONE", "torch.amp.USES_GONE"}
        assert not hasattr(torch.amp, "GONE")
        with pytest.raises(ImportError, match="never"):
            exec("from torch.amp import never", test)
        with pytest.raises(ImportError, match="GONE"):  # a file outside of the sources
            exec(program, {"__file__": __file__})
    with pytest.raises(ImportError, match="GONE"):
        exec(program, test)


def test_a_function_of_the_sources_has_the_globals_of_the_installed_module(suite: Any, tmp_path: Path) -> None:
    import torch

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "amp.py").write_text(OLD_AMP)
    test = {"__file__": str(tmp_path / "test_a.py")}
    with suite.names_of_sources.names_from(tmp_path):
        exec("from torch.amp import gone_function", test)
    assert test["gone_function"]() is torch.amp.autocast


# --- the record


def record(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


PASSED = {"test": "a", "outcome": "passed", "message": "", "opened": 2, "on_key": 1}


def test_a_test_that_starts_and_does_not_end_failed(suite: Any, tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_text(record({"test": "a", "outcome": "started"}, PASSED, {"test": "b", "outcome": "started"}))
    outcome = suite.running.Outcome
    outcomes, is_whole = suite.running.read(file, "died", {})
    assert outcomes == {"a": outcome("passed", opened=2, on_key=1), "b": outcome("failed", "died")}
    assert not is_whole
    file.write_text(file.read_text() + record({"test": "c", "outcome": "started"}))
    outcomes, _ = suite.running.read(file, "died again", outcomes)
    assert [outcome.message for outcome in outcomes.values()] == ["", "died", "died again"]


@pytest.mark.parametrize(("lines", "is_whole"), [([PASSED, {"end": True}], True), ([{"end": True}, PASSED], False)])
def test_a_record_is_whole_if_the_last_process_ended(
    suite: Any, tmp_path: Path, lines: list[dict[str, Any]], is_whole: bool
) -> None:
    file = tmp_path / "record"
    file.write_text(record(*lines))
    outcomes, found = suite.running.read(file, "died", {})
    assert (list(outcomes), found) == (["a"], is_whole)
    assert suite.running.read(tmp_path / "missing", "died", {}) == ({}, False)


# --- the comparison


@pytest.mark.parametrize(
    ("stock", "ours", "verdict", "is_wrong", "is_wrong_if_explained"),
    [
        ("passed", "passed", "same", False, True),  # explained, and passes: the explanation is stale
        ("skipped", "skipped", "same", False, False),
        ("xfailed", "xfailed", "same", False, True),
        ("failed", "failed", "fails under both", False, False),
        ("passed", "failed", "fails only under ours", True, False),
        ("skipped", "failed", "fails only under ours", True, False),
        ("failed", "passed", "passes only under ours", False, True),
        ("passed", "skipped", "skipped under one", True, True),
        ("passed", None, "not run under one", True, True),
        (None, "failed", "not run under one", True, True),
    ],
)
def test_the_verdict_on_a_test(
    suite: Any, stock: str | None, ours: str | None, verdict: str, is_wrong: bool, is_wrong_if_explained: bool
) -> None:
    outcomes = [{"a": suite.running.Outcome(kind)} if kind else {} for kind in (stock, ours)]
    explanation = {"a": suite.comparison.Explanation("why", "row")}
    for explained, expected in (({}, is_wrong), (explanation, is_wrong_if_explained)):
        (result,) = suite.comparison.compare(*outcomes, explained)
        assert (result.verdict, result.is_wrong) == (verdict, expected)
    assert verdict in suite.comparison.VERDICTS


def test_the_list_of_explained_tests_is_valid(suite: Any) -> None:
    suite.comparison.read_explanations(FOLDER / "explained.toml")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[[test]]\nid = "a"\nreason = "why"', "keys id, reason and row, not id, reason"),
        (
            '[[test]]\nid = "a"\nreason = "why"\nrow = "No such row"',
            "no row or item of page.md begins with 'No such row'",
        ),
        ('[[test]]\nid = "a"\nreason = "why"\nrow = "A row"\n' * 2, "lists a twice"),
    ],
)
def test_an_explanation_names_a_row_of_the_page(suite: Any, tmp_path: Path, text: str, error: str) -> None:
    page, listed = tmp_path / "page.md", tmp_path / "explained.toml"
    page.write_text("| A row of a table | stock |\n- An item of a list\n")
    listed.write_text(text)
    with pytest.raises(ValueError, match=error):
        suite.comparison.read_explanations(listed, page)
    listed.write_text(
        '[[test]]\nid = "a"\nreason = "why"\nrow = "A row of"\n[[test]]\nid = "b"\nreason = ""\nrow = "An item"'
    )
    assert list(suite.comparison.read_explanations(listed, page)) == ["a", "b"]


# --- the report


def test_the_report(suite: Any) -> None:
    import io

    from rich.console import Console

    outcome, explanation = suite.running.Outcome, suite.comparison.Explanation("a graph's text", "A row")
    stock = {"a": outcome("passed"), "b": outcome("passed"), "c": outcome("skipped", "no GPU")}
    ours = {"a": outcome("passed", opened=3), "b": outcome("failed", "AssertionError: [1]", opened=1), "c": stock["c"]}
    results = suite.comparison.compare(stock, ours, {"a": explanation})
    text = io.StringIO()
    suite.report.show(Console(file=text, width=140), {"test_x.py": results}, ["These sources lack test_y.py."])
    shown = text.getvalue()
    assert "│ test_x.py │     3 │      1 │    2 │                     1 │       4 │" in shown
    assert "fails only under ours: b\n    stock: passed\n    ours: failed AssertionError: [1]\n" in shown
    assert "It passes: remove it from explained.toml." in shown
    assert "These sources lack test_y.py." in shown
    values = suite.report.as_json("2.13.0", {"test_x.py": results}, [])
    assert (values["tests"], values["regions"], values["verdicts"]) == (3, 4, {"same": 2, "fails only under ours": 1})
    assert [one["wrong"] for one in values["files"]["test_x.py"]] == [True, True, False]
    json.dumps(values)


# --- the command


SOURCES = """
import os, unittest
import torch
from torch.testing._internal.common_utils import TestCase

KEY = torch._C._parse_dispatch_key("AutocastPrivateUse1")

class TestRegions(TestCase):
    def test_same(self):
        with torch.autocast("cpu"):
            self.assertEqual((torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.bfloat16)
    def test_both(self):
        self.fail("wrong")
    def test_on_stocks_key(self):
        with torch.autocast("cpu"):
            self.assertFalse(torch._C._dispatch_tls_is_dispatch_key_included(KEY))
    @unittest.skip("no GPU")
    def test_skipped(self):
        pass
    def test_kills_the_process(self):
        with torch.autocast("cpu"):
            if torch._C._dispatch_tls_is_dispatch_key_included(KEY):
                os._exit(3)
    def test_later(self):
        pass
"""
BEGINNING = "test_toy_autocast.py::TestRegions::test_"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def sources(folder: Path) -> Path:
    (folder / "test").mkdir()
    (folder / "test" / "test_toy_autocast.py").write_text(SOURCES)
    (folder / "version.txt").write_text("1.0.0a0\n")
    return folder


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "results.json"
    folder = sources(tmp_path)
    (folder / "test" / "test_plain.py").write_text("def test_plain(): pass")
    process = run(folder, "--only", "test_toy_autocast.py", "test_plain.py", "test_none.py", "--json", page)
    assert process.returncode == 1, process.stderr
    assert "These sources lack test_none.py." in process.stdout
    assert "test_plain.py has no test to run here." in process.stdout
    assert "The tests are those of 1.0.0a0" in process.stdout
    values = json.loads(page.read_text())
    found = {
        one["test"].removeprefix(BEGINNING): (one["verdict"], one["ours"]["opened"], one["ours"]["on_key"])
        for one in values["files"]["test_toy_autocast.py"]
    }
    assert found == {
        "same": ("same", 1, 1),
        "both": ("fails under both", 0, 0),
        "on_stocks_key": ("fails only under ours", 1, 1),
        "skipped": ("same", 0, 0),
        "kills_the_process": ("fails only under ours", 0, 0),
        "later": ("same", 0, 0),
    }
    assert "the process died with exit status 3" in process.stdout


def test_a_file_that_no_test_of_runs_failed(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.running, "_run", lambda *_: "the process died with exit status 4")
    run = suite.running.Run(tmp_path, tmp_path, 20, False)
    (outcome,) = suite.running.run_file(run, "a/test_b.py", None, None).items()
    log = tmp_path / "a.test_b.stock.log"
    assert outcome == (
        "a/test_b.py",
        suite.running.Outcome("failed", f"the process died with exit status 4: see {log}"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("test", "status"), [("test_same", 0), ("test_skipped", 1)])
def test_the_command_passes_if_all_tests_end_alike_and_a_region_is_ours(tmp_path: Path, test: str, status: int) -> None:
    process = run(sources(tmp_path), "--only", "test_toy_autocast.py", "-k", test)
    assert process.returncode == status, process.stdout
    assert ("No region of torch.autocast became one of ours" in process.stdout) == (status == 1)


def test_without_sources_the_command_says_how_to_get_them(tmp_path: Path) -> None:
    for arguments in ((), (tmp_path,)):
        process = run(*arguments)
        assert process.returncode == 2
        assert "git clone --depth 1 --branch v" in process.stderr
    (tmp_path / "test").mkdir()
    process = run(tmp_path, "--only", "test_none.py")
    assert (process.returncode, "These sources lack test_none.py." in process.stderr) == (2, True)
