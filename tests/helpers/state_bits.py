"""The bits of models, optimizers and generators, to compare before and after."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn


def snapshot(*objects: Any) -> Any:
    """The bits of everything, with the identity of gradients."""
    found: list[Any] = [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]
    for one in objects:
        if isinstance(one, nn.Module):
            for name, tensor in (*one.named_parameters(), *one.named_buffers()):
                found.append((name, id(tensor), tensor.tolist(), tensor.requires_grad, tensor.dtype))
                gradient = tensor.grad
                found.append((id(gradient), None if gradient is None else gradient.tolist()))
            found.append([module.training for module in one.modules()])
        elif isinstance(one, torch.Generator):
            found.append(one.get_state().tolist())
        elif isinstance(one, random.Random):
            found.append(one.getstate())
        else:
            found.append(repr(one.state_dict()))
    return found
