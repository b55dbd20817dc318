"""The precision plugins without Lightning, or with an imitation; `make test-ecosystem` runs them with Lightning."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_promote.errors import MissingPackageError

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


class NotInstalled(MetaPathFinder):
    def find_spec(self, fullname: str, *unused: Any) -> None:
        if fullname in PACKAGES:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, in an environment without Lightning."""
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    module = importlib.import_module("torch_promote.integrations.lightning")
    for name in module.__all__:
        monkeypatch.delitem(vars(module), name, raising=False)
    return module


@pytest.mark.parametrize("name", ["MixedPrecision", "FabricMixedPrecision"])
def test_the_module_imports_and_a_plugin_says_what_to_install(plugins: ModuleType, name: str) -> None:
    with pytest.raises(MissingPackageError, match=f"{name} extends .* neither lightning nor .*pip install lightning"):
        getattr(plugins, name)


@pytest.mark.parametrize("name", ["MixedPrecision", "FabricMixedPrecision"])
def test_a_plugin_extends_that_of_the_package_and_opens_regions_of_ours(
    plugins: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfLightning:
        def __init__(self, precision: str, device: str, scaler: Any) -> None:
            self.given = precision, device, scaler

    package = {"MixedPrecision": "pytorch_lightning", "FabricMixedPrecision": "lightning_fabric"}[name]
    for module in (package, f"{package}.plugins", f"{package}.plugins.precision"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    sys.modules[module].MixedPrecision = OfLightning  # type: ignore[attr-defined]
    kind = getattr(plugins, name)
    assert getattr(plugins, name) is kind
    assert (kind.__module__, kind.__qualname__) == (plugins.__name__, name)
    plugin = kind("bf16-mixed", "cpu", overrides={"softmax": "lower"}, cache="all")
    assert isinstance(plugin, OfLightning)
    assert plugin.given == ("bf16-mixed", "cpu", None)
    x = torch.ones(2, 2)
    for context in (plugin.forward_context, plugin.autocast_context_manager):
        with context():
            assert (x @ x).dtype is torch.softmax(x, 0).dtype is torch.bfloat16
    with kind("16-mixed", "cpu").forward_context():
        assert (x @ x).dtype is torch.float16
