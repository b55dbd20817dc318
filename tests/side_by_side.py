"""Runs one call under a region of stock's and under one of ours, and compares all that can be seen of the two runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from support import assert_same

#: What to call, and its positional and keyword arguments.
Bound = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: An op as it arrives below autocast: its name, the dtypes that it gets and those that it gives.
SeenOp = tuple[str, tuple[str, ...], tuple[str, ...]]


class Watch(TorchDispatchMode):
    """Records the ops that arrive below autocast, also those that then raise.

    Args:
        stand_in: Give a blank result for an op on fake CUDA tensors that asks for a GPU or a CUDA build. What
            autocast sends down is seen all the same.
    """

    def __init__(self, *, stand_in: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[SeenOp] = []
        self._stand_in = stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # how a fake tensor is asked for its device: not an op
            return func(*args, **kwargs)
        index, arrived = len(self.ops), _dtypes((args, kwargs))
        self.ops.append((str(func), arrived, ()))
        try:
            result = func(*args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if not (self._stand_in and any(text in str(error) for text in _ONLY_WITH_A_GPU)):
                raise
            result = _blank(func, args)
        self.ops[index] = (str(func), arrived, _dtypes(result))
        return result


_ONLY_WITH_A_GPU = (
    "Torch not compiled with CUDA enabled",
    "PyTorch is not linked with support for cuda devices",
    "Found no NVIDIA driver",
)


def _blank(func: Any, args: Any) -> Any:
    """Results of the kinds that the schema names; tensors are like the first argument."""
    first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    results = [first.new_empty(first.shape) if str(ret.type) == "Tensor" else 0 for ret in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def _dtypes(tree: Any) -> tuple[str, ...]:
    """The dtypes of the tensors, and dtypes that are arguments themselves, such as that of a cast."""
    leaves = tree_leaves(tree)
    dtypes = (leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return tuple(str(dtype) for dtype in dtypes if isinstance(dtype, torch.dtype))


@dataclass
class Outcome:
    """What came of one run: results and gradients or what was raised instead, and the ops below autocast."""

    result: Any = None
    gradients: Any = None
    ops: list[SeenOp] | None = None
    error: Exception | None = None
    backward_error: Exception | None = None


def run(region: contextlib.AbstractContextManager[Any], bound: Bound, watch: Watch | None = None) -> Outcome:
    """Runs a call in a region, on copies of its arguments and from a fixed seed, and the backward outside of it."""
    outcome = Outcome()
    func, args, kwargs = bound
    args, kwargs = copied((args, kwargs))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated ops have rows too
        try:
            with region, watch or contextlib.nullcontext():
                outcome.result = func(*args, **kwargs)
        except Exception as error:
            outcome.error = error
        else:
            _run_backward(outcome, (args, kwargs))
    outcome.ops = watch.ops if watch is not None else None
    return outcome


def copied(tree: Any) -> Any:
    """Copies the tensors of a tree as leaves with their strides; one that occurs twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, tree)


def _run_backward(outcome: Outcome, inputs: Any) -> None:
    outputs = [out for out in tree_leaves(outcome.result) if isinstance(out, torch.Tensor) and out.requires_grad]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not leaves:
        return
    # An eigenvector is only defined up to its phase, so of a complex output the absolute value is what has a gradient.
    outputs = [out.abs() if out.is_complex() else out for out in outputs]
    try:
        torch.autograd.backward(outputs, [_ramp(out) for out in outputs])
    except Exception as error:
        outcome.backward_error = error
    else:
        outcome.gradients = [leaf.grad for leaf in leaves]


def _ramp(output: torch.Tensor) -> torch.Tensor:
    """A gradient that differs from element to element: softmax has none for equal ones."""
    ramp = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
    return ramp.reshape(output.shape).to(output.dtype)


def assert_alike(ours: Outcome, stock: Outcome, what: str, *, same_text: bool = True) -> None:
    """Fails unless two runs gave equal results, gradients, errors and ops.

    The text of an error names dtypes and shapes, so it is compared too. `same_text=False` is for errors that
    autocast itself raises: ours words them its own way.
    """
    assert spell(ours.error, same_text) == spell(stock.error, same_text), f"{what}: not raised alike"
    assert_same(ours.result, stock.result, what)
    assert ours.ops == stock.ops, f"{what}: other ops below autocast"
    assert spell(ours.backward_error) == spell(stock.backward_error), f"{what}: not raised alike in the backward"
    assert_same(ours.gradients, stock.gradients, f"{what}: gradients")


def spell(error: Exception | None, with_text: bool = True) -> str | None:
    """An error's type and the first line of its text, or None."""
    if error is None:
        return None
    text = str(error).partition("\n")[0] if with_text else ""
    return f"{type(error).__qualname__}: {text}"


def without_bits(outcome: Outcome) -> Outcome:
    """The same outcome with zeros for all values: dtypes, shapes and strides are left."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()
        return blank.requires_grad_(tensor.requires_grad)

    result, gradients = tree_map_only(torch.Tensor, zeros, (outcome.result, outcome.gradients))
    return replace(outcome, result=result, gradients=gradients)
