"""Module policies: which modules get which policy, how policies are shown, and errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same
from torch_promote import _C, errors
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_policies import (
    module_policies,
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


BLOCK_0 = ["blocks.0", "blocks.0.attn", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.norm"]
BLOCK_1 = ["blocks.1", "blocks.1.attn", "blocks.1.attn.qkv", "blocks.1.attn.proj", "blocks.1.norm"]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("", [""]),
        ("blocks.1.attn", ["blocks.1.attn"]),
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn"]),
        ("blocks.[!0].*", ["blocks.1.attn", "blocks.1.norm"]),
        ("*", ["lm_head"]),  # the ModuleList is never called
        ("blocks.?", ["blocks.0", "blocks.1"]),
        ("**.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("**", [*BLOCK_0, *BLOCK_1, "lm_head"]),
        ("**.**", [*BLOCK_0, *BLOCK_1, "lm_head"]),
        ("**.**.qkv", ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]),
        ("**.lm_head", ["lm_head"]),
        ("**.blocks.**.norm.**", ["blocks.0.norm", "blocks.1.norm"]),
        ("blocks.1.**", BLOCK_1),
        (nn.LayerNorm, ["blocks.0.norm", "blocks.1.norm"]),
        (Model, [""]),
    ],
)
def test_keys(key: Any, expected: list[str]) -> None:
    model = Model()
    set_module_policy(model, {key: "fp32"})
    assert module_policies(model) == dict.fromkeys(expected, "fp32")


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


def test_module_with_two_names() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 4)})
    set_module_policy(model, {"b": "fp32"})
    assert module_policies(model) == {"a": "fp32"}
    with pytest.raises(tp.PolicyError, match="'a' gets two policies, fp32 from 'a' and off from 'b'"):
        set_module_policy(model, {"a": "fp32", "b": "off"})
    set_module_policy(model, {"a": "off", "b": "off"})
    assert module_policies(model) == {"a": "off"}


def test_tree() -> None:
    model = Model()
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
    policies = module_policies(model)
    assert str(policies) == str(pickle.loads(pickle.dumps(policies))) == expected
    assert repr(policies) == repr(dict(policies))


MISTAKES: list[tuple[Any, str]] = [
    ({"lm_haed": "fp32"}, "no module of the model is named 'lm_haed'. Closest: lm_head."),
    ({"blocks.*.atn": "fp32"}, "In a pattern, * matches within one part of a name; ** matches any number of parts."),
    ({nn.Bilinear: "fp32"}, "no module of the model is of type Bilinear. Closest: Linear."),
    ({"Block": "fp32"}, "pass the class: set_module_policy(model, {Block: ...})."),
    ({"blocks": "fp32"}, "'blocks' selects only modules whose forward is never called (ModuleList)."),
    (
        {3: "fp32"},
        "a key is the name of a module, a pattern of names, or a subclass of nn.Module, got 3. Write it as a str: '3'.",
    ),
    ({"lm_head": "fp16"}, "'lm_head': 'fp16' is not a policy of a module. Legal: 'fp32', 'off', a policy or a mapping"),
    (
        {"**.norm": "fp32", "blocks.*.norm": "off"},
        "'blocks.0.norm' gets two policies, fp32 from '**.norm' and off from 'blocks.*.norm'. Name the module itself,",
    ),
]


@pytest.mark.parametrize(("policies", "text"), MISTAKES)
def test_mistakes_change_nothing(policies: dict[Any, Any], text: str) -> None:
    model = Model()
    set_module_policy(model, {"blocks.1": "off"})
    before = classes(model)
    with pytest.raises(tp.PolicyError) as error:
        set_module_policy(model, {"blocks.0": "fp32", **policies, "blocks.1": "fp32"})
    assert text in str(error.value)
    assert module_policies(model) == {"blocks.1": "off"}
    assert classes(model) == before


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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), "cannot have a policy: it is a TorchScript module"),
        (lambda: torch.fx.symbolic_trace(nn.Linear(4, 4)), "cannot have a policy: it is a graph module"),
        (Holder, "selects only modules whose forward is never called"),
        (Steps, "cannot have a policy: its forward is a generator or a coroutine"),
        (Later, "cannot have a policy: its forward is a generator or a coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_modules_that_cannot_have_one(make: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make())
    before = classes(model)
    with pytest.raises(tp.PolicyError) as error:
        set_module_policy(model, {"0": "fp32", "1": "fp32"})
    assert text in str(error.value)
    assert classes(model) == before
    assert module_policies(model) == {}


# --- Module policies: ops and their dtypes, compared with regions written by hand


OVERRIDES = {"linear": torch.float16, "softmax": "fp32"}
MORE = {"linear": "fp32", "gelu": "fp32"}
KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])

ours = functools.partial(tp.my_autocast, "cpu")
stock = functools.partial(tp.stock_autocast, "cpu")
AROUND = pytest.mark.parametrize(
    "around",
    [
        ours,
        functools.partial(ours, overrides={"softmax": "fp32", "gelu": "keep"}, cache_enabled=False),
        functools.partial(stock, dtype=torch.float16),
        functools.partial(ours, enabled=False, overrides={"linear": "fp16"}),
        contextlib.nullcontext,
    ],
    ids=["ours", "overrides", "stock half", "off with overrides", "nothing"],
)


class Body(nn.Module):
    """A module with ops of several policies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return self.second(torch.softmax(hidden, -1).to(hidden.dtype))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(8, 8), Body(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def by_hand(policy: Any) -> type[Body]:
    """A body whose forward opens the region that its policy asks for."""

    class ByHand(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_autocast_enabled("cpu"):
                return super().forward(x)
            if policy in ("fp32", "off"):
                with stock(enabled=False):
                    return super().forward(x.float() if policy == "fp32" else x)
            with ours(dtype=torch.get_autocast_dtype("cpu"), overrides=policy):
                return super().forward(x)

    return ByHand


def train(model: nn.Module, around: Callable[[], Any], call: Callable[..., Any] | None = None) -> list[Any]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with around():
        output = model(x) if call is None else call(model, x)
    output.float().square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in model.parameters())]


