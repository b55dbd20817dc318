"""Compares the policies of the ranks of a distributed job, once: in the first region.

A new process group, or a newly wrapped model, makes a comparison pending; the next region makes it.

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
import functools
import hashlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.errors import OptionError, PolicyMismatchError, check_flag
from torch_promote.extension import policies_beyond_stock, tables_in_force
from torch_promote.integrations.after_import import run_after_import
from torch_promote.policy.module_tables import section_of, spell_table
from torch_promote.policy.op_table import spell_policy

__all__ = ["C10D", "compare_ranks", "describe_module_policies", "install", "set_check_ranks"]


#: The environment variable that switches the comparison off.
VARIABLE = "TORCH_PROMOTE_CHECK_RANKS"

C10D = "torch.distributed.distributed_c10d"
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


class Model(NamedTuple):
    """A wrapped model, and a name for it that is the same on all ranks that share it."""

    module: weakref.ref[torch.nn.Module]
    name: str


class Pending(NamedTuple):
    """The comparisons that the next region makes.

    Attributes:
        policy: Whether it compares its policy.
        models: The models whose module policies it compares.
        group: The number of default process groups that this process has initialised.
        codes: The functions that were running when it initialised the last one, outermost first.
    """

    policy: bool
    models: list[Model]
    group: int
    codes: list[CodeType]


_enabled = True
_pending = Pending(False, [], 0, [])
_process = 0  # the process that initialised the group
_wrapped: dict[str, int] = {}  # the number of wrapped models of each class


def set_check_ranks(enabled: bool) -> bool:
    """Sets whether the ranks of a distributed job compare their policies, each in its first region.

    By default they do. Otherwise, ranks with different policies would train one model in different precisions without
    an error. If you want different policies, as between the stages of a pipeline, switch the comparison off before the
    first region. The environment variable TORCH_PROMOTE_CHECK_RANKS=0 does the same.

    A rank compares settings that `torch.autocast` does not have: the cast policies of ops, the promotion rule, and the
    module policies of models in DistributedDataParallel or FSDP2. It compares them with ranks that reach their first
    region through the same lines of code. It never waits for other ranks: if two ranks differ, the later one raises
    `PolicyMismatchError`.

    Args:
        enabled: Whether ranks compare.

    Returns:
        The previous setting.

    Raises:
        FlagError: `enabled` is not a bool. It is a TypeError.

    Example:
        >>> set_check_ranks(False), set_check_ranks(True)
        (True, False)
    """
    global _enabled
    before, _enabled = _enabled, check_flag("enabled", enabled)
    _arm()
    return before


def install() -> None:
    """Enables the comparison, unless the environment variable disables it, for process groups initialised from now on.

    Raises:
        OptionError: TORCH_PROMOTE_CHECK_RANKS is neither empty nor 0 nor 1.
    """
    global _enabled
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(f"{VARIABLE} is {value!r}. Legal: 0 (ranks do not compare their policies), 1.")
    _enabled = value != "0"
    run_after_import(C10D, _watch_groups)


def _arm() -> None:
    _C.set_ranks_unchecked(_enabled and (_pending.policy or bool(_pending.models)))


def _frames_from(frame: FrameType | None) -> list[FrameType]:
    """Returns a frame and its callers, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _watch_groups() -> None:
    """Hooks into changes of the default process group.

    Source: torch/distributed/distributed_c10d.py, _update_default_pg (v2.13).
    """
    c10d: Any = sys.modules[C10D]
    update = c10d._update_default_pg

    @functools.wraps(update)
    def update_and_note(group: Any) -> None:
        update(group)
        _note_group(group, [frame.f_code for frame in _frames_from(sys._getframe(1))])

    c10d._update_default_pg = update_and_note
    if c10d.is_initialized():
        _note_group(c10d.group.WORLD, [])


def _note_group(group: Any, codes: list[CodeType]) -> None:
    """Makes the next region compare, unless the group has ended or has only this rank."""
    global _pending, _process
    several = isinstance(group, torch.distributed.ProcessGroup) and group.size() > 1
    _pending = Pending(several, [], _pending.group + several, codes)
    if several:
        _process = os.getpid()
        _watch_models()
    _arm()


@functools.cache
def _watch_models() -> None:
    _note_after(torch.nn.parallel.DistributedDataParallel, "__init__", lambda model: (model,))
    run_after_import(_FSDP_STATE, _watch_sharded_models)


def _watch_sharded_models() -> None:
    """Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState.init (v2.13)."""
    _note_after(sys.modules[_FSDP_STATE].FSDPState, "init", lambda state: state._modules)


def _note_after(wrapper: Any, name: str, models_of: Callable[[Any], Iterable[torch.nn.Module]]) -> None:
    """Makes a method of a class record the models that it has wrapped."""
    method = getattr(wrapper, name)

    @functools.wraps(method)
    def call_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if _enabled:
            for model in models_of(self):
                kind = type(model).__qualname__
                _wrapped[kind] = _wrapped.get(kind, 0) + 1
                _pending.models.append(Model(weakref.ref(model), f"{kind} {_wrapped[kind]}"))
            _arm()

    setattr(wrapper, name, call_and_note)


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
    global _pending
    pending, c10d = _pending, sys.modules[C10D]
    _pending = _pending._replace(policy=False, models=[])
    _arm()
    # A fork of the process that initialised the group shares the connection to the store with its parent.
    if os.getpid() != _process or not c10d.is_initialized():
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


def _compare(what: str, place: str, ranks: Sequence[int], policies: Mapping[str, str], label: str) -> None:
    found: list[Any] = []

    def exchange() -> None:
        with contextlib.suppress(Exception):  # the store lacks these requests, or its server has ended
            found.append(_exchange(store, rank, place, ranks, dict(policies), label))

    with contextlib.suppress(Exception):  # the group has ended, or the interpreter cannot start more threads
        store, rank = sys.modules[C10D]._get_default_store(), sys.modules[C10D].get_rank()
        inner, types = store, sys.modules["torch.distributed"]
        while isinstance(inner, types.PrefixStore):
            inner = inner.underlying_store
        # A request would create the file of a store again that the program has deleted, and leave it behind.
        if not isinstance(inner, types.FileStore) or os.path.exists(inner.path):
            thread = threading.Thread(target=exchange, name="torch_promote_compare_ranks", daemon=True)
            thread.start()
            thread.join(_PATIENCE)
    if found and found[0] is not None:
        raise PolicyMismatchError(what, *found[0])


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
    frames = _frames_from(sys._getframe(1))
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
    c10d = sys.modules[C10D]
    try:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return [c10d.get_process_group_ranks(model.process_group)]
        meshes: Iterator[Any] = (p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
        mesh = next(meshes, None)
        groups = [] if mesh is None else [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        return [sorted(c10d.get_process_group_ranks(group)) for group in groups]
    except Exception:  # the program has ended the group
        return []
