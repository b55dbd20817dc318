"""The warm-up of a soak: fills registries that keep a number of the last entries with entries like those to come."""

from __future__ import annotations

import functools
import random
from typing import Any

from features import PATTERNS, new_overrides
from registries import LIMITS
from tool_features import unused_overrides

from torch_promote.native.module_tables import number_in_force
from torch_promote.native.policy_changes import Named
from torch_promote.native.region_spec import RegionSpec
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.overrides import parse_overrides
from torch_promote.regions import arguments
from torch_promote.regions.base import Region

__all__ = ["fill"]


def fill() -> None:
    """Fills the registries. Each op and policy is parsed once, and not for each change."""
    draw = random.Random(0)
    for number in range(LIMITS["policy changes"] + 1):
        asked = new_overrides(draw)
        if draw.random() < 0.15:  # fewer than in the feature, whose inner regions have no pattern
            asked[draw.choice(PATTERNS)] = draw.choice(("lower", "fp32", "keep"))
        parsed = [_parsed(op, policy) for op, policy in asked.items()]
        changes = [change for of_op, _ in parsed for change in of_op]
        named = [one for _, one in parsed if one is not None]
        change = arguments.register_policy_change(changes, named=named)
        if number < LIMITS["policy tables"]:
            with Region(RegionSpec(policy_change=change).pack()):
                number_in_force()
    for number in range(LIMITS["regions.unused_overrides._lines"]):
        unused_overrides(draw, -number)  # iterations have positive numbers, and so other lines


@functools.cache
def _parsed(op: str, policy: Any) -> tuple[list[Any], Named | None]:
    pairs = parse_overrides({op: policy})
    named = None if op in PATTERNS else arguments._named(op, policy)
    return [(name, device, value) for name, value in pairs for device in DEVICE_TYPES], named
