"""Overrides for modules and sites: tables that affect exactly the chosen sites, and patterns for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.numerics.candidates import Overriding, compress
from torch_promote.numerics.comparing.site import Site


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        return [torch.nn.functional.linear(x, x).dtype]


class Block(nn.Module):
    """Calls linear itself, and has children that do."""

    def __init__(self, children: int, inner: type[nn.Module] = Leaf) -> None:
        super().__init__()
        self.attn = inner()
        self.mlps = nn.ModuleList(inner() for _ in range(children))

    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        own = [torch.nn.functional.linear(x, x).dtype]
        return own + self.attn(x) + [one for mlp in self.mlps for one in mlp(x)]


class Root(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(2) for _ in range(blocks))
        self.head = Leaf()

    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        own = [torch.nn.functional.linear(x, x).dtype]
        return own + [one for block in self.blocks for one in block(x)] + self.head(x)


def callers(blocks: int) -> list[str]:
    """The modules that call linear, in the order of the calls."""
    inside = [f"blocks.{number}{rest}" for number in range(blocks) for rest in ("", ".attn", ".mlps.0", ".mlps.1")]
    return ["", *inside, "head"]


def overriding(model: nn.Module, blocks: int, base: tp.Policy | None = None) -> Overriding:
    found = Overriding(base or tp.Policy.stock(), model, "site", "fp32")
    sites = [Site("aten::linear", "", module, 1, policy="lower_precision_fp") for module in callers(blocks)]
    assert found.choose_from(sites) == []
    return found


def ran_in_float32(model: nn.Module, blocks: int, policy: tp.Policy) -> set[str]:
    with tp.my_autocast("cpu", policy=policy, model=model):
        dtypes = model(torch.ones(2, 2))
    names = callers(blocks)
    assert len(dtypes) == len(names)
    return {name for name, dtype in zip(names, dtypes, strict=True) if dtype is torch.float32}


@pytest.mark.parametrize("seed", range(5))
def test_exactly_the_chosen_sites_run_in_float32(seed: int) -> None:
    draw = random.Random(seed)
    model = Root(2)
    found = overriding(model, 2)
    chosen = set(draw.sample(callers(2), draw.randint(1, 6)))
    tables = found.overrides({(module, "aten::linear") for module in chosen})
    assert ran_in_float32(model, 2, found.policy(tables)) == chosen
    effect = found.effect(tables)
    assert {module for (module, _), value in effect.items() if value} == chosen
    packed = compress(tables, found)
    assert len(packed) <= len(tables)
    assert found.effect(packed) == effect
    assert ran_in_float32(model, 2, found.policy(packed)) == chosen


@pytest.mark.parametrize("seed", range(3))
def test_tables_of_the_policy_stay(seed: int) -> None:
    """Also tables of patterns, which a table with a module's exact name would replace."""
    draw = random.Random(seed)
    base = tp.Policy.stock().override_modules(
        {"blocks.*": {"mm": "fp32"}, "**.attn": {"linear": "fp32"}, "head": {"mm": "fp32"}}
    )
    model = Root(2)
    found = overriding(model, 2, base)
    already = {"blocks.0.attn", "blocks.1.attn"}
    assert ran_in_float32(model, 2, base) == already
    chosen = set(draw.sample(sorted(set(callers(2)) - already), 4))
    tables = found.overrides({(module, "aten::linear") for module in chosen})
    policy = found.policy(tables)
    assert ran_in_float32(model, 2, policy) == chosen | already
    with policy.apply_to(model) as applied:
        for number in range(2):
            assert applied.modules[f"blocks.{number}"]["aten::mm.default"] == "fp32"
        assert applied.modules["head"]["aten::mm.default"] == "fp32"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([f"blocks.{number}.attn" for number in range(12)], {"blocks.*.attn"}),
        ([f"blocks.{number}.attn" for number in (1, 3, 4)], {"blocks.[134].attn"}),
        ([f"blocks.{number}.mlps.{inner}" for number in range(12) for inner in range(2)], {"blocks.*.mlps.*"}),
        (["blocks.2.attn"], {"blocks.2.attn"}),
        (["blocks.2.attn", "head"], {"blocks.2.attn", "head"}),
        (
            [f"blocks.{number}.attn" for number in range(12)] + ["head"],
            {"blocks.*.attn", "head"},
        ),
    ],
)
def test_patterns(chosen: list[str], expected: set[str]) -> None:
    model = Root(12)
    found = overriding(model, 12)
    tables = found.overrides({(module, "aten::linear") for module in chosen})
    packed = compress(tables, found)
    assert set(packed) == expected
    assert ran_in_float32(model, 12, found.policy(packed)) == set(chosen)


