"""`Policy` as a value: its entries, equality, copies, repr, errors, and immutability."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import torch_promote
from helpers.library_for_policies import NAMESPACE
from helpers.policies import WAYS
from helpers.subprocesses import output_of
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, schema_of
from torch_promote.policy.policy import Difference, Policy

FP64 = torch.float64

# --- what a policy says


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_stock_is_the_table_where_pytorch_registers_the_op(device: str) -> None:
    for row in (row for row in op_table() if schema_of(row) is not None):
        if torch._C._dispatch_has_kernel_for_dispatch_key(row.name, f"Autocast{device.upper()}"):
            assert Policy.stock().lookup(exact_key(row.name), device) is row.policy(device)


def test_stock_is_fallthrough_where_pytorch_does_not_register_a_row() -> None:
    assert stock_policy("aten::exp", "cpu") is CastPolicy.fallthrough
    assert Policy.stock().override({"exp.default": "fallthrough"}, "cpu") == Policy.stock()
    assert Policy.stock().override({"exp.default": "fallthrough"}, "cuda") != Policy.stock()


def test_a_policy_has_no_entry_for_an_op_outside_the_table_until_it_is_overridden() -> None:
    join = f"{NAMESPACE}::join"
    assert Policy.stock().lookup(join, "cpu") is None
    policy = Policy.stock().override({join: "fallthrough"}, "cpu")
    assert policy.lookup(join, "cpu") is CastPolicy.fallthrough
    assert policy.lookup(join, "cuda") is None
    assert policy.diff("stock") == (Difference(join, "cpu", CastPolicy.fallthrough, None),)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, ["cpu", "cuda"]),
        ("cpu", ["cpu"]),
        ("cuda", ["cuda"]),
        (["cuda"], ["cuda"]),
        (("cuda", "cpu"), ["cpu", "cuda"]),
    ],
    ids=str,
)
def test_overrides_hold_on_the_devices_that_are_named(device: Any, expected: list[str]) -> None:
    policy = Policy.stock().override({"mm.default": FP64}, device)
    assert [name for name in DEVICE_TYPES if policy.lookup("mm.default", name) is FP64] == expected
    assert policy.changes == tuple(("aten::mm", name, FP64) for name in expected)


def test_overriding_back_to_stock_gives_stock() -> None:
    policy = Policy.stock().override({"mm.default": "fp32", "softmax.int": "fp16"})
    back = policy.override({"mm.default": "fp16"}).override({"softmax.int": "fallthrough"}, "cpu")
    assert back.changes == (("aten::softmax.int", "cuda", CastPolicy.lower_precision_fp),)
    assert back.override({"softmax.int": "fp32_set_opt_dtype"}, "cuda") == Policy.stock()


def test_lookup_of_an_op_is_of_its_rows() -> None:
    assert Policy.stock().lookup("softmax", "cuda") is CastPolicy.fp32_set_opt_dtype
    assert Policy.stock().lookup(torch.ops.aten.mm, "cpu") is CastPolicy.lower_precision_fp
    assert Policy.stock().lookup("mm.out", "cpu") is None
    assert Policy.stock().override({"pow": FP64}).lookup("pow", "cpu") is FP64


def test_diff_lists_both_sides_in_order() -> None:
    mine = Policy.stock().override({"mm.default": "fp32"}).override({"exp.default": FP64}, "cpu")
    theirs = Policy.stock().override({"mm.default": "keep"}, "cuda")
    lower, fp32 = CastPolicy.lower_precision_fp, CastPolicy.fp32
    assert mine.diff(theirs) == (
        Difference("aten::exp", "cpu", FP64, CastPolicy.fallthrough),
        Difference("aten::mm", "cpu", fp32, lower),
        Difference("aten::mm", "cuda", fp32, CastPolicy.keep),
    )


def test_of_takes_a_policy_a_name_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.stock().override({"mm.default": FP64})
    monkeypatch.chdir(tmp_path)
    policy.save("mine.toml")
    policy.save("cuda")
    assert Policy.of(policy) is policy
    assert Policy.of("cuda") == Policy.named("cuda"), "a name comes before a file that is called so"
    for path in ("mine.toml", "./cuda", tmp_path / "cuda", Path("cuda"), str(tmp_path / "cuda")):
        assert Policy.of(path) == policy


# --- a frozen value


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", Policy.names())
def test_a_copy_is_equal(way: Callable[[Policy], Policy], name: str) -> None:
    policy = Policy.named(name).override({"mm.out": "match_self", f"{NAMESPACE}::join": FP64}, "cpu")
    copied = way(policy)
    assert (copied, hash(copied), repr(copied)) == (policy, hash(policy), repr(policy))


@pytest.mark.parametrize("name", ["changes", "other"])
def test_nothing_can_be_set(name: str) -> None:
    policy = Policy.stock()
    with pytest.raises(AttributeError, match=r"a Policy is immutable, so '\w+' cannot be set\. Use policy\.override"):
        setattr(policy, name, ())
    with pytest.raises(AttributeError, match="a Policy is immutable"):
        delattr(policy, name)
    assert policy == Policy.stock()


def test_is_unequal_to_other_things() -> None:
    assert Policy.stock() != ()
    assert Policy.stock() != "stock"
    assert len({Policy.stock(), Policy.named("stock"), Policy.named("cuda"), Policy.stock().override({})}) == 2


def test_importing_it_scans_no_ops() -> None:
    """Schemas are looked up lazily."""
    code = (
        "import torch; names = torch._C._dispatch_get_all_op_names; asked = []\n"
        "torch._C._dispatch_get_all_op_names = lambda: asked.append('names') or names()\n"
        "schema = torch._C._get_schema\n"
        "torch._C._get_schema = lambda *args: asked.append(args) or schema(*args)\n"
        "import torch_promote.policy.policy; print(asked)"
    )
    assert output_of(code) == "[]\n"


# --- repr

SHORT: list[tuple[Policy, str]] = [
    (Policy.stock(), "Policy.stock()"),
    (Policy.named("cuda"), "Policy.named('cuda')"),
    (Policy.named("off"), "Policy.named('off')"),
    (
        Policy.stock().override({"mm.default": "fp32", "softmax.int": FP64}),
        "Policy.stock().override({'aten::mm.default': 'fp32', 'aten::softmax.int': 'float64'})",
    ),
    (
        Policy.stock().override({"exp.default": "fp16"}, "cuda").override({"mm.default": "keep"}),
        "Policy.stock().override({'aten::mm.default': 'keep'})"
        ".override({'aten::exp.default': 'lower_precision_fp'}, device_type='cuda')",
    ),
    (
        Policy.stock().override({f"{NAMESPACE}::many.out": "match_self"}, "cpu").override({"mm.default": FP64}, "cuda"),
        "Policy.stock().override({'policy_tests::many.out': 'match_self'}, device_type='cpu')"
        ".override({'aten::mm.default': 'float64'}, device_type='cuda')",
    ),
]


@pytest.mark.parametrize(("policy", "text"), SHORT, ids=[text for _, text in SHORT])
def test_repr_evaluates_to_the_policy(policy: Policy, text: str) -> None:
    assert repr(policy) == text
    assert eval(text) == policy


def test_a_long_repr_says_how_many_more() -> None:
    ops = ["exp", "log", "mm", "bmm", "erfinv", "acos"]
    policy = Policy.stock().override({f"{op}.default": FP64 for op in ops})
    assert repr(policy) == (
        "Policy.stock().override({'aten::acos.default': 'float64', 'aten::bmm.default': 'float64', "
        "'aten::erfinv.default': 'float64', 'aten::exp.default': 'float64', ... 2 more})"
    )


# --- errors

ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a misspelt name": (
        lambda: Policy.named("cdua"),
        PolicyError,
        "no policy is called 'cdua'. Closest: cuda. Legal: stock, cpu, cuda, fp32_safe, off.",
    ),
    "a number for a name": (
        lambda: Policy.named(3),  # type: ignore[arg-type]
        PolicyError,
        "no policy is called 3. Legal: stock, cpu, cuda, fp32_safe, off.",
    ),
    "a list for a name": (
        lambda: Policy.named(["cuda"]),  # type: ignore[arg-type]
        PolicyError,
        "no policy is called ['cuda']. Closest: cuda. Legal: stock, cpu, cuda, fp32_safe, off.",
    ),
    "a misspelt name or path": (
        lambda: Policy.of("fp32safe"),
        PolicyError,
        "no policy is called 'fp32safe'. Closest: fp32_safe. Legal: stock, cpu, cuda, fp32_safe, off, or the path of a "
        "file, which contains a separator or ends with .toml.",
    ),
    "an empty name": (
        lambda: Policy.of(""),
        PolicyError,
        "no policy is called ''. Legal: stock, cpu, cuda, fp32_safe, off, or the path of a file, which contains a "
        "separator or ends with .toml.",
    ),
    "a mapping for a policy": (
        lambda: Policy.of({"mm": "fp32"}),  # type: ignore[arg-type]
        PolicyError,
        "a policy is a Policy, a name or the path of a policy file, got {'mm': 'fp32'} of type dict. For single ops, "
        "use Policy.stock().override({op: policy}).",
    ),
    "a cast policy for a policy": (
        lambda: Policy.stock().diff(CastPolicy.fp32),  # type: ignore[arg-type]
        PolicyError,
        "a policy is a Policy, a name or the path of a policy file, got <CastPolicy.fp32: 'fp32'> of type CastPolicy. "
        "For single ops, use Policy.stock().override({op: policy}).",
    ),
    "a device type without autocast here": (
        lambda: Policy.stock().override({}, "xpu"),
        torch_promote.UnsupportedDeviceError,
        "a policy has no device type 'xpu'. Legal: 'cpu', 'cuda'.",
    ),
    "a device with an index": (
        lambda: Policy.stock().lookup("mm", "cuda:0"),
        torch_promote.UnsupportedDeviceError,
        "a policy has no device type 'cuda:0'. Legal: 'cpu', 'cuda'.",
    ),
    "a device": (
        lambda: Policy.stock().override({}, torch.device("cpu")),  # type: ignore[arg-type]
        torch_promote.DeviceTypeError,
        "device_type is a device type, a sequence of them or None, got device(type='cpu'). Legal: 'cpu', 'cuda'.",
    ),
    "no device": (
        lambda: Policy.stock().override({}, []),
        torch_promote.DeviceTypeError,
        "device_type is a device type, a sequence of them or None, got []. Legal: 'cpu', 'cuda'.",
    ),
    "a device twice": (
        lambda: Policy.stock().override({}, ["cpu", "cpu"]),
        torch_promote.DeviceTypeError,
        "device_type ['cpu', 'cpu'] contains a duplicate. Name each device type once.",
    ),
    "a lookup on every device": (
        lambda: Policy.stock().lookup("mm", None),  # type: ignore[arg-type]
        torch_promote.DeviceTypeError,
        "lookup takes one device type, got None. Legal: 'cpu', 'cuda'.",
    ),
    "a lookup on two devices": (
        lambda: Policy.stock().lookup("mm", ["cpu", "cuda"]),  # type: ignore[arg-type]
        torch_promote.DeviceTypeError,
        "lookup takes one device type, got ['cpu', 'cuda']. Legal: 'cpu', 'cuda'.",
    ),
    "a lookup of overloads that differ": (
        lambda: Policy.stock().override({f"{NAMESPACE}::many": "fp32"}).lookup(f"{NAMESPACE}::many", "cpu"),
        PolicyError,
        "'policy_tests::many' selects 3 overloads with different policies on cpu: fp32 (policy_tests::many), fp32 "
        "(policy_tests::many.dtype), no entry (policy_tests::many.out). Name one of them, such as "
        "'policy_tests::many.default'.",
    ),
    "a name for changes": (
        lambda: Policy("cuda"),  # type: ignore[arg-type]
        PolicyError,
        "Policy(...) takes a tuple of (overload, device, policy) triples, got 'cuda'. To get a policy by name, use "
        "Policy.named(...).",
    ),
    "an override of no mapping": (
        lambda: Policy.stock().override("mm"),  # type: ignore[arg-type]
        PolicyError,
        "overrides must be a mapping of ops to policies, got str.",
    ),
}


@pytest.mark.parametrize(("ask", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_bad_input(ask: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        ask()
    assert str(error.value) == text
    assert type(error.value) is kind


# --- torch.compile


def test_a_compiled_function_is_given_a_policy() -> None:
    def scaled(x: torch.Tensor, policy: Policy) -> torch.Tensor:
        return x * 2 if policy == Policy.stock() else x * 3

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x, policy: scaled(x, policy), backend=counter, fullgraph=True)
    one, other = Policy.stock(), Policy.stock().override({"mm.default": "fp32"})
    results = [compiled(torch.ones(()), policy).item() for policy in (one, other, Policy((*one.changes,)), other)]
    assert results == [2, 3, 2, 3]
    assert counter.frame_count == 2, "an equal policy is served by what was compiled for the first"


@pytest.mark.skipif(not hasattr(torch.utils._pytree, "register_constant"), reason="this PyTorch has no such constants")
def test_a_function_that_is_traced_as_it_is_gets_a_policy_for_a_constant() -> None:
    @torch._dynamo.nonstrict_trace
    def count(x: torch.Tensor, policy: Policy) -> torch.Tensor:
        return x + len(policy.changes)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x, policy: count(x, policy), backend=counter, fullgraph=True)
    other = Policy.stock().override({"mm.default": "fp32"})
    results = [compiled(torch.zeros(()), policy).item() for policy in (other, Policy.stock(), copy.copy(other))]
    assert results == [2, 0, 2]
    assert counter.frame_count == 2
