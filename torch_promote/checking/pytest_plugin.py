"""The pytest plugin proper: one crosscheck around each test, its verdict, and the summary of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

from torch_promote.checking.crosscheck import CrosscheckLevel, crosscheck
from torch_promote.checking.report import CrosscheckReport, Mismatch, mismatch_text
from torch_promote.errors import CrosscheckError
from torch_promote.report.base import load_renderer

#: The name of the marker, and of the attribute that carries a test's counts on its teardown report.
_NAME = "torch_promote_crosscheck"
_LEVELS = ("off", *get_args(CrosscheckLevel))
#: The modules between an op and the check that raises for it.
_OURS = ("torch_promote.checking.", "torch_promote.observe.")


@dataclass
class _Check:
    """The crosscheck of one test. `blocks` ends it when closed."""

    report: CrosscheckReport
    level: str
    blocks: ExitStack
    reported: int = 0  # how many mismatches the phases so far (setup, call, teardown) have failed with
    # Whether the test function is running. A report that is made then belongs to a subtest, not to a phase.
    calling: bool = False

    def unreported(self) -> list[Mismatch]:
        """The mismatches of this phase."""
        return self.report.mismatches[self.reported :]

    def text(self) -> str:
        """The unreported mismatches as text. Its first line goes into pytest's short summary."""
        return mismatch_text(self.unreported(), self.report.calls)


_check_key = pytest.StashKey[_Check]()


def report_of(item: pytest.Item) -> CrosscheckReport | None:
    """Returns the report of the crosscheck around a test; None if the test is not checked."""
    check = item.stash.get(_check_key, None)
    return None if check is None else check.report


class CrosscheckPlugin:
    """The hooks around each test. The level, "off", "dtype" or "bits", is that of tests without a marker."""

    def __init__(self, level: str) -> None:
        self._level = level
        self.levels: Counter[str] = Counter()  # tests that were checked, in whichever process
        self.total: CrosscheckReport = CrosscheckReport()

    # These wrappers are innermost: pytest's own wrappers, which rely on one another, are already open if these fail.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Opens the crosscheck, and fails the setup if it has mismatches."""
        self.end(item)  # the crosscheck of a first run, if a plugin runs the test again
        self._begin(item)
        yield
        _fail_on_mismatches(item)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fails the call if it has mismatches."""
        check = item.stash.get(_check_key, None)
        if check is None:
            return (yield)
        check.calling = True
        try:
            yield
        finally:
            check.calling = False
        _fail_on_mismatches(item)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fails the teardown if it has mismatches."""
        yield
        _fail_on_mismatches(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds the mismatches of the phase to its report, and the counts to that of the teardown."""
        check = item.stash.get(_check_key, None)
        if check is None or check.calling:
            return (yield)
        _end_traceback_at_the_op(call)
        report = yield
        if check.unreported():
            if report.skipped and not hasattr(report, "wasxfail"):  # mismatches before the skip count
                report.outcome, report.longrepr = "failed", check.text()
            else:
                _show(report, check, call)
            check.reported = len(check.report.mismatches)
        if call.when == "teardown":
            # Plain data in an attribute: pytest-xdist copies it from the worker's report to the controller's.
            setattr(report, _NAME, (check.level, check.report.to_dict()))
        return report

    def add(self, level: str, data: Mapping[str, Any]) -> None:
        """Adds the crosscheck of one test, from its teardown report."""
        self.levels[level] += 1
        self.total.add(CrosscheckReport.from_dict(data))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the section of the terminal summary, if any test was checked."""
        if not self.levels:
            return
        terminalreporter.write_sep("=", f"torch_promote crosscheck, level {', '.join(self.levels)}")
        content = self.total.content()
        facts = [("tests checked", f"{self.levels.total():,}"), *content.facts]
        parts = [part for part in content.parts if part.title != "mismatches"]  # each is in the failure of its test
        text = load_renderer("terminal").to_text(replace(content, facts=facts, parts=parts))
        terminalreporter.write_line(text)

    def _begin(self, item: pytest.Item) -> None:
        """Opens the crosscheck that the option, the marker or the fixture requests, if any."""
        level, markers = self._level, list(item.iter_markers(_NAME))  # the test's own first, then class and module
        if level == "off" and (markers or _NAME in getattr(item, "fixturenames", ())):
            level = "dtype"
        options: dict[str, Any] = {}
        for marker in reversed(markers):
            options.update(marker.kwargs)
        arguments = [argument for marker in markers for argument in marker.args]
        level, raises = options.pop("level", level), options.pop("raise_on_mismatch", False)
        if arguments or options:
            strange = ", ".join([*map(repr, arguments), *options])
            pytest.fail(f"marker {_NAME} takes level= and raise_on_mismatch= only, got {strange}.", pytrace=False)
        if level not in _LEVELS:
            pytest.fail(f"marker {_NAME}: {level!r} is not a level. Legal: {', '.join(_LEVELS)}.", pytrace=False)
        if level != "off":
            blocks = ExitStack()
            report = blocks.enter_context(crosscheck(level=level, raise_on_mismatch=raises))
            item.stash[_check_key] = _Check(report, level, blocks)

    def end(self, item: pytest.Item) -> None:
        """Ends the crosscheck of a test, if it has one."""
        check = item.stash.get(_check_key, None)
        if check is not None:
            del item.stash[_check_key]
            check.blocks.close()


def _fail_on_mismatches(item: pytest.Item) -> None:
    """Fails a phase that has passed by itself."""
    check = item.stash.get(_check_key, None)
    if check is not None and check.unreported():
        pytest.fail(check.text(), pytrace=False)


def _end_traceback_at_the_op(call: pytest.CallInfo[None]) -> None:
    """Under raise_on_mismatch, cuts off the frames between the call of the op and the check that raised."""
    if call.excinfo is None or not isinstance(call.excinfo.value, CrosscheckError):
        return
    entry = last = call.excinfo.value.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


def _show(report: pytest.TestReport, check: _Check, call: pytest.CallInfo[None]) -> None:
    """Adds the mismatches to the failure of a test that failed by itself."""
    text, error = check.text(), None if call.excinfo is None else call.excinfo.value
    if isinstance(error, CrosscheckError) or str(error) == text:
        return
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):  # pytest shows it whatever --show-capture says
        longrepr.addsection("torch_promote crosscheck", text)
    else:
        report.sections.append(("torch_promote crosscheck", text))
