"""The plugin of docs/frameworks.md with an imitation of Lightning; `make test-ecosystem` runs it with Lightning."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.doc_blocks import blocks

(RECIPE,) = (block.text for block in blocks() if block.text.startswith("import lightning\n"))


class OfLightning:
    def __init__(self, precision: str, device: str, scaler: Any) -> None:
        self.given = precision, device, scaler


def test_the_plugin_opens_regions_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning, pytorch, plugins = map(ModuleType, ("lightning", "lightning.pytorch", "lightning.pytorch.plugins"))
    vars(plugins)["MixedPrecision"] = OfLightning
    vars(pytorch)["plugins"] = plugins
    vars(lightning)["Trainer"] = dict
    for module in (lightning, pytorch, plugins):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {}
    exec(RECIPE.replace('"cuda"', '"cpu"'), names)
    plugin = names["trainer"]["plugins"]
    assert plugin.given == ("bf16-mixed", "cpu", None)
    x = torch.ones(2, 2)
    with plugin.forward_context():
        assert (x @ x).dtype is torch.softmax(x, 0).dtype is torch.bfloat16
    with names["MixedPrecision"]("16-mixed", "cpu").forward_context():
        assert (x @ x).dtype is torch.float16
