"""Schedules comparisons between the ranks of a distributed job, after a new process group or a newly wrapped model.

The next region then compares (compare_ranks.py).
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
        OptionError: `enabled` is not a bool.

    Example:
        >>> set_check_ranks(False), set_check_ranks(True)
        (True, False)
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise OptionError(f"enabled must be a bool, got {enabled!r}. Legal: True, False.")
    before, _enabled = _enabled, enabled
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


def take_pending() -> Pending | None:
    """Returns the pending comparison and clears it. None in a fork of the process that initialised the group."""
    global _pending
    taken, _pending = _pending, _pending._replace(policy=False, models=[])
    _arm()
    # A fork shares the connection to the store with its parent.
    return taken if os.getpid() == _process else None


def _arm() -> None:
    _C.set_ranks_unchecked(_enabled and (_pending.policy or bool(_pending.models)))


def frames_from(frame: FrameType | None) -> list[FrameType]:
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
    update = getattr(c10d, "_update_default_pg", None)
    if update is None:  # pragma: no cover: another PyTorch
        return

    @functools.wraps(update)
    def update_and_note(group: Any) -> None:
        update(group)
        _note_group(group, [frame.f_code for frame in frames_from(sys._getframe(1))])

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
    _note_after(getattr(sys.modules[_FSDP_STATE], "FSDPState", None), "init", lambda state: state._modules)


def _note_after(wrapper: Any, name: str, models_of: Callable[[Any], Iterable[torch.nn.Module]]) -> None:
    """Makes a method of a class record the models that it has wrapped."""
    method = getattr(wrapper, name, None)
    if method is None:  # pragma: no cover: another PyTorch
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
