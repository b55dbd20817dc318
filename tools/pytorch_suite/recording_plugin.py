"""The pytest plugin of `make test-pytorch`: installs, selects the tests, and records their outcomes.

The process gets a plan, a JSON file:

    install   the arguments of torch_promote.install, or null: then torch_promote is not imported
    chosen    the names of the test functions to run, without what PyTorch appends to them; null for all
    done      ids of tests that a former process has run
    record    the file to append to, one JSON object to a line

The plugin writes a line when a test starts and when it ends, so the record also shows where a process died.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_WORST_FIRST = ("failed", "passed", "xfailed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pytorch-plan", required=True, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    plan = json.loads(config.getoption("pytorch_plan").read_text(encoding="utf-8"))
    _set_pytorchs_test_flags()
    regions = None if plan["install"] is None else _Regions(plan["install"])
    config.pluginmanager.register(_Recorder(plan, regions))


def _set_pytorchs_test_flags() -> None:
    """Sets the flags that PyTorch's `run_tests` sets first; some tests fail to import without them."""
    common = importlib.import_module("torch.testing._internal.common_utils")
    before = sys.argv
    sys.argv = before[:1]
    try:
        common.parse_cmd_line_args()
    finally:
        sys.argv = before


@contextmanager
def _versions_of_a_gpu() -> Iterator[None]:
    """On the stand-in: while test files are imported, they ask for CUDA's version and cuDNN, to choose their tests."""
    torch = importlib.import_module("torch")
    cudnn = torch.backends.cudnn
    before = torch.version.cuda, cudnn.is_acceptable, cudnn.version
    if torch.version.cuda is None and torch.cuda.is_available():
        torch.version.cuda, cudnn.is_acceptable, cudnn.version = "12.6", lambda tensor: True, lambda: 8900
    try:
        yield
    finally:
        torch.version.cuda, cudnn.is_acceptable, cudnn.version = before


class _Regions:
    """Installs, and counts the regions of ours that regions of torch.autocast have become."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import torch

        import torch_promote as tp

        tp.install(**arguments)
        self.opened = 0
        # Replaces the names only in our `__enter__`, because Dynamo refers to the functions themselves.
        names = torch.autocast.__enter__.__globals__
        if not names["__name__"].startswith("torch_promote."):
            raise pytest.UsageError("install() has not replaced the methods of torch.autocast")
        names["_C"] = _Counted(names["_C"], self.count)
        if "graph_enter" in names:  # regions that a compiled function opens
            names["graph_enter"] = self.counted(names["graph_enter"])

    def count(self) -> None:
        self.opened += 1

    def counted(self, enter: Any) -> Any:
        def enter_and_count(packed: str) -> None:
            enter(packed)
            self.count()

        return enter_and_count


class _Counted:
    """The extension, with a call for each region that it opens."""

    def __init__(self, extension: Any, count: Any) -> None:
        self._extension = extension
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    def enter_region(self, owner: object, packed: str) -> Any:
        surroundings = self._extension.enter_region(owner, packed)
        self._count()
        return surroundings


class _Recorder:
    def __init__(self, plan: dict[str, Any], regions: _Regions | None) -> None:
        self._chosen = plan["chosen"]
        self._done = set(plan["done"])
        self._file = Path(plan["record"]).open("a", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
        self._regions = regions
        self._reports: list[pytest.TestReport] = []

    def _write(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with _versions_of_a_gpu():
            return (yield)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid not in self._done and is_chosen(item.name, self._chosen)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(test=report.nodeid, outcome=report.outcome, message=_message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._before = self._opened()
        self._write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = [(_outcome(report), report) for report in self._reports if report.when == "call" or not report.passed]
        outcome, report = min(found, key=lambda one: _WORST_FIRST.index(one[0]))
        self._write(test=nodeid, outcome=outcome, message=_message(report), opened=self._opened() - self._before)

    def _opened(self) -> int:
        return self._regions.opened if self._regions else 0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write(end=True)


def is_chosen(name: str, chosen: Sequence[str] | None) -> bool:
    """Whether a test is one of the chosen functions, to whose names PyTorch appends a device, a dtype, parameters."""
    name = name.partition("[")[0]
    return chosen is None or any(name == one or name.startswith(f"{one}_") for one in chosen)


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return "failed" if report.failed else "passed"


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the reason for a failure or skip."""
    if report.passed:
        return ""
    text = report.longrepr
    if isinstance(text, tuple):  # of a skipped test: file, line, reason
        text = text[2]
    crash = getattr(text, "reprcrash", None)
    lines = str(crash.message if crash else text).strip().splitlines()
    return lines[0][:300] if lines else ""
