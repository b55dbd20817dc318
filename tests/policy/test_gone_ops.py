"""Custom ops that are destroyed: their kernels and numbers go, unless a policy that something holds refers to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from torch_promote import _C

#: More than csrc/dispatch/registration.cpp lets pass between two looks at which ops are gone.
MANY = 400
X = torch.ones(2, 2)


@contextlib.contextmanager
def custom_op(name: str) -> Iterator[str]:
    """An op that returns its argument's double, as long as the context is open."""
    library = torch.library.Library("gone", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    try:
        yield f"gone::{name}"
    finally:
        library._destroy()


def call(name: str, x: torch.Tensor = X) -> torch.Tensor:
    result: torch.Tensor = torch._C._jit_get_operation(name)[0](x)
    return result


def is_known(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastPrivateUse1")


def other_ops(kind: str, rounds: int = 3) -> None:
    """Gives ops policies and destroys them, until those are forgotten that were gone before."""
    byte = _C.POLICY_BYTES["fp32"]
    for number in range(rounds * MANY):
        with custom_op(f"{kind}{number}") as name:
            change = _C.register_change([(_C.register_op(name, ""), 0, byte)], False)
            assert change


def test_the_kernels_of_ops_that_are_gone_do_not_pile_up() -> None:
    other_ops("warm", 2)
    before = _C.registry_sizes()
    other_ops("more", 4)
    after = _C.registry_sizes()
    assert after["op numbers"] <= before["op numbers"] + MANY
    assert after["policy changes"] <= before["policy changes"] + MANY
    assert not torch._C._dispatch_dump("gone::more0")


@pytest.mark.parametrize("how", ["a region", "a registered policy", "an open region", "install"])
def test_a_policy_that_something_holds_keeps_its_op(how: str) -> None:
    name = f"kept_by_{how.replace(' ', '_')}"
    with contextlib.ExitStack() as stack, custom_op(name) as op:
        region: contextlib.AbstractContextManager[object] = tp.my_autocast("cpu")
        if how == "a registered policy":
            stack.enter_context(tp.register_policy(op, "lower"))
        elif how == "install":
            stack.enter_context(tp.installed_as(overrides={op: "lower"}))
            region = torch.autocast("cpu")
        else:
            region = tp.my_autocast("cpu", overrides={op: "lower"})
        if how == "an open region":
            stack.enter_context(region)
            region = contextlib.nullcontext()
        with region:
            assert call(op).dtype is torch.bfloat16
        gone = stack.pop_all()
    other_ops(name)
    with gone, custom_op(name), region:
        assert call(op).dtype is torch.bfloat16


def test_an_op_that_lives_keeps_its_kernel() -> None:
    with custom_op("living") as name:
        with tp.my_autocast("cpu", overrides={name: "lower"}):
            assert call(name).dtype is torch.bfloat16
        other_ops("beside_a_living_one")
        assert is_known(name)
        with tp.my_autocast("cpu", overrides={name: "lower"}):
            assert call(name).dtype is torch.bfloat16


def test_an_op_is_defined_again_after_its_policy_was_forgotten() -> None:
    with custom_op("again") as name, tp.my_autocast("cpu", overrides={name: "lower"}):
        assert call(name).dtype is torch.bfloat16
    other_ops("before_again")
    with custom_op("again") as name:
        assert not is_known(name)
        assert call(name).dtype is torch.float32
        with tp.my_autocast("cpu", overrides={name: "lower"}):
            assert call(name).dtype is torch.bfloat16


def test_an_op_gets_no_policy_of_the_one_that_had_its_number() -> None:
    with custom_op("first") as name:
        number = _C.register_op(name, "")
        with tp.my_autocast("cpu", overrides={name: "lower", "mm": "fp32"}):
            assert call(name).dtype is torch.bfloat16
    other_ops("between")
    assert _C.registry_sizes()["op numbers"]
    with contextlib.ExitStack() as stack:
        for at in range(3 * MANY):  # one of these gets it
            other = stack.enter_context(custom_op(f"next{at}"))
            if _C.register_op(other, "") == number:
                break
        else:
            pytest.fail(f"no op got the number {number}")
        with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
            assert call(other).dtype is torch.float32
        with tp.my_autocast("cpu", overrides={other: "lower"}):
            assert call(other).dtype is torch.bfloat16


@pytest.mark.parametrize("key", ["gone::later", "gone::late*"])
def test_the_same_overrides_select_ops_that_are_defined_later(key: str) -> None:
    for overload in ("later.a", "later.b", "later"):
        with custom_op(overload) as name, tp.my_autocast("cpu", overrides={key: "lower"}):
            assert torch._C._jit_get_operation("gone::later")[0](X).dtype is torch.bfloat16, name


def test_overrides_are_checked_against_the_schema_of_now() -> None:
    overrides = {"gone::writes": "fp32"}
    with custom_op("writes"):
        tp.my_autocast("cpu", overrides=overrides)
    library = torch.library.Library("gone", "FRAGMENT")
    library.define("writes(Tensor(a!) x) -> ()")
    with pytest.raises(tp.PolicyError, match="it writes to an argument"):
        tp.my_autocast("cpu", overrides=overrides)
    library._destroy()


@pytest.mark.parametrize("key", ["gone::had_a_policy", "gone::had_a_pol*"])
def test_an_op_that_is_gone_has_no_name(key: str) -> None:
    with custom_op("had_a_policy") as name, tp.my_autocast("cpu", overrides={name: "lower"}):
        call(name)
    assert name in torch._C._dispatch_get_all_op_names()
    with pytest.raises(tp.PolicyError, match=r"no op is (called|registered)|matches no op"):
        tp.my_autocast("cpu", overrides={key: "lower"})


def test_a_number_that_no_op_has() -> None:
    with pytest.raises(IndexError, match="no op has the number 16777215"):
        _C.register_change([(2**24 - 1, 0, _C.POLICY_BYTES["fp32"])], False)
