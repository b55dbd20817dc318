"""Module policies: which modules get which policy, how policies are shown, and errors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.regions.module_policies import (
    format_module_policy,
    module_policies,
    print_module_policy,
    remove_module_policy,
    set_module_policy,
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(torch.softmax(self.qkv(x), -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


class Model(nn.Module):
    """Two blocks and a head, as people name them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("", [""]),
        ("lm_head", ["lm_head"]),
        ("blocks.1.attn", ["blocks.1.attn"]),
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn"]),
        ("blocks.[!0].*", ["blocks.1.attn", "blocks.1.norm"]),
        ("*", ["lm_head"]),  # the ModuleList is never called
        ("blocks.?", ["blocks.0", "blocks.1"]),
        ("**.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("blocks.1.**", ["blocks.1", "blocks.1.attn", "blocks.1.attn.qkv", "blocks.1.attn.proj", "blocks.1.norm"]),
        ("**.q*", ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]),
        (nn.LayerNorm, ["blocks.0.norm", "blocks.1.norm"]),
        (Model, [""]),
        (Block, ["blocks.0", "blocks.1"]),
    ],
)
def test_keys(key: Any, expected: list[str]) -> None:
    model = Model()
    set_module_policy(model, {key: "fp32"})
    assert module_policies(model) == dict.fromkeys(expected, "fp32")


def test_all_modules_by_pattern_and_by_class() -> None:
    """Modules that are never called are excluded; only "" names the model itself."""
    names = [name for name, module in Model().named_modules() if not isinstance(module, nn.ModuleList)]
    for key, expected in (("**", names[1:]), (nn.Module, names)):
        model = Model()
        set_module_policy(model, {key: "off"})
        assert list(module_policies(model)) == expected


def test_exact_name_beats_pattern_beats_class() -> None:
    model = Model()
    policies = {nn.Linear: "fp32", "blocks.*.attn.*": "off", "blocks.0.attn.qkv": {"linear": "float16"}}
    for order in (list(policies), list(reversed(policies))):
        set_module_policy(model, {key: policies[key] for key in order})
        assert module_policies(model) == {
            "blocks.0.attn.qkv": {"linear": "float16"},
            "blocks.0.attn.proj": "off",
            "blocks.1.attn.qkv": "off",
            "blocks.1.attn.proj": "off",
            "lm_head": "fp32",
        }


def test_setting_again_replaces_and_removing_restores() -> None:
    model = Model()
    before, state, shown = classes(model), model.state_dict(), repr(model)
    set_module_policy(model, {nn.Linear: "fp32", "blocks.0": "off"})
    during = classes(model)
    set_module_policy(model, {"lm_head": "off"})
    assert module_policies(model)["lm_head"] == "off"
    assert len(module_policies(model)) == 6
    assert classes(model) == during
    remove_module_policy(model, "lm_head")
    assert len(module_policies(model)) == 5
    remove_module_policy(model, nn.Linear)
    assert module_policies(model) == {"blocks.0": "off"}
    remove_module_policy(model)
    assert module_policies(model) == {}
    assert classes(model) == before
    assert repr(model) == shown
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_the_module_looks_as_before() -> None:
    model = Model()
    names, shown, keys = [name for name, _ in model.named_modules()], repr(model), list(model.state_dict())
    set_module_policy(model, {"**": "fp32"})
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    kind = type(head)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Linear", "Linear", nn.Linear.__module__)
    assert kind.__doc__ == nn.Linear.__doc__
    assert type(model.blocks[0].norm) is type(model.blocks[1].norm) is nn.LayerNorm
    assert (names, shown, keys) == ([name for name, _ in model.named_modules()], repr(model), list(model.state_dict()))
    assert model.load_state_dict(Model().state_dict()).missing_keys == []


def test_module_with_two_names() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 4)})
    set_module_policy(model, {"b": "fp32"})
    assert module_policies(model) == {"a": "fp32"}
    with pytest.raises(tp.PolicyError, match="'a' gets two policies, fp32 from 'a' and off from 'b'"):
        set_module_policy(model, {"a": "fp32", "b": "off"})
    set_module_policy(model, {"a": "off", "b": "off"})
    assert module_policies(model) == {"a": "off"}


