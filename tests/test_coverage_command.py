"""`make coverage` (tests/line_coverage/): what it copies, what it counts, and its report."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "line_coverage"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def report() -> ModuleType:
    return importlib.import_module("coverage_report")


def test_the_report(report: ModuleType) -> None:
    def lines(file: str, executed: range, *lacking: int, left_out: tuple[int, ...] = ()) -> object:
        return report.Lines(file, frozenset(executed), frozenset(lacking), frozenset(left_out))

    files = [
        lines("package/__init__.py", range(1, 10)),
        lines("package/room/deep/one.py", range(1, 1000), 1000, left_out=(2000, 2001)),
        lines("package/room/two.py", range(0)),
        lines("csrc/room/one.h", range(1, 4), 4, 6, 5, 9),
    ]
    assert report.draw(files).splitlines() == [
        "folder        files  lines  executed  not executed  left out",
        "package           1      9    100.0%             0         0",
        "package/room      2   1000     99.9%             1         2",
        "Python            3   1009     99.9%             1         2",
        "csrc/room         1      7     42.8%             4         0",
        "C++               1      7     42.8%             4         0",
        "",
        "Not executed:",
        "package/room/deep/one.py: 1000",
        "csrc/room/one.h: 4-6, 9",
    ]
    assert report.draw(files[:1]).splitlines()[-1] == "Every line was executed."
    assert json.loads(report.plain(files))[1] == {
        "file": "package/room/deep/one.py",
        "executed": 999,
        "not_executed": [1000],
        "left_out": [2000, 2001],
    }


def test_a_copy_without_a_build_is_an_error(tmp_path: Path) -> None:
    measured_copy = importlib.import_module("measured_copy")
    with pytest.raises(measured_copy.CoverageError, match="has 0 builds of the extension"):
        measured_copy.objects_of(tmp_path)


def test_the_copy_is_a_repository_of_the_copied_files(tmp_path: Path) -> None:
    measured_copy = importlib.import_module("measured_copy")
    for name in (".gitignore", "kept.bak", "built.so", "gone"):
        (tmp_path / name).write_text("*.bak\n*.so\n", encoding="utf-8")
    for names in (["gone", ".gitignore"], [".gitignore", "kept.bak"]):
        measured_copy.make_repository(tmp_path, names)
    listed = subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert listed.stdout.split() == [".gitignore", "kept.bak"]


PROGRAM = """
import ctypes, os, sys, types
from torch_promote import module

library = sys.argv[1]
sys.modules["torch_promote._C"] = types.SimpleNamespace(__file__=library)
try:
    os.execv("/nonexistent", ["nonexistent"])
except FileNotFoundError:
    pass
if os.fork() == 0:
    module.called(ctypes.CDLL(library).called(1))
    os._exit(0)
os.wait()
os.execv(sys.executable, [sys.executable, "-c", "from torch_promote import module; module.called(0)"])
"""
MODULE = """def called(number):
    if number == 7:
        return 1
    if number == 0:
        return 2
    return 3


if False:  # pragma: no cover: reason
    print()
"""
LIBRARY = """// file: two functions
extern "C" {
int called(int number) {
  if (number == 1) {
    return 7;
  }
  return number;
}
int left_out() { // GCOVR_EXCL_LINE: reason
  return 0;
}
}
"""


def test_lines_of_forks_and_replaced_processes_count(tmp_path: Path) -> None:
    for needed in ("coverage", "gcovr"):
        pytest.importorskip(needed, reason="needs the extra `coverage`")
    counted_lines, suite_runs = importlib.import_module("counted_lines"), importlib.import_module("suite_runs")
    copy, out = tmp_path / "copy", tmp_path / "out"
    for folder in (copy / "torch_promote", copy / "csrc", out / "objects"):
        folder.mkdir(parents=True)
    (copy / "torch_promote" / "__init__.py").touch()
    (copy / "torch_promote" / "module.py").write_text(MODULE, encoding="utf-8")
    (copy / "torch_promote" / "unused.py").write_text("a = 1\nb = 2\n", encoding="utf-8")
    (copy / "csrc" / "library.cpp").write_text(LIBRARY, encoding="utf-8")
    library = out / "library.so"
    compiler = ("c++", "-fPIC", "-O0", "--coverage")
    for source, target in ((copy / "csrc" / "library.cpp", "library.o"), (FOLDER / "write_counts.cpp", "write.o")):
        subprocess.run((*compiler, "-c", source, "-o", out / "objects" / target), check=True)
    objects = [out / "objects" / name for name in ("library.o", "write.o")]
    subprocess.run((*compiler, "-shared", *objects, "-o", library), check=True)

    settings = suite_runs.write_settings(copy, out)
    suite_runs.forget_counts(out / "objects", out)
    env = {**os.environ, **suite_runs.variables(copy, settings)}
    env.pop("COVERAGE_PROCESS_CONFIG", None)  # if this test is measured itself
    subprocess.run([sys.executable, "-c", PROGRAM, str(library)], cwd=copy, env=env, check=True)

    python = {one.file: one for one in counted_lines.lines_of_python(copy, settings, out / "html" / "python")}
    module = python["torch_promote/module.py"]
    assert (sorted(module.executed), sorted(module.not_executed)) == ([1, 2, 3, 4, 5], [6])
    assert sorted(module.left_out) == [9, 10]
    assert sorted(python["torch_promote/unused.py"].not_executed) == [1, 2]
    (cpp,) = counted_lines.lines_of_cpp(copy, out / "objects", out / "html" / "cpp")
    assert (cpp.file, sorted(cpp.executed), sorted(cpp.left_out)) == ("csrc/library.cpp", [3, 4, 5], [9])
    assert sorted(cpp.not_executed) == [7, 10]


def test_pytest_waits_for_workers_that_write_counts(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        "from xdist.workermanage import NodeManager\n"
        "def pytest_sessionfinish(): print('waits for', NodeManager.EXIT_TIMEOUT)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "patient_workers", "--rootdir", str(tmp_path), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(FOLDER / "hooks")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "waits for 300" in done.stdout


def test_every_line_that_is_left_out_has_a_reason() -> None:
    marks = re.compile(r"(?:pragma: no cover|GCOVR_EXCL_(?:LINE|START))(.*)")
    sources = [*ROOT.glob("torch_promote/**/*.py"), *ROOT.glob("torch_promote_*.py"), *ROOT.glob("csrc/*/*")]
    reasons = [
        (str(file.relative_to(ROOT)), reason)
        for file in sources
        for reason in marks.findall(file.read_text(encoding="utf-8"))
    ]
    assert [file for file, reason in reasons if not re.fullmatch(r": \w.+", reason)] == []
