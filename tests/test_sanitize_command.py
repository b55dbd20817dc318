"""`make sanitize` (tests/sanitizers/): its reading of reports, its copy of the checkout, its lists and exit status."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.source_copies import copy_sources
from helpers.subprocesses import environment

TESTS = Path(__file__).parent
FOLDER = TESTS / "sanitizers"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("building", "planted", "reports", "suites")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


RACE = """\
==================
WARNING: ThreadSanitizer: data race (pid=17600)
  Write of size 1 at 0x7b5000027220 by thread T2:
    #0 torch::autograd::Node::f() const /site/torch/include/torch/csrc/autograd/node.h:393 (_C.so+0x82739)
    #1 CastBackward /checkout/csrc/cast/cast.cpp:88 (_C.so+0x82739)
    #2 at::_ops::linear::call(at::Tensor const&) <null> (libtorch_cpu.so+0x26fbb9f)

  Previous write of size 1 at 0x7b5000027220 by thread T19:
    #0 other /checkout/csrc/cast/other.cpp:1 (_C.so+0x82739)

SUMMARY: ThreadSanitizer: data race /site/torch/include/torch/csrc/autograd/node.h:393 in f
==================
"""
USE_AFTER_FREE = """\
=================================================================
==77==ERROR: AddressSanitizer: heap-use-after-free on address 0x602000000010 at pc 0x7f bp 0x7f sp 0x7f
READ of size 8 at 0x602000000010 thread T0
    #0 0x7f12 in std::mutex::lock() /usr/include/c++/12/bits/std_mutex.h:100
    #1 0x7f13 in torch_promote::f(int) csrc_of_another/csrc/x.cpp:1
    #2 0x7f14 in torch_promote::clear_persistent() /checkout/csrc/cache/persistent_cache.cpp:186

SUMMARY: AddressSanitizer: heap-use-after-free /usr/include/c++/12/bits/std_mutex.h:100 in std::mutex::lock()
"""
LEAKS = """\
=================================================================
==78==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 64 byte(s) in 1 object(s) allocated from:
    #0 0x7f12 in operator new(unsigned long) ../../src/asan_new_delete.cpp:95
    #1 0x7f13 in make /checkout/csrc/cache/weight_casts.cpp:40

Direct leak of 99 byte(s) in 1 object(s) allocated from:
    #0 0x7f12 in malloc ../../src/asan_malloc_linux.cpp:69
    #1 0x7f13 in PyObject_Malloc Objects/obmalloc.c:685

SUMMARY: AddressSanitizer: 163 byte(s) leaked in 2 allocation(s).
"""
UNDEFINED = """\
/checkout/tests/cuda_stand_in/graphs.cpp:12:7: runtime error: signed integer overflow: 1 + 2 cannot be represented
    #0 0x7f12 in replay(long) /checkout/tests/cuda_stand_in/graphs.cpp:12
"""
DIED = "ThreadSanitizer:DEADLYSIGNAL\n==9==ERROR: ThreadSanitizer: SEGV on unknown address 0x0 (pc 0x1 T9)\n"

FOUND = {
    "race": (RACE, "data race", "csrc/cast/cast.cpp:88 CastBackward"),
    "use after free": (
        USE_AFTER_FREE,
        "heap-use-after-free",
        "csrc/cache/persistent_cache.cpp:186 torch_promote::clear_persistent()",
    ),
    "leak": (LEAKS, "Direct leak", "csrc/cache/weight_casts.cpp:40 make"),
    "undefined": (
        UNDEFINED,
        "signed integer overflow: 1 + 2 cannot be represented",
        "tests/cuda_stand_in/graphs.cpp:12 replay(long)",
    ),
    "signal": (DIED, "SEGV", "no stack"),
}


@pytest.mark.parametrize("name", FOUND)
def test_reports_are_read(modules: SimpleNamespace, tmp_path: Path, name: str) -> None:
    text, kind, place = FOUND[name]
    (tmp_path / "log.77").write_text(text, encoding="utf-8")
    (report,) = modules.reports.counted(modules.reports.read(tmp_path))
    assert (report.kind, report.place, report.log) == (kind, place, "log.77")


def test_the_reports_of_all_processes_are_read(modules: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "tsan.1").write_text(RACE + RACE, encoding="utf-8")
    (tmp_path / "tsan.2").write_text(RACE, encoding="utf-8")
    assert len(list(modules.reports.counted(modules.reports.read(tmp_path)))) == 3


def test_leaks_of_others_do_not_count(modules: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "asan.1").write_text(LEAKS, encoding="utf-8")
    reports = modules.reports.read(tmp_path)
    assert [report.ours for report in reports] == [True, False]
    assert "PyObject_Malloc" in reports[1].text


def test_a_file_without_reports(modules: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "asan.1").write_text("==1==WARNING: Can't read from symbolizer at fd 5\n", encoding="utf-8")
    assert modules.reports.read(tmp_path) == []


def test_a_race_of_others_counts(modules: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "tsan.1").write_text(RACE.replace("checkout/csrc", "elsewhere/src"), encoding="utf-8")
    (report,) = modules.reports.counted(modules.reports.read(tmp_path))
    assert not report.ours
    assert report.place.startswith("torch::autograd::Node::f() const ")


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_planted_bugs_fit_the_sources(modules: SimpleNamespace, sanitizer: str, tmp_path: Path) -> None:
    copy_sources(TESTS.parent, tmp_path)
    for bug in modules.planted.PLANTED[sanitizer]:
        modules.planted.plant(bug, tmp_path)
        assert exists(bug.test)
        assert (tmp_path / bug.file).read_bytes() != (TESTS.parent / bug.file).read_bytes()


def test_a_planted_bug_without_a_report_is_undetected(modules: SimpleNamespace) -> None:
    bugs = modules.planted.PLANTED["thread"]
    reports = [modules.reports.Report(bug.kind, "", True, f"#0 {bug.within}(int)", "tsan.1") for bug in bugs]
    assert modules.planted.undetected("thread", reports) == []
    assert modules.planted.undetected("thread", reports[1:]) == [bugs[0]]
    assert modules.planted.undetected("thread", []) == list(bugs)


def exists(test: str) -> bool:
    """Whether there is such a test: its file, and the function's name in it."""
    file, _, name = test.partition("::")
    text = (TESTS.parent / file).read_text(encoding="utf-8")
    return f"def {name.partition('[')[0]}(" in text if name else True


