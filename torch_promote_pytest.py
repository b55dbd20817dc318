"""The pytest plugin: a test-suite with every op that it dispatches checked.

    pytest --torch-promote-crosscheck          # or =bits: against stock autocast too, bit for bit

It is a module of its own, so that pytest, which loads it at its start, imports neither torch nor torch_promote. Both
are imported when the first test is checked. docs/crosscheck.md tells how to use it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch_promote.checking.crosscheck import CrosscheckReport, Mismatch

__all__ = ["torch_promote_crosscheck"]

_NAME = "torch_promote_crosscheck"
_OPTION = "--torch-promote-crosscheck"
_LEVELS = ("off", "dtype", "bits")
_LEGAL = f"Legal: {', '.join(_LEVELS)}."
#: What the summary adds up, by the names of `CrosscheckReport.to_dict`, and what it calls them.
_COUNTED = {
    "checked": "checked against the reference",
    "composite": "composite, made of others",
    "no_rule": "without a rule",
    "with_policy": "with a cast policy",
    "with_stock": "compared with stock",
    "stock_raised": "stock raised",
    "not_compared": "not compared",
    "known_gaps": "known gap",
}
#: Counts of few kinds, of which the summary names each.
_NAMED = ("no_rule", "stock_raised", "not_compared", "known_gaps")
#: How many mismatches a failure shows, and how many names a line of the summary.
_SHOWN = 20


@dataclass(frozen=True)
class _Wanted:
    """How a test is to be checked."""

    level: str
    raise_on_mismatch: bool = False


@dataclass
class _Check:
    """The check of one test.

    Attributes:
        report: What it has found.
        level: Its level.
        blocks: Ends it when closed.
        told: How many of the mismatches a phase of the test (setup, call, teardown) has failed with.
        calling: Whether the test itself is running. What is reported meanwhile is a subtest, and no phase's end.
    """

    report: CrosscheckReport
    level: str
    blocks: ExitStack
    told: int = 0
    calling: bool = False

    def news(self) -> list[Mismatch]:
        """The mismatches of this phase."""
        return self.report.mismatches[self.told :]


@dataclass(eq=False)  # pytest keeps plugins in sets
class _Summary:
    """What the tests of a run have found, in whichever processes they ran."""

    tests: int = 0
    calls: int = 0
    mismatches: int = 0
    levels: Counter[str] = field(default_factory=Counter)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _COUNTED})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data: Mapping[str, Any] | None = getattr(report, _NAME, None)
        if data is None:
            return
        self.tests += 1
        self.calls += data["calls"]
        self.mismatches += data["mismatches"]
        self.levels[data["level"]] += 1
        for name, counter in self.counts.items():
            counter.update(data[name])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        terminalreporter.write_sep("=", f"torch_promote crosscheck, level {', '.join(self.levels)}")
        terminalreporter.write_line(_line("tests checked", self.tests))
        terminalreporter.write_line(_line("calls", self.calls))
        for name, title in _COUNTED.items():
            counter = self.counts[name]
            if counter or name in ("checked", "no_rule"):
                terminalreporter.write_line(_line(title, counter.total(), _names(counter) if name in _NAMED else ""))
        terminalreporter.write_line(_line("mismatches", self.mismatches))


def _line(title: str, count: int, note: str = "") -> str:
    return f"{title:<30}{count:>10}  {note}".rstrip()


def _names(counter: Counter[str]) -> str:
    common = counter.most_common(_SHOWN)
    rest = len(counter) - len(common)
    return ", ".join(f"{name} {count}" for name, count in common) + (f", and {rest} more" if rest else "")


_check_key = pytest.StashKey[_Check]()
_level_key = pytest.StashKey[str]()


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(
            f"there is no level {text!r}. {_LEGAL} Without one, it has to stand last or before another option."
        )
    return text


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_promote")
    group.addoption(
        _OPTION,
        nargs="?",
        const="dtype",
        type=_level,
        metavar="LEVEL",
        help="check every op that the tests dispatch: its dtypes and strides against the reference (dtype), under "
        "my_autocast also its bits against stock autocast's (bits); off: not, whatever the ini file says",
    )
    parser.addini(_NAME, f"{_OPTION} where the command line does not have it: off, dtype or bits", default="off")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_NAME}(level='dtype', raise_on_mismatch=False): check the ops of this test; level: off, dtype or bits; "
        "raise_on_mismatch: stop at the line of the first mismatch",
    )
    level = config.getini(_NAME)
    if level not in _LEVELS:
        raise pytest.UsageError(f"ini option {_NAME}: there is no level {level!r}. {_LEGAL}")
    config.stash[_level_key] = config.getoption(_OPTION) or level
    config.pluginmanager.register(_Summary(), f"{_NAME}_summary")


def pytest_report_header(config: pytest.Config) -> str | None:
    level = config.stash[_level_key]
    return None if level == "off" else f"torch_promote: crosscheck, level {level}"


def _wanted(item: pytest.Item) -> _Wanted | None:
    """What the test's marker, fixtures and the command line ask for; None for nothing."""
    level = item.config.stash[_level_key]
    markers = list(item.iter_markers(_NAME))  # the test's own first, then its class's and its module's
    if level == "off" and (markers or _NAME in getattr(item, "fixturenames", ())):
        level = "dtype"
    options: dict[str, Any] = {}
    for marker in reversed(markers):
        options.update(marker.kwargs)
    arguments = [argument for marker in markers for argument in marker.args]
    wanted = _Wanted(options.pop("level", level), options.pop("raise_on_mismatch", False))
    if arguments or options:
        strange = ", ".join([*map(repr, arguments), *options])
        pytest.fail(f"marker {_NAME} has level= and raise_on_mismatch= alone, got {strange}.", pytrace=False)
    if wanted.level not in _LEVELS:
        pytest.fail(f"marker {_NAME}: there is no level {wanted.level!r}. {_LEGAL}", pytrace=False)
    return None if wanted.level == "off" else wanted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        _end(item)


