"""Compares the policies of the ranks of a distributed job, once: in the first region.

NOTE [ What ranks compare ]
- The policy of the first region after the default process group was initialised. It is compared among ranks that reach
  their first region through the same lines of code, because one rank may run an evaluation under another policy before
  it trains. The lines are those below the function that initialised the group.
- The module policies of each model that DistributedDataParallel or fully_shard has wrapped before that region, among
  the ranks that share the model.
Settings that torch.autocast also has (the dtype, whether it is enabled) are not compared, so a program that only uses
torch.autocast cannot fail here. The cache mode is not compared either, because it does not change results.

NOTE [ Ranks compare without waiting ]
If a rank entered no region, a collective would hang, or pair with one of the program's. So each rank writes its
policies to the store of the process group and compares them with those of the first rank that did so: two requests to
the store for any number of ranks. If two ranks differ, the later one raises. The end of its process ends the job:
gloo's collectives fail, and launchers stop the other processes. If the store fails or times out, nothing is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from torch_promote import _C
from torch_promote.errors import PolicyMismatchError
from torch_promote.integrations.ranks import C10D, Model, frames_from, take_pending
from torch_promote.native.module_tables import tables_in_force
from torch_promote.native.policy_changes import policies_beyond_stock
from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.module_tables import section_of, spell_table

__all__ = ["compare_ranks", "describe_module_policies"]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

#: The seconds for which a rank that differs waits for the policies of others, to name them in its error.
_GRACE = 2.0
#: The seconds for which a rank waits for the store. A request blocks while another thread of the program uses it.
_PATIENCE = 10.0
#: A rank writes this if its policies equal those of the first rank.
_AS_THE_FIRST = "="

_Describe = Callable[[torch.nn.Module], Mapping[str, str]]

_describe_modules: _Describe | None = None


def describe_module_policies(describe: _Describe) -> _Describe:
    """Sets the function that returns the policies of a model's modules, keyed by name."""
    global _describe_modules
    _describe_modules = describe
    return describe


def compare_ranks(region: object = None) -> None:
    """Compares this rank with others. A region calls it if `enter_region` reports a pending comparison.

    Args:
        region: The region, or another object that describes it in errors, or None.

    Raises:
        PolicyMismatchError: Ranks differ.
    """
    pending, c10d = take_pending(), _c10d()
    if pending is None or not c10d.is_initialized():
        return
    if pending.policy:
        place = f"torch_promote/{pending.group}/policy/{_path_from(pending.codes)}"
        label = "" if region is None or type(region).__repr__ is object.__repr__ else repr(region)
        everybody = range(c10d.get_world_size())
        _compare("the policy of their first region", place, everybody, _policy_in_force(), label)
    for model, name in _roots(pending.models):
        policies = {} if _describe_modules is None else _describe_modules(model)
        for ranks in _groups_of(model):
            place = f"torch_promote/{pending.group}/modules/{name}/{_digest(ranks)}"
            _compare(f"the policies of the modules of {name.partition(' ')[0]}", place, ranks, policies, "")


def _c10d() -> Any:
    return sys.modules[C10D]


def _compare(what: str, place: str, ranks: Sequence[int], policies: Mapping[str, str], label: str) -> None:
    found: list[Any] = []

    def exchange() -> None:
        with contextlib.suppress(Exception):  # the store lacks these requests, or its server has ended
            found.append(_exchange(store, rank, place, ranks, dict(policies), label))

    with contextlib.suppress(Exception):  # the group has ended, or the interpreter cannot start more threads
        store, rank = _c10d()._get_default_store(), _c10d().get_rank()
        if not _is_deleted(store):
            thread = threading.Thread(target=exchange, name="torch_promote_compare_ranks", daemon=True)
            thread.start()
            thread.join(_PATIENCE)
    if found and found[0] is not None:
        raise PolicyMismatchError(what, *found[0])


def _is_deleted(store: Any) -> bool:
    """Whether a store is a file that the program has deleted. A request would recreate it and leave it behind."""
    types: Any = torch.distributed
    while isinstance(store, types.PrefixStore):
        store = store.underlying_store
    return isinstance(store, types.FileStore) and not os.path.exists(store.path)


def _exchange(store: Any, rank: int, place: str, ranks: Sequence[int], policies: dict[str, str], label: str) -> Any:
    """Writes the policies of this rank to the store.

    Returns:
        None if they equal those of the first rank. Otherwise the policies and labels by rank, and the ranks that have
        not written theirs.
    """
    left = json.dumps([policies, label])
    first = json.loads(store.compare_set(f"{place}/first", "", left))
    if first[0] == policies:
        store.set(f"{place}/{rank}", _AS_THE_FIRST)
        return None
    store.set(f"{place}/{rank}", left)
    found, missing = {rank: (policies, label)}, [other for other in ranks if other != rank]
    deadline = time.monotonic() + _GRACE
    while missing:
        for other in list(missing):
            if time.monotonic() > deadline:
                return found, missing
            if store.check([f"{place}/{other}"]):
                missing.remove(other)
                theirs = store.get(f"{place}/{other}").decode()
                found[other] = tuple(first if theirs == _AS_THE_FIRST else json.loads(theirs))
        time.sleep(0.02)
    return found, missing


def _policy_in_force() -> dict[str, str]:
    """Returns the changes of this thread's current policy, as text that is the same in every process."""
    changed = policies_beyond_stock()
    policies = {f"{op} on {device}": spell_policy(value) for op, by in changed.items() for device, value in by.items()}
    for name, table in tables_in_force():
        policies[f"the table {section_of(name)}"] = ", ".join(
            f"{op}: {value}" for op, value in spell_table(table).items()
        )
    rule = _C.promotion_rule()
    return {**policies, "the promotion rule": rule} if rule else policies


def _path_from(codes: list[CodeType]) -> str:
    """Returns a digest of the running lines, from the innermost function in `codes` that is still running."""
    frames = frames_from(sys._getframe(1))
    shared = 0
    while shared < min(len(frames), len(codes)) and frames[shared].f_code is codes[shared]:
        shared += 1
    path = [(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno) for frame in frames[max(shared - 1, 0) :]]
    # The folder of a file may differ between machines.
    return _digest([(os.path.basename(file), *line) for file, *line in path if not file.startswith(_PACKAGE)])


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _roots(models: list[Model]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yields the models that are not part of another one. fully_shard is applied to the parts first."""
    inside: set[int] = set()
    for model in reversed(models):
        module = model.module()
        if module is not None and id(module) not in inside:
            inside.update(map(id, module.modules()))
            yield module, model.name


def _groups_of(model: torch.nn.Module) -> list[list[int]]:
    """Returns the groups of ranks that share a model; for a mesh, the groups along each dimension."""
    c10d = _c10d()
    try:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return [c10d.get_process_group_ranks(model.process_group)]
        meshes: Iterator[Any] = (p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
        mesh = next(meshes, None)
        groups = [] if mesh is None else [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        return [sorted(c10d.get_process_group_ranks(group)) for group in groups]
    except Exception:  # the program has ended the group
        return []