def test_a_pattern_at_every_depth() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"norm": Leaf(), "b": nn.ModuleDict({"norm": Leaf()})}), "c": Leaf()})
    found = Overriding(tp.Policy.stock(), model, "site", "fp32")
    places = ["a.norm", "a.b.norm"]
    found.choose_from(Site("aten::linear", "", module, 1) for module in [*places, "c"])
    tables = found.overrides({(module, "aten::linear") for module in places})
    assert compress(tables, found) == {"**.norm": {"aten::linear": "fp32"}}


def test_a_custom_op_that_has_no_policy_gets_none_back() -> None:
    model = Root(1)
    found = Overriding(tp.Policy.stock(), model, "site", "fp32")
    found.choose_from(Site("aten::linear", "", module, 1, policy="") for module in ("blocks.0", "blocks.0.attn"))
    tables: Mapping[str, Any] = found.overrides({("blocks.0", "aten::linear")})
    assert tables == {"blocks.0": {"aten::linear": "fp32"}, "blocks.0.attn": {"aten::linear": "fallthrough"}}


def test_modules_that_cannot_have_a_table_are_no_candidates() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([Leaf()])})
    found = Overriding(tp.Policy.stock(), model, "site", "fp32")
    [text] = found.choose_from(Site("aten::linear", "", module, 1) for module in ("list", "list.0"))
    assert "forward is never called" in text
    assert [site.module for site in found.sites] == ["list.0"]


def test_modules_with_autocast_off_are_closed() -> None:
    model = Root(1)
    base = tp.Policy.stock().override_modules({"blocks.*": "off", "head": "fp32"})
    assert Overriding(base, model, "site", "fp32").closed == ["blocks.0", "head"]


class Net(nn.Module):
    """All blocks except the last overflow in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Overflowing(scale) for scale in (1e6, 1e6, 1e6, 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Overflowing(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = Scale(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.linear(x))


class Scale(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale / self.scale).tanh()


@pytest.mark.parametrize("level", ["module", "site"])
def test_patterns_are_run_again(level: Any) -> None:
    torch.manual_seed(0)
    model = Net()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(torch.randn(4, 4))

    tuning = tp.tune(step, model=model, tolerance=0.01, level=level)
    assert tuning.met
    assert list(tuning.overrides) == ["blocks.[012].scale"]
    [pattern] = [one for one in tuning.trials if one.why == "pattern"]
    assert pattern.passed
    assert len(pattern.overrides) == 3
    assert tuning.policy.modules[0][0] == "blocks.[012].scale"
    few = tp.tune(step, model=model, tolerance=0.01, level=level, budget=6)
    assert few.met
    assert few.runs <= 6


def test_calls_outside_of_modules_are_reached() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scale(2.0))

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            y = model(torch.randn(4, 4))
            return (y * 1e6).float().square().mean()

    tuning = tp.tune(step, model=model, tolerance=0.01, level="site")
    assert tuning.met
    assert tuning.overrides == {"": {"aten::mul": "fp32"}, "1": {"aten::mul": "fallthrough"}}
