"""A name of an op takes precedence over a pattern, in every order; dtypes and policies by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.policy.overrides import parse_overrides, parse_policy

FP32, LOWER = tp.CastPolicy.fp32, tp.CastPolicy.lower_precision_fp
FAMILY = {"linalg_*": "fp32", "linalg_norm": "lower"}


@pytest.mark.parametrize("overrides", [FAMILY, dict(reversed(FAMILY.items()))], ids=["pattern first", "name first"])
def test_a_name_wins(overrides: dict[Any, Any]) -> None:
    found = dict(parse_overrides(overrides))
    assert found["aten::linalg_norm"] is found["aten::linalg_norm.ord_str"] is LOWER
    assert found["aten::linalg_vector_norm"] is FP32
    overload = dict(parse_overrides({"linalg_norm.ord_str": "lower", "linalg_*": "fp32"}))
    assert (overload["aten::linalg_norm"], overload["aten::linalg_norm.ord_str"]) == (FP32, LOWER)


def test_a_name_decides_between_two_patterns() -> None:
    patterns = {"linalg_v*": "fp32", "*_vector_norm": "lower"}
    with pytest.raises(tp.PolicyError, match="Name the op itself as well, which takes precedence over patterns"):
        parse_overrides(patterns)
    assert (
        dict(parse_overrides(patterns | {"linalg_vector_norm": "float64"}))["aten::linalg_vector_norm"] is torch.float64
    )


@pytest.mark.parametrize(
    "text",
    [
        '[all]\n"linalg_*" = "fp32"\n"linalg_norm" = "lower"\n',
        '[all]\n"linalg_norm" = "lower"\n"linalg_*" = "fp32"\n',
        '[all]\n"linalg_*" = "fp32"\n[cpu]\n"linalg_norm" = "lower"\n[cuda]\n"linalg_norm" = "lower"\n',
        '[cpu]\n"linalg_*" = "fp32"\n[cuda]\n"linalg_*" = "fp32"\n[all]\n"linalg_norm" = "lower"\n',
    ],
)
def test_in_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"format = 1\n{text}")
    assert tp.Policy.load(file) == tp.Policy.stock().override(FAMILY)


def test_in_tables_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for rows in (FAMILY, dict(reversed(FAMILY.items()))):
        table = "".join(f'"{op}" = "{policy}"\n' for op, policy in rows.items())
        file.write_text(f'format = 2\n[modules."head"]\n{table}')
        assert tp.Policy.load(file) == tp.Policy.stock().override_modules({"head": FAMILY})
    file.write_text('format = 2\n[modules."head"]\n"linalg_v*" = "fp32"\n"*_vector_norm" = "keep"\n')
    with pytest.raises(
        tp.PolicyError, match=r'"\*_vector_norm": .* already has a policy from .*"linalg_v\*"\. Name the op'
    ):
        tp.Policy.load(file)


def test_in_a_region_and_a_module() -> None:
    x = torch.ones(3, dtype=torch.float16)
    with tp.my_autocast("cpu", overrides=FAMILY):
        assert torch.linalg.vector_norm(x).dtype is torch.float32
        assert torch.linalg.norm(torch.ones(3)).dtype is torch.bfloat16


# --- names of policies and of dtypes

NAMES = {
    "lower": LOWER,
    "fp16": LOWER,
    "lower_precision_fp": LOWER,
    "fp32": FP32,
    "float16": torch.float16,
    "torch.float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "double": torch.float64,
}


@pytest.mark.parametrize(("name", "policy"), NAMES.items())
def test_a_policy_by_name(name: str, policy: Any, tmp_path: Path) -> None:
    assert parse_policy(name) is policy
    file = tmp_path / "mine.toml"
    file.write_text(f'format = 1\n[all]\n"softmax.int" = "{name}"\n')
    assert tp.Policy.load(file) == tp.Policy.stock().override({"softmax.int": policy})


DTYPES = {name: policy for name, policy in NAMES.items() if isinstance(policy, torch.dtype)} | {"fp16": torch.float16}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_the_dtype_of_a_region_by_name(name: str, dtype: torch.dtype) -> None:
    """Here, "fp16" is a dtype."""
    if dtype not in (torch.float16, torch.bfloat16):
        with pytest.warns(UserWarning, match="supports torch.bfloat16 and torch.float16"):
            tp.my_autocast("cpu", dtype=name)
        return
    region = tp.my_autocast("cpu", dtype=name)
    assert repr(region) == f"my_autocast('cpu', dtype={dtype})"
    with region:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype
    with tp.my_autocast("cpu", name, policy="cuda"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


def test_the_policy_of_an_op_for_that_of_a_region() -> None:
    with pytest.raises(tp.PolicyError) as error:
        tp.my_autocast("cpu", policy="bf16")
    assert str(error.value) == (
        "no policy is called 'bf16'. 'bf16' is for single ops: overrides={op: 'bf16'}. The dtype of a region is "
        "my_autocast(dtype='bf16'). Legal: stock, cpu, cuda, fp32_safe, off, or the path of a file, which contains a "
        "separator or ends with .toml."
    )


def test_messages_say_what_fp16_means() -> None:
    for wrong in ("fp61", "fp8", "nothing"):
        with pytest.raises(tp.PolicyError, match=r"fp16: all three mean the region's dtype"):
            parse_policy(wrong)
    with pytest.raises(tp.PolicyError, match=r"Closest: fp16 \(the region's dtype\)\."):
        parse_policy("fp61")
    assert "Short: lower. Alias: fp16." in tp.CastPolicy("lower").meaning
