"""`RegionSpec`: packing and unpacking, in Python and by the extension."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.probes import leaves_no_trace
from torch_promote import _C
from torch_promote.extension import DeviceSpec, RegionSpec
from torch_promote.regions.region import Region

BF16, FP16 = torch.bfloat16, torch.float16
DEVICES: list[tuple[DeviceSpec, ...]] = [
    (),
    (DeviceSpec("cpu", BF16, True),),
    (DeviceSpec("cuda", FP16, False),),
    (DeviceSpec("cpu", FP16, False), DeviceSpec("cuda", torch.float64, True)),
]
SPECS = [
    RegionSpec(*fields)
    for fields in itertools.product(DEVICES, (None, False, True), (None, *_C.CACHE_MODES), (0, 1, 2**24 - 1))
]


@pytest.mark.parametrize("around", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.policy_change == 0], ids=RegionSpec.pack)
def test_the_extension_reads_what_is_packed(spec: RegionSpec, around: torch.dtype | None) -> None:
    outer = Region(RegionSpec((), around is FP16, "all" if around is BF16 else None).pack())
    with leaves_no_trace(), outer:
        expected = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda")}
        cache = torch.is_autocast_cache_enabled() if spec.cache_enabled is None else spec.cache_enabled
        mode = spec.cache_mode or _C.cache_mode()
        for device_type, dtype, enabled in spec.devices:
            expected[device_type] = enabled, dtype
        with Region(spec.pack()):
            found = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in expected}
            assert found == expected
            assert (torch.is_autocast_cache_enabled(), _C.cache_mode()) == (cache, mode)


def test_the_extension_packs_as_python_does() -> None:
    modes = (None, *_C.CACHE_MODES, "none")
    for dtype, enabled, flag, mode in itertools.product((BF16, FP16), (True, False), (True, False), modes):
        plain = _C.pack_plain_region("cpu", dtype, enabled, flag, mode)
        cache = flag if mode is None else mode != "none"
        spec = RegionSpec((DeviceSpec("cpu", dtype, enabled),), cache, None if mode == "none" else mode)
        assert plain == (spec.pack(), ("cpu", dtype, enabled, flag, mode))
