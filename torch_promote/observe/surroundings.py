"""What happens around a block that is observed: optimizer steps, and computations that cannot be observed.

NOTE [ One hook for all listeners ]
PyTorch iterates over its post-step hooks without a copy, so the optimizer raises if a hook adds or removes another one.
A trace that begins or ends at a step would do that. So all listeners share one hook, and may be added and removed
during notification.
"""

from __future__ import annotations

import multiprocessing.process
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torch_promote.extension import fork_safe_lock
from torch_promote.integrations.compile import skip_frames
from torch_promote.observe.events import COMPILED_CALLS
from torch_promote.observe.places import RunningModules

__all__ = ["Listener", "watch_steps", "watch_unseen"]


Listener = Callable[[], None]

_lock = fork_safe_lock()
_listeners: list[Listener] = []
_hook: RemovableHandle | None = None


@contextmanager
def watch_steps(listener: Listener) -> Iterator[None]:
    """Calls a function after each optimizer step, on any thread, during a block. Compiled steps are not reported.

    Args:
        listener: The function to call. The newest listeners are called first.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> with watch_steps(lambda: print("a step")):
        ...     torch.optim.SGD([weight], lr=0.1).step()
        a step
    """
    global _hook
    try:
        with _lock:
            _listeners.append(listener)
            if _hook is None:
                skip_frames(_tell, _remove)
                _hook = register_optimizer_step_post_hook(_tell)
        yield
    finally:
        _remove(listener)


def _remove(listener: Listener) -> None:
    global _hook
    with _lock:
        if listener in _listeners:  # else Ctrl-C came before it was added
            _listeners.remove(listener)
        if not _listeners and _hook is not None:
            _hook.remove()
            _hook = None


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        for listener in reversed(tuple(_listeners)):
            listener()


_NOT_TRACED = "Their ops are not in the trace."
_set_hook: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_guard_complete_hook
_blocks: list[_Block] = []
_before: Any = None


@dataclass(eq=False)
class _Block:
    """An open block: the id of its thread, and the number of calls of compiled functions in it."""

    thread: int
    compiled: int = 0


@contextmanager
def watch_unseen(sentences: list[str], modules: RunningModules | None = None) -> Iterator[None]:
    """Adds a sentence for each kind of unobserved computation at the end of a block.

    Args:
        sentences: The list to add to.
        modules: The modules of the block, to detect that its model did not run.

    Example:
        >>> said = []
        >>> with watch_unseen(said):
        ...     thread = threading.Thread(target=torch.ones, args=(2,))
        ...     thread.start()
        ...     thread.join()
        >>> said
        ['Threads started in the block: 1. Their ops are not in the trace. Open a block in each thread.']
    """
    global _before
    block = _Block(threading.get_ident())
    before, started = set(threading.enumerate()), _started_so_far()
    with _lock:
        if not _blocks:
            _before = _set_hook(_compiled_code_ran)
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            if not _blocks:
                now = _set_hook(_before)
                if now is not _compiled_code_ran:  # other code has replaced it since
                    _set_hook(now)
                _before = None
        # Autograd's threads, which a trace observes, are dummy threads to Python.
        alive = [
            one for one in threading.enumerate() if one not in before and not isinstance(one, threading._DummyThread)
        ]
        unnamed, processes = (now - then for now, then in zip(_started_so_far(), started, strict=True))
        threads = max(len(alive), unnamed)
        if block.compiled:
            sentences.append(
                f'{COMPILED_CALLS}{block.compiled}. Modules in them have no paths. Unless the backend is "eager", '
                "casts are part of the graph, whose calls have no policies, and Inductor's own kernels are not in the "
                "trace. To see all, call the uncompiled function."
            )
        if threads:
            sentences.append(f"Threads started in the block: {threads}. {_NOT_TRACED} Open a block in each thread.")
        if processes:
            sentences.append(
                f"Processes started in the block, such as workers of a DataLoader: {processes}. {_NOT_TRACED}"
            )
        if modules is not None and modules.missed and not block.compiled:
            sentences.append(
                "The given model was not called in the block, so calls have no module paths. Pass the module that the "
                "program calls, such as the wrapped one, or no model."
            )


def _started_so_far() -> tuple[int, int]:
    """The numbers of threads started without a name, and of processes. Named threads can only be found as they run."""
    threads = getattr(getattr(threading, "_counter", None), "__self__", None)
    return _number(threads), _number(getattr(multiprocessing.process, "_process_counter", None))


def _number(counter: Any) -> int:
    """The next value of an itertools.count; 0 for another object."""
    digits = repr(counter).removeprefix("count(").removesuffix(")")
    return int(digits) if digits.isdigit() else 0


def _compiled_code_ran(hit: bool) -> Any:
    """Called after torch.compile has looked up compiled code. Returns whether to use the code."""
    here = threading.get_ident()
    for block in tuple(_blocks):
        if block.thread == here:
            block.compiled += 1
    return hit if _before is None else _before(hit)
