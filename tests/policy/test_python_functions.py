"""The ops that functions of PyTorch stand for, compared with the ops that the functions call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.testing._internal.common_methods_invocations import op_db

from torch_promote import PolicyError
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.policy.op_names import _path_of, called_ops, op_of_function

ones, rand = torch.ones, torch.rand
IMAGE = rand(1, 2, 6, 6)
MODES = ("nearest", "bilinear", "bicubic", "area")

#: Calls of functions that PyTorch's op database has no entry for, or calls in a lambda.
CALLS: dict[str, Callable[[], Any]] = {
    "F._threshold": lambda: F.threshold(IMAGE, 0.5, 1.0),
    "F.adaptive_max_pool1d_with_indices": lambda: F.adaptive_max_pool1d_with_indices(IMAGE[0], 3),
    "F.adaptive_max_pool2d_with_indices": lambda: F.adaptive_max_pool2d_with_indices(IMAGE, 3),
    "F.adaptive_max_pool3d_with_indices": lambda: F.adaptive_max_pool3d_with_indices(IMAGE, 2),
    "F.affine_grid": lambda: F.affine_grid(rand(1, 2, 3), [1, 1, 4, 4]),
    "F.alpha_dropout": lambda: F.alpha_dropout(IMAGE, 0.5, True),
    "F.dropout": lambda: F.dropout(IMAGE),
    "F.dropout1d": lambda: F.dropout1d(IMAGE[0]),
    "F.dropout2d": lambda: F.dropout2d(IMAGE),
    "F.dropout3d": lambda: F.dropout3d(rand(1, 2, 3, 3, 3)),
    "F.embedding": lambda: F.embedding(torch.tensor([0]), rand(2, 3)),
    "F.embedding_bag": lambda: F.embedding_bag(torch.tensor([[0, 1]]), rand(2, 3)),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGE, 0.5, True),
    "F.fold": lambda: F.fold(rand(1, 8, 9), (4, 4), (2, 2)),
    "F.fractional_max_pool2d": lambda: F.fractional_max_pool2d(IMAGE, 2, 3),
    "F.fractional_max_pool2d_with_indices": lambda: F.fractional_max_pool2d_with_indices(IMAGE, 2, 3),
    "F.fractional_max_pool3d": lambda: F.fractional_max_pool3d(rand(1, 2, 4, 4, 4), 2, 2),
    "F.fractional_max_pool3d_with_indices": lambda: F.fractional_max_pool3d_with_indices(rand(1, 2, 4, 4, 4), 2, 2),
    "F.gumbel_softmax": lambda: F.gumbel_softmax(rand(2, 3)),
    "F.log_softmax": lambda: F.log_softmax(IMAGE, -1),
    "F.lp_pool1d": lambda: F.lp_pool1d(IMAGE[0], 2.0, 2),
    "F.lp_pool2d": lambda: F.lp_pool2d(IMAGE, 2.0, 2),
    "F.lp_pool3d": lambda: F.lp_pool3d(rand(1, 2, 4, 4, 4), 2.0, 2),
    "F.max_pool1d_with_indices": lambda: F.max_pool1d_with_indices(IMAGE[0], 2),
    "F.max_pool2d_with_indices": lambda: F.max_pool2d_with_indices(IMAGE, 2),
    "F.max_pool3d_with_indices": lambda: F.max_pool3d_with_indices(IMAGE, 2),
    "F.multi_head_attention_forward": lambda: [
        nn.MultiheadAttention(4, 2)(*[rand(3, 1, 4, requires_grad=True)] * 3, need_weights=need)
        for need in (True, False)
    ],
    "F.interpolate": lambda: [F.interpolate(IMAGE, 3, mode=mode) for mode in MODES],
    "F.local_response_norm": lambda: (F.local_response_norm(IMAGE, 2), F.local_response_norm(rand(1, 2, 3, 3, 3), 2)),
    "F.upsample_nearest": lambda: [F.upsample_nearest(rand(1, 2, *[3] * n), 3) for n in (1, 2, 3)],
    "F.rrelu": lambda: F.rrelu(IMAGE),
    "F.sigmoid": lambda: F.sigmoid(IMAGE),
    "F.softmax": lambda: F.softmax(IMAGE, -1),
    "F.tanh": lambda: F.tanh(IMAGE),
    "F.upsample": lambda: [F.upsample(IMAGE, 3, mode=mode) for mode in MODES],
    "Tensor.__getitem__": lambda: (IMAGE[0], IMAGE[:, 0:1], IMAGE[torch.tensor([0])]),
    "Tensor.__setitem__": lambda: [rand(3, 2).__setitem__(index, rand(2)) for index in (0, (torch.tensor([0]),))],
    "Tensor.istft": lambda: torch.stft(rand(64), 16, return_complex=True).istft(16),
    "Tensor.lu": lambda: rand(3, 3).lu(),
    "Tensor.norm": lambda: (IMAGE.norm(), rand(3, 3).norm("nuc")),
    "Tensor.pow_": lambda: torch.Tensor.__ipow__(rand(3), 2),
    "Tensor.resize": lambda: IMAGE.clone().resize(72),
    "Tensor.resize_as": lambda: IMAGE.clone().resize_as(rand(72)),
    "Tensor.split": lambda: IMAGE.split(1),
    "Tensor.stft": lambda: rand(64).stft(16, return_complex=True),
    "Tensor.to_sparse_coo": lambda: IMAGE.to_sparse_coo(),
    "Tensor.unflatten": lambda: IMAGE.unflatten(-1, (2, 3)),
    "Tensor.unique": lambda: (IMAGE.unique(), IMAGE.unique(dim=0)),
    "Tensor.unique_consecutive": lambda: IMAGE.unique_consecutive(),
    "torch.chain_matmul": lambda: torch.chain_matmul(rand(2, 2), rand(2, 2)),
    "torch.einsum": lambda: torch.einsum("ij,jk", rand(2, 2), rand(2, 2)),
    "torch.unique": lambda: torch.unique(IMAGE, dim=0),
    "torch.istft": lambda: torch.istft(torch.stft(rand(64), 16, return_complex=True), 16),
}  # fmt: skip


class Outermost:
    """Records the ops that are called, and not those that they call in turn."""

    stock_too = see_through = False

    def __init__(self) -> None:
        self.ops: list[str] = []

    def begin(self, op: Any, args: list[Any]) -> Outermost:
        self.ops.append(op._schema.name.removeprefix("aten::"))
        return self

    def end(self, token: object, results: list[Any]) -> None: ...

    def failed(self, token: object) -> None: ...


def outermost(run: Callable[[], Any]) -> set[str]:
    with observe_dispatch(observer := Outermost()):
        run()
    return set(observer.ops)


def rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    return ((path, ops) for path, ops in called_ops().items() if function_at(path) is not None)


def sampled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of PyTorch's functions and methods, with where people find them."""
    yield from CALLS.items()
    for path, _ in rows():
        if path.startswith("Tensor.__") and path not in CALLS:  # an operator
            others = () if path in ("Tensor.__abs__", "Tensor.__neg__") else (rand(3, 3),)
            yield path, lambda p=path, o=others: function_at(p)(rand(3, 3), *o)
    for entry in op_db:
        dtype = next((one for one in (torch.float32, torch.int64, torch.complex64) if one in entry.dtypes), None)
        functions = {_path_of(one): one for one in (entry.op, entry.method_variant) if one is not None}
        if dtype is None or not functions.keys() - {None}:
            continue
        for _, sample in zip(range(4), entry.sample_inputs_func(entry, "cpu", dtype, False), strict=False):
            for path, function in functions.items():
                if path is not None and isinstance(sample.input, torch.Tensor | list | tuple):
                    yield path, lambda f=function, s=sample: f(s.input, *s.args, **s.kwargs)  # type: ignore[misc]