def models(policy: Any) -> tuple[Network, Network]:
    """A model whose body has a policy, and one whose body opens the region itself."""
    torch.manual_seed(0)
    model, expected = Network(), Network()
    expected.body = by_hand(policy)()
    expected.load_state_dict(model.state_dict())
    set_module_policy(model, {"body": policy})
    return model, expected


# "off" gives the body what the layer before it made, in bfloat16 mostly; its weights have that dtype then.
def weights_like_inputs(model: Network, around: Callable[[], Any]) -> Network:
    with around():
        dtype = model.embed(torch.ones(1, 8)).dtype
    model.body.to(dtype)
    return model


@AROUND
@pytest.mark.parametrize("policy", ["fp32", "off", OVERRIDES, MORE], ids=["fp32", "off", "overrides", "more"])
def test_same_as_by_hand(policy: Any, around: Callable[[], Any]) -> None:
    model, expected = models(policy)
    if policy == "off":
        model, expected = (weights_like_inputs(each, around) for each in (model, expected))
    assert_same(train(model, around), train(expected, around))


@AROUND
@KINDS
@pytest.mark.parametrize("policy", ["fp32", OVERRIDES], ids=["fp32", "overrides"])
@pytest.mark.parametrize("checkpointed", ["the model", "the body"])
def test_checkpointed(use_reentrant: bool, around: Callable[[], Any], policy: Any, checkpointed: str) -> None:
    """The recomputation uses the policy, with the region inside or outside of the checkpointed function."""

    def call(model: Network, x: torch.Tensor) -> Any:
        again = functools.partial(checkpoint, use_reentrant=use_reentrant)
        if checkpointed == "the model":
            return again(model, x)
        return model.head(again(model.body, model.embed(x)))

    model, expected = models(policy)
    assert_same(train(model, around, call), train(expected, around))


