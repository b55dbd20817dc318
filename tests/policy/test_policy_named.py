"""The named policies: their entries for every row, on every device type."""

from __future__ import annotations

import pytest
import torch

from helpers.library_for_policies import NAMESPACE
from torch_promote import CastPolicy
from torch_promote.policy import named_policies
from torch_promote.policy import named_policies as registered_policies
from torch_promote.policy.legality import check_legal
from torch_promote.policy.named_policies import MEANINGS, stock_policy
from torch_promote.policy.op_table import DEVICE_TYPES, Row, op_table, schema_of
from torch_promote.policy.policy import Policy, _named

ROWS = [row for row in op_table() if schema_of(row) is not None]
FP32_FORMS = {CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype}


def in_stock(row: Row, device: str) -> CastPolicy:
    """The row's policy, if the running PyTorch registers the op there."""
    key = f"Autocast{device.upper()}"
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(row.name, key)
    return row.policy(device) if registered else CastPolicy.fallthrough


def effective(policy: Policy, row: Row, device: str) -> object:
    return policy.lookup(f"{row.name}.default" if not row.overload else row.name, device)


@pytest.mark.parametrize("listed", DEVICE_TYPES)
def test_a_device_is_its_list_on_every_device(listed: str) -> None:
    policy = Policy.named(listed)
    for row in ROWS:
        for device in DEVICE_TYPES:
            assert effective(policy, row, device) is in_stock(row, listed), (row.name, device)
    (other,) = set(DEVICE_TYPES) - {listed}
    assert {device for _, device, _ in policy.changes} == {other}, "on its own device it is stock"


def test_fp32_safe_is_fp32_where_either_list_is() -> None:
    policy = Policy.named("fp32_safe")
    kept_as_it_is = 0
    for row in ROWS:
        lists = {device: in_stock(row, device) for device in DEVICE_TYPES}
        safe = FP32_FORMS & set(lists.values())
        for device in DEVICE_TYPES:
            got = effective(policy, row, device)
            if lists[device] in FP32_FORMS or not safe:
                assert got is lists[device], (row.name, device)
                kept_as_it_is += 1
            else:
                assert got in safe, (row.name, device)
    assert kept_as_it_is > len(ROWS)


@pytest.mark.parametrize(
    ("op", "cpu", "cuda"),
    [
        ("exp", "fp32", "fp32"),
        ("softmax.int", "fp32_set_opt_dtype", "fp32_set_opt_dtype"),
        ("norm.Scalar", "fp32_append_dtype", "fp32_append_dtype"),
        ("prod.dim_int", "fp32", "fp32_set_opt_dtype"),
        ("binary_cross_entropy.default", "fp32", "fp32"),
        ("grid_sampler.default", "fp32", "fp32"),
        ("mm.default", "lower_precision_fp", "lower_precision_fp"),
        ("cat.default", "promote", "fallthrough"),
    ],
)
def test_fp32_safe_of_some_ops(op: str, cpu: str, cuda: str) -> None:
    policy = Policy.named("fp32_safe")
    assert [str(policy.lookup(op, device).value) for device in DEVICE_TYPES] == [cpu, cuda]  # type: ignore[union-attr]


def test_off_casts_nothing() -> None:
    policy = Policy.named("off")
    assert {effective(policy, row, device) for row in ROWS for device in DEVICE_TYPES} == {CastPolicy.fallthrough}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    op = f"{NAMESPACE}::join"
    monkeypatch.setattr(registered_policies, "_ops", ((op, "cuda"),))
    return op


def test_off_includes_registered_ops(registered: str) -> None:
    policy = Policy.named("off")
    assert policy.lookup(registered, "cuda") is CastPolicy.fallthrough
    assert policy.lookup(registered, "cpu") is None
    assert repr(policy) == "Policy.named('off')"


def forget() -> None:
    """Clears the cached registrations of PyTorch."""
    named_policies._column.cache_clear()
    _named.cache_clear()


@pytest.mark.parametrize("name", MEANINGS)
def test_says_only_what_is_legal_and_differs_from_stock(name: str) -> None:
    policy = Policy.named(name)
    for overload, device, value in policy.changes:
        check_legal(overload, value)
        assert value != stock_policy(overload, device)
    assert (policy == Policy.stock()) == (name == "stock")
    assert len({Policy.named(other) for other in MEANINGS}) == len(MEANINGS)
    assert MEANINGS[name].endswith(".")


def test_a_librarys_kernel_for_a_row_is_not_part_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's autocast has a kernel there and the table no policy: `fallthrough` is a change, it takes that away."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: (name, key) == ("aten::exp", "AutocastCPU") or has_kernel(name, key),
    )
    forget()
    try:
        assert stock_policy("aten::exp", "cpu") is None
        assert Policy.stock().override({"exp.default": "fallthrough"}, "cpu") != Policy.stock()
        assert Policy.named("cuda").lookup("exp", "cpu") is CastPolicy.fp32
        assert Policy.named("cpu").lookup("exp", "cuda") is CastPolicy.fallthrough
        assert Policy.named("off").lookup("exp", "cpu") is CastPolicy.fallthrough
    finally:
        forget()


def test_a_row_that_pytorch_does_not_have_or_register(monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: (name, key) != ("aten::mm", "AutocastCUDA") and has_kernel(name, key),
    )
    monkeypatch.setattr(
        named_policies, "schema_of", lambda row: None if row.name == "aten::cholesky" else schema_of(row)
    )
    forget()
    try:
        assert Policy.stock().lookup("mm", "cuda") is CastPolicy.fallthrough
        assert Policy.named("cuda").lookup("mm", "cpu") is CastPolicy.fallthrough
        names = {overload for name in MEANINGS for overload, _, _ in Policy.named(name).changes}
        assert "aten::cholesky_solve" in names
        assert "aten::cholesky" not in names
    finally:
        forget()
