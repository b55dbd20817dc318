"""Regions of XPU and MPS, on fake tensors: state, dtypes, nesting, defaults, `install`, tools; other device types.

tests/parity/test_parity.py compares every row of the op table with stock on these device types.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.command_line import Capture, json_of
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.regions.autocast import default_device_type

Autocast = Callable[..., AbstractContextManager[Any]]

pytestmark = pytest.mark.usefixtures("pretend_cuda")
each_device = pytest.mark.parametrize("device", ["xpu", "mps"])
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def state() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICE_TYPES]


def dtypes_in(device: str) -> tuple[torch.dtype, ...]:
    """The dtypes of a product, a softmax and a batch norm."""
    with FakeTensorMode():
        x = torch.empty(2, 4, device=device)
        return (x @ x.t()).dtype, (x.half().softmax(-1)).dtype, torch.batch_norm(
            x.half(), None, None, None, None, True, 0.1, 1e-5, False
        ).dtype  # fmt: skip


def observed(autocast: Autocast, device: str, *arguments: Any) -> list[Any]:
    """What a program sees in a region, in regions inside of it, and after it."""
    seen: list[Any] = []

    def look() -> None:
        seen.extend((state(), *map(dtypes_in, ("cuda", "xpu", "mps"))))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outer = autocast(device, *arguments)
    seen.append([(one.category, "Disabling" in str(one.message)) for one in warned])
    with outer:
        look()
        with torch.autocast("cpu"), autocast(device, enabled=False):
            look()
            with torch.autocast(device, BF16):
                look()
        with autocast("cuda"):
            look()
        look()
    look()
    return seen


@each_device
@pytest.mark.parametrize("dtype", [None, BF16, F16, F32, torch.float64], ids=str)
def test_a_program_sees_what_it_sees_in_torch_autocast(device: str, dtype: torch.dtype | None) -> None:
    assert observed(tp.my_autocast, device, dtype) == observed(tp.stock_autocast, device, dtype)
    with tp.install():
        assert observed(torch.autocast, device, dtype) == observed(tp.stock_autocast, device, dtype)


def test_bfloat16_on_mps_needs_macos_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    with pytest.warns(UserWarning, match=r"my_autocast on MPS supports torch\.bfloat16 from macOS 14 on\."):
        region = tp.my_autocast("mps", BF16)
    with region:
        assert not torch.is_autocast_enabled("mps")
    with tp.my_autocast("mps"):
        assert torch.is_autocast_enabled("mps")


@pytest.mark.parametrize("devices", [*itertools.permutations(DEVICE_TYPES, 2), DEVICE_TYPES], ids="-".join)
def test_one_region_for_several(devices: tuple[str, ...]) -> None:
    before = state()
    with tp.my_autocast(devices, F16, overrides={"mm": "fp32", "softmax.int": BF16}):
        assert state() == [(d in devices, F16 if d in devices else torch.get_autocast_dtype(d)) for d in DEVICE_TYPES]
        for device in DEVICE_TYPES:
            assert (dtypes_in(device)[1] is BF16) == (device in devices)
    assert state() == before


def test_the_default_is_the_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
    for module, device in ((torch.backends.mps, "mps"), (torch.xpu, "xpu"), (torch.cuda, "cuda")):
        monkeypatch.setattr(module, "is_available", lambda: True)
        assert repr(tp.my_autocast()) == f"my_autocast({device!r})"


@each_device
def test_policies(device: str, tmp_path: Path) -> None:
    """A column is a policy for every device type, and a section of a policy file."""
    product, softmax, norm = {"xpu": (F16, F32, F16), "mps": (F16, F32, F32)}[device]
    assert dtypes_in(device) == (F32, F16, F16)
    with tp.my_autocast(device):
        assert dtypes_in(device) == (product, softmax, norm)
    for other in DEVICE_TYPES:
        with tp.my_autocast(other, F16, policy=device):
            assert dtypes_in(other) == (product, softmax, norm)
    path = tmp_path / "mine.toml"
    path.write_text(f'format = 1\n[{device}]\n"mm" = "fp32"\n')
    policy = tp.Policy.load(path)
    policy.save(path)
    assert tp.Policy.load(path) == policy == tp.Policy.stock().override({"mm": "fp32"}, device)
    with FakeTensorMode(), tp.my_autocast(DEVICE_TYPES, F16, policy=policy):
        results = {each: torch.empty(2, 2, device=each).mm(torch.empty(2, 2, device=each)) for each in DEVICE_TYPES}
    assert {each: result.dtype for each, result in results.items()} == {**dict.fromkeys(DEVICE_TYPES, F16), device: F32}


@each_device
def test_install(device: str) -> None:
    @torch.amp.custom_fwd(device_type=device, cast_inputs=BF16)
    def given(ctx: object, x: torch.Tensor) -> torch.dtype:
        return x.dtype

    with tp.install(policy="off"):
        with torch.autocast(device):
            assert dtypes_in(device) == (F32, F16, F16)
            with FakeTensorMode():
                assert given(SimpleNamespace(), torch.empty(2, device=device)) is BF16
        with tp.stock_autocast(device):
            assert dtypes_in(device)[0] is F16


@pytest.mark.parametrize("device", ["hpu", "mtia", "maia", "ipu"])
def test_other_device_types_are_torch_autocasts(device: str) -> None:
    with pytest.raises(tp.errors.UnsupportedDeviceError, match=f"no device type '{device}'. .* torch.autocast") as one:
        tp.my_autocast(device)
    assert f"torch.autocast({device!r}) serves that device type." in str(one.value)
    with tp.install(policy="off"), torch.autocast(device):
        assert torch.is_autocast_enabled(device)
        assert not tp.observe.policy_sources.my_autocast_is_in_force()
        with FakeTensorMode() if device == "mtia" else nullcontext():
            x = torch.empty(2, 2, device=device if device == "mtia" else "cpu")
            assert (x @ x).dtype is (F16 if device == "mtia" else F32)
    assert not torch.is_autocast_enabled(device)


@each_device
def test_a_step_of_a_coroutine(device: str) -> None:
    """The region, and those of torch.autocast inside of it, are suspended between the steps."""

    @tp.my_autocast(device)
    async def run() -> tuple[torch.dtype, ...]:
        with torch.autocast("cuda", BF16), torch.autocast(device, BF16):
            await asyncio.sleep(0)
            return dtypes_in(device)

    step = run()
    before = state()
    assert step.send(None) is None
    assert state() == before
    with pytest.raises(StopIteration) as done:
        step.send(None)
    assert done.value.value[0] is BF16
    assert state() == before


@each_device
def test_compiled(device: str) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        with tp.my_autocast(device, overrides={"mm": "fp32"}):
            return x @ x, torch.is_autocast_enabled(device)

    _, enabled = torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2))
    assert enabled
    assert not torch.is_autocast_enabled(device)


@each_device
def test_tools(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 4, device=device)
        with tp.crosscheck() as checked, tp.trace() as traced, tp.my_autocast(device, overrides={"exp": "lower"}):
            (x @ x).softmax(-1).exp()
    assert not checked.mismatches
    said = {call.op: (call.policy, call.policy_source) for call in traced.calls}
    softmax = {"xpu": tp.CastPolicy.fp32_set_opt_dtype, "mps": tp.CastPolicy.fp32}[device]
    assert said["aten::matmul"] == (tp.CastPolicy.lower_precision_fp, "PyTorch's table")
    assert said["aten::softmax"] == (softmax, "PyTorch's table")
    assert said["aten::exp"][0] is tp.CastPolicy.lower_precision_fp
    assert __file__ in said["aten::exp"][1]


@each_device
def test_commands(device: str, capsys: Capture) -> None:
    info = json_of(capsys, "info")["devices"][device]
    assert (info["available"], info["default_dtype"]) == (False, "float16")
    [row] = json_of(capsys, "policies", "--op", "mm", "--device", device)["rows"]
    assert row[device] == "lower_precision_fp"
    why = json_of(capsys, "why", "F.softmax(f2[2, 3], -1)", "--autocast", device)
    assert why["dtype"] == "float32"
    parity = json_of(capsys, "parity", "--device", f"fake-{device}", "--ops", "aten::mm", "--jobs", "0")
    assert parity["totals"]["mismatches"] == 0
