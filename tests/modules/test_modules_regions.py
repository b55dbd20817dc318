"""Module policies: ops and their dtypes, compared with regions written by hand."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same
from torch_promote import _C
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_policies import (
    format_module_policy,
    module_policies,
    remove_module_policy,
    set_module_policy,
)

OVERRIDES = {"linear": torch.float16, "softmax": "fp32"}
MORE = {"linear": "fp32", "gelu": "fp32"}
KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])

ours = functools.partial(tp.my_autocast, "cpu")
stock = functools.partial(tp.stock_autocast, "cpu")
AROUND = pytest.mark.parametrize(
    "around",
    [
        ours,
        functools.partial(ours, dtype=torch.float16),
        functools.partial(ours, overrides={"softmax": "fp32", "gelu": "keep"}),
        functools.partial(ours, cache_enabled=False),
        stock,
        functools.partial(stock, dtype=torch.float16),
        functools.partial(ours, enabled=False),
        functools.partial(ours, enabled=False, overrides={"linear": "fp16"}),
        contextlib.nullcontext,
    ],
    ids=["ours", "half", "overrides", "no cache", "stock", "stock half", "off", "off with overrides", "nothing"],
)


class Body(nn.Module):
    """A module with ops of several policies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return self.second(torch.softmax(hidden, -1).to(hidden.dtype))


class Model(nn.Module):
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


def models(policy: Any) -> tuple[Model, Model]:
    """A model whose body has a policy, and one whose body opens the region itself."""
    torch.manual_seed(0)
    model, expected = Model(), Model()
    expected.body = by_hand(policy)()
    expected.load_state_dict(model.state_dict())
    set_module_policy(model, {"body": policy})
    return model, expected


# "off" gives the body what the layer before it made, in bfloat16 mostly; its weights have that dtype then.
def weights_like_inputs(model: Model, around: Callable[[], Any]) -> Model:
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

    def call(model: Model, x: torch.Tensor) -> Any:
        again = functools.partial(checkpoint, use_reentrant=use_reentrant)
        if checkpointed == "the model":
            return again(model, x)
        return model.head(again(model.body, model.embed(x)))

    model, expected = models(policy)
    assert_same(train(model, around, call), train(expected, around))


def test_it_makes_a_difference() -> None:
    """Without policies, the results of the tests above would differ."""
    for policy, dtype in (("fp32", torch.float32), (OVERRIDES, torch.float16), (MORE, torch.float32)):
        model, _ = models(policy)
        model.head = nn.Identity()  # type: ignore[assignment]
        with ours():
            assert model(torch.ones(1, 8)).dtype is dtype
        remove_module_policy(model)
        with ours():
            assert model(torch.ones(1, 8)).dtype is torch.bfloat16


def test_nested_modules() -> None:
    """Overrides add up; in a module that is off, the policies of modules in it do not count."""
    seen: dict[str, torch.dtype] = {}
    model = Model()
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


@pytest.mark.parametrize("how", ["value", "file", "path"])
def test_policies_by_value_and_from_a_file(how: str, tmp_path: Path) -> None:
    """Such a policy replaces the surrounding one; a file is read once, and later changes of it have no effect."""
    value = Policy.stock().override({"linear": "float16"})
    value.save(tmp_path / "policy.toml")
    given = {"value": value, "file": str(tmp_path / "policy.toml"), "path": tmp_path / "policy.toml"}[how]
    model = nn.Sequential(Body())
    set_module_policy(model, {"0": given})
    (tmp_path / "policy.toml").unlink()
    assert module_policies(model) == {"0": value}
    expected = copy.deepcopy(model)
    remove_module_policy(expected)

    def by_hand(model: nn.Module, x: torch.Tensor) -> Any:
        with ours(overrides={"linear": "float16", "gelu": "fallthrough"}):
            return model(x)

    around = functools.partial(ours, overrides={"gelu": "keep"})
    result = train(pickle.loads(pickle.dumps(model)), around)
    assert result[0].dtype is torch.float16
    assert_same(result, train(expected, around, by_hand))
    assert format_module_policy(model).splitlines()[1] == f"`-- 0: Body  [{value!r}]"


