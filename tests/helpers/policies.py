"""Policies as values: random ones for hypothesis, every way to copy one, and one with its file."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from helpers.library_for_policies import NAMESPACE
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.op_table import DEVICE_TYPES, TABLE_VERSION
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy

FP64 = torch.float64


WAYS: dict[str, Callable[[Policy], Policy]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
    "dict": lambda policy: Policy.from_dict(policy.to_dict()),
    "json": lambda policy: Policy.from_dict(json.loads(json.dumps(policy.to_dict()))),
}


KEYS = [
    "mm", "mm.default", "mm.out", "softmax", "softmax.int", "norm.Scalar", "pow", "add_.Tensor", "index_put_", "cat",
    "linalg_*", "prod", f"{NAMESPACE}::join", f"{NAMESPACE}::many", f"{NAMESPACE}::*",
]  # fmt: skip


VALUES = [*CastPolicy, torch.float64, torch.bfloat16, torch.float16]


def selected(key: str, value: Any) -> tuple[str, ...]:
    try:
        return select(key, value)[1]
    except PolicyError:
        return ()


LEGAL = [(key, value) for key in KEYS for value in VALUES if selected(key, value)]


STEPS = st.lists(st.tuples(st.sampled_from(LEGAL), st.sampled_from([None, *DEVICE_TYPES])), max_size=6)


def made_of(steps: list[tuple[tuple[str, Any], str | None]], base: str = "stock") -> Policy:
    policy = Policy.named(base)
    for (key, value), device in steps:
        policy = policy.override({key: value}, device)
    return policy


POLICIES = st.builds(made_of, STEPS, st.sampled_from(Policy.names()))


TORCH = torch.__version__.partition("+")[0]


MINE = (
    Policy.stock()
    .override({"mm.default": "fp32", "softmax.int": "fp16", f"{NAMESPACE}::many.out": "match_self"})
    .override({"exp.default": FP64, "add_.Tensor": "match_self"}, "cpu")
)


TEXT = f"""\
# A policy of torch_promote: where it differs from PyTorch's autocast. Policy.load() reads it.
format = 1
torch = "{TORCH}"
table = "{TABLE_VERSION}"

[all]
"aten::mm.default" = "fp32"
"aten::softmax.int" = "lower_precision_fp"
"policy_tests::many.out" = "match_self"

[cpu]
"aten::add_.Tensor" = "match_self"
"aten::exp.default" = "float64"
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("p.toml")
