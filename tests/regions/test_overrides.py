"""`overrides={op: policy}`: names of ops and policies, the effect of each policy, and its duration."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote import _C
from torch_promote.extension import RegionSpec
from torch_promote.reference.promotion_rules import make_rule
from torch_promote.regions import autocast
from torch_promote.regions import promotion_tables as hooks
from torch_promote.regions.autocast import Region, policy_change

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


# --- a policy of an op, and those of the ops that it calls

X = torch.tensor([[0.3, 1.7], [2.9, 0.2]])


def test_fallthrough_leaves_the_ops_inside_to_autocast() -> None:
    with tp.my_autocast("cpu", overrides={"matmul": "fallthrough"}):
        assert (X @ X).dtype == BF16
    with tp.my_autocast("cpu", overrides={"matmul": "fallthrough", "mm": "fp32"}):
        assert (X @ X.bfloat16()).dtype == FP32
    with tp.my_autocast("cpu", overrides={"mm.default": "fp32"}):
        assert (X @ X.bfloat16()).dtype == BF16, "the row of matmul comes first"
    with tp.my_autocast("cpu", overrides={"mse_loss": "fallthrough"}):
        assert aten.mse_loss(X.bfloat16(), X.bfloat16()).dtype == BF16


# --- how long overrides hold


MIXED_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pow(cuda, cpu)": torch.pow,
    "pow(cpu, cuda)": lambda cuda, cpu: torch.pow(cpu, cuda),
    "addcmul": lambda cuda, cpu: torch.addcmul(cuda, cuda, cpu),
    "addcdiv": lambda cuda, cpu: torch.addcdiv(cuda, cpu, cuda),
    "atan2": torch.atan2,
    "mul": torch.mul,
    "mse_loss": lambda cuda, cpu: aten.mse_loss(cuda, cpu),
    "where": lambda cuda, cpu: torch.where(cuda > cpu, cuda, cpu),
    "stack": lambda cuda, cpu: torch.stack([cuda, cpu]),
    "mm": lambda cuda, cpu: torch.mm(cuda, cpu),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        result = call()
    except Exception as error:
        return type(error)
    return result.dtype, result.device.type, tuple(result.shape)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("call", MIXED_CALLS.values(), ids=MIXED_CALLS)
@pytest.mark.parametrize("cuda_dtype", [FP32, FP16, FP64], ids=str)
@pytest.mark.parametrize("cpu_dtype", [FP32, FP16, FP64, torch.int64], ids=str)
def test_calls_with_tensors_of_both_devices_are_as_under_both_of_stocks_regions(
    call: Callable[..., Any], cuda_dtype: torch.dtype, cpu_dtype: torch.dtype
) -> None:
    with torch._subclasses.FakeTensorMode():
        cuda = torch.empty(2, 2, device="cuda", dtype=cuda_dtype)
        cpu = torch.empty((), dtype=cpu_dtype)
        with tp.stock_autocast("cpu", FP16), tp.stock_autocast("cuda", FP16):
            stock = outcome(partial(call, cuda, cpu))
        with tp.my_autocast(["cpu", "cuda"], FP16):
            assert outcome(partial(call, cuda, cpu)) == stock
        with tp.my_autocast("cpu", FP16), tp.my_autocast("cuda", FP16):
            assert outcome(partial(call, cuda, cpu)) == stock


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize(("policy", "wanted"), [("fp16", FP16), ("fp32", FP32), (FP64, FP64), ("keep", FP16)], ids=str)
def test_an_override_of_a_call_with_tensors_of_both_devices(policy: Any, wanted: torch.dtype) -> None:
    with torch._subclasses.FakeTensorMode():
        cuda, cpu = torch.empty(2, 2, device="cuda", dtype=FP16), torch.empty(())
        with tp.my_autocast(["cpu", "cuda"], FP16, overrides={"pow": policy}):
            assert torch.pow(cuda, cpu).dtype == torch.pow(cpu, cuda).dtype == wanted


def three_dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """What mm, exp (a row of CUDA alone) and neg (no row) give for float16 under the CPU's autocast of bfloat16."""
    x = torch.ones(2, 2, dtype=FP16)
    return torch.mm(x, x).dtype, torch.exp(x).dtype, torch.neg(x).dtype


STOCK = (BF16, FP16, FP16)


def test_a_policy_takes_the_place_of_the_one_around() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "float64", "neg": "float64"}):
        assert three_dtypes() == (FP64, FP16, FP64)
        with tp.my_autocast("cpu", policy="cuda", overrides={"exp": "float64"}):
            assert three_dtypes() == (BF16, FP64, FP16)
        with tp.my_autocast("cpu", policy="cuda"):
            assert three_dtypes() == (BF16, FP32, FP16)
            with tp.my_autocast("cpu", overrides={"neg": "fp32"}):
                assert three_dtypes() == (BF16, FP32, FP32)
                with tp.my_autocast("cpu", policy="stock"):
                    assert three_dtypes() == STOCK
                    assert _C.policy_is_stock()
                assert three_dtypes() == (BF16, FP32, FP32)
            assert three_dtypes() == (BF16, FP32, FP16)
        assert three_dtypes() == (FP64, FP16, FP64)
    with tp.my_autocast("cpu"):
        assert three_dtypes() == STOCK
    with tp.my_autocast("cpu", enabled=False, overrides={"mm": "float64"}), tp.my_autocast("cpu"):
        assert three_dtypes() == (FP64, FP16, FP16)


def test_more_policies_than_fingerprints_tell_apart() -> None:
    """Some of them have the same 25-bit hash; the second one then gets another."""
    rows = range(len(_C.OP_ENTRY_NAMES))
    changes = (
        [(row, 0, 5), (other, 0, 5), (third, 1, 8)] for row in rows for other in rows[::7] for third in rows[::20]
    )
    seen: dict[tuple[torch.dtype, ...], str] = {}
    held: list[_C.HeldChange] = []
    slots = ("privateuseone", "ipu", "maia", "hpu", "mtia")
    for _, change in zip(range(30000), changes, strict=False):
        held.append(_C.register_change(change, False))
        with Region(RegionSpec(policy_change=held[-1].number).pack()):
            digits = tuple(torch.get_autocast_dtype(slot) for slot in slots)
            policy = str(_C.current_policy())
        assert seen.setdefault(digits, policy) == policy


# --- the extension keeps policies and promotion rules as long as something holds them


OVERRIDES = {"mm.default": "keep", "exp.default": torch.float64}


def forget() -> None:
    """Drops the changes that Python keeps for regions with equal arguments."""
    autocast._register.cache_clear()
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
    with tp.install(overrides={"exp.default": torch.float64, "dot.default": "keep"}):
        forget()
        with torch.autocast("cpu"):
            assert torch.exp(x).dtype is torch.float64
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
