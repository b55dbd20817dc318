"""Compares one call of a promoting op under stock and in a region: results, writes, errors and gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from promoting_calls import Outcome, outcome, overload, writes

from torch_promote.promoting.ops import PromotingOp

Arguments = tuple[list[Any], dict[str, Any]]


def run(op: PromotingOp, arguments: Arguments, gradients: bool) -> list[Any]:
    """Calls an op on copies; returns its results, what it has written, and the gradients."""
    args, kwargs = _copy(arguments[0]), {name: _copy(value) for name, value in arguments[1].items()}
    leaves = [leaf for leaf in _tensors(args) if leaf.is_floating_point() or leaf.is_complex()] if gradients else []
    for leaf in leaves:
        leaf.requires_grad_()
    result = overload(op)(*args, **kwargs)
    found = [result, args if writes(op) else None, kwargs.get("out")]
    differentiable = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    if leaves and differentiable:
        total = sum((t.abs() if t.is_complex() else t).double().sum() for t in differentiable)
        found.append(torch.autograd.grad(total, leaves, allow_unused=True))
    return found


def outcome_in(
    region: AbstractContextManager[Any], op: PromotingOp, arguments: Arguments, gradients: bool = False
) -> Outcome:
    def call() -> list[Any]:
        with region:
            return run(op, arguments, gradients)

    return outcome(call)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copy(element) for element in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value for tensor in _tensors(element)] if isinstance(value, list | tuple) else []
