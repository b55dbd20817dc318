"""Precision plugins: `MixedPrecision` for Lightning's Trainer, and `FabricMixedPrecision` for Fabric.

Each extends a class of Lightning, so the classes are created on first access, and this file imports without Lightning.
It opens regions, so docs/architecture.md places it above `regions`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_promote.errors import MissingPackageError
from torch_promote.policy.op_table import OpPolicy
from torch_promote.policy.policy import PolicyLike
from torch_promote.regions.autocast import CacheMode, my_autocast

__all__ = ["FabricMixedPrecision", "MixedPrecision"]

#: The packages with a plugin to extend: two distributions of one project with unrelated classes.
_PACKAGES = {
    "MixedPrecision": ("lightning.pytorch", "pytorch_lightning"),
    "FabricMixedPrecision": ("lightning.fabric", "lightning_fabric"),
}

MixedPrecision: Any  # __getattr__ creates them
FabricMixedPrecision: Any


class _Plugin:
    """Lightning's plugin `MixedPrecision` with regions of `my_autocast`, for `Trainer(plugins=...)` or Fabric.

        trainer = lightning.Trainer(plugins=MixedPrecision("bf16-mixed", "cuda", overrides={"softmax": "lower"}))
        fabric = lightning.Fabric(plugins=FabricMixedPrecision("bf16-mixed", "cuda", cache="persistent"))

    The plugin replaces the argument `precision` of Trainer and Fabric. Gradient scaling, clipping and checkpoints stay
    Lightning's. The plugin reuses casts of weights within a step. Lightning 2.6 disables that in its Trainer
    (cache_enabled=False), because PyTorch would reuse casts that were made under `torch.no_grad()`.

    If both `lightning` and `pytorch_lightning` are installed, import the one you use before this plugin, which then
    extends only that one. Otherwise it imports and extends both.

    Args:
        precision: "bf16-mixed" or "16-mixed".
        device: A device type of `my_autocast`.
        scaler: The gradient scaler of "16-mixed". None: a `torch.amp.GradScaler`.
        policy: As for `my_autocast`.
        overrides: As for `my_autocast`.
        cache: As for `my_autocast`.

    Raises:
        ValueError: The precision does not exist.
        UnsupportedDeviceError: my_autocast does not support the device type. It is a RuntimeError.
        OptionError: The cache mode does not exist. It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, or a policy file is invalid. It is
            a ValueError.

    Source: lightning/pytorch/plugins/precision/amp.py, lightning/fabric/plugins/precision/amp.py (v2.6.6).
    """

    def __init__(
        self,
        precision: str,
        device: str,
        scaler: torch.amp.GradScaler | None = None,
        *,
        policy: PolicyLike | None = None,
        overrides: Mapping[Any, OpPolicy] | None = None,
        cache: CacheMode | None = None,
    ) -> None:
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        self._region = my_autocast(device, dtype=dtype, policy=policy, overrides=overrides, cache=cache)

    def forward_context(self) -> my_autocast:
        """Returns the region that Lightning runs steps in."""
        return self._region

    #: Up to Lightning 2.6, the Trainer's `forward_context` calls this method.
    autocast_context_manager = forward_context


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packages, bases = _PACKAGES[name], []
    for package in [package for package in packages if package in sys.modules] or packages:
        try:
            bases.append(importlib.import_module(f"{package}.plugins.precision").MixedPrecision)
        except ModuleNotFoundError as error:
            if error.name != package.partition(".")[0]:
                raise
    if not bases:
        missing = " nor ".join(package.partition(".")[0] for package in packages)
        raise MissingPackageError(
            f"{__name__}.{name} extends a plugin of Lightning, but neither {missing} is installed. Install Lightning: "
            f"pip install lightning. Without it, use torch_promote.my_autocast."
        )
    # Lightning stores a plugin's state in checkpoints under the qualified name of its class.
    plugin = type(name, (_Plugin, *bases), {"__module__": __name__, "__doc__": _Plugin.__doc__})
    globals()[name] = plugin
    return plugin
