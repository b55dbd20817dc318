"""Tensors that are not plain, modes, and ops that others have registered, inside our regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.program_comparison import Region, assert_like_stock, grads

# --- nested tensors

ALWAYS, JAGGED = (torch.strided, torch.jagged), (torch.jagged,)
#: What to compute, and the layouts for which PyTorch has it.
NESTED: dict[str, tuple[Callable[[torch.Tensor, nn.Linear], torch.Tensor], tuple[torch.layout, ...]]] = {
    "linear": (lambda x, layer: layer(x), ALWAYS),
    "linear and relu": (lambda x, layer: layer(torch.relu(layer(x))), ALWAYS),
    "softmax": (lambda x, layer: torch.softmax(layer(x), -1), ALWAYS),
    "matmul": (lambda x, layer: x @ layer.weight.t(), JAGGED),
    "layer norm": (lambda x, layer: F.layer_norm(layer(x), (8,)), JAGGED),
    "attention": (lambda x, layer: attend(layer(x)), JAGGED),
}


def attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in NESTED for layout in NESTED[name][1]])
def test_nested(name: str, layout: torch.layout) -> None:
    def train(region: Region) -> Any:
        layer, compute = nn.Linear(8, 8), NESTED[name][0]
        parts = [torch.randn(length, 8) for length in (3, 1, 4)]
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        with region():
            outputs = compute(x, layer), compute(x, layer)
        sums = [torch.cat(output.unbind()).float().square().sum() for output in outputs]
        (sums[0] + sums[1] * 0.5).backward()
        return outputs, grads(layer), x.grad

    assert_like_stock(train)


# --- sparse tensors

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SPARSE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sparse @ dense": lambda sparse, dense: sparse @ dense,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.addmm(torch.ones_like(dense), sparse, dense),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP64, FP64)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str, requires_grad: bool, layout: torch.layout, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """For some of these PyTorch has no kernel once autocast has made them bfloat16; then the errors are compared."""

    def compute(region: Region) -> Any:
        matrix = torch.randn(6, 6, dtype=dtypes[0]).relu().to_sparse(layout=layout).requires_grad_(requires_grad)
        dense = torch.randn(6, 6, dtype=dtypes[1], requires_grad=requires_grad)
        try:
            with region():
                result = SPARSE[name](matrix, dense)
            if requires_grad:
                result.float().sum().backward()
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error).partition("\n")[0]
        return result, dense.grad, matrix.grad

    assert_like_stock(compute, casts=dtypes[0] is FP32)


# --- tensor subclasses


def kinds(tree: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of the tensors in a tree."""
    return [(leaf.dtype, tuple(leaf.shape)) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# --- modes


class DispatchLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.log.append((str(func), kinds((args, kwargs)), kinds(result)))
        return result


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(getattr(func, "__qualname__", repr(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_outside", [True, False])
@pytest.mark.parametrize("make_mode", [DispatchLog, FunctionLog])
def test_modes_see_what_they_see_under_stock(make_mode: Callable[[], Any], mode_outside: bool) -> None:
    """The same calls: modes do not see regions, and see the same casts as under stock."""

    def train(region: Region) -> Any:
        model, mode = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2)), make_mode()
        x = torch.randn(4, 6)
        first, second = (mode, region()) if mode_outside else (region(), mode)
        with first, second:
            loss = model(x).square().sum() + model(-x).square().sum()
            loss.backward()
        return loss, grads(model), mode.log

    *_, log = assert_like_stock(train)
    assert log


# --- ops that others have registered


def test_custom_op_with_register_autocast() -> None:
    @torch.library.custom_op("torch_promote_test_tensors::product", mutates_args=())
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, weight.dtype))
        return x @ weight

    seen: list[Any] = []
    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.library.register_autocast("torch_promote_test_tensors::product", "cpu", torch.float16)

    def train(region: Region) -> Any:
        seen.clear()
        x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
        with region():
            outputs = product(x, weight), product(F.relu(x @ weight), weight.t())
            with region(enabled=False):
                outputs += (product(x, weight),)
        sum(output.float().square().sum() for output in outputs).backward()
        return outputs, grads(x, weight), list(seen)

    *_, dtypes = assert_like_stock(train)
    assert dtypes == [(torch.float16,) * 2, (torch.float16,) * 2, (torch.float32,) * 2]