def test_named_policies() -> None:
    """On the CPU, softmax casts nothing; on CUDA's list it makes float32."""

    class Softmax(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x, -1)

    dtypes = {}
    for name in ("cuda", "stock", "cpu"):
        model = Softmax()
        set_module_policy(model, {"": name})
        assert module_policies(model) == {"": name}
        for overrides in (None, {"softmax": "fp32"}):
            with ours(overrides=overrides):
                dtypes[name, bool(overrides)] = copy.deepcopy(model)(torch.ones(2, 2)).dtype
    half, single = torch.bfloat16, torch.float32
    assert dtypes == {
        ("cuda", False): single, ("stock", False): half, ("cpu", False): half,
        ("cuda", True): single, ("stock", True): half, ("cpu", True): half,
    }  # fmt: skip


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
    model = Records()
    set_module_policy(model, {"": "fp32"})
    given = (half, [double, half], (whole, "text", None), Pair(half, {"a": half}), torch.ones(1, dtype=torch.complex64))
    keywords = {"mapping": collections.OrderedDict(x=half), "packed": packed, "meta": half.to("meta"), "n": 3}
    with ours():
        args, kwargs = model(*given, **keywords)
    single = half.float()
    assert_same(args[0], single)
    assert_same(args[1], [double, single])
    assert args[1][0] is double
    assert args[2] == (whole, "text", None)
    assert type(args[3]) is Pair
    assert_same([args[3].left, args[3].right["a"]], [single, single])
    assert args[4] is given[4]
    assert type(kwargs["mapping"]) is collections.OrderedDict
    assert_same(kwargs["mapping"]["x"], single)
    assert type(kwargs["packed"]) is nn.utils.rnn.PackedSequence
    assert kwargs["packed"].data.dtype is torch.float32
    assert kwargs["meta"] is keywords["meta"], "on another device"
    assert kwargs["n"] == 3
    assert model.enabled == [False, False]


def test_inputs_of_others_are_left() -> None:
    half = torch.ones(2, dtype=torch.half)
    model = Records()
    for policy, enabled in (("off", False), (OVERRIDES, True)):
        set_module_policy(model, {"": policy})
        with ours():
            args, _ = model(half)
        assert args[0] is half
        assert model.enabled == [enabled, False]


@pytest.mark.parametrize("policy", ["fp32", "off", OVERRIDES])
def test_state_inside_and_after(policy: Any) -> None:
    """Devices, dtypes and the cache flag are those of the region around, whatever it is."""
    seen: list[Any] = []

    class Looks(nn.Module):
        def forward(self) -> None:
            seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), _C.depth()))

    model = Looks()
    set_module_policy(model, {"": policy})
    for dtype in (torch.float16, torch.bfloat16):
        for cached in (True, False):
            with ours(dtype=dtype, cache_enabled=cached):
                depth, policy_id = _C.depth(), _C.current_policy_id()
                model()
                assert seen.pop() == (dtype, cached, depth + 1)
                assert (_C.depth(), _C.current_policy_id()) == (depth, policy_id)
                assert torch.is_autocast_enabled("cpu")


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


def test_in_threads() -> None:
    """One module, two threads, two regions around it."""
    model = nn.Linear(8, 8)
    dtypes: dict[str, torch.dtype] = {}

    def run(name: str, around: Callable[[], Any]) -> None:
        with around():
            dtypes[name] = model(torch.ones(1, 8)).dtype

    set_module_policy(model, {"": {"linear": "fp16"}})
    threads = [
        threading.Thread(target=run, args=("half", functools.partial(ours, dtype=torch.float16))),
        threading.Thread(target=run, args=("bf16", ours)),
        threading.Thread(target=run, args=("nothing", contextlib.nullcontext)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == {"half": torch.float16, "bf16": torch.bfloat16, "nothing": torch.float32}
