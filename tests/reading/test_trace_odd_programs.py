"""trace, find_nonfinite and crosscheck around unusual programs, which run the same as without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.counting_mode import count_both_ways, counts_of

_BLOCKS: dict[str, Callable[[], Any]] = {
    "trace": tp.trace,
    "values": lambda: tp.trace(values=True),
    "find_nonfinite": tp.find_nonfinite,
    "crosscheck": tp.crosscheck,
    "crosscheck of bits": lambda: tp.crosscheck(level="bits"),
}
X, W = torch.linspace(-1, 2, 16).view(4, 4), torch.linspace(2, -1, 16).view(4, 4).requires_grad_()
HALF = torch.float16
SPOILED = torch.full((2,), torch.nan, dtype=HALF)


def _with_a_graph_break(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    torch._dynamo.graph_break()
    return y * torch.tensor(x.tolist()).sum()


def _compiled() -> Any:
    torch._dynamo.reset()
    result: Any = torch.compile(_with_a_graph_break, backend="eager")(torch.ones(3, 3))
    return result


def _sparse() -> Any:
    x = torch.eye(3).to_sparse()
    return torch.sparse.mm(x, torch.ones(3, 2)), (x + x).coalesce().values(), x.to_sparse_csr().values()


def _nested(layout: Any) -> Any:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    return torch.nested.to_padded_tensor(nn.functional.linear(nested, torch.eye(3)), 0.0)


def _float4() -> Any:
    """PyTorch has no op that reads its numbers."""
    return torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).clone().view(torch.uint8)


def _jvp() -> Any:
    return torch.func.jvp(lambda x: (x @ x).tanh(), (torch.ones(2, 2),), (torch.ones(2, 2),))


def _fake() -> Any:
    with torch._subclasses.FakeTensorMode():
        return tuple((torch.ones(2, 3) @ torch.ones(3, 2)).exp().shape)


class _Subclass(torch.Tensor):
    pass


class _Wrapper(torch.Tensor):
    """Wraps a tensor, as DTensor does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        wrapper: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = tree_map(lambda value: value.inner if isinstance(value, _Wrapper) else value, args)
        results = function(*inside, **(kwargs or {}))
        return args[0] if function._schema.is_mutable else cls(results)


def _writes() -> Any:
    """In-place ops on tensors without their own data."""
    with torch._subclasses.FakeTensorMode():
        torch.ones(3, dtype=HALF).add_(1)
    torch.ones(3, dtype=HALF, device="meta").add_(1)
    wrapped = _Wrapper(torch.ones(3, dtype=HALF))
    wrapped.add_(1)
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], dtype=HALF, layout=torch.jagged).mul_(2)
    return wrapped.inner, torch.eye(2, dtype=HALF).to_sparse().mul_(2).to_dense()


def _writes_in_transforms() -> Any:
    """An in-place op of torch.func.grad gets its number in a wrapper."""
    x, grad = torch.ones(3, dtype=HALF), torch.func.grad
    cube = grad(grad(lambda x: (x.clone().mul_(2) ** 3).sum()))
    return (
        torch.vmap(lambda x: x.clone().mul_(2))(torch.ones(2, 3, dtype=HALF)),
        grad(lambda x: x.clone().mul_(3).sum())(x),
        grad(lambda x: x.clone().add_(2).mul(3).sum())(x),
        cube(torch.tensor(1.0)),
    )


def _lists() -> Any:
    weights = [torch.ones(2), torch.ones(3)]
    torch._foreach_add_(weights, 1)
    return torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)), weights, torch.ones(2)[torch.tensor([1])]


def _lazy() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)).half().float()
    return model(torch.ones(2, 3, 5, 5)), *model.parameters()


def _in_mode(mode: Any) -> Callable[[], Any]:
    def program() -> torch.Tensor:
        with mode():
            y = X @ W
            y[0] = 2
            return y.add_(1)

    return program


