"""The options of the tests, and their order. Fixtures are in helpers/fixtures.py."""

from __future__ import annotations

import gc
import os
import signal
import tempfile

import pytest

from cuda_stand_in import for_pytest

collect_ignore = ["helpers/user_script.py", "helpers/decorated_script.py"]  # programs for type checkers, with errors

for_pytest.start_if_asked()  # before anything imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    for_pytest.add_option(parser)
    parser.addoption("--installed", action="store_true", help="run the tests with install() in force")
    parser.addoption(
        "--installed-policy",
        metavar="POLICY",
        help='run them with install(policy=POLICY); "off" finds tests that take torch.autocast for stock',
    )


@pytest.hookimpl(trylast=True)  # pytest-xdist has said by then what this process is
def pytest_configure(config: pytest.Config) -> None:
    for_pytest.check(config)
    # The process that distributes tests to others runs none. Importing torch there would only delay the others.
    if not config.pluginmanager.has_plugin("dsession"):
        if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
            # Inductor's cache does not tell apart graphs that were generated for other vector instructions.
            folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{capability}"
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        gc.disable()  # until everything is collected: what is imported and collected stays
        config.pluginmanager.import_plugin("helpers.fixtures")
    # A shell starts what it runs in the background with Ctrl-C ignored, and the processes of tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest test first, so that no process ends with a long test while the others are idle."""
    items.sort(key=lambda item: item.path.name != "test_cuda.py")
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what CONTRIBUTING.md limits. Unlike the seconds on the clock, it hardly depends on what else runs."""
    minutes, seconds = divmod(round(sum(os.times()[:4])), 60)  # of this process, and of those that have ended
    terminalreporter.write_line(f"CPU time: {minutes} min {seconds} s, with all processes that the tests started")
