"""`check_casts`: compares every reused cast with a fresh one, and raises if their bits differ.

Functions without a docstring that names a user are called by the extension (csrc/python/callbacks.cpp).
"""

from __future__ import annotations

import gc
import os
import threading
from types import TracebackType
from typing import Any, NoReturn

import torch

from torch_promote import _C
from torch_promote.checking.comparison import unequal_elements
from torch_promote.errors import OptionError, StaleCastError, check_flag, explains_arguments
from torch_promote.observe.places import calling_line

#: The environment variable that switches the check on for the whole process.
VARIABLE = "TORCH_PROMOTE_CHECK_CASTS"

_lock = threading.Lock()
_open: list[check_casts] = []
_in_environment = False


class check_casts:  # noqa: N801 (what people write after `with`)
    """Compares every cast that the cache reuses in the block with a fresh cast, bit for bit.

    The block covers all threads of the process, those of the autograd engine included, and every cache mode. The fresh
    cast is invisible to dispatch modes, hooks, profilers and autograd. It takes the time of a cast, and its memory
    until the comparison is done. The environment variable TORCH_PROMOTE_CHECK_CASTS=1 does the same for a whole
    program. Open the block outside of compiled functions.

    Args:
        enabled: False: check nothing in the block, for code that uses stale casts on purpose. Of several open blocks,
            the one entered last decides.

    Raises:
        FlagError: `enabled` is not a bool. It is a TypeError.
        StaleCastError: In the block, from the op that would have used the stale cast. The cast is dropped, so the
            next use makes a new one.

    Example:
        >>> import torch, torch_promote as tp
        >>> x, weight = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
        >>> with tp.check_casts() as checks, tp.my_autocast("cpu"):
        ...     y = x @ weight @ weight
        >>> checks.checked, checks.skipped
        (1, 0)
        >>> with tp.check_casts(), tp.my_autocast("cpu"):
        ...     y = x @ weight
        ...     _ = weight.data.mul_(2)  # does not change weight._version
        ...     try:
        ...         y = x @ weight
        ...     except tp.errors.StaleCastError as error:
        ...         print(str(error).partition(" has")[0])
        the cast of a Parameter (4 x 4, float32) to bfloat16
    """

    __slots__ = ("_begin", "_end", "enabled")

    @explains_arguments
    def __init__(self, enabled: bool = True) -> None:
        self.enabled: bool = check_flag("enabled", enabled)
        self._begin = self._end = (0, 0)

    @property
    def checked(self) -> int:
        """How many uses of cached casts were compared in the block, so far or until its end."""
        return self._count(0)

    @property
    def skipped(self) -> int:
        """How many uses could not be compared: fake tensors, unknown subclasses, and a CUDA graph's capture."""
        return self._count(1)

    def _count(self, kind: int) -> int:
        with _lock:
            is_open = self in _open
        return (_C.cast_check_counts() if is_open else self._end)[kind] - self._begin[kind]

    def __enter__(self) -> check_casts:
        self._begin = _C.cast_check_counts()
        with _lock:
            _open.append(self)
            _switch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            self._end = _C.cast_check_counts()
            # Blocks of several threads may end in any order.
            position = max((i for i, block in enumerate(_open) if block is self), default=None)
            if position is not None:
                del _open[position]
            _switch()


def use_environment() -> None:
    """Switches the check on if the environment says so."""
    global _in_environment
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(f"{VARIABLE} is {value!r}. Legal: 1 (check every reused cast), 0.")
    with _lock:
        _in_environment = value == "1"
        _switch()


def _switch() -> None:
    """Tells the extension whether to check. The caller holds the lock."""
    on = _open[-1].enabled if _open else _in_environment
    _C.set_checks_casts(on)


line_of_this_thread = calling_line  # outside of PyTorch and this package


def parts_of(wrapper: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that a functorch wrapper or a subclass consists of; none if they are unknown."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(wrapper):
        unwrapped = functorch.get_unwrapped(wrapper)
        return parts_of(unwrapped) if functorch.is_functorch_wrapped_tensor(unwrapped) else [unwrapped]
    flatten: Any = getattr(type(wrapper), "__tensor_flatten__", None)
    if flatten is None:
        return []
    parts: list[torch.Tensor] = []
    with torch._C.DisableTorchFunction():
        names, _ = flatten(wrapper)
        for name in names:
            part = getattr(wrapper, name)
            parts += parts_of(part) if hasattr(type(part), "__tensor_flatten__") else [part]
    return parts


def raise_stale(source: torch.Tensor, kept: torch.Tensor, fresh: torch.Tensor, mode: str, first_line: str) -> NoReturn:
    """Raises the error for a stale cast. Ops in here pass by autograd, autocast and dispatch modes."""
    with torch._C.DisableTorchFunction():
        raise StaleCastError(
            weight=_described(source),
            dtype=str(kept.dtype).removeprefix("torch."),
            mode=mode,
            first_line=first_line or "unknown: it was made before the check began",
            this_line=calling_line(),
            difference=_difference(kept, fresh),
        )


def _difference(kept: torch.Tensor, fresh: torch.Tensor) -> str:
    if kept.shape != fresh.shape:
        return f"its shape is {tuple(kept.shape)}, that of a fresh cast {tuple(fresh.shape)}"
    count, index = unequal_elements(kept, fresh)
    return (
        f"{count} of {kept.numel()} elements differ, the first at {list(index)}: "
        f"{kept[index].item()} instead of {fresh[index].item()}"
    )


def _described(source: torch.Tensor) -> str:
    """The name of a weight if a module has it, what it is, and its shape and dtype."""
    owner = source._base if source._is_view() and source._base is not None else source
    shape = " x ".join(map(str, source.shape)) or "0-dim"
    dtype = str(source.dtype).removeprefix("torch.")
    name = _name_of(owner)
    kind = "Parameter" if isinstance(owner, torch.nn.Parameter) else "Tensor"
    if owner is not source:
        return f"a view ({shape}, {dtype}) of {name or f'a {kind}'}"
    return f"{name} ({kind}, {shape}, {dtype})" if name else f"a {kind} ({shape}, {dtype})"


def _name_of(weight: torch.Tensor) -> str:
    """The longest name that a live module gives the tensor: that of the outermost module. "" if there is none."""
    names = [
        name
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.nn.Module)
        for name, tensor in _named_tensors(thing)
        if tensor is weight
    ]
    return max(names, key=lambda name: (name.count("."), name), default="")


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    try:
        return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    except Exception:  # a module whose __init__ has not finished, or that overrides these
        return []
