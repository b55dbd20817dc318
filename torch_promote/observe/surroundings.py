"""What happens around a block that is observed: optimizer steps, and computations that cannot be observed.

NOTE [ One hook for all listeners ]
PyTorch iterates over its post-step hooks without a copy, so the optimizer raises if a hook adds or removes another one.
A trace that begins or ends at a step would do that. So all listeners share one hook, and may be added and removed
during notification.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing.process
import os
import platform
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_promote.extension import fork_safe_lock
from torch_promote.integrations.compile import skip_frames
from torch_promote.observe.call import Unseen
from torch_promote.observe.places import RunningModules, frames

Listener = Callable[[Optimizer], None]
CompiledListener = Callable[[Any, list[Any]], Callable[[Any], None] | None]
"""Gets a compiled function as the program wrote it, and its arguments, before a call of it. What it returns is called
with the result, or with None if the call raised, or if PyTorch does not say: PyTorch 2.11."""

_CHECKPOINT = torch.utils.checkpoint.__file__
#: The file of the wrapper of compiled functions.
_COMPILING = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")

_lock = fork_safe_lock()
_listeners: list[Listener] = []
_before_listeners: list[Listener] = []
_hooks: list[RemovableHandle] = []


@contextmanager
def watch_steps(listener: Listener, before: Listener | None = None) -> Iterator[None]:
    """Calls a function after each uncompiled optimizer step during a block, on any thread, the newest one first."""
    try:
        with _lock:
            _listeners.append(listener)
            if before is not None:
                _before_listeners.append(before)
            if not _hooks:
                _hooks.append(register_optimizer_step_post_hook(_tell))
                _hooks.append(register_optimizer_step_pre_hook(_tell_before))
        yield
    finally:
        _remove(listener, before)


def _remove(listener: Listener, before: Listener | None) -> None:
    with _lock:
        for one, known in ((listener, _listeners), (before, _before_listeners)):
            if one in known:  # else Ctrl-C came before it was added
                known.remove(one)
        while _hooks and not _listeners:
            _hooks.pop().remove()


def recomputation_stops() -> bool:
    """Whether a call raises because its checkpoint has all that the forward saved, and stops the recomputation."""
    of_checkpoint = ("unpack_hook", _CHECKPOINT)
    frame: Any = next((one for one in frames() if (one.f_code.co_name, one.f_code.co_filename) == of_checkpoint), None)
    with suppress(AttributeError, LookupError):  # without a checkpoint, or in another PyTorch
        of, group = frame.f_locals["frame"], frame.f_locals["gid"]
        return bool(of.early_stop and of.recomp_counter[group] == len(of.weak_holders))
    return False


def _makes_state() -> bool:
    """Whether PyTorch's distributed checkpoints make a step, with gradients of 0, which makes an optimizer's state."""
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    return code is not None and any(one.f_code is code for one in itertools.islice(frames(), 12))  # wrappers of `step`


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not (torch.compiler.is_dynamo_compiling() or _makes_state()):
        for listener in reversed(tuple(_listeners)):
            listener(optimizer)


def _tell_before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not (torch.compiler.is_dynamo_compiling() or _makes_state()):
        for listener in reversed(tuple(_before_listeners)):
            listener(optimizer)


skip_frames(_tell, _tell_before, _remove)

ScalerListener = Callable[[GradScaler], None]
_scaler_listeners: list[ScalerListener] = []
_update: Any = None  # PyTorch's method, while ours takes its place


@contextmanager
def watch_scalers(listener: ScalerListener) -> Iterator[None]:
    """Calls a function before each `GradScaler.update` during a block: nothing else tells of a skipped step."""
    global _update
    with _lock:
        _scaler_listeners.append(listener)
        if _update is None:
            skip_frames(_update_and_tell)
            _update = GradScaler.update
            GradScaler.update = _update_and_tell  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _scaler_listeners.remove(listener)
            if not _scaler_listeners and GradScaler.update is _update_and_tell:  # else other code has replaced it
                GradScaler.update, _update = _update, None  # type: ignore[method-assign]


@functools.wraps(GradScaler.update)
def _update_and_tell(self: GradScaler, *args: Any, **kwargs: Any) -> None:
    for listener in tuple(_scaler_listeners):
        listener(self)
    _update(self, *args, **kwargs)


_NOT_TRACED = "Their ops are not in the trace."
_set_hook: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_guard_complete_hook
_blocks: list[_Block] = []
_before: Any = None
_profile_before: Any = None
_start: Any = None  # ours in the place of threading.Thread.start


@dataclass(eq=False)
class _Block:
    """An open block."""

    thread: int
    tell: CompiledListener | None = None  # who asks for calls of compiled functions
    region: Callable[[], str] = str  # says which region is open in the thread that calls it, "" for none
    started_in: Counter[str] = field(default_factory=Counter)  # the threads that were started in regions
    compiled: int = 0  # the number of lookups of compiled code
    threads: list[weakref.ref[threading.Thread]] = field(default_factory=list)  # that have begun in it
    # Those of PyTorch's wrapper in the open calls of which `tell` knows.
    frames: list[Any] = field(default_factory=list)
    untold: set[str] = field(default_factory=set)  # what PyTorch does not tell of them: "read" or "return"


@contextmanager
def watch_unseen(
    sentences: list[Unseen],
    modules: RunningModules | None = None,
    compiled: CompiledListener | None = None,
    region: Callable[[], str] = str,
) -> Iterator[None]:
    """Adds a sentence for each kind of unobserved computation at the end of a block."""
    # The modules tell whether the block's model ran. `compiled` is called once for each call of a compiled function.
    global _before, _profile_before, _start
    block = _Block(threading.get_ident(), compiled, region)
    started, frames = _started_so_far(), _compiled_so_far()
    with _lock:
        if not _blocks:
            _before = _set_hook(_compiled_code_ran)
            _profile_before = threading.getprofile()
            threading.setprofile(_thread_began)
            _start = _noting(threading.Thread.start)
            threading.Thread.start = _start  # type: ignore[method-assign]
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            is_counted = threading.getprofile() is _thread_began  # else other code has replaced it
            start: Any = threading.Thread.start
            if not _blocks and start is _start:  # likewise
                threading.Thread.start = start.__wrapped__  # type: ignore[method-assign]
            if not _blocks and is_counted:
                threading.setprofile(_profile_before)
            if not _blocks:
                now = _set_hook(_before)
                if now is not _compiled_code_ran:  # other code has replaced it since
                    _set_hook(now)
                _before = None
        now = _started_so_far()
        processes = None if now is None or started is None else now - started
        threads = sum(not _is_of_inductor(one()) for one in block.threads)
        uncounted = ["threads"] * (not is_counted) + ["processes"] * (processes is None)
        if not block.compiled:  # the first call, which compiles, looks nothing up
            block.compiled = max(_compiled_so_far() - frames, 0)
        if block.compiled:
            text = (
                f"Calls of compiled functions: at least {block.compiled}. Modules in them have no paths. Unless the "
                'backend is "eager", casts are part of the graph, whose calls have no policies, and Inductor'
                "'s own kernels are not in the trace. To see all, call the uncompiled function."
            )
            sentences.append(Unseen("compiled", block.compiled, text))
        if block.untold:
            text = (
                f"What compiled functions {' and '.join(sorted(block.untold))} is unknown: PyTorch "
                f"{torch.__version__} does not say it where this package looks."
            )
            sentences.append(Unseen("unknown", 0, text))
        if threads:
            text = f"Threads started in the block: {threads}. {_NOT_TRACED} Open a block in each thread."
            for name, number in block.started_in.items():
                text += f" Autocast was on where {number} of them were started ({name})."
            text += " A region acts only in the thread that opens it: open one in each thread." * bool(block.started_in)
            sentences.append(Unseen("threads", threads, text))
        if processes:
            text = f"Processes started in the block, such as workers of a DataLoader: {processes}. {_NOT_TRACED}"
            sentences.append(Unseen("processes", processes, text))
        if uncounted:
            text = (
                f"Whether the block has started and ended {' or '.join(uncounted)} is unknown: other code has replaced "
                f"what counts them, or Python {platform.python_version()} has no count where this package looks."
            )
            sentences.append(Unseen("unknown", 0, text))
        if modules is not None and modules.missed and not block.compiled:
            text = (
                "The given model was not called in the block, so calls have no module paths. Pass the module that the "
                "program calls, such as the wrapped one, or no model."
            )
            sentences.append(Unseen("model", 1, text))


@functools.cache
def _noting(start: Callable[[threading.Thread], None]) -> Any:
    """Returns a method that notes in which regions threads are started."""

    @functools.wraps(start)
    def noting(self: threading.Thread) -> None:
        # Other code may have kept one of an earlier block, which then notes nothing.
        for block in tuple(_blocks) if noting is _start and not _is_of_inductor(self) else ():
            if name := block.region():
                block.started_in[name] += 1
        start(self)

    skip_frames(noting)
    return noting


def _thread_began(frame: Any, event: str, argument: Any) -> None:
    """Called in each new thread of Python's, not of autograd's; then the profiler that was set before takes over."""
    sys.setprofile(_profile_before)
    thread = threading.current_thread()
    for block in tuple(_blocks) if not _is_of_inductor(thread) else ():
        block.threads.append(weakref.ref(thread))
    if _profile_before is not None:
        _profile_before(frame, event, argument)


def _started_so_far() -> int | None:
    """The number of processes so far; None if this Python does not say."""
    digits = repr(getattr(multiprocessing.process, "_process_counter", None)).removeprefix("count(").removesuffix(")")
    return int(digits) if digits.isdigit() else None


def _is_of_inductor(thread: threading.Thread | None) -> bool:
    """Whether Inductor started the thread, to compile kernels; such a thread runs no ops."""
    if str(getattr(getattr(thread, "_target", None), "__module__", None)).startswith("torch._inductor."):
        return True
    module = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    # A call of `pool` would start one.
    return pool is not None and pool.cache_info().currsize > 0 and thread in pool()._threads


def _compiled_so_far() -> int:
    """The number of frames that torch.compile has compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["ok"])


