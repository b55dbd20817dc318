"""`check_ranks`: compares the policies of the ranks of a distributed job."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torch_promote import _C
from torch_promote.errors import OptionError, PolicyMismatchError, explains_arguments
from torch_promote.extension import policies_beyond_stock, tables_in_force
from torch_promote.observe.places import check_model
from torch_promote.observe.policy_sources import my_autocast_is_in_force
from torch_promote.policy.module_tables import WHOLE, Tables, entries_of
from torch_promote.policy.op_table import DEVICE_TYPES, spell_policy
from torch_promote.policy.policy import Policy, PolicyOfModule
from torch_promote.regions.module_policies import module_policies


@explains_arguments
def check_ranks(model: nn.Module | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank of a distributed job if the ranks have different policies.

    Ranks with different policies train one model in different precisions, and PyTorch does not notice. Call it once on
    all ranks, in the region that the training uses. It compares what is in force there: the dtype of each device type
    whose autocast is on, the policies of ops and modules that differ from PyTorch's, and the promotion rule. The cache
    mode may differ, since it changes no result. It runs one collective, `torch.distributed.all_gather_object`.

    Args:
        model: A model whose module policies are compared as well (`set_module_policy`).
        group: The process group, of which this rank is a member. None: the default group. If ranks differ on purpose,
            as the stages of a pipeline do, pass a group whose ranks have to be equal.

    Raises:
        PolicyMismatchError: Ranks differ. The error says which, and in what. It is a RuntimeError.
        OptionError: No process group has been initialized, or the model is not a module. It is a ValueError.

    Example:
        >>> import torch.distributed as dist, torch_promote as tp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with tp.my_autocast("cpu", overrides={"softmax": "lower"}):
        ...     tp.check_ranks()
        >>> dist.destroy_process_group()
    """
    check_model(model)
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            "check_ranks(model, group) compares the ranks of a distributed job, and no process group is initialized. "
            "Start several ranks, as torchrun does, and call torch.distributed.init_process_group() first."
        )
    ranks = dist.get_process_group_ranks(group)
    found: list[dict[str, str]] = [{} for _ in ranks]
    dist.all_gather_object(found, _settings(model), group=group)
    if any(settings != found[0] for settings in found):
        raise PolicyMismatchError(dict(zip(ranks, found, strict=True)))


def _settings(model: nn.Module | None) -> dict[str, str]:
    """Returns what is in force in this thread, as text that is the same in every process."""
    on = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    found = {f"autocast on {device}": spell_policy(torch.get_autocast_dtype(device)) for device in on}
    for op, policies in policies_beyond_stock().items() if my_autocast_is_in_force() else ():
        found |= {f"{op} on {device}": spell_policy(policies[device]) for device in on if device in policies}
    found |= _spell_tables(tables_in_force())
    if rule := _C.promotion_rule():
        found["the promotion rule"] = rule
    for name, policy in {} if model is None else module_policies(model).items():
        found |= _spell_module(f"module {name!r}", policy)
    return found


def _spell_tables(tables: Tables) -> dict[str, str]:
    entries = entries_of(tables).items()
    return {f"{key} in {section}": v if isinstance(v, str) else spell_policy(v) for (key, section), v in entries}


def _spell_module(module: str, policy: PolicyOfModule) -> dict[str, str]:
    if isinstance(policy, dict):
        return {f"{op} in {module}": value for op, value in policy.items()}
    if isinstance(policy, str) and policy in WHOLE:
        return {module: policy}
    whole = Policy.of(policy)
    changes = {f"{op} on {device} in {module}": spell_policy(value) for op, device, value in whole.changes}
    tables = {f"{entry} in {module}": value for entry, value in _spell_tables(whole.modules).items()}
    return {module: "a policy of its own", **changes, **tables}
