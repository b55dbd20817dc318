"""Notices what the processes of a distributed job, its ranks, have to compare: a new process group, a wrapped model.

The extension then tells the next region, which compares; compare_ranks.py.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torch_promote import _C
from torch_promote.errors import OptionError
from torch_promote.integrations.after_import import run_after_import

__all__ = ["C10D", "Model", "Pending", "frames_from", "install", "set_check_ranks", "take_pending"]

#: The environment variable that switches the comparison off.
VARIABLE = "TORCH_PROMOTE_CHECK_RANKS"

C10D = "torch.distributed.distributed_c10d"
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


class Model(NamedTuple):
    """A model that was wrapped, and a name for it, which is the same on all ranks that share it."""

    module: weakref.ref[torch.nn.Module]
    name: str


class Pending(NamedTuple):
    """What the next region compares.

    Attributes:
        policy: Whether it compares the policy in force.
        models: The models whose modules' policies it compares.
        group: How many default process groups this process has initialised.
        codes: The functions that were running when it initialised the last one, the outermost first.
    """

    policy: bool
    models: list[Model]
    group: int
    codes: list[CodeType]


_enabled = True
_pending = Pending(False, [], 0, [])
_process = 0  # that initialised the group
_wrapped: dict[str, int] = {}  # how many models of each class have been wrapped


def set_check_ranks(enabled: bool) -> bool:
    """Sets whether the ranks of a distributed job compare their policies, each in its first region.

    They do by default. Ranks whose policies differ would otherwise train one model in different precisions, without an
    error. Switch it off before the first region if the difference is meant, as between the stages of a pipeline. The
    environment variable TORCH_PROMOTE_CHECK_RANKS=0 does the same.

    A rank compares what `torch.autocast` does not have: the cast policies of ops, the promotion rule, and the policies
    of modules of models in DistributedDataParallel or FSDP2. It compares with ranks that reach their first region by
    the same lines of code. It waits for nobody: of two ranks that differ, the later one raises `PolicyMismatchError`.

    Args:
        enabled: Whether they do.

    Returns:
        Whether they did before.

    Raises:
        OptionError: `enabled` is not a bool.

    Example:
        >>> set_check_ranks(False), set_check_ranks(True)
        (True, False)
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise OptionError(f"enabled is {enabled!r}, which is not a bool. Legal: True, False.")
    before, _enabled = _enabled, enabled
    _arm()
    return before


def install() -> None:
    """Compares ranks as the environment says, from when somebody initialises a process group.

    Raises:
        OptionError: TORCH_PROMOTE_CHECK_RANKS is neither empty nor 0 nor 1.
    """
    global _enabled
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(f"{VARIABLE} is {value!r}. Legal: 0 (ranks do not compare their policies), 1.")
    _enabled = value != "0"
    run_after_import(C10D, _watch_groups)


def take_pending() -> Pending | None:
    """Returns what a region compares, which the next one then does not. None in a fork of the process of the group."""
    global _pending
    taken, _pending = _pending, _pending._replace(policy=False, models=[])
    _arm()
    # A fork shares the connection to the store with its parent.
    return taken if os.getpid() == _process else None


def _arm() -> None:
    _C.set_ranks_unchecked(_enabled and (_pending.policy or bool(_pending.models)))


def frames_from(frame: FrameType | None) -> list[FrameType]:
    """Returns a frame and those that called it, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _watch_groups() -> None:
    """Notices when the default process group changes.

    Source: torch/distributed/distributed_c10d.py, _update_default_pg (v2.13).
    """
    c10d: Any = sys.modules[C10D]
    update = getattr(c10d, "_update_default_pg", None)
    if update is None:
        return

    @functools.wraps(update)
    def update_and_note(group: Any) -> None:
        update(group)
        _note_group(group, [frame.f_code for frame in frames_from(sys._getframe(1))])

    c10d._update_default_pg = update_and_note
    if c10d.is_initialized():
        _note_group(c10d.group.WORLD, [])


def _note_group(group: Any, codes: list[CodeType]) -> None:
    """Has the next region compare, unless the group has ended or this rank is alone in it."""
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
    _note_after(getattr(sys.modules[_FSDP_STATE], "FSDPState", None), "init", lambda state: state._modules)


def _note_after(wrapper: Any, name: str, models_of: Callable[[Any], Iterable[torch.nn.Module]]) -> None:
    """Makes a method of a class note the models that it has wrapped."""
    method = getattr(wrapper, name, None)
    if method is None:
        return

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