# The wrappers of the phases come last, so that pytest's own, which expect one another, have begun when these fail.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    _end(item)  # where a test is run again, its first check
    wanted = _wanted(item)
    if wanted is not None:
        _begin(item, wanted)
    yield
    _fail_if_news(item)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    check = item.stash.get(_check_key, None)
    if check is None:
        return (yield)
    check.calling = True
    try:
        yield
    finally:
        check.calling = False
    _fail_if_news(item)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    _fail_if_news(item)


def _begin(item: pytest.Item, wanted: _Wanted) -> None:
    from torch_promote.checking.crosscheck import crosscheck

    blocks = ExitStack()
    block = crosscheck(level=wanted.level, raise_on_mismatch=wanted.raise_on_mismatch)  # type: ignore[arg-type]
    item.stash[_check_key] = _Check(blocks.enter_context(block), wanted.level, blocks)


def _end(item: pytest.Item) -> None:
    check = item.stash.get(_check_key, None)
    if check is not None:
        del item.stash[_check_key]
        check.blocks.close()


def _fail_if_news(item: pytest.Item) -> None:
    """Fails a phase that has passed by itself."""
    check = item.stash.get(_check_key, None)
    if check is not None and check.news():
        pytest.fail(_text(check.news(), check.report.calls), pytrace=False)


def _text(mismatches: list[Mismatch], calls: int) -> str:
    """The first line goes into pytest's short summary."""
    kinds = ", ".join(f"{name} x{count}" for name, count in Counter(f"{m.op} {m.kind}" for m in mismatches).items())
    lines = [f"crosscheck: {_plural(len(mismatches), 'mismatch')} in {calls} calls: {kinds}"]
    lines += map(str, mismatches[:_SHOWN])
    if len(mismatches) > _SHOWN:
        lines.append(f"and {len(mismatches) - _SHOWN} more")
    return "\n".join(lines)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}es"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    check = item.stash.get(_check_key, None)
    if check is None or check.calling:
        return (yield)
    _end_traceback_at_the_op(call)
    report = yield
    if check.news():
        if report.skipped and not hasattr(report, "wasxfail"):  # what was found before the skip counts
            report.outcome, report.longrepr = "failed", _text(check.news(), check.report.calls)
        else:
            _show(report, check, call)
        check.told = len(check.report.mismatches)
    if call.when == "teardown":
        # An attribute of plain data: pytest-xdist takes it from the worker's report to the controller's.
        data = check.report.to_dict()
        setattr(report, _NAME, {**data, "mismatches": len(data["mismatches"]), "level": check.level})
    return report


def _end_traceback_at_the_op(call: pytest.CallInfo[None]) -> None:
    """Cuts off, under raise_on_mismatch, what lies between the call of the op and the check that raised."""
    from torch_promote.checking.crosscheck import CrosscheckError

    if call.excinfo is None or not isinstance(call.excinfo.value, CrosscheckError):
        return
    entry = last = call.excinfo.value.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_globals.get("__name__", "").startswith("torch_promote.checking."):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


def _show(report: pytest.TestReport, check: _Check, call: pytest.CallInfo[None]) -> None:
    """Puts the mismatches beside the failure of a test that has failed by itself."""
    from torch_promote.checking.crosscheck import CrosscheckError

    text = _text(check.news(), check.report.calls)
    own = call.excinfo is not None and (
        isinstance(call.excinfo.value, CrosscheckError) or str(call.excinfo.value) == text
    )
    if own:
        return
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):  # shown whatever --show-capture says
        longrepr.addsection("torch_promote crosscheck", text)
    else:
        report.sections.append(("torch_promote crosscheck", text))


@pytest.fixture(name=_NAME)
def torch_promote_crosscheck(request: pytest.FixtureRequest) -> CrosscheckReport:
    """The report of the test's crosscheck, which fills while the test runs. A test that names it is checked.

    Raises:
        pytest.UsageError: The test is not checked: it switches the check off, or asks for the fixture by
            `request.getfixturevalue` alone.
    """
    check: _Check | None = request.node.stash.get(_check_key, None)
    if check is None:
        raise pytest.UsageError(
            f"{request.node.name} is not checked: take away level='off', or name {_NAME} as an argument."
        )
    return check.report