def test_nested_modules() -> None:
    """Overrides add up; in a module that is off, the policies of modules in it do not count."""
    seen: dict[str, torch.dtype] = {}
    model = Network()
    for name in ("embed", "body.first", "body.second", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.__setitem__(name, output.dtype)
        )
    set_module_policy(model, {"": {"linear": "fp32"}, "body": {"softmax": "fp32"}, "body.first": OVERRIDES})
    with ours():
        model(torch.ones(1, 8))
    assert seen == {
        "embed": torch.float32, "body.first": torch.float16, "body.second": torch.float32, "head": torch.float32,
    }  # fmt: skip
    set_module_policy(model, {"": "off", "body.first": "fp32", "body.second": OVERRIDES})
    with ours():
        model(torch.ones(1, 8, dtype=torch.float32))
    assert set(seen.values()) == {torch.float32}
    with ours(), pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("how", ["value", "path"])
def test_policies_by_value_and_from_a_file(how: str, tmp_path: Path) -> None:
    """Such a policy replaces the surrounding one; a file is read once, and later changes of it have no effect."""
    value, path = Policy.stock().override({"linear": "float16"}), tmp_path / "policy.toml"
    value.save(path)
    model, expected = nn.Sequential(Body()), nn.Sequential(Body())
    expected.load_state_dict(model.state_dict())
    set_module_policy(model, {"0": value if how == "value" else path})
    path.unlink()
    assert module_policies(model) == {"0": value}

    def by_hand(model: nn.Module, x: torch.Tensor) -> Any:
        with ours(overrides={"linear": "float16", "gelu": "fallthrough"}):
            return model(x)

    around = functools.partial(ours, overrides={"gelu": "keep"})
    assert_same(train(pickle.loads(pickle.dumps(model)), around), train(expected, around, by_hand))


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Records(nn.Module):
    """Returns its input, and records the autocast state of the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.enabled = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
        return args, kwargs


def test_inputs_of_fp32() -> None:
    """Eligible tensors are cast in any container."""
    half, double, whole = torch.ones(2, dtype=torch.half), torch.ones(2, dtype=torch.double), torch.ones(2).long()
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1, dtype=torch.bfloat16)])
    model, single, others = Records(), half.float(), (double, whole, torch.ones(1, dtype=torch.complex64), "text", 3)
    set_module_policy(model, {"": "fp32"})
    with ours():
        args, kwargs = model(half, [half], Pair(half, {"a": half}), *others, packed=packed, meta=half.to("meta"))
    assert_same([args[0], *args[1], args[2].left, args[2].right["a"]], [single] * 4)
    assert type(args[2]) is Pair
    assert all(given is other for given, other in zip(args[3:], others, strict=True))
    assert type(kwargs["packed"]) is nn.utils.rnn.PackedSequence
    assert kwargs["packed"].data.dtype is torch.float32
    assert kwargs["meta"].dtype is torch.half, "on another device"
    assert model.enabled == [False, False]


def test_on_cuda(pretend_cuda: None) -> None:
    """Each device type separately: autocast goes off if it was on, and inputs on the device are cast."""
    model = nn.Linear(4, 4)
    seen: list[Any] = []

    class Looks(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            seen.append([torch.is_autocast_enabled(device) for device in ("cpu", "cuda")])
            return [value.dtype for value in inputs]

    looks = Looks()
    half, single = torch.float16, torch.float32
    with FakeTensorMode():
        weight, x = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
        inputs = torch.ones(1, dtype=half), torch.ones(1, dtype=half, device="cuda")
        set_module_policy(looks, {"": "fp32"})
        for devices, expected in (("cpu", [single, half]), ("cuda", [half, single]), (["cpu", "cuda"], [single] * 2)):
            with tp.my_autocast(devices):
                assert looks(*inputs) == expected
        assert seen == [[False, False]] * 3
        set_module_policy(model, {"": {"linear": "fp32"}})
        with tp.my_autocast("cuda"):
            model.weight, model.bias = nn.Parameter(weight, requires_grad=False), None
            assert (model(x).dtype, (x @ x).dtype) == (single, half)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("policy", ["fp32", OVERRIDES])
def test_errors_leave_nothing_open(error: type[BaseException], policy: Any) -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            raise error

    model = Fails()
    set_module_policy(model, {"": policy})
    with ours():
        depth = _C.depth()
        with pytest.raises(error):
            model()
        assert _C.depth() == depth
        assert _C.policy_is_stock()
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("child", ["linear1", "self_attn", "norm1"])
def test_encoder_layer_does_not_pass_its_modules_by(child: str, training: bool) -> None:
    """In evaluation PyTorch runs the whole layer as one op, unless a module of it has a hook."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    called = []
    set_module_policy(layer, {child: "fp32"})
    inside = layer.get_submodule(child)
    kind = type(inside)
    original = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is inside:
            called.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), ours():
        patch.setattr(kind, "forward", forward)
        layer(torch.randn(2, 3, 8))
    assert called == [False], "it ran, with autocast off"


