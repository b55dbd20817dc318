"""What happens inside a call that is checked: transforms, recomputation, hooks that raise, ops that kernels call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote.checking.report import CrosscheckReport

levels = pytest.mark.parametrize("level", ["dtype", "bits"])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 4)


# --- what raises in the middle of a call

HOOK = "the call raised, possibly in a saved-tensor hook"


@pytest.mark.parametrize("raises", [False, True])
def test_a_recomputation_that_stops_early(x: torch.Tensor, raises: bool) -> None:
    """The hook of torch.utils.checkpoint raises as soon as it has what the backward needs: here, in the last Linear."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    leaf = x.clone().requires_grad_()
    with tp.crosscheck(level="bits", raise_on_mismatch=raises) as report, tp.my_autocast("cpu"):
        checkpoint(model, leaf, use_reentrant=False).float().sum().backward()
    assert report.mismatches == []
    assert report.not_compared[HOOK] == 1
    # Twice the first layer, once the last: its second run is the one that is not compared.
    assert report.with_stock["aten.linear.default"] == 3
    assert leaf.grad is not None


class MineError(Exception):
    pass


def test_a_hook_on_saved_tensors_that_raises(x: torch.Tensor) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise MineError

    layer = nn.Linear(4, 4)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with tp.crosscheck(level="bits", raise_on_mismatch=True) as report, tp.my_autocast("cpu"):
        with hooks, pytest.raises(MineError):
            layer(x)
        layer(x)
    assert report.mismatches == []
    assert report.not_compared == {HOOK: 1}
    assert report.with_stock["aten.linear.default"] == 1


# --- transforms


def through_vmap(w: torch.Tensor, x: torch.Tensor) -> object:
    return vmap(lambda row: (row @ w).log_softmax(0))(x)


def through_grad(w: torch.Tensor, x: torch.Tensor) -> object:
    return grad(lambda a: (a @ w).float().sum())(x)


def through_jvp(w: torch.Tensor, x: torch.Tensor) -> object:
    return jvp(lambda a: a @ w, (x,), (x,))


def through_both(w: torch.Tensor, x: torch.Tensor) -> object:
    return vmap(grad(lambda row: (row @ w).float().sum()))(x)


@pytest.mark.parametrize("transform", [through_vmap, through_grad, through_jvp, through_both])
def test_a_second_run_under_a_transform_is_not_counted(
    transform: Callable[[torch.Tensor, torch.Tensor], object], x: torch.Tensor
) -> None:
    """Functorch's layers run the calls below them in their own dispatch state."""
    w = torch.randn(4, 4)
    reports: dict[str, CrosscheckReport] = {}
    for level in ("dtype", "bits"):
        with tp.crosscheck(level=level) as reports[level], tp.my_autocast("cpu"):  # type: ignore[arg-type]
            transform(w, x)
        assert reports[level].mismatches == []
    once, twice = reports["dtype"], reports["bits"]
    for counts in ("checked", "composite", "no_rule", "with_policy"):
        assert getattr(twice, counts) == getattr(once, counts), counts
    assert twice.calls == once.calls
    assert twice.with_stock.total() > 0
    # Ops that the check itself calls.
    assert not {"aten.equal.default", "aten.detach.default", "aten.view.dtype"} & twice.checked.keys()


X, W = torch.randn(4, 4), torch.randn(4, 4)
CLOSURES: list[Callable[[], Any]] = [
    lambda: vmap(lambda row: X @ W + row)(X),
    lambda: vmap(lambda row: torch.mm(X, W) + row)(X),
    lambda: grad(lambda a: (X @ W + a).sum())(X),
    lambda: vmap(grad(lambda a: (torch.mm(X, W) @ a).sum()))(X),
]


@levels
@pytest.mark.parametrize("call", CLOSURES)
@pytest.mark.parametrize("region", [tp.my_autocast, tp.stock_autocast])
def test_plain_tensors_in_a_transform(call: Callable[[], Any], region: Any, level: Any) -> None:
    """Functorch repeats the call before autocast runs; that is not the call that autocast makes."""
    with tp.crosscheck(level=level) as report, region("cpu"):
        call()
    assert report.mismatches == []
    assert report.with_policy.total() > 0
    assert all(count > 0 for count in report.with_policy.values())


