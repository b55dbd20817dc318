"""In-place ops on tensors without their own data, under every observer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import torch_promote as tp
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.numerics.find_nonfinite import find_nonfinite
from torch_promote.observe.trace import trace

HALF = torch.float16


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


def _fake() -> None:
    with FakeTensorMode():
        torch.ones(3, dtype=HALF).add_(1)


def _meta() -> None:
    torch.ones(3, dtype=HALF, device="meta").add_(1)


def _wrapped() -> None:
    tensor = _Wrapper(torch.ones(3, dtype=HALF))
    tensor.add_(1)
    assert tensor.inner.tolist() == [2.0] * 3


def _vmapped() -> None:
    result = torch.vmap(lambda x: x.clone().mul_(2))(torch.ones(2, 3, dtype=HALF))
    assert result.tolist() == [[2.0] * 3] * 2


def _func_grad() -> None:
    """An in-place op of torch.func.grad gets its number in a wrapper."""
    for function in (lambda x: x.clone().mul_(3).sum(), lambda x: x.clone().add_(2).mul(3).sum()):
        assert torch.func.grad(function)(torch.ones(3, dtype=HALF)).tolist() == [3.0] * 3


def _func_grad_of_grad() -> None:
    cube = torch.func.grad(torch.func.grad(lambda x: (x.clone().mul_(2) ** 3).sum()))
    assert cube(torch.tensor(1.0)).item() == 48.0


def _sparse() -> None:
    assert torch.eye(2, dtype=HALF).to_sparse().mul_(2).to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]


def _nested() -> None:
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], dtype=HALF, layout=torch.jagged).mul_(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", [trace, lambda: trace(values=True), find_nonfinite, crosscheck])
@pytest.mark.parametrize(
    "program", [_fake, _meta, _wrapped, _vmapped, _func_grad, _func_grad_of_grad, _sparse, _nested]
)
def test_in_place_ops(program: Callable[[], None], around: Callable[[], AbstractContextManager[Any]]) -> None:
    with around(), tp.my_autocast("cpu"):
        program()