def _compiled_code_ran(hit: bool) -> Any:
    """Called after torch.compile has looked up compiled code. Returns whether to use the code."""
    here = threading.get_ident()
    for block in tuple(_blocks):
        if block.thread == here:
            block.compiled += 1
    report_compiled_call(is_compiled=True)
    return hit if _before is None else _before(hit)


def report_compiled_call(is_compiled: bool = False) -> None:
    """Tells the blocks of this thread of the compiled function that runs, or that is being compiled."""
    # The first call, which compiles, looks nothing up. So observers call this for each op that is traced, perhaps by
    # something else; `is_compiled`: it is known that a compiled function runs.
    here = threading.get_ident()
    blocks = [block for block in _blocks if block.thread == here and block.tell is not None]
    for frame in frames() if blocks else ():
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == _COMPILING:
            for block in blocks:
                if frame not in block.frames:
                    _CompiledCall(block, frame)
            return
    for block in blocks if is_compiled else ():
        block.untold |= {"read", "return"}


class _CompiledCall:
    """A call of a compiled function. PyTorch's wrapper of it calls this at the end, as one of its clean-ups."""

    # Source: `compile_wrapper` in torch/_dynamo/eval_frame.py, of whose variables this reads `fn`, `args`, `kwargs`,
    # `cleanups` and `result`.

    def __init__(self, block: _Block, frame: Any) -> None:
        known = frame.f_locals
        self._block, self._frame = block, frame
        assert block.tell is not None
        self._end = block.tell(known.get("fn"), [*known.get("args", ()), *known.get("kwargs", {}).values()])
        block.frames.append(frame)
        cleanups = known.get("cleanups")
        if not all(name in known for name in ("fn", "args", "kwargs")):
            block.untold.add("read")
        if "result" not in frame.f_code.co_varnames or not isinstance(cleanups, list):
            block.untold.add("return")
        if isinstance(cleanups, list):
            cleanups.append(self)
        else:
            self()

    def __call__(self) -> None:
        frame, end, self._frame, self._end = self._frame, self._end, None, None  # which the frame refers to
        if frame is not None and self._block in _blocks:
            self._block.frames.remove(frame)
            if end is not None:
                end(frame.f_locals.get("result"))
