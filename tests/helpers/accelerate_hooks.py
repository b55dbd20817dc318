"""Replaces `module.forward` like Accelerate, in a few lines, so that the tests do not need Accelerate.

Source: accelerate 1.15: hooks.py, add_hook_to_module and remove_hook_from_module; accelerator.py, prepare_model;
utils/other.py, extract_model_from_parallel; utils/operations.py, convert_outputs_to_fp32.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn


class ModelHook:
    """Code that runs before and after the forward of a module."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


def add_hook_to_module(module: Any, hook: ModelHook) -> None:
    old_forward = module.forward
    module._old_forward = old_forward
    module._hf_hook = hook

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old_forward)


def remove_hook_from_module(module: Any) -> None:
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


class _ConvertOutputsToFp32:
    def __init__(self, model_forward: Any) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model_forward(*args, **kwargs).float()


def _convert_outputs_to_fp32(model_forward: Any) -> Any:
    convert = _ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    forward.__wrapped__ = convert  # type: ignore[attr-defined]
    return forward


def prepare(model: Any) -> None:
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16)
    if hasattr(model.forward, "__func__"):
        model.forward = MethodType(autocast(model.forward.__func__), model)
        model.forward = MethodType(_convert_outputs_to_fp32(model.forward.__func__), model)
    else:
        model.forward = _convert_outputs_to_fp32(autocast(model.forward))


def unwrap(model: Any) -> None:
    forward = model.forward
    original_forward = model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original_forward:
            break
    model.forward = MethodType(forward, model)