@cache
def observed() -> dict[str, list[set[str]]]:
    """The outermost ops of each sampled call, by function."""
    found = defaultdict(list)
    torch.manual_seed(0)
    for path, run in sampled():
        try:
            found[path].append(outermost(run))
        except (RuntimeError, TypeError, AttributeError):  # a sample for the function alone, or for another build
            continue
    return found


def function_at(path: str) -> Any:
    place, _, name = path.rpartition(".")
    found = {"F": F, "torch": torch, "Tensor": torch.Tensor}.get(place) or getattr(torch._C, place[9:])
    return getattr(found, name, None)  # None where an older PyTorch lacks it


@pytest.mark.filterwarnings("ignore")
def test_a_function_stands_for_an_op_that_it_calls() -> None:
    wrong = {}
    for path, calls in observed().items():
        try:
            op = op_of_function(function_at(path)).removeprefix("aten::")
        except PolicyError:
            continue
        # A call may be of another op, as of one that returns indices, or of none, as contiguous() may be.
        called = [ops for ops in calls if ops]
        if sum(op in ops for ops in called) * 3 < len(called):
            wrong[path] = (op, called)
    assert not wrong, wrong


@pytest.mark.filterwarnings("ignore")
def test_an_error_names_ops_that_the_function_calls() -> None:
    wrong = {}
    for path, ops in rows():
        found = set().union(*observed().get(path, ()))
        if not found.issuperset(ops):
            wrong[path] = (ops, found)
    assert not wrong, wrong
