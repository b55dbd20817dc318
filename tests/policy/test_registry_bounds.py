"""The extension keeps a bounded number of overrides and promotion rules, and shares equal ones."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from torch_promote import _C
from torch_promote.promoting import hooks
from torch_promote.reference.promotion_rules import make_rule
from torch_promote.regions.arguments import policy_number

POLICIES = ("fp16", "fp32", "promote", "fallthrough", "keep")
OPS = ("softmax.int", *(f"{op}.default" for op in ("mm", "bmm", "addmm", "mv", "dot", "exp", "log")))
#: What csrc/policy/policy_registry.h keeps, and an eighth more before it drops that.
MOST_CHANGES, MOST_TABLES = 16384, 1024


def different_overrides() -> Iterator[dict[str, str]]:
    for policies in itertools.product(POLICIES, repeat=len(OPS)):
        yield dict(zip(OPS, policies, strict=True))


def sizes(name: str) -> int:
    return _C.registry_sizes()[name]


@pytest.mark.slow
def test_different_overrides_are_dropped_and_may_be_used_again() -> None:
    asked = list(itertools.islice(different_overrides(), 3 * MOST_TABLES))
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    for overrides in asked:
        with tp.my_autocast("cpu", overrides=overrides):
            pass
    assert sizes("policy tables") <= MOST_TABLES + MOST_TABLES // 8 + 1
    assert sizes("policy changes") <= MOST_CHANGES + MOST_CHANGES // 8
    for overrides in (asked[0], asked[-1]):
        with tp.my_autocast("cpu", overrides={**overrides, "mm.default": "fp32"}):
            assert torch.mm(x, x).dtype is torch.float32


@pytest.mark.slow
def test_an_open_region_keeps_its_policy_while_others_are_dropped() -> None:
    x = torch.ones(2, 2)
    with tp.my_autocast("cpu", overrides={"mm.default": torch.float64, "relu.default": torch.float64}):
        for overrides in itertools.islice(different_overrides(), 3 * MOST_TABLES):
            with tp.my_autocast("cpu", overrides=overrides):
                assert torch.relu(x).dtype is torch.float64
        assert torch.mm(x, x).dtype is torch.float64


@pytest.mark.slow
def test_changes_are_dropped_and_a_region_whose_change_was_dropped_says_so() -> None:
    first = tp.my_autocast("cpu", overrides={"mm.default": "keep", "exp.default": torch.float64})
    for overrides in itertools.islice(different_overrides(), MOST_CHANGES + MOST_CHANGES // 8 + 100):
        policy_number(None, overrides)
    assert sizes("policy changes") <= MOST_CHANGES + MOST_CHANGES // 8
    with pytest.raises(RuntimeError, match=r"16384 others have been used since this one\. Make the region anew"):
        first.__enter__()
    with tp.my_autocast("cpu", overrides={"mm.default": "keep", "exp.default": torch.float64}):
        assert torch.exp(torch.ones(2)).dtype is torch.float64


def test_equal_overrides_are_one() -> None:
    before = sizes("policy changes")
    numbers = set()
    for _ in range(300):
        numbers.add(policy_number(tp.Policy.stock().override({"mm.default": "fp32"}), {"exp.default": "fp16"}))
    assert len(numbers) == 1
    assert sizes("policy changes") <= before + 1


def rule(kind: torch.dtype = torch.float32, name: str = "mine") -> tp.reference.promotion_rules.PromotionRule:
    return make_rule(name, {(torch.int32, torch.float16): kind}, over="torch")


def test_equal_rules_are_one() -> None:
    assert rule() is rule()
    assert rule() is not rule(torch.float64)
    assert rule() is not rule(name="other")
    known = len(hooks._known)
    for _ in range(300):
        with tp.promotion(rule()):
            assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    assert len(hooks._known) <= known + 1


def test_different_rules_are_dropped() -> None:
    made = []
    for number in range(60):
        with tp.promotion(mine := rule(name=f"rule {number}")):
            torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)
        made.append(weakref.ref(mine.build))
    gc.collect()
    assert len(hooks._known) < 60
    assert sum(one() is not None for one in made) < 60


def test_regions_keep_their_rules() -> None:
    regions = [tp.promotion(rule(torch.float64, f"kept {number}")) for number in range(60)]
    for region in regions:
        with region:
            assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float64


def test_more_rules_of_one_content_than_a_fingerprint_tells_apart() -> None:
    """Rules that are equal, and not made by make_rule, are different objects."""
    import dataclasses

    for _ in range(300):
        with tp.promotion(dataclasses.replace(rule())):
            pass


def test_defaults_are_unchanged_if_the_second_policy_is_unknown() -> None:
    registered = policy_number(None, {"relu.default": "fp32"})
    before = sizes("policy changes")
    with pytest.raises(RuntimeError, match="there is no policy change with the number"):
        _C.set_defaults(registered, 2**24 - 1)
    with tp.my_autocast("cpu"):
        assert torch.relu(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert sizes("policy changes") == before
