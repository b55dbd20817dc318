"""Puts a policy in force in every region that a block opens, of ours and of torch.autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from torch_promote.errors import OptionError
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.regions.defaults import default_policy, set_default_policy
from torch_promote.regions.installation import installed, installed_as
from torch_promote.regions.module_policies import without_module_policies

__all__ = ["present_policy", "put_policy_in_force"]


def present_policy() -> Policy:
    """Returns the policy of regions without a `policy`: that of `install` if it has one, or the default."""
    present = installed()
    policy = default_policy() or Policy.stock()
    if present is None:
        return policy
    if present.policy is not None:
        policy = Policy.of(present.policy)
    return policy.override(present.overrides) if present.overrides else policy


@contextlib.contextmanager
def put_policy_in_force(
    policy: Policy, model: nn.Module | None = None, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Puts a policy in force in regions that a block opens, unless they have a `policy`. Calls `install`.

    Under the policy "off", policies from `set_module_policy` on the model are suspended as well.

    Args:
        policy: The policy.
        model: The model for the policy's module tables.
        dtype: The dtype of regions without a `dtype`. None: PyTorch's default.

    Raises:
        OptionError: The policy has module tables, and there is no model.
    """
    present = installed()
    with contextlib.ExitStack() as stack:
        if policy.modules:
            if model is None:
                raise OptionError(f"{policy!r} has module tables. Pass the model to which they apply: model=...")
            stack.enter_context(policy.apply_to(model))
        if model is not None and policy == Policy.named("off"):
            stack.enter_context(without_module_policies(model))
        stack.callback(set_default_policy, set_default_policy(policy))
        cache = None if present is None else present.cache
        stack.enter_context(installed_as(policy=policy, cache=cache))
        if dtype is not None:
            for device_type in DEVICE_TYPES:
                stack.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
                torch.set_autocast_dtype(device_type, dtype)
        yield
