"""Runs one call in one region, on copies of its arguments, and returns results and gradients, or the error."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.checking.strided_copy import copy_with_strides

__all__ = ["Bound", "Outcome", "copied", "error_type", "run", "without_bits"]

#: A function with its positional and keyword arguments.
Bound = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """The outcome of one run.

    Attributes:
        result: The result of the call.
        gradients: The gradients of the inputs that require grad, in order; None without a backward.
        error: The error that the call raised.
        backward_error: The error that the backward raised.
        inputs: The arguments after the run.
    """

    result: Any = None
    gradients: Any = None
    error: Exception | None = None
    backward_error: Exception | None = None
    inputs: Any = None


_AnyOutcome = TypeVar("_AnyOutcome", bound=Outcome)


def run(
    region: contextlib.AbstractContextManager[Any],
    bound: Bound,
    *,
    forward: contextlib.AbstractContextManager[Any] | None = None,
    backward: contextlib.AbstractContextManager[Any] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Outcome:
    """Runs a call in a region from a fixed seed, then its backward outside of the region.

    Args:
        region: The region.
        bound: The call. It runs on copies of its arguments.
        forward: A context around the forward, inside the region.
        backward: A context around the backward.
        finish: Maps the results to what is differentiated. It is called outside of the region.

    Returns:
        The outcome.

    Example:
        >>> run(torch.autocast("cpu"), (torch.mm, (torch.ones(2, 2), torch.ones(2, 2)), {})).result.dtype
        torch.bfloat16
    """
    outcome = Outcome()
    func, args, kwargs = bound
    args, kwargs = outcome.inputs = copied((args, kwargs))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from deprecated ops
        try:
            with region, forward or contextlib.nullcontext():
                outcome.result = func(*args, **kwargs)
        except Exception as error:
            outcome.error = error
        else:
            with backward or contextlib.nullcontext():
                _run_backward(outcome, (args, kwargs), finish)
    return outcome


def _run_backward(outcome: Outcome, inputs: Any, finish: Callable[[Any], Any] | None) -> None:
    leaves = [leaf for leaf in _tensors(inputs) if leaf.requires_grad]
    if not leaves or not any(out.requires_grad for out in _tensors(outcome.result)):
        return
    try:
        finished = outcome.result if finish is None else finish(outcome.result)
        outputs = [out for out in _tensors(finished) if out.requires_grad]
        # An eigenvector is defined up to its phase only, so differentiate the absolute value of a complex output.
        outputs = [out.abs() if out.is_complex() else out for out in outputs]
        torch.autograd.backward(outputs, [_ramp(out) for out in outputs])
    except Exception as error:
        outcome.backward_error = error
    else:
        outcome.gradients = [leaf.grad for leaf in leaves]


def _ramp(output: torch.Tensor) -> torch.Tensor:
    """Returns a gradient whose elements differ: for equal ones, the gradient of softmax is zero."""
    ramp = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
    return ramp.reshape(output.shape).to(output.dtype)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def copied(tree: Any) -> Any:
    """Copies the tensors of a tree as leaves with the same strides. A tensor that occurs twice is copied once.

    Example:
        >>> copied([torch.ones(1).expand(3)])[0].stride()
        (0,)
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy_with_strides(tensor).requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, tree)


def without_bits(outcome: _AnyOutcome, positions: tuple[int, ...] | None = None) -> _AnyOutcome:
    """Returns the outcome with all values zero. Dtypes, shapes and strides stay.

    Args:
        outcome: The outcome.
        positions: The positions of the results to change; None for all results, gradients and inputs.
    """
    if positions is not None:
        if outcome.error is not None:
            return outcome
        result = tuple(_zeros(leaf) if i in positions else leaf for i, leaf in enumerate(outcome.result))
        return replace(outcome, result=result)
    kept = (outcome.result, outcome.gradients, outcome.inputs)
    result, gradients, inputs = tree_map_only(torch.Tensor, _zeros, kept)
    return replace(outcome, result=result, gradients=gradients, inputs=inputs)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return torch.zeros_like(tensor)
    blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()
    return blank.requires_grad_(tensor.requires_grad)


def error_type(error: Exception | None) -> str:
    """Returns the name of an error's type, or "a result" if there is none.

    Example:
        >>> error_type(ValueError("no")), error_type(None)
        ('ValueError', 'a result')
    """
    return "a result" if error is None else type(error).__qualname__