def test_a_bug_is_found_in_a_transform() -> None:
    def uncast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return torch.mm(a, b).bfloat16()

    with our_kernel("mm", uncast), tp.crosscheck() as report, tp.my_autocast("cpu"):
        vmap(lambda row: torch.mm(X, W) + row)(X)
    assert {mismatch.op for mismatch in report.mismatches} == {"aten.mm.default"}
    assert {mismatch.kind for mismatch in report.mismatches} <= {"casts", "dtype"}


# --- ops that kernels call


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1).add(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def our_kernel(op: str, kernel: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replaces our wrapper by another."""
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells of the one before
        library.impl(op, kernel, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def bilinear() -> torch.Tensor:
    """Of a kernel that calls bmm."""
    return F.bilinear(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3, 4))


@levels
def test_ops_inside_a_kernel_are_seen(level: Any) -> None:
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        bilinear()
    assert report.mismatches == []
    assert report.with_policy["aten.bmm.default"] > 0
    assert report.with_stock["aten.bmm.default"] == (report.with_policy["aten.bmm.default"] if level == "bits" else 0)
    assert report.no_rule.total() == 0
    with tp.crosscheck(level=level) as plain:  # no autocast, no policies: nothing to see
        bilinear()
    assert plain.checked["aten.bmm.default"] == 0


def test_a_bug_inside_a_kernel_is_found() -> None:
    def uncast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return torch.bmm(a, b)

    with our_kernel("bmm", uncast), tp.crosscheck() as report, tp.my_autocast("cpu"):
        bilinear()
    assert {(mismatch.op, mismatch.kind) for mismatch in report.mismatches} >= {("aten.bmm.default", "casts")}
    with tp.crosscheck() as again, tp.my_autocast("cpu"):
        bilinear()
    assert again.mismatches == []


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


@levels
@pytest.mark.parametrize(
    ("overrides", "op", "call"),
    [
        ({"dot": "fp32"}, "aten.vdot.default", lambda: torch.vdot(half(3), half(3))),
        ({"norm": "fp32"}, "aten.dist.default", lambda: torch.dist(half(3, 4), half(3, 4))),
        ({"pow": "fp32"}, "aten.ldexp.Tensor", lambda: torch.ldexp(half(3), half(3))),
    ],
)
def test_a_rule_does_not_answer_for_what_overrides_do_inside(
    overrides: dict[str, str], op: str, call: Callable[[], torch.Tensor], level: Any
) -> None:
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        assert call().dtype is torch.bfloat16
    assert (report.checked[op] + report.composite[op], report.no_rule[op]) == (1, 0)
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu", overrides=overrides):
        result = call()
    assert report.mismatches == []
    # A kernel may have come to do without the op, and then the rule holds.
    assert report.no_rule[op] == (result.dtype is torch.float32) == report.with_policy.total()


def test_nondeterministic_results_are_not_compared() -> None:
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        torch.linalg.lstsq(torch.randn(5, 3), torch.randn(5, 2))
        torch.linalg.lstsq(torch.ones(4, 4), torch.randn(4, 2))
    assert report.mismatches == []
    assert report.not_compared == {"PyTorch does not repeat its bits": 2}
    assert report.with_policy["aten.linalg_lstsq.default"] == 2
    assert report.with_stock["aten.linalg_lstsq.default"] == 0


def test_a_write_between_gaps_is_compared_as_it_lies() -> None:
    """copy_ gets a kernel of ours for good when it is first given a policy, and is then compared at level bits."""
    with tp.my_autocast("cpu", overrides={"aten::copy_": "match_self"}):
        pass
    target = torch.zeros(3, 8)[:, :4]
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        target.copy_(torch.ones(3, 4))
    assert report.with_stock["aten.copy_.default"] == 1
    assert report.mismatches == []
