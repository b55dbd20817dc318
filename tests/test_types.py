"""Type checkers on a user's program: exact types of decorated functions and of results, and the lines that are errors.

`make lint` runs this file with the commands: python tests/test_types.py pyright.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import torch_promote as tp
from torch_promote.policy.named_policies import MEANINGS
from torch_promote.policy.op_table import DEVICE_TYPES, POLICY_ALIASES, CastPolicyName, DeviceType
from torch_promote.policy.policy import PolicyName
from torch_promote.reference.promotion_rules import RuleName, promotion_rule
from torch_promote.regions.autocast import CacheInfo, CacheMode, allows_cache
from torch_promote.regions.promotion import KindLike, PromotionKind

SCRIPT = Path(__file__).parent / "helpers" / "user_script.py"


def check(command: Sequence[str]) -> None:
    """Compares the lines with errors of a type checker with those that are marked."""
    root = str(Path(__file__).parents[1])
    ran = subprocess.run(
        [*command, str(SCRIPT)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    found = {int(line) for line in re.findall(r"user_script\.py:(\d+)(?::\d+)?(?: -|:) error", ran.stdout)}
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert marked == found, f"{sorted(marked ^ found)}\n{ran.stdout}{ran.stderr}"


@pytest.mark.slow  # it reads all of PyTorch; `make lint` keeps what it has read
def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    check([sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}"])


def test_the_names_of_arguments_are_those_that_exist() -> None:
    assert get_args(DeviceType) == DEVICE_TYPES
    assert get_args(PolicyName) == tuple(MEANINGS)
    assert {*get_args(CastPolicyName)} == {*(policy.value for policy in tp.CastPolicy), *POLICY_ALIASES}
    assert [allows_cache(mode, None) for mode in get_args(CacheMode)] == [True, True, True, False]
    assert [promotion_rule(name).name for name in get_args(RuleName)] == list(get_args(RuleName))
    names = {name for one in get_args(KindLike) for name in get_args(one) or [one]} - {PromotionKind}
    assert names == {*(kind.value for kind in PromotionKind), *(kind.name.lower() for kind in PromotionKind)}
    assert get_type_hints(CacheInfo).keys() == tp.cache_info().keys()


if __name__ == "__main__":
    check(sys.argv[1:])
