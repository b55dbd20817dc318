"""The entry points of torch_promote: the command, the hook of `import torch`, and the pytest plugin.

pyproject.toml names them. Each runs before torch and torch_promote are imported, in programs that may need neither, so
this module imports them only inside functions. The same holds for pytest.

The pytest plugin checks every op that the tests dispatch:

    pytest --torch-promote-crosscheck          # or =bits: also against stock autocast, bit for bit

and compares what tests with the marker `record_numerics` compute with an earlier run:

    pytest --record-numerics=DIR

The first test that is checked imports `torch_promote.checking.pytest_plugin`, and the first that is recorded
`torch_promote.checking.numerics_plugin`, which do the work. docs/crosscheck.md is the user's guide.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    import pytest

    from torch_promote.checking.numerics_plugin import RecordedTest
    from torch_promote.checking.pytest_plugin import CrosscheckPlugin
    from torch_promote.checking.report import CrosscheckReport

__all__ = ["autoload", "main", "pytest_addoption", "pytest_configure"]


# --- the command


#: Whether this process is the command and has not parsed its command line yet. The package then loads no PyTorch.
is_command = False


def main() -> int:
    """Runs the command line of the process, and returns the exit status; see torch_promote/cli/program.py."""
    global is_command
    is_command = True
    from torch_promote.cli import program

    return program.main()


# --- import torch


def autoload() -> None:
    """Imports torch_promote, which installs itself, if the environment variable TORCH_PROMOTE_AUTOCAST is set.

    PyTorch calls this at the end of every `import torch`. An error would make `import torch` fail, so every error
    becomes one warning, and torch.autocast stays PyTorch's.
    """
    asked = os.environ.get("TORCH_PROMOTE_AUTOCAST", "")
    if asked in ("", "0") and not os.environ.get("TORCH_PROMOTE_TRACED"):  # `torch-promote trace --stock` sets that
        return
    if asked not in ("", "0", "1"):
        _warn(f"TORCH_PROMOTE_AUTOCAST is {asked!r}. Legal: 1 (torch_promote runs the regions of torch.autocast), 0.")
        return
    if "torch_promote" in sys.modules:  # it is importing torch, and installs itself at its end
        return
    try:
        import torch_promote  # noqa: F401
    except KeyboardInterrupt:  # from the user
        raise
    except BaseException as error:  # any failure of a broken installation, including sys.exit()
        import traceback

        text = "".join(traceback.format_exception_only(error)).strip()
        _warn(f"{text} Correct this, or unset TORCH_PROMOTE_AUTOCAST.")


def _warn(reason: str) -> None:
    text = f"torch_promote is not in use, and torch.autocast stays PyTorch's. {reason}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:  # warnings are errors here, as with python -W error
        with contextlib.suppress(Exception):
            sys.stderr.write(f"RuntimeWarning: {text}\n")


# --- pytest

_NAME = "torch_promote_crosscheck"
_OPTION = "--torch-promote-crosscheck"
_LEVELS = ("off", "dtype", "bits")
_LEGAL = f"Legal: {', '.join(_LEVELS)}."
#: The name of the marker, and of the property of a test's report that says how it ended.
_NUMERICS = "record_numerics"
_RECORD, _UPDATE, _STRICT = "--record-numerics", "--record-numerics-update", "--record-numerics-strict"


def _level(text: str) -> str:
    import argparse

    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a level. {_LEGAL} To use the default level, put the option last or before another option."
        )
    return text


def _folder(text: str) -> str:
    import argparse

    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty.")
    return os.path.abspath(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options and the ini option."""
    group = parser.getgroup("torch_promote")
    group.addoption(
        _RECORD,
        type=_folder,
        metavar="DIR",
        help=f"compare what the tests with the marker {_NUMERICS} compute with the recordings in this folder; of tests "
        "without one, store it",
    )
    group.addoption(_UPDATE, action="store_true", help=f"with {_RECORD}: replace the stored recordings that differ")
    group.addoption(
        _STRICT,
        action="store_true",
        help=f"with {_RECORD}: fail tests that have no stored recording, in place of storing one, as in CI",
    )
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
    """Declares the markers and the fixture."""
    import pytest

    config.addinivalue_line(
        "markers",
        f"{_NUMERICS}(tolerance=None): with {_RECORD}=DIR, compare what this test computes with an earlier run. "
        "tolerance: the largest relative L2 error that passes; without it, all bits have to be equal",
    )
    _configure_numerics(config)
    config.addinivalue_line(
        "markers",
        f"{_NAME}(level='dtype', raise_on_mismatch=False): check the ops of this test. level: off, dtype or bits; "
        "raise_on_mismatch: stop the test at the line of the first mismatch",
    )
    level = config.getini(_NAME)
    if level not in _LEVELS:
        raise pytest.UsageError(f"ini option {_NAME}: {level!r} is not a level. {_LEGAL}")
    loader = _plugin_loader(config.pluginmanager, config.getoption(_OPTION) or level)
    config.pluginmanager.register(loader, f"{_NAME}_loader")


