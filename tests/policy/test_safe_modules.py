"""`Policy.safe_modules`: rounding what it lists changes no result, as DeepSpeed rounds what it gathers."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_promote as tp
from torch_promote.errors import DeviceTypeError, DtypeError, PolicyError, UnsupportedDeviceError
from torch_promote.policy.policy import Policy
from torch_promote.regions.deepspeed import _OVERLOADS

LINEAR, CONV = "torch.nn.modules.linear.Linear", "torch.nn.modules.conv.Conv2d"
SHAPES: dict[str, tuple[Any, ...]] = {"1d": (2, 3, 8), "2d": (2, 3, 8, 8), "3d": (2, 3, 8, 8, 8)}
#: A module of each class, and its inputs.
MODULES: dict[str, tuple[Any, ...]] = {
    "Linear": (lambda: nn.Linear(8, 4), torch.randn(2, 8)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), *[torch.randn(3, 2, 8)] * 3),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), torch.randn(2, 8), torch.randn(2, 8)),
    "Embedding": (lambda: nn.Embedding(5, 4), torch.tensor([0, 3])),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 4), torch.tensor([[0, 3]])),
    "PReLU": (lambda: nn.PReLU(3), torch.randn(2, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3), torch.randn(2, 3, 8)),
    "LayerNorm": (lambda: nn.LayerNorm(8), torch.randn(2, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), torch.randn(2, 8)),
    **{f"{name}{n}": (functools.partial(getattr(nn, f"{name}{n}"), *arguments, **options), torch.randn(shape))
       for name, arguments, options in (
           ("Conv", (3, 4, 3), {}), ("ConvTranspose", (3, 4, 3), {}), ("BatchNorm", (3,), {}),
           ("InstanceNorm", (3,), {"affine": True}),
       ) for n, shape in SHAPES.items()},
}  # fmt: skip


def outputs(module: nn.Module, inputs: Any, policy: Policy) -> torch.Tensor:
    with tp.my_autocast("cpu", torch.bfloat16, policy=policy):
        result = module.eval()(*inputs)
    return result[0] if isinstance(result, tuple) else result


def is_listed(module: nn.Module, policy: Policy) -> bool:
    return f"{type(module).__module__}.{type(module).__name__}" in policy.safe_modules(module, "cpu")


def same_when_rounded(module: nn.Module, inputs: Any, policy: Policy) -> bool:
    """Whether the outputs stay the same if the module's parameters are rounded to bfloat16."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    before = outputs(module, inputs, policy)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    return torch.equal(outputs(module, inputs, policy), before)


@pytest.mark.parametrize("name", MODULES)
def test_rounding_a_listed_class_changes_nothing(name: str) -> None:
    """Under stock's policy, and with the ops of the class in lower precision. What is not listed changes."""
    make, *inputs = MODULES[name]
    (ops,) = (ops for known, ops in _OVERLOADS.items() if known.endswith(f".{name}"))
    lower = Policy.stock().override({f"aten::{op}" if "." in op else f"{op}.default": "lower" for op in ops})
    assert is_listed(make(), lower)
    assert same_when_rounded(make(), inputs, lower)
    assert is_listed(make(), Policy.stock()) == same_when_rounded(make(), inputs, Policy.stock())
    assert not is_listed(make(), Policy.named("off"))


def test_each_known_class_of_torch_is_tested() -> None:
    known = {name.rpartition(".")[2] for name in _OVERLOADS if name.startswith("torch.")}
    assert known - set(MODULES) == {"NonDynamicallyQuantizableLinear"}, "which nn.MultiheadAttention contains"


@pytest.mark.parametrize("n", SHAPES)
def test_a_convolution_whose_padding_is_named(n: str, pretend_cuda: None) -> None:
    """It calls another overload, which has no policy on CUDA: an op inside casts there."""
    make = functools.partial(getattr(nn, f"Conv{n}"), 3, 4, 3, padding="same")
    fp32 = Policy.stock().override({f"conv{n}.padding": "fp32"})
    for policy, safe in ((Policy.stock(), True), (fp32, False)):
        assert same_when_rounded(make(), [torch.randn(SHAPES[n])], policy) == safe
        with FakeTensorMode():
            x, weight = (torch.empty(shape, device="cuda") for shape in (SHAPES[n], make().weight.shape))
            with tp.my_autocast("cuda", torch.bfloat16, policy=policy):
                result = getattr(nn.functional, f"conv{n}")(x, weight, padding="same")
            assert (result.dtype is torch.bfloat16) == safe
        for device_type in ("cpu", "cuda"):
            assert bool(policy.safe_modules(make(), device_type)) == safe
    assert fp32.safe_modules(make(padding_mode="reflect"))


class Head(nn.Linear):
    pass


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.exp(), self.bias)


def model(head: type[nn.Linear] = nn.Linear) -> nn.ModuleDict:
    return nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1), "block": nn.Sequential(nn.Linear(8, 8)), "head": head(8, 8)})


