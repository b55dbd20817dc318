"""What a call of an op finds around it: which devices have autocast on, in which dtype, and what the cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from torch_promote.policy.cast_policy import CastPolicy

__all__ = ["TURNS", "AutocastState", "DeviceAutocast", "Override", "Overrides"]

#: The device types that have policies, in the order of their turns, with the devices whose tensors they cast.
TURNS = {"cuda": ("cuda", "xla"), "cpu": ("cpu",)}

#: A policy for every device type, or one for each of some device types.
Override = CastPolicy | torch.dtype | Mapping[str, CastPolicy | torch.dtype]
#: What replaces the table's policies: an overload's full name, such as `aten::mm` or `mylib::op`, to its override.
Overrides = Mapping[str, Override]


@dataclass(frozen=True, slots=True)
class DeviceAutocast:
    """Autocast's state for one device type.

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
    """What a call finds around it. Grad mode is no part of it: casts are the same with and without.

    Attributes:
        devices: The state for each device type; a device type that is not named is off.
        cache_enabled: Whether casts of weights are cached.
        overrides: Policies of ops in and outside of the table, by the overload's full name, such as `aten::mm`: for
            every device type, or by device type. Where they say nothing, the table's policy stands.
        inference_mode: Whether the call is made in inference mode, in which no cast is kept or used again.
        keeps_more: Whether casts that PyTorch makes anew at every use are kept too, as `my_autocast` keeps them: of
            weights in half precision, frozen parameters, views of weights, and in inference mode. It is taken that no
            other tensor shares their data.
        cached: The casts that the cache holds: weights, and the dtypes that they were cast to. A weight that has
            changed since does not count, as its cast is no longer good.

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
        """Returns the state in a region of one device type.

        Args:
            device_type: "cpu" or "cuda".
            dtype: The autocast dtype; None means PyTorch's default, bfloat16 on the CPU and float16 on CUDA.
            cache_enabled: Whether casts of weights are cached.
            overrides: Policies of ops, by the overload's full name: for every device type, or by device type.

        Example:
            >>> AutocastState.region("cuda", cache_enabled=False).devices
            {'cuda': DeviceAutocast(enabled=True, dtype=torch.float16)}

        Source: torch/amp/autocast_mode.py, autocast::__init__ (v2.13).
        """
        chosen = dtype or (torch.bfloat16 if device_type == "cpu" else torch.float16)
        return cls({device_type: DeviceAutocast(True, chosen)}, cache_enabled, MappingProxyType(dict(overrides or {})))

    @classmethod
    def current(cls, overrides: Overrides | None = None) -> AutocastState:
        """Returns the state of this thread, as PyTorch holds it, with nothing in the cache.

        Args:
            overrides: Policies of ops, by the overload's full name: PyTorch's state knows of none.

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

    def override(self, name: str, device: str) -> CastPolicy | torch.dtype | None:
        """Returns the policy that the overrides give an op on a device type; None where they say nothing.

        Args:
            name: The overload's full name.
            device: "cpu" or "cuda".

        Example:
            >>> state = AutocastState.region("cpu", overrides={"aten::mm": {"cpu": CastPolicy.fp32}})
            >>> state.override("aten::mm", "cpu"), state.override("aten::mm", "cuda")
            (<CastPolicy.fp32: 'fp32'>, None)
        """
        found = self.overrides.get(name)
        return found.get(device) if isinstance(found, Mapping) else found
