"""The autocast state during a call: the enabled device types, their dtypes, overrides and cached casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from torch_promote.policy.op_table import CastPolicy

__all__ = ["TURNS", "AutocastState", "DeviceAutocast", "Override", "Overrides"]

#: The device types with policies, in the order in which they cast, each with the devices whose tensors it casts.
TURNS = {"cuda": ("cuda", "xla"), "cpu": ("cpu",)}

#: A policy for every device type, or a mapping of device types to policies.
Override = CastPolicy | torch.dtype | Mapping[str, CastPolicy | torch.dtype]
#: Replaces the table's policies: maps full names of overloads, such as `aten::mm` or `mylib::op`, to overrides.
Overrides = Mapping[str, Override]


@dataclass(frozen=True, slots=True)
class DeviceAutocast:
    """The autocast state of one device type.

    Attributes:
        enabled: Whether autocast is on.
        dtype: The autocast dtype.

    Example:
        >>> DeviceAutocast(enabled=True, dtype=torch.bfloat16).dtype
        torch.bfloat16

    Source: aten/src/ATen/autocast_mode.cpp, is_autocast_enabled (v2.13); aten/src/ATen/autocast_mode.cpp,
    get_autocast_dtype (v2.13).
    """

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The autocast state during a call. It does not include grad mode, which does not affect casts.

    Attributes:
        devices: The state of each device type. Autocast is off for the others.
        cache_enabled: Whether casts of weights are cached.
        overrides: Policies by the overload's full name, such as `aten::mm`: for every device type, or by device type.
            For other ops, the table's policies apply.
        inference_mode: Whether inference mode is on, in which no cast is cached or reused.
        keeps_more: Whether `my_autocast` also keeps casts that PyTorch repeats at each use: of half-precision weights,
            frozen parameters, views of weights, and in inference mode. This assumes that no other tensor shares their
            data.
        cached: The valid casts in the cache: weights, and the dtypes that they were cast to.

    Example:
        >>> AutocastState.region("cpu").devices["cpu"]
        DeviceAutocast(enabled=True, dtype=torch.bfloat16)

    Source: aten/src/ATen/autocast_mode.cpp, is_autocast_cache_enabled (v2.13); aten/src/ATen/autocast_mode.cpp,
    get_cached_casts (v2.13).
    """

    devices: Mapping[str, DeviceAutocast]
    cache_enabled: bool = True
    overrides: Overrides = field(default_factory=lambda: MappingProxyType({}))
    inference_mode: bool = False
    keeps_more: bool = False
    cached: tuple[tuple[torch.Tensor, torch.dtype], ...] = field(default=(), compare=False)

    @classmethod
    def region(
        cls,
        device_type: str,
        dtype: torch.dtype | None = None,
        *,
        cache_enabled: bool = True,
        overrides: Overrides | None = None,
    ) -> AutocastState:
        """Returns the state inside a region of one device type.

        Args:
            device_type: "cpu" or "cuda".
            dtype: The autocast dtype. None: PyTorch's default, bfloat16 on the CPU and float16 on CUDA.
            cache_enabled: Whether casts of weights are cached.
            overrides: Policies by the overload's full name: for every device type, or by device type.

        Example:
            >>> AutocastState.region("cuda", cache_enabled=False).devices
            {'cuda': DeviceAutocast(enabled=True, dtype=torch.float16)}

        Source: torch/amp/autocast_mode.py, autocast::__init__ (v2.13).
        """
        chosen = dtype or (torch.bfloat16 if device_type == "cpu" else torch.float16)
        return cls({device_type: DeviceAutocast(True, chosen)}, cache_enabled, MappingProxyType(dict(overrides or {})))

    @classmethod
    def current(cls, overrides: Overrides | None = None) -> AutocastState:
        """Returns PyTorch's state in this thread, with an empty cache.

        Args:
            overrides: Policies by the overload's full name. PyTorch's own state has no overrides.

        Example:
            >>> with torch.autocast("cpu"):
            ...     AutocastState.current().devices["cpu"]
            DeviceAutocast(enabled=True, dtype=torch.bfloat16)

        Source: aten/src/ATen/autocast_mode.cpp, is_autocast_enabled (v2.13).
        """
        devices = {
            device: DeviceAutocast(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in TURNS
        }
        chosen = MappingProxyType(dict(overrides or {}))
        return cls(devices, torch.is_autocast_cache_enabled(), chosen, torch.is_inference_mode_enabled())

    def override(self, name: str, device_type: str) -> CastPolicy | torch.dtype | None:
        """Returns the override for an op on a device type, or None.

        Args:
            name: The overload's full name.
            device_type: "cpu" or "cuda".

        Example:
            >>> state = AutocastState.region("cpu", overrides={"aten::mm": {"cpu": CastPolicy.fp32}})
            >>> state.override("aten::mm", "cpu"), state.override("aten::mm", "cuda")
            (<CastPolicy.fp32: 'fp32'>, None)
        """
        found = self.overrides.get(name)
        return found.get(device_type) if isinstance(found, Mapping) else found
