"""The pytest plugin: checks every op that the tests dispatch.

    pytest --torch-promote-crosscheck          # or =bits: also against stock autocast, bit for bit

pytest imports this module at startup, so it imports neither torch nor torch_promote. The first test that is checked
imports `torch_promote.checking.pytest_plugin`, which does the work. docs/crosscheck.md is the user's guide.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch_promote.checking.crosscheck import CrosscheckReport
    from torch_promote.checking.pytest_plugin import CrosscheckPlugin

__all__ = ["torch_promote_crosscheck"]

_NAME = "torch_promote_crosscheck"
_OPTION = "--torch-promote-crosscheck"
_LEVELS = ("off", "dtype", "bits")
_LEGAL = f"Legal: {', '.join(_LEVELS)}."


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a level. {_LEGAL} To use the default level, put the option last or before another option."
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
        help="check every op that the tests dispatch. dtype (the default level): dtypes, casts and strides against the "
        "reference; bits: under my_autocast, also results against stock autocast, bit for bit; off: check nothing, "
        "whatever the ini file says",
    )
    parser.addini(_NAME, f"the level if {_OPTION} is not given: off, dtype or bits", default="off")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_NAME}(level='dtype', raise_on_mismatch=False): check the ops of this test. level: off, dtype or bits; "
        "raise_on_mismatch: stop the test at the line of the first mismatch",
    )
    level = config.getini(_NAME)
    if level not in _LEVELS:
        raise pytest.UsageError(f"ini option {_NAME}: {level!r} is not a level. {_LEGAL}")
    config.pluginmanager.register(_Loader(config, config.getoption(_OPTION) or level), f"{_NAME}_loader")


class _Loader:
    """Imports the plugin proper when a test is checked, or when pytest-xdist hands over the report of such a test."""

    def __init__(self, config: pytest.Config, level: str) -> None:
        self._manager = config.pluginmanager
        self._level = level
        self._loaded: CrosscheckPlugin | None = None

    def _plugin(self) -> CrosscheckPlugin:
        if self._loaded is None:
            from torch_promote.checking.pytest_plugin import CrosscheckPlugin

            self._loaded = CrosscheckPlugin(self._level)
            self._manager.register(self._loaded, f"{_NAME}_plugin")
        return self._loaded

    def pytest_report_header(self) -> str | None:
        return None if self._level == "off" else f"torch_promote: crosscheck, level {self._level}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self._is_checked(item):
            return (yield)
        plugin = self._plugin()
        try:
            return (yield)
        finally:
            plugin.end(item)

    def _is_checked(self, item: pytest.Item) -> bool:
        """Whether the plugin has to look at a test. It validates markers itself."""
        if self._level != "off" or _NAME in getattr(item, "fixturenames", ()):
            return True
        return any(marker.args or marker.kwargs != {"level": "off"} for marker in item.iter_markers(_NAME))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, _NAME):
            self._plugin().summary.add(getattr(report, _NAME))


@pytest.fixture(name=_NAME)
def torch_promote_crosscheck(request: pytest.FixtureRequest) -> CrosscheckReport:
    """The report of the test's crosscheck. It fills while the test runs. A test that names the fixture is checked.

    Raises:
        pytest.UsageError: The test is not checked: its marker says level='off', or it requested the fixture with
            `request.getfixturevalue` only.
    """
    from torch_promote.checking.pytest_plugin import report_of

    report = report_of(request.node)
    if report is None:
        raise pytest.UsageError(
            f"{request.node.name} is not checked. Remove level='off', or name {_NAME} as an argument of the test."
        )
    return report
