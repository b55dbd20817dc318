"""Policies and cache modes of installed regions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote import _C

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

pytestmark = pytest.mark.usefixtures("nothing_installed")


def dtypes(*regions: Any) -> tuple[torch.dtype, torch.dtype]:
    """Of matmul and softmax, in a region of torch.autocast unless others are given."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu") if not regions else regions[0]:
        return (x @ x).dtype, torch.softmax(x.half(), -1).dtype


def test_policies(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    tp.Policy.named("off").save(file)
    for policy, expected in (
        (None, (BF16, HALF)), ("stock", (BF16, HALF)), ("cuda", (BF16, F32)), ("off", (F32, HALF)),
        (tp.Policy.named("cuda"), (BF16, F32)), (file, (F32, HALF)), (str(file), (F32, HALF)),
    ):  # fmt: skip
        with tp.installed_as(policy=policy):
            assert dtypes() == expected


def test_the_default_policy_acts_unless_a_policy_is_given() -> None:
    before = tp.set_default_policy("off")
    try:
        with tp.installed_as():
            assert dtypes() == (F32, HALF)
            tp.set_default_policy("cuda")
            assert dtypes() == (BF16, F32)
        with tp.installed_as(overrides={"matmul": HALF}):
            assert dtypes() == (HALF, F32)
        with tp.installed_as(policy="stock"):
            assert dtypes() == (BF16, HALF)
    finally:
        tp.set_default_policy(before)


def test_registered_policies_act() -> None:
    for arguments in ({}, {"overrides": {"matmul": HALF}}):
        with tp.installed_as(**arguments):  # type: ignore[arg-type]
            assert dtypes()[1] is HALF
            with tp.register_policy("softmax.int", "fp32"):
                assert dtypes()[1] is F32
            assert dtypes()[1] is HALF


# --- the cache


def casts_kept(**arguments: Any) -> tuple[int, str]:
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    with torch.autocast("cpu", **arguments):
        x @ weight
        return tp.cache_info()["entries"], _C.cache_mode()


def test_cache_modes() -> None:
    with tp.installed_as():
        assert casts_kept() == (1, "weights")
        with tp.my_autocast("cpu", cache="all"):
            assert casts_kept()[1] == "all"
    for mode in ("weights", "all", "persistent"):
        with tp.installed_as(cache=mode):
            assert casts_kept()[1] == mode
    with tp.installed_as(cache="none"):
        assert casts_kept() == (0, "weights")
        assert casts_kept(cache_enabled=True) == (0, "weights")
        with torch.autocast("cpu"):
            assert not torch.is_autocast_cache_enabled()
    tp.clear_cache()
