"""The extension keeps policies and promotion rules as long as something holds them, and shares equal ones."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote import _C
from torch_promote.extension import RegionSpec
from torch_promote.reference.promotion_rules import make_rule
from torch_promote.regions import autocast as arguments
from torch_promote.regions import promotion_tables as hooks
from torch_promote.regions.autocast import policy_change
from torch_promote.regions.region import Region

OVERRIDES = {"mm.default": "keep", "exp.default": torch.float64}


def forget() -> None:
    """Drops the changes that Python keeps for regions with equal arguments."""
    arguments._register.cache_clear()
    gc.collect()


def sizes(name: str) -> int:
    return _C.registry_sizes()[name]


def test_different_policies_do_not_pile_up() -> None:
    ops = [f"{op}.default" for op in ("mm", "bmm", "addmm", "mv", "dot", "exp", "log")]
    policies = itertools.product(("fp16", "fp32", "promote", "fallthrough", "keep"), repeat=len(ops))
    forget()
    before = sizes("policy changes"), sizes("policy tables")
    outer = tp.my_autocast("cpu", overrides={"softmax.int": "banned", "tan.default": "keep"})
    for row in itertools.islice(policies, 3000):
        region = tp.my_autocast("cpu", overrides=dict(zip(ops, row, strict=True)))
        with region, outer:
            pass
    assert sizes("policy changes") <= before[0] + 1024 + 2  # what `_register` keeps
    assert sizes("policy tables") <= before[1] + 1024 + 64 + 2  # and what `outer` made last
    del region, outer
    forget()
    assert sizes("policy changes") <= before[0]
    assert sizes("policy tables") <= before[1]


def test_an_open_region_keeps_its_policy() -> None:
    x = torch.ones(2, 2)
    tp.my_autocast("cpu", overrides={"mm.default": torch.float64, "relu.default": torch.float64}).__enter__()
    try:
        forget()
        assert torch.relu(x).dtype is torch.float64
        with tp.my_autocast("cpu"):
            assert torch.mm(x, x).dtype is torch.float64
    finally:
        _C.suspend_regions(0)


def test_a_spec_whose_change_nothing_holds_raises() -> None:
    packed = RegionSpec(policy_change=policy_change(None, OVERRIDES).number).pack()
    with tp.my_autocast("cpu"), Region(packed):
        assert torch.exp(torch.ones(2)).dtype is torch.float64
        forget()
    with pytest.raises(RuntimeError, match=r"nothing holds the policy change .* Make the region anew"):
        Region(packed).__enter__()
    with tp.my_autocast("cpu", overrides=OVERRIDES):
        assert torch.exp(torch.ones(2)).dtype is torch.float64


def test_what_enters_regions_later_keeps_its_change() -> None:
    x, module = torch.ones(2), nn.Softmax(0)
    tp.set_module_policy(module, {"": {"softmax.int": torch.float64}})
    region = tp.my_autocast("cpu", overrides=OVERRIDES)
    copied = copy.deepcopy(tp.my_autocast("cpu", overrides={**OVERRIDES, "log.default": "keep"}))
    decorated = tp.my_autocast("cpu", overrides={**OVERRIDES, "mv.default": "keep"})(torch.exp)
    promoted = tp.promotion("numpy", matmul=True, kinds=None)
    leaf = torch.ones(2, 2, requires_grad=True)
    with tp.my_autocast("cpu", overrides={**OVERRIDES, "dot.default": "fp32"}):
        checkpointed = checkpoint(lambda x: torch.exp(x).sin().sum(), leaf, use_reentrant=False)
    with tp.my_autocast("cpu"):
        of_stock = checkpoint(lambda x: torch.mm(x, x).float().sum(), leaf, use_reentrant=False)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tp.promotion("numpy"):
            y = x.int() + x.half()
        with tp.my_autocast("cpu", overrides={**OVERRIDES, "bmm.default": "keep"}):
            return y.float() + torch.exp(x)

    assert compiled(x).dtype is torch.float64
    forget()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(x).dtype is torch.float64
    tp.install(overrides={"exp.default": torch.float64, "dot.default": "keep"})
    try:
        forget()
        with torch.autocast("cpu"):
            assert torch.exp(x).dtype is torch.float64
    finally:
        tp.uninstall()
    for one in (region, copied):
        with one:
            assert torch.exp(x).dtype is torch.float64
    assert decorated(x).dtype is torch.float64
    with tp.my_autocast("cpu"):
        assert module(x).dtype is torch.float64
    checkpointed.backward()
    with region:
        of_stock.backward()
    with promoted:
        assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float64


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
