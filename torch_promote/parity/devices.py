"""The devices that samples run on: real ones, and a simulated CUDA device with dtypes, shapes and strides only."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from torch._subclasses import FakeTensorMode

from torch_promote.checking.pretend_cuda import STAND_IN, pretend_cuda, stand_in
from torch_promote.errors import OptionError, did_you_mean
from torch_promote.parity.model import DEVICES, Options

__all__ = ["asks_for_a_gpu", "check_device", "on_device"]

_ONLY_WITH_A_GPU = (
    "Torch not compiled with CUDA enabled",
    "PyTorch is not linked with support for cuda devices",
    "Found no NVIDIA driver",
)


def asks_for_a_gpu(error: Exception | None) -> bool:
    """Whether an error says that there is no GPU, or no CUDA in this build: a real kernel was called.

    Example:
        >>> asks_for_a_gpu(AssertionError("Torch not compiled with CUDA enabled"))
        True
    """
    return error is not None and any(text in str(error) for text in _ONLY_WITH_A_GPU)


def check_device(device: str, *, stock_only: bool = False) -> None:
    """Checks that samples can run on a device.

    Args:
        device: One of `DEVICES`; with `stock_only`, any device type.
        stock_only: Whether the run only compares stock with the reference.

    Raises:
        OptionError: The device does not exist, or this machine does not have it.

    Example:
        >>> check_device("cpu")
        >>> check_device("meta", stock_only=True)
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device 'cuda' needs a GPU, but PyTorch finds none. Without a GPU, use fake-cuda or {STAND_IN}."
        )
    if device == STAND_IN and stand_in() is None:
        raise OptionError(f"this process was not started for device {STAND_IN!r}. Use torch-promote parity.")
    if device in DEVICES:
        return
    if ":" in device:
        raise OptionError(f"device {device!r} has an index. Use the device type only: {device.partition(':')[0]}.")
    if not stock_only:
        raise OptionError(
            f"{device!r} is not a device. Legal: {', '.join(DEVICES)}, and with --stock-only every device type of "
            f"this PyTorch.{did_you_mean(device, DEVICES)}"
        )
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise OptionError(f"this PyTorch cannot make a tensor on device {device!r}: {first_line}") from error


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silences the logger that prints a traceback whenever a meta kernel raises, which samples provoke on purpose."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def on_device(options: Options) -> Iterator[None]:
    """The context of an entry's samples: one thread, a forked random state, and fake tensors for a fake device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a sum depend on how threads split it
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[0] if options.device == "cuda" else []))
        if options.fake:
            stack.enter_context(pretend_cuda())
            stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
            stack.enter_context(FakeTensorMode())
        yield
