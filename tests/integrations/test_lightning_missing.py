"""The errors of the precision plugins without Lightning; `make test-ecosystem` runs them with it."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import pytest

from torch_promote import MissingPackageError

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


@pytest.mark.parametrize(
    ("name", "packages"),
    [("MixedPrecision", "lightning nor pytorch_lightning"), ("FabricMixedPrecision", "lightning nor lightning_fabric")],
)
def test_the_module_imports_and_a_plugin_says_what_to_install(plugins: ModuleType, name: str, packages: str) -> None:
    with pytest.raises(MissingPackageError) as error:
        getattr(plugins, name)
    assert str(error.value) == (
        f"torch_promote.integrations.lightning.{name} extends a plugin of Lightning, but neither {packages} is "
        f"installed. Install Lightning: pip install lightning. Without it, use torch_promote.my_autocast."
    )
    assert isinstance(error.value, ImportError)


def test_an_import_of_the_name_raises_the_same_error(plugins: ModuleType) -> None:
    with pytest.raises(MissingPackageError, match="pip install lightning"):
        from torch_promote.integrations.lightning import MixedPrecision  # noqa: F401


def test_a_name_that_does_not_exist_is_an_attribute_error(plugins: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'MixedPrecison'"):
        plugins.MixedPrecison  # noqa: B018


def test_an_error_of_an_installed_lightning_is_not_hidden(plugins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class LacksTorchmetrics(MetaPathFinder):
        def find_spec(self, fullname: str, *unused: Any) -> None:
            if fullname == "lightning":
                raise ModuleNotFoundError("No module named 'torchmetrics'", name="torchmetrics")

    monkeypatch.setattr(sys, "meta_path", [LacksTorchmetrics(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="torchmetrics"):
        _ = plugins.MixedPrecision
