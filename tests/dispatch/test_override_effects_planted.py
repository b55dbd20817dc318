"""The comparison with the plan finds bugs planted in the plan, and policies other than those asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers import override_effects
from helpers.override_effects import Policy, check_effect
from torch_promote.parity.entry_run import Bound
from torch_promote.policy.op_table import CastPolicy

#: A module whose name its function has too.
PLAN = importlib.import_module("torch_promote.reference.autocast")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten
MonkeyPatch = pytest.MonkeyPatch


def t(dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return (torch.linspace(0.1, 2.3, 4, dtype=F64) + seed).to(dtype)


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("planted", "FRAGMENT") as made:
        made.define("named(Tensor x, Dict(str, Tensor) others) -> Tensor")
        made.impl("named", lambda x, others: x + others["a"], "CompositeExplicitAutograd")
        made.define("fill(Tensor(a!) x, Tensor(b!) y, Tensor z) -> ()")
        made.impl("fill", lambda x, y, z: None if y.copy_(z * 0.3) is y else x, "CompositeExplicitAutograd")
        made.define("listed(Tensor[] xs) -> Tensor")
        made.impl("listed", lambda xs: xs[0].clone(), "CompositeExplicitAutograd")
        yield


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "one": (aten.sin.default, (t(),)),
    "doubles": (aten.maximum.default, (t(), t(F64, 1))),
    "optional": (aten.clamp.Tensor, (t(BF16), t(F32), None)),
    "write": (aten.mul_.Tensor, (t(BF16), t(F32, 1))),
    "sum": (aten.nansum.default, (t(BF16),)),
}


def bound(name: str) -> Bound:
    """The call of a name. Ops of the library exist only inside a test."""
    if name == "list":
        return torch.ops.planted.listed.default, ([t(BF16), t(F32)],), {}
    if name == "dict":
        return torch.ops.planted.named.default, (t(F32), {"a": t(F32, 1)}), {}
    if name == "write two":
        return torch.ops.planted.fill.default, (t(BF16), t(F64), t(F32, 1)), {}
    return (*CALLS[name], {})


def a_wrong_dtype(patch: MonkeyPatch) -> None:
    right = PLAN._target
    patch.setattr(PLAN, "_target", lambda *args: F16 if right(*args) is BF16 else right(*args))


def doubles_are_cast(patch: MonkeyPatch) -> None:
    right = PLAN._eligible
    patch.setattr(PLAN, "_eligible", lambda tensor, device, with_doubles=True: right(tensor, device, True))


def optional_tensors_are_left_alone(patch: MonkeyPatch) -> None:
    right = PLAN._candidates
    patch.setattr(PLAN, "_candidates", lambda call: (one for one in right(call) if one[2]))


def containers_are_left_alone(patch: MonkeyPatch) -> None:
    right = PLAN._candidates
    patch.setattr(PLAN, "_candidates", lambda call: (one for one in right(call) if "[" not in one[0]))


def the_last_written_tensor_decides(patch: MonkeyPatch) -> None:
    right = PLAN._written
    patch.setattr(PLAN, "_written", lambda call: iter([*right(call)][::-1]))


#: The bug, the call that it shows in, and under which policy.
PLANTED: list[tuple[Callable[[MonkeyPatch], None], str, Policy]] = [
    (a_wrong_dtype, "one", CastPolicy.lower_precision_fp),
    (doubles_are_cast, "doubles", CastPolicy.fp32),
    (optional_tensors_are_left_alone, "optional", CastPolicy.lower_precision_fp),
    (containers_are_left_alone, "dict", CastPolicy.lower_precision_fp),
    (the_last_written_tensor_decides, "write two", CastPolicy.match_self),
]
IDS = [f"{bug.__name__} {name} {policy}" for bug, name, policy in PLANTED]


@pytest.mark.parametrize(("bug", "name", "policy"), PLANTED, ids=IDS)
def test_a_bug_in_the_plan_is_found(
    monkeypatch: MonkeyPatch, bug: Callable[[MonkeyPatch], None], name: str, policy: Policy
) -> None:
    check_effect(name, bound(name), policy)
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check_effect(name, bound(name), policy)


#: The requested policy, and the policy that the region has instead.
SWAPPED: list[tuple[str, Policy, str]] = [
    ("one", CastPolicy.lower_precision_fp, "fp32"),
    ("list", CastPolicy.promote, "keep"),
    ("write", CastPolicy.match_self, "keep"),
    ("sum", CastPolicy.fp32_set_opt_dtype, "keep"),
]


@pytest.mark.parametrize(("name", "policy", "instead"), SWAPPED)
def test_another_policy_than_the_one_asked_for_is_found(
    monkeypatch: MonkeyPatch, name: str, policy: Policy, instead: str
) -> None:
    right = tp.my_autocast

    def region(*args: Any, overrides: Any = None, **kwargs: Any) -> Any:
        return right(*args, overrides=overrides and dict.fromkeys(overrides, instead), **kwargs)

    monkeypatch.setattr(override_effects.tp, "my_autocast", region)
    with pytest.raises(AssertionError):
        check_effect(name, bound(name), policy)