def test_deepspeed_can_import_what_is_listed() -> None:
    names = Policy.stock().safe_modules(model(Head))
    assert names == sorted([CONV, LINEAR, f"{__name__}.Head"])
    for name in names:
        package, _, kind = name.rpartition(".")
        assert getattr(importlib.import_module(package), kind).__name__ == kind


def inside(x: nn.Module) -> nn.Module:
    class Local(nn.Linear):
        pass

    return nn.Sequential(Local(8, 8), x)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy.named("off"), []),
        (Policy.stock().override({"linear": "fp32"}), [CONV]),
        (Policy.stock().override({"linear": "fp32"}, device_type="cpu"), [CONV, LINEAR]),
        (Policy.stock().override({"addmm": "fp32"}), [CONV]),  # stage 3 calls it
        (Policy.stock().override({"conv2d.padding": "fp32"}), [CONV, LINEAR]),  # not what its padding is
        (Policy.stock().override({"linear": "bfloat16", "conv2d": "float16"}), [LINEAR]),
        (Policy.stock().override({"linear": "float8"}), [CONV, LINEAR]),
        (Policy.stock().override_modules({"**": "fp32"}), []),
        (Policy.stock().override_modules({"*": {"linear": "fp32"}}), [CONV]),
        (Policy.stock().override({"linear": "fp32"}).override_modules({"**": {"linear": "lower"}}), [CONV, LINEAR]),
        (Policy.stock().override_modules({"block": "off", "block.0": {"linear": "lower"}, "head": "fp32"}), [CONV]),
    ],
    ids=str,
)
def test_policies(policy: Policy, expected: list[str]) -> None:
    assert policy.safe_modules(model()) == expected


def test_policies_of_modules() -> None:
    """They act inside the tables of the policy, and a class with a subclass's name of its own is told apart."""
    own = model(Head)
    with tp.set_module_policy(own, {"head": "fp32"}):
        assert Policy.stock().safe_modules(own) == [CONV, LINEAR]
        assert Policy.stock().override({"linear": "fp32"}).safe_modules(own) == [CONV]
    with tp.set_module_policy(own, {"block": "off", "head": Policy.named("cuda")}):
        assert Policy.stock().safe_modules(own) == sorted([CONV, f"{__name__}.Head"])


@pytest.mark.parametrize("make", [
    lambda: Scaled(8, 8), lambda: nn.LSTM(8, 8), lambda: inside(nn.ReLU()),
    lambda: nn.utils.weight_norm(nn.Linear(8, 8)), lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_left_out(make: Any) -> None:
    assert Policy.stock().safe_modules(make()) == []


def test_a_parameter_that_another_op_reads() -> None:
    (name,) = Policy.stock().safe_modules(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    assert name == f"{LINEAR.removesuffix('Linear')}NonDynamicallyQuantizableLinear", "the class of out_proj"


@pytest.mark.parametrize(("policies", "reason"), [
    ({"head": "fp32"}, "autocast is off there"),
    ({"head": {"linear": "fp32"}}, "linear has the policy fp32 there"),
    ({"head": {"linear": "float16"}}, "linear has the policy float16 there"),
])  # fmt: skip
def test_a_policy_that_differs_within_a_class_raises(policies: Any, reason: str) -> None:
    expected = (
        f"DeepSpeed selects modules by class, and cannot select 'block.0' without 'head': both are {LINEAR}, but "
        f"{reason}. Give 'head' a class of its own at the top of your module, class OwnLinear(Linear): pass, with "
        f"model.get_submodule('head').__class__ = OwnLinear, and call safe_modules again; or write the list by hand."
    )
    with pytest.raises(PolicyError) as error:
        Policy.stock().override_modules(policies).safe_modules(model())
    assert str(error.value) == expected


def test_a_shared_parameter() -> None:
    """The embedding reads it in float32."""
    shared = model()
    shared["embedding"] = nn.Embedding(8, 8)
    shared["head"].weight = shared["embedding"].weight
    with pytest.raises(PolicyError, match="shares a parameter with 'embedding', where embedding casts nothing there"):
        Policy.stock().safe_modules(shared)
    assert Policy.stock().override({"embedding": "lower"}).safe_modules(shared) == [
        CONV, LINEAR, "torch.nn.modules.sparse.Embedding"
    ]  # fmt: skip
    shared.get_submodule("head").__class__ = Head  # as the error says; its bias is not shared
    assert Policy.stock().safe_modules(shared) == [CONV, LINEAR]


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ((lambda: None,), PolicyError, "model must be an nn.Module, got function."),
    ((nn.ReLU(), None), DeviceTypeError, "safe_modules takes one device type, got None. Legal: "),
    ((nn.ReLU(), "tpu"), UnsupportedDeviceError, "a policy has no device type 'tpu'. Legal: "),
    ((nn.ReLU(), "cpu", torch.float32), DtypeError, "dtype is that of DeepSpeed's section torch_autocast, got "),
    ((nn.ReLU(), "cpu", "bf"), DtypeError, "dtype 'bf' is not the name of a dtype. Closest: bfloat16."),
])  # fmt: skip
def test_errors(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        Policy.stock().safe_modules(*arguments)
    assert str(raised.value).startswith(text)