# --- the handle


def test_a_handle_restores_what_was_before() -> None:
    model = Model()
    before, keys = classes(model), [set(vars(module)) for module in model.modules()]
    handle = set_module_policy(model, {nn.Linear: "fp32", "": {"softmax": "fp32"}})
    assert set(handle.modules) == {"", *(name for name, one in model.named_modules() if isinstance(one, nn.Linear))}
    assert handle.modules["lm_head"] == "fp32"
    for _ in range(2):
        handle.remove()
        assert module_policies(model) == {}
    assert classes(model) == before
    assert [set(vars(module)) for module in model.modules()] == keys
    with set_module_policy(model, {"lm_head": "off"}) as handle:
        assert module_policies(model) == handle.modules == {"lm_head": "off"}
    assert module_policies(model) == {}
    with pytest.raises(RuntimeError, match="own"), set_module_policy(model, {"lm_head": "off"}):
        raise RuntimeError("own")
    assert module_policies(model) == {}


LAYERS: list[dict[Any, Any]] = [
    {"lm_head": "fp32", "blocks.0": "off"},
    {"lm_head": "off"},
    {"lm_head": {"linear": "float16"}, "blocks.0": "fp32"},
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("kept", [None, {"lm_head": "cuda"}], ids=str)
def test_handles_are_removed_in_any_order(order: tuple[int, ...], kept: dict[str, Any] | None) -> None:
    """A module has the policy of the last call whose handle is not removed."""
    model = Model()
    if kept:
        set_module_policy(model, kept)  # whose handle is dropped
    handles = [set_module_policy(model, policies) for policies in LAYERS]
    left = set(range(3))
    for number in order:
        handles[number].remove()
        left.remove(number)
        expected = dict(kept or {})
        for one in sorted(left):
            expected.update(LAYERS[one])
        assert module_policies(model) == expected
        handles[number].remove()
        assert module_policies(model) == expected


def test_a_handle_leaves_alone_what_is_not_its_own() -> None:
    model = Model()
    first = set_module_policy(model, {"lm_head": "fp32"})
    remove_module_policy(model)
    first.remove()
    assert module_policies(model) == {}
    first = set_module_policy(model, {"lm_head": "fp32"})
    second = set_module_policy(model, {"lm_head": "off"})
    remove_module_policy(model, "lm_head")
    set_module_policy(model, {"lm_head": "off"})  # equal, and not the handle's
    second.remove()
    first.remove()
    assert module_policies(model) == {"lm_head": "off"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_keep_their_policies_when_a_handle_is_removed(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outer = set_module_policy(model, {"1": "off"})
    inner = set_module_policy(model, {nn.Linear: "fp32"})
    other = copied(model)
    inner.remove()
    assert (module_policies(model), module_policies(other)) == ({"1": "off"}, {"0": "fp32", "1": "fp32"})
    outer.remove()
    again = copied(other)
    assert (module_policies(model), module_policies(again)) == ({}, {"0": "fp32", "1": "fp32"})
    set_module_policy(again, {"0": "off"}).remove()
    assert module_policies(again) == {"0": "fp32", "1": "fp32"}
    with tp.my_autocast("cpu"):
        assert model(torch.ones(2, 4)).dtype is torch.bfloat16
        assert again(torch.ones(2, 4)).dtype is torch.float32


def test_a_handle_keeps_no_model_and_no_chain_of_policies_alive() -> None:
    model = nn.Linear(4, 4)
    handle = set_module_policy(model, {"": "fp32"})
    old = weakref.ref(model)
    del model
    gc.collect()
    assert old() is None
    handle.remove()
    model = nn.Linear(4, 4)
    for _ in range(3):
        set_module_policy(model, {"": {"linear": "fp32"}})  # a loop that drops the handles
    policy = vars(model)["_torch_promote_policy"]
    assert not any(type(one) is type(policy) for one in gc.get_referents(policy))


def test_a_handle_removed_while_tables_hold_leaves_them() -> None:
    model = nn.Linear(4, 4)
    policy = tp.Policy.stock().override_modules({"": {"linear": "float16"}})
    handle = set_module_policy(model, {"": "fp32"})
    x = torch.ones(2, 4)
    with policy.apply_to(model), tp.my_autocast("cpu", policy=policy):
        assert model(x).dtype is torch.float32
        handle.remove()
        assert model(x).dtype is torch.float16
    with tp.my_autocast("cpu"):
        assert model(x).dtype is torch.bfloat16
    assert "forward" not in vars(model)


# --- modules that are never called


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules() if module is not model)


@pytest.mark.parametrize("region", [tp.my_autocast, torch.autocast])
def test_a_policy_whose_module_is_never_called_warns_once(region: Any) -> None:
    model = Encoder()
    tp.set_module_policy(model, {"": "fp32"})
    model.encode(torch.ones(1, 2))  # autocast is off: no policy acts
    with region("cpu"):
        with pytest.warns(errors.UnusedOverrideWarning, match="Its child 'layers.0' ran outside of such a call"):
            assert model.encode(torch.ones(1, 2)).dtype is torch.bfloat16
        with warnings.catch_warnings(action="error"):
            model.encode(torch.ones(1, 2))
            assert model(torch.ones(1, 2)).dtype is torch.float32
    assert hooks_of(model) == 0


@pytest.mark.parametrize("key", ["", "**"])
def test_a_policy_that_acts_does_not_warn(key: str) -> None:
    model = Encoder()
    tp.set_module_policy(model, {key: "fp32"})
    with warnings.catch_warnings(action="error"), tp.my_autocast("cpu"):
        assert model(torch.ones(1, 2)).dtype is torch.float32
        assert model.encode(torch.ones(1, 2)).dtype is (torch.float32 if key else torch.bfloat16)
    if not key:
        assert hooks_of(model) == 0


def test_what_looks_for_the_call_goes_with_the_policy() -> None:
    model = Encoder()
    handle = tp.set_module_policy(model, {"": "fp32"})
    assert hooks_of(model) == 2
    for copied in (copy.deepcopy(model.head), pickle.loads(pickle.dumps(model.head)), copy.copy(model.head)):
        with warnings.catch_warnings(action="error"), tp.my_autocast("cpu"):
            assert copied(torch.ones(1, 2)).dtype is torch.bfloat16
    assert b"torch_promote" not in pickle.dumps(model.head)
    handle.remove()
    assert hooks_of(model) == 0
    transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 2), 1, enable_nested_tensor=False)
    tp.set_module_policy(transformer, {"": "fp32"})  # a hook would keep PyTorch from its fast path
    assert hooks_of(transformer) == 0
