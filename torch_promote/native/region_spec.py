"""`RegionSpec`: the settings of a region, and the str that they are packed into.

The packed form is a str of 16 hexadecimal digits. Regions hold it, the extension reads it, and graphs of torch.compile
contain it. It is a str because Dynamo treats a str as a constant (an int that changes between calls becomes a symbol),
and FX can print, hash and pickle it. csrc/region/region_spec.h defines the digits; no other Python file reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_promote import _C
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = ["DTYPE_NUMBERS", "DeviceSpec", "RegionSpec"]

#: The c10::ScalarType number of each dtype that ops can run in.
DTYPE_NUMBERS = {
    dtype: _C.scalar_type(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

# The bits, as in csrc/region/region_spec.cpp.
_BITS_PER_DEVICE = 16
_NAMED = 1 << 8
_ENABLED = 1 << 9
_CACHE_ENABLED = 1 << 32
_CACHE_MODE_SHIFT = 33
_KEEPS_CACHE = 1 << 35
_POLICY_CHANGE_SHIFT = 40
_CACHE_MODES: tuple[str | None, ...] = (None, *_C.CACHE_MODES)


class DeviceSpec(NamedTuple):
    """The settings of a region for one device type.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: The autocast dtype.
        enabled: Whether autocast is on.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool


class RegionSpec(NamedTuple):
    """The settings of a region.

    Attributes:
        devices: The device types that it changes.
        cache_enabled: The cache flag; None leaves it unchanged.
        cache_mode: One of `_C.CACHE_MODES`; None leaves the mode unchanged.
        policy_change: The extension's number for the region's policy change, 0 for none. It is valid only in this
            process.
    """

    devices: tuple[DeviceSpec, ...] = ()
    cache_enabled: bool | None = None
    cache_mode: str | None = None
    policy_change: int = 0

    def pack(self) -> str:
        """Returns the packed form.

        Example:
            >>> RegionSpec((DeviceSpec("cpu", torch.bfloat16, True),), True).pack()
            '000000010000030f'
        """
        bits = self.policy_change << _POLICY_CHANGE_SHIFT
        if self.cache_enabled is None:
            bits |= _KEEPS_CACHE
        elif self.cache_enabled:
            bits |= _CACHE_ENABLED
        bits |= _CACHE_MODES.index(self.cache_mode) << _CACHE_MODE_SHIFT
        for device_type, dtype, enabled in self.devices:
            field = DTYPE_NUMBERS[dtype] | _NAMED | (_ENABLED if enabled else 0)
            bits |= field << (_BITS_PER_DEVICE * DEVICE_TYPES.index(device_type))
        return f"{bits:016x}"

    @classmethod
    def unpack(cls, packed: str) -> RegionSpec:
        """Returns the spec that a str was packed from.

        Example:
            >>> RegionSpec.unpack("000000010000030f").devices
            (DeviceSpec(device_type='cpu', dtype=torch.bfloat16, enabled=True),)
        """
        bits = int(packed, 16)
        fields = ((name, bits >> (_BITS_PER_DEVICE * index)) for index, name in enumerate(DEVICE_TYPES))
        return cls(
            tuple(
                DeviceSpec(name, _DTYPES[field & 0xFF], bool(field & _ENABLED))
                for name, field in fields
                if field & _NAMED
            ),
            None if bits & _KEEPS_CACHE else bool(bits & _CACHE_ENABLED),
            _CACHE_MODES[bits >> _CACHE_MODE_SHIFT & 3],
            bits >> _POLICY_CHANGE_SHIFT,
        )
