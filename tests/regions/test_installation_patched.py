"""install and uninstall with other code that also replaces the methods of torch.autocast."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from helpers.installed import MARKED, OURS, STOCKS, is_restored, region_is

pytestmark = pytest.mark.usefixtures("nothing_installed")


def spy(calls: list[str], name: str, original: Any) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        calls.append(name)
        return original(self, *arguments)

    return method


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_a_wrapper_from_before(name: str) -> None:
    """Regions of ours bypass the earlier wrapper; PyTorch's regions call it."""
    calls: list[str] = []
    with mock.patch.object(torch.autocast, name, spy(calls, name, getattr(torch.autocast, name))) as wrapper:
        tp.install(**MARKED)
        assert (region_is(), calls) == (OURS, [])
        tp.uninstall()
        assert getattr(torch.autocast, name) is wrapper
        assert (region_is(), calls) == (STOCKS, [name])
    assert is_restored()


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_a_wrapper_from_after(name: str) -> None:
    calls: list[str] = []
    tp.install(**MARKED)
    with mock.patch.object(torch.autocast, name, spy(calls, name, getattr(torch.autocast, name))):
        assert (region_is(), calls) == (OURS, [name])
        tp.install(policy="off")
        assert (region_is(), calls) == (torch.float32, [name] * 2)
        tp.uninstall()
        assert (region_is(), calls) == (STOCKS, [name] * 3)
        tp.install(**MARKED)
        assert (region_is(), calls) == (OURS, [name] * 4)
    assert region_is() is OURS
    tp.uninstall()
    assert is_restored()