def _configure_numerics(config: pytest.Config) -> None:
    """Registers the plugin that records tests, if the option is given."""
    import pytest

    folder = config.getoption(_RECORD)
    update, strict = config.getoption(_UPDATE), config.getoption(_STRICT)
    if folder is None:
        if update or strict:
            raise pytest.UsageError(f"{_UPDATE if update else _STRICT} needs {_RECORD}=DIR, the folder of recordings.")
        return
    if update and strict:
        raise pytest.UsageError(f"{_STRICT} stores nothing, and {_UPDATE} replaces what differs. Give one of them.")
    reason = "permission denied"
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not os.path.isdir(folder):
        reason = "it is a file" if os.path.exists(folder) else "it cannot be created"
    elif os.access(folder, os.W_OK | os.X_OK):
        # Before the crosscheck: its failures are the test's own.
        config.pluginmanager.register(_numerics_plugin(folder, update, strict), f"{_NUMERICS}_plugin")
        return
    raise pytest.UsageError(f"{_RECORD}: cannot record to {folder!r}: {reason}. Name a folder: {_RECORD}=DIR.")


def _numerics_plugin(folder: str, update: bool, strict: bool) -> object:
    """Returns a plugin that records the call phase of tests with the marker, and counts how they ended.

    Its class is made here since its decorators need pytest.
    """
    from collections import Counter

    import pytest

    class Numerics:
        def __init__(self) -> None:
            self.ends: Counter[str] = Counter()
            self.test: RecordedTest | None = None  # which runs

        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
            if item.get_closest_marker(_NUMERICS) is None:
                return (yield)
            from torch_promote.checking.numerics_plugin import recorded

            with recorded(item, folder, update, strict) as self.test:
                try:
                    return (yield)
                finally:
                    self.test = None

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if self.test is not None:  # the report is a subtest's
                self.test.failed |= report.failed
            elif report.when == "call":
                self.ends.update(str(end) for name, end in report.user_properties if name == _NUMERICS)

        def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
            ends = self.ends
            parts = [f"compared {ends['compared'] + ends['differs']:,}"]
            if ends["recorded"]:
                parts.insert(0, f"recorded {ends['recorded']:,} new tests")
            if ends["replaced"]:
                parts.append(f"replaced {ends['replaced']:,}")
            if ends["missing"]:
                parts.append(f"{ends['missing']:,} without a recording")
            if ends["differs"]:
                parts.append(f"{ends['differs']:,} differ{'s' * (ends['differs'] == 1)}")
            if not ends:
                parts = [f"compared 0: no test with the marker {_NUMERICS} passed"]
            terminalreporter.write_line(f"torch_promote: {', '.join(parts)} ({folder})")

    return Numerics()


def _plugin_loader(manager: pytest.PytestPluginManager, level: str) -> object:
    """Returns a plugin that imports the plugin proper for a test that is checked, or for the report of such a test.

    Its class is made here since its decorators need pytest.
    """
    import pytest

    class Loader:
        loaded: CrosscheckPlugin | None = None

        def plugin(self) -> CrosscheckPlugin:
            if self.loaded is None:
                from torch_promote.checking.pytest_plugin import CrosscheckPlugin

                self.loaded = CrosscheckPlugin(level)
                manager.register(self.loaded, f"{_NAME}_plugin")
            return self.loaded

        def pytest_report_header(self) -> str | None:
            return None if level == "off" else f"torch_promote: crosscheck, level {level}"

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
            # The plugin validates markers.
            markers = any(mark.args or mark.kwargs != {"level": "off"} for mark in item.iter_markers(_NAME))
            if level == "off" and not markers and _NAME not in getattr(item, "fixturenames", ()):
                return (yield)
            plugin = self.plugin()
            try:
                return (yield)
            finally:
                plugin.end(item)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if hasattr(report, _NAME):  # pytest-xdist hands reports over from another process
                self.plugin().add(*getattr(report, _NAME))

        @pytest.fixture(name=_NAME)
        def report(self, request: pytest.FixtureRequest) -> CrosscheckReport:
            """The report of the test's crosscheck. It fills while the test runs. A test that names it is checked.

            Raises:
                pytest.UsageError: The test is not checked: its marker says level='off', or it requested the fixture
                    with `request.getfixturevalue` only.
            """
            from torch_promote.checking.pytest_plugin import report_of

            found = report_of(request.node)
            if found is None:
                raise pytest.UsageError(
                    f"{request.node.name} is not checked. Remove level='off', or name {_NAME} as an argument of the "
                    "test."
                )
            return found

    return Loader()