def _made_inside() -> Any:
    """A tensor that becomes a Parameter or another subclass must not have a Python object before that."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance((X + 1).as_subclass(_Subclass), _Subclass)
    assert isinstance(torch._subclasses.FakeTensorMode().from_tensor(X), torch.Tensor)
    return layer(X).detach(), nn.Parameter(X * 2).detach()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return g.float() @ b.t(), a.t() @ g.float()


def _graph(tracing_mode: str) -> Callable[[], Any]:
    return lambda: make_fx(lambda a: (a @ a).relu().sum(), tracing_mode=tracing_mode)(X).code


def _recomputed(reentrant: bool) -> Callable[[], Any]:
    def program() -> Any:
        torch.manual_seed(1)
        w, leaf = W.detach().clone().requires_grad_(), X.clone().requires_grad_()
        part = lambda a: torch.dropout(torch.relu(a @ w), 0.5, True) @ w  # noqa: E731
        loss = checkpoint(part, leaf, use_reentrant=reentrant).float().sum()
        loss.backward()
        return loss.detach(), w.grad, leaf.grad

    return program


_PROGRAMS: dict[str, Callable[[], Any]] = {
    "compiled": _compiled,
    "sparse": _sparse,
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
    "float4": _float4,
    "hessian": lambda: torch.func.hessian(lambda x: (x @ x).sum())(torch.ones(2, 2)),
    "vmap": lambda: torch.vmap(lambda x: torch.softmax(x @ x, -1).exp().sum())(torch.ones(2, 3, 3)),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda x: (x @ x).sin().sum()))(torch.ones(2, 3, 3)),
    "jvp": _jvp,
    "fake": _fake,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize() * 2,
    "subclass": lambda: (torch.ones(2, 2).as_subclass(_Subclass) @ torch.ones(2, 2)).exp(),
    "lazy": _lazy,
    "lists": _lists,
    "writes": _writes,
    "writes in transforms": _writes_in_transforms,
    "subclasses": _made_inside,
    "autograd.Function": lambda: torch.autograd.grad(_Product.apply(X, W).sum(), W),
    "checkpoint": _recomputed(reentrant=False),
    "checkpoint, reentrant": _recomputed(reentrant=True),
    **{mode.__name__: _in_mode(mode) for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)},
    **{f"make_fx, {mode}": _graph(mode) for mode in ("real", "fake", "symbolic")},
}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda one: one @ x)(torch.stack([x, x]))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", _BLOCKS)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_block_does_not_change_a_program(block: str, name: str) -> None:
    with tp.my_autocast("cpu"):
        alone = _PROGRAMS[name]()
    with _BLOCKS[block]() as report, tp.my_autocast("cpu"):
        traced = _PROGRAMS[name]()
    for ours, plain in zip(tree_leaves(traced), tree_leaves(alone), strict=True):
        assert_same(ours, plain)
    assert str(report)
    if isinstance(report, tp.types.CrosscheckReport):
        assert report.mismatches == []
        assert report.calls > 0


def test_torch_compile_does_not_compile_observers() -> None:
    def graphs() -> int:
        torch._dynamo.utils.counters.clear()
        _compiled()
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    alone = graphs()
    with tp.trace():
        assert graphs() == alone


@pytest.mark.parametrize("transform", [_rows, torch.func.grad(lambda x: (x @ x).sin().sum())])
def test_calls_and_casts_in_transforms_are_counted_once(transform: Callable[[Any], Any]) -> None:
    def program() -> None:
        with tp.my_autocast("cpu"):
            transform(torch.ones(3, 3))

    report, mode = count_both_ways(program)
    assert counts_of(report) == mode.counts
    casting = [call for call in report.calls if call.casts]
    assert casting
    assert all(call.ran_with[0].dtype is torch.bfloat16 for call in casting)


def test_a_call_in_a_transform_that_raises() -> None:
    with tp.trace() as report:
        with pytest.raises(RuntimeError, match="size"):
            torch.vmap(lambda x: torch.mm(x, x))(torch.ones(2, 3, 4))
        torch.exp(torch.ones(2))
    calls = {call.op: call.error for call in report.calls}
    assert (calls["aten::bmm"], calls["aten::exp"]) == (True, False)


def test_a_cast_of_a_sparse_tensor_has_the_bytes_of_what_it_stores() -> None:
    with tp.trace() as report, tp.my_autocast("cpu"):
        torch.eye(3).to_sparse() @ torch.ones(3, 3)
    assert 3 * 2 in [cast.bytes for call in report.calls for cast in call.casts]


@pytest.mark.parametrize(
    ("make", "op", "kind"),
    [
        (lambda: 1 / torch.zeros(2, dtype=torch.int64), "aten::reciprocal", "mathematics"),
        (lambda: torch.ones(2).long() / torch.zeros(2).long(), "aten::div", "mathematics"),
        (lambda: torch.tensor([70000]).half(), "aten::to", "overflow in a cast"),
        # What a tensor held before it was overwritten does not matter.
        (lambda: SPOILED.copy_(torch.tensor([1e5, 1.0])), "aten::copy_", "overflow in a cast"),
        (lambda: torch.tensor([1.0, 1e3]).masked_fill(torch.tensor([True, False]), -torch.inf).exp(),
         "aten::exp", "mathematics"),
    ],
)  # fmt: skip
def test_infinite_values_of_integers_or_beside_a_mask_are_faults(
    make: Callable[[], torch.Tensor], op: str, kind: str
) -> None:
    with tp.find_nonfinite() as report:
        make()
    assert report.origin is not None
    assert (report.origin.op, report.origin.kind) == (op, kind)


def test_a_mask_of_booleans_and_the_exponential_of_a_mask_are_no_faults() -> None:
    with tp.find_nonfinite() as report:
        torch.tensor([False, True]).log()
        torch.zeros(2).masked_fill(torch.tensor([True, False]), -torch.inf).exp()
    assert not report.found


def test_a_buffer_that_is_filled_piece_by_piece_is_no_fault() -> None:
    with tp.find_nonfinite() as report:
        cache = torch.empty(1, 4, 2)
        cache.view(torch.int32).fill_(0x7FC00000)  # NaNs, as they may be there
        cache.index_copy_(1, torch.tensor([0]), torch.ones(1, 1, 2))
        cache[:, :1].sum()
    assert not report.found
    with tp.find_nonfinite() as report:
        cache.sum()
    assert report.origin is not None
    assert report.origin.kind == "data"


def test_ctrl_c_in_the_middle_of_a_record_stays_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(tensor: torch.Tensor) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_promote.observe.observer.bytes_of", interrupt)
    with pytest.raises(KeyboardInterrupt), tp.trace(), tp.my_autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)


def test_an_error_without_a_text_ends_the_trace() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    for _ in range(2):
        with pytest.raises(SilentError), tp.trace() as report:  # noqa: PT012
            torch.ones(2).sin()
            raise SilentError
        assert report.failure is None
        torch.ones(2).cos()
        assert not report.calls.where(op="cos")
