"""Applies the options --installed and --installed-policy: they run the tests with `install` in force.

With `install` in force, `torch.autocast` opens regions of ours. A test that compares ours with stock uses
`tp.stock_autocast` for stock:

    with tp.stock_autocast("cpu"): ...    # stock, whatever is installed
    with torch.autocast("cpu"): ...       # a region of whatever is installed, where a test is true of both

`--installed-policy=off` installs the policy "off". Every test that takes `torch.autocast` for stock fails then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torch_promote as tp
from helpers.installed import uninstall
from torch_promote import _C
from torch_promote.regions.installation import Installation

#: Modules whose doctests show `install`.
_SHOW_INSTALL = ("installation.py",)


def watch(config: pytest.Config) -> None:
    """Applies the options to all tests and doctests."""
    policy = config.getoption("installed_policy")
    config.pluginmanager.register(_Watch(config.getoption("installed") or policy is not None, policy))


def options(config: pytest.Config) -> list[str]:
    """Returns the options of this run, for a pytest that a test starts."""
    policy = config.getoption("installed_policy")
    return ["--installed"] * config.getoption("installed") + [f"--installed-policy={policy}"] * (policy is not None)


class _Watch:
    def __init__(self, asked: bool, policy: str | None) -> None:
        self._asked, self._policy = asked, policy
        self._in_force: Installation | None = None
        self._before: Installation | None = None

    def pytest_collection_finish(self) -> None:
        """Installs after all test modules are imported, so that names bound to the class are affected, too."""
        self._in_force = tp.install(policy=self._policy) if self._asked else tp.installed()
        assert_stock(lambda: tp.stock_autocast("cpu"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if isinstance(item, pytest.DoctestItem) and item.path.name in _SHOW_INSTALL:
            uninstall()
        self._before = tp.installed()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Checks that the test has restored the installation, and restores it otherwise."""
        try:
            return (yield)
        finally:
            before, after = self._before, tp.installed()
            if after is not self._in_force:
                self._put_back()
            if _asked_for(after) != _asked_for(before):
                pytest.fail(
                    f"the test began with {before} installed and ends with {after}. Use a `with` block, or restore "
                    "what was installed in the end."
                )

    def _put_back(self) -> None:
        again = self._in_force
        if again is None:
            uninstall()
        else:
            self._in_force = tp.install(policy=again.policy, overrides=again.overrides, cache=again.cache)


def _asked_for(installation: Installation | None) -> Any:
    return installation and (installation.policy, dict(installation.overrides), installation.cache)


def assert_stock(region: Callable[[], Any]) -> None:
    """Fails if a region that should be stock's is one of ours: the test would compare ours with ours."""
    before = _C.depth()
    with region():
        assert _C.depth() == before, "a region that is to be stock's is one of ours: use tp.stock_autocast for stock"
