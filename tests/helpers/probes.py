"""The autocast state that a program can observe: PyTorch's state, and the dtypes in which ops run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.thread_state import thread_state

Region = Any  # a tp.my_autocast or a tp.stock_autocast: neither is a subclass of the other

#: The two kinds of regions, by the word that a test's id shows.
KINDS: dict[str, Callable[..., Region]] = {"ours": tp.my_autocast, "stock": tp.stock_autocast}

#: Regions that a body opens inside a float16 region of the CPU, and holds across a step. They want `pretend_cuda`.
INNER: dict[str, Callable[[], Region]] = {
    "ours": lambda: tp.my_autocast("cpu", torch.bfloat16),
    "ours, disabled": lambda: tp.my_autocast("cpu", enabled=False),
    "ours, without cache": lambda: tp.my_autocast("cpu", torch.bfloat16, cache_enabled=False),
    "ours, persistent cache": lambda: tp.my_autocast("cpu", torch.bfloat16, cache="persistent"),
    "ours, overrides": lambda: tp.my_autocast("cpu", torch.bfloat16, overrides={"exp": "fp16"}),
    "ours, cuda": lambda: tp.my_autocast("cuda", torch.bfloat16),
    "stock": lambda: tp.stock_autocast("cpu", torch.bfloat16),
    "stock, disabled": lambda: tp.stock_autocast("cpu", enabled=False),
    "stock, without cache": lambda: tp.stock_autocast("cpu", torch.bfloat16, cache_enabled=False),
    "stock, cuda": lambda: tp.stock_autocast("cuda", torch.bfloat16),
}

_T = TypeVar("_T")


class _Operands(threading.local):
    """A float32 and a bfloat16 matrix on each device.

    Those of CUDA are fake, so that they exist on every machine. One fake mode does not serve two threads at a time.
    """

    def __init__(self) -> None:
        self.cpu = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
        with FakeTensorMode():
            self.cuda = torch.empty(2, 2, device="cuda"), torch.empty(2, 2, device="cuda", dtype=torch.bfloat16)


_operands = _Operands()


def mm_dtype(device: str = "cpu") -> torch.dtype:
    """The dtype of a product of float32 matrices: the autocast dtype if autocast is on."""
    matrix = getattr(_operands, device)[0]
    return torch.mm(matrix, matrix).dtype


def mse_dtype(device: str = "cpu") -> torch.dtype:
    """The dtype of a loss of bfloat16 tensors: float32 if autocast is on."""
    matrix = getattr(_operands, device)[1]
    return torch.nn.functional.mse_loss(matrix, matrix).dtype


def autocast_dtype() -> torch.dtype | None:
    """The CPU's current autocast dtype, or None if autocast is off. Checks that ops and PyTorch's state agree."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    assert mm_dtype() == (dtype or torch.float32)
    assert mse_dtype() == (torch.bfloat16 if dtype is None else torch.float32)
    return dtype


def seen(devices: tuple[str, ...] = ("cpu", "cuda")) -> dict[str, Any]:
    """All autocast state that a program can observe, independent of the kind of region."""
    return {"cache": torch.is_autocast_cache_enabled()} | {
        device: {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "mm": mm_dtype(device),
            "mse_loss": mse_dtype(device),
        }
        for device in devices
    }


class OpLog(TorchDispatchMode):
    """Records the ops that arrive below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def leaves_no_trace() -> Iterator[None]:
    """Fails unless the block restores the autocast state, also after an error."""
    before = thread_state()
    try:
        yield
    finally:
        assert thread_state() == before


def in_thread(function: Callable[[], _T]) -> _T:
    """Runs a function in a new thread with its own autocast state.

    Use it for code with which stock leaves state behind.
    """
    outcome: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "the thread hangs"
    if failure:
        raise failure[0]
    return outcome[0]
