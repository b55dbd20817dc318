"""What runs in a block and cannot be seen there: compiled graphs, other threads, other processes."""

from __future__ import annotations

import multiprocessing.process
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.numerics.observing.running_modules import RunningModules

__all__ = ["watch_unseen"]

_set_hook: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_guard_complete_hook
_lock = fork_safe_lock()
_blocks: list[_Block] = []
_before: Any = None


class _Block:
    """A block that is open.

    Attributes:
        thread: The id of its thread.
        compiled: How often the thread has called a function that torch.compile had compiled.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.compiled = 0


@contextmanager
def watch_unseen(sentences: list[str], modules: RunningModules | None = None) -> Iterator[None]:
    """Adds a sentence for each kind of thing that a block ran unseen, when the block ends.

    Args:
        sentences: The list to add to. Nothing is added for what did not happen.
        modules: The modules of the block, whose model may not be the one that ran.

    Example:
        >>> said = []
        >>> with watch_unseen(said):
        ...     thread = threading.Thread(target=torch.ones, args=(2,))
        ...     thread.start()
        ...     thread.join()
        >>> said
        ['1 thread was started in the block; what it ran is not in the trace. A thread needs a block of its own.']
    """
    block = _Block()
    threads, processes = set(threading.enumerate()), _processes_so_far()
    started = _threads_so_far()
    _open(block)
    try:
        yield
    finally:
        _close(block)
        alive = [one for one in threading.enumerate() if one not in threads and _is_the_programs(one)]
        sentences += _sentences(
            block.compiled, max(len(alive), _threads_so_far() - started), _processes_so_far() - processes
        )
        if modules is not None and modules.missed:
            sentences.append(
                "The model that was passed was not called in the block, so calls have no module paths. Pass the module "
                "that the program calls, such as the wrapped one, or none."
            )


def _sentences(compiled: int, threads: int, processes: int) -> Iterator[str]:
    if compiled:
        times = "once" if compiled == 1 else f"{compiled} times"
        yield (
            f"A function that torch.compile had compiled was called {times}; of a graph, only those ops are in the "
            "trace that it leaves to PyTorch's kernels. To see all, call the function that was compiled."
        )
    if threads:
        yield (
            f"{_count(threads, 'thread')} started in the block; what {'it' if threads == 1 else 'they'} ran is not in "
            "the trace. A thread needs a block of its own."
        )
    if processes:
        yield (
            f"{_count(processes, 'process')} started in the block, such as a worker of a DataLoader; what "
            f"{'it' if processes == 1 else 'they'} ran is not in the trace."
        )


def _count(number: int, noun: str) -> str:
    return f"1 {noun} was" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'} were"


def _is_the_programs(thread: threading.Thread) -> bool:
    """Whether Python started it; autograd's threads, which a trace sees, are known to Python as dummies."""
    return not isinstance(thread, threading._DummyThread)


def _threads_so_far() -> int:
    """How many threads without a name of their own were started. Threads with a name are known while they run."""
    return _number(getattr(getattr(threading, "_counter", None), "__self__", None))


def _processes_so_far() -> int:
    return _number(getattr(multiprocessing.process, "_process_counter", None))


def _number(counter: Any) -> int:
    """What an itertools.count gives next; 0 if it is none."""
    digits = repr(counter).removeprefix("count(").removesuffix(")")
    return int(digits) if digits.isdigit() else 0


def _open(block: _Block) -> None:
    global _before
    with _lock:
        if not _blocks:
            _before = _set_hook(_compiled_code_ran)
        _blocks.append(block)


def _close(block: _Block) -> None:
    global _before
    with _lock:
        _blocks.remove(block)
        if not _blocks:
            now = _set_hook(_before)
            if now is not _compiled_code_ran:  # somebody else's, since
                _set_hook(now)
            _before = None


def _compiled_code_ran(hit: bool) -> Any:
    """Called when torch.compile has looked for code that it compiled; returns whether to take the code."""
    here = threading.get_ident()
    for block in tuple(_blocks):
        if block.thread == here:
            block.compiled += 1
    return hit if _before is None else _before(hit)