def test_values_are_kept_by_name() -> None:
    model = Model()
    overrides = {torch.ops.aten.linear: tp.CastPolicy.fp32, torch.ops.aten.softmax.int: torch.float16, "exp": "fp16"}
    set_module_policy(model, {"lm_head": overrides})
    expected = {"aten::linear": "fp32", "aten::softmax.int": "float16", "exp": "fp16"}
    assert module_policies(model) == {"lm_head": expected}


def test_tree(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    assert format_module_policy(model) == "Model\n0 of 13 modules have a policy."
    set_module_policy(
        model, {"": {"softmax": "fp32"}, "blocks.0.attn.qkv": "off", "blocks.1.norm": "fp32", "lm_head": "fp32"}
    )
    expected = """\
Model  [{softmax: fp32}]
|-- blocks: ModuleList
|   |-- 0: Block
|   |   `-- attn: Attention
|   |       `-- qkv: Linear  [off]
|   `-- 1: Block
|       `-- norm: LayerNorm  [fp32]
`-- lm_head: Linear  [fp32]
4 of 13 modules have a policy."""
    assert format_module_policy(model) == expected
    print_module_policy(model)
    assert capsys.readouterr().out == expected + "\n"


MATCH_NOTHING = [
    ({"lm_haed": "fp32"}, "no module of the model is named 'lm_haed'. Closest: lm_head."),
    (
        {"blocks.*.atn": "fp32"},
        "no module of the model is named 'blocks.*.atn'. Closest: blocks.1.attn, blocks.0.attn, blocks.1.attn.qkv. In "
        "a pattern, * matches within one part of a name; ** matches any number of parts.",
    ),
    ({nn.Conv2d: "fp32"}, "no module of the model is a Conv2d."),
    ({nn.LayerNorm: "fp32", nn.Bilinear: "fp32"}, "no module of the model is a Bilinear. Closest: Linear."),
    (
        {"blocks": "fp32"},
        "'blocks' selects only modules whose forward is never called (ModuleList). Select the modules inside them, or "
        "their parent.",
    ),
    ({3: "fp32"}, "a key is a str or a subclass of nn.Module, got 3."),
    ({torch.Tensor: "fp32"}, "a key is a str or a subclass of nn.Module, got <class 'torch.Tensor'>."),
]
LEGAL = "Legal: stock, cpu, cuda, fp32_safe, off, or the path of a file, which contains a separator or ends with .toml."
BAD_VALUES = [
    (
        {"lm_head": "fp16"},
        "'lm_head': 'fp16' is not a policy of a module. Legal: 'fp32', 'off', a policy or a mapping of overrides. "
        "'fp16' is for single ops, and means the region's dtype: overrides={op: 'fp16'}.",
    ),
    ({nn.Linear: "fp32_saef"}, f"Linear: no policy is called 'fp32_saef'. Closest: fp32_safe. {LEGAL}"),
    (
        {"lm_head": 3},
        "'lm_head': a policy is a Policy, a name or the path of a policy file, got 3 of type int. For single ops, use "
        "Policy.stock().override({op: policy}).",
    ),
    (
        {"lm_head": torch.float32},
        "'lm_head': torch.float32 is not a policy of a module. Legal: 'fp32', 'off', a policy or a mapping of "
        "overrides. torch.float32 is for single ops: overrides={op: torch.float32}. The dtype of a region is "
        "my_autocast(dtype=torch.float32).",
    ),
    (
        {"lm_head": {torch.ops.aten.linear: "fp32", "aten::linear": "fp16"}},
        "'lm_head': 'aten::linear' gets two policies, 'fp32' and 'fp16'. Name it once.",
    ),
    (
        {"**.norm": "fp32", "blocks.*.norm": "off"},
        "'blocks.0.norm' gets two policies, fp32 from '**.norm' and off from 'blocks.*.norm'. Name the module itself, "
        "or change one of the two.",
    ),
    (
        {nn.Module: "off", Model: "fp32"},
        "the model gets two policies, off from Module and fp32 from Model. Name the module itself, or change one of "
        "the two.",
    ),
]


@pytest.mark.parametrize(("policies", "text"), [*MATCH_NOTHING, *BAD_VALUES])
def test_mistakes_change_nothing(policies: dict[Any, Any], text: str) -> None:
    model = Model()
    set_module_policy(model, {"blocks.1": "off"})
    before = classes(model)
    with pytest.raises(tp.PolicyError) as error:
        set_module_policy(model, {"blocks.0": "fp32", **policies, "blocks.1": "fp32"})
    assert str(error.value) == text
    assert module_policies(model) == {"blocks.1": "off"}
    assert classes(model) == before


@pytest.mark.parametrize("overrides", [{"sofmax": "fp32"}, {"mm": "fp32_set_opt_dtype"}, {"mm": 3}, {"mm": None}])
def test_mistakes_in_overrides_are_those_of_a_region(overrides: dict[str, Any]) -> None:
    model = Model()
    with pytest.raises(tp.PolicyError) as expected:
        tp.my_autocast("cpu", overrides=overrides)
    with pytest.raises(tp.PolicyError) as error:
        set_module_policy(model, {"blocks.0": "fp32", "lm_head": overrides})
    assert str(error.value) == f"'lm_head': {expected.value}"
    assert module_policies(model) == {}


@pytest.mark.parametrize(("policies", "text"), MATCH_NOTHING)
def test_removing_a_missing_policy_is_an_error(policies: dict[Any, Any], text: str) -> None:
    model = Model()
    set_module_policy(model, {"lm_head": "off"})
    with pytest.raises(tp.PolicyError) as error:
        remove_module_policy(model, list(policies)[-1])
    assert str(error.value) == text
    assert module_policies(model) == {"lm_head": "off"}


def test_not_a_mapping_and_not_a_model() -> None:
    with pytest.raises(tp.PolicyError, match="policies must be a mapping of modules to policies, got list"):
        set_module_policy(Model(), ["lm_head"])  # type: ignore[arg-type]
    with pytest.raises(tp.PolicyError, match=r"model must be an nn\.Module, got function"):
        set_module_policy(print_module_policy, {"": "off"})  # type: ignore[arg-type]


def model_with(head: nn.Module) -> Model:
    model = Model()
    model.lm_head = head  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), "cannot have a policy: it is a TorchScript module"),
        (lambda: torch.fx.symbolic_trace(nn.Linear(4, 4)), "cannot have a policy: it is a graph module"),
    ],
    ids=["scripted", "traced"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_modules_that_cannot_have_one(make: Any, text: str) -> None:
    model = model_with(make())
    before = classes(model)
    with pytest.raises(tp.PolicyError) as error:
        set_module_policy(model, {"blocks.0": "fp32", "lm_head": "fp32"})
    assert text in str(error.value)
    assert classes(model) == before
    assert module_policies(model) == {}


def test_class_without_subclasses() -> None:
    class Sealed(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("Sealed has no subclasses")

    module = Sealed(4, 4)
    set_module_policy(model_with(module), {"lm_head": "fp32"})
    with tp.my_autocast("cpu"):
        assert module(torch.ones(1, 4)).dtype is torch.float32


def test_lazy_module_after_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.ones(1, 2))
    set_module_policy(model, {"0": "fp32"})
    with tp.my_autocast("cpu"):
        assert model(torch.ones(1, 2)).dtype is torch.float32


def test_a_module_that_is_not_called_cannot_have_one() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x

    class Later(nn.Module):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Holder(), Steps(), Later())
    with pytest.raises(tp.PolicyError, match="selects only modules whose forward is never called"):
        tp.set_module_policy(model, {"0": "fp32"})
    for name in ("1", "2"):
        with pytest.raises(
            tp.PolicyError, match=f"'{name}' .* cannot have a policy: its forward is a generator or a coroutine"
        ):
            tp.set_module_policy(model, {name: "fp32"})
    tp.set_module_policy(nn.Sequential(Holder(), nn.ReLU()), {"*": "fp32"})
    assert tp.module_policies(model) == {}


def test_a_custom_op_is_kept_by_name() -> None:
    @torch.library.custom_op("torch_promote_test_modules::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    model = nn.Sequential(nn.ReLU())
    tp.set_module_policy(model, {"0": {op: "fp32"}})
    assert tp.module_policies(model) == {"0": {"torch_promote_test_modules::op": "fp32"}}
    assert tp.module_policies(pickle.loads(pickle.dumps(model))) == tp.module_policies(model)