def test_the_lists_name_tests_that_exist(modules: SimpleNamespace) -> None:
    for sanitizer, folders in modules.suites.FOLDERS.items():
        assert sanitizer in modules.building.FLAGS
        assert all((TESTS / folder).is_dir() for folder in folders)
        for entry in modules.suites.excluded(sanitizer):
            assert exists(entry.tests), entry
            assert len(entry.reason.split()) > 5


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_each_suppression_has_its_reason(sanitizer: str) -> None:
    lines = (FOLDER / f"{sanitizer}.supp").read_text(encoding="utf-8").splitlines()
    suppressions = [at for at, line in enumerate(lines) if line and not line.startswith("#")]
    assert suppressions
    assert all(lines[at - 1].startswith("# ") for at in suppressions)


def outcome_of(suites: ModuleType, folder: Path, cases: str, status: int | None) -> Any:
    results = folder / "cache.xml"
    results.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    return suites._outcome("cache", results, status, 1.0)


@pytest.mark.parametrize(
    ("cases", "status", "failures"),
    [
        ('<testcase classname="a" name="b"/>', 0, []),
        ('<testcase classname="a" name="b"><failure/></testcase>', 1, ["a::b"]),
        ('<testcase classname="a" name="b"/>', -11, ["pytest ended with status -11"]),
        ('<testcase classname="a" name="b"/>', 1, ["pytest ended with status 1"]),
        ("", 5, ["no test ran"]),
        ("", None, ["it reached its time limit"]),
    ],
)
def test_what_counts_as_failed(
    modules: SimpleNamespace, tmp_path: Path, cases: str, status: int | None, failures: list[str]
) -> None:
    assert outcome_of(modules.suites, tmp_path, cases, status).failures == failures


def test_a_pytest_that_writes_no_results_failed(modules: SimpleNamespace, tmp_path: Path) -> None:
    """AddressSanitizer ends a process with status 0, because the leaks of Python would fail every process."""
    outcome = modules.suites._outcome("cache", tmp_path / "cache.xml", 0, 1.0)
    assert outcome.failures == ["pytest wrote no results and ended with status 0"]


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, os.fspath(FOLDER), *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_what_cpp_writes_to_stderr_is_a_report(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "/home/me/csrc/cache/entry.cpp:1:2: runtime error: signed integer overflow: 1 + 2"
    test = tmp_path / "test_one.py"
    test.write_text(f"import os\ndef test_it(): os.write(2, b'{line}\\n')\n", encoding="utf-8")
    (tmp_path / "out" / "reports").mkdir(parents=True)
    monkeypatch.setattr(modules.suites, "environment", lambda *_: dict(os.environ))
    outcome = modules.suites.run("address", "one", [str(test)], tmp_path, tmp_path / "out", 60)
    assert (outcome.counts["passed"], outcome.failures) == (1, [])
    (report,) = modules.reports.counted(modules.reports.read(tmp_path / "out" / "reports"))
    assert report.kind.startswith("signed integer overflow")
    assert (report.place, report.log) == ("csrc/cache/entry.cpp:1", "stderr.one")


def test_without_a_compiler_the_command_says_what_to_do(tmp_path: Path) -> None:
    done = command("address", "--out", os.fspath(tmp_path), PATH=os.fspath(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sanitize: error: there is no g++. Install it.\n"


def test_the_help() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "--planted" in done.stdout
    assert command("address", "tests/cache", "--planted").returncode == 2
