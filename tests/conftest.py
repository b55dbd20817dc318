"""Fixtures of all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from cuda_stand_in import for_pytest

for_pytest.start_if_asked()  # before anything imports torch

import torch

import torch_promote as tp
from helpers import under_install
from helpers.installed import installed_marked, nothing_installed  # noqa: F401
from helpers.thread_state import thread_state
from torch_promote.checking import pretend_cuda as cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    for_pytest.add_option(parser)
    under_install.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    for_pytest.check(config)
    under_install.watch(config)
    # A shell starts what it runs in the background with Ctrl-C ignored, and the processes of tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that none of them is what one of several processes ends with."""
    items.sort(key=lambda item: item.path.name != "test_cuda.py")


def pytest_collection_finish() -> None:
    """The collected tests are millions of objects that stay. The garbage collector need not go through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_switched_on() -> Iterator[None]:
    """Every test leaves the thread's autocast state, and our cache, as it found them."""
    before = thread_state()
    yield
    assert thread_state() == before
    assert tp.cache_info()["entries"] == 0


@pytest.fixture
def nothing_persists() -> Iterator[None]:
    """No weight has casts that outlive regions, before the test and, by clearing them, after it."""
    tp.clear_cache()
    yield
    tp.clear_cache()
    info = tp.cache_info()
    assert (info["persistent_entries"], info["persistent_bytes"]) == (0, 0)


@pytest.fixture
def stale_casts_on_purpose() -> Iterator[None]:
    """For tests of documented limits: with TORCH_PROMOTE_CHECK_CASTS=1 their stale casts would raise."""
    with tp.check_casts(False):
        yield


@pytest.fixture
def no_cast_checks() -> Iterator[None]:
    """For tests that count kernels or bytes: TORCH_PROMOTE_CHECK_CASTS=1 adds those of the comparisons."""
    with tp.check_casts(False):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_seeds_for_absent_devices() -> Iterator[None]:
    """`torch.manual_seed` does not queue seeds for devices that are absent.

    PyTorch formats and keeps the stack for each: a sixth of the time of tests that seed each sample.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        for device, module in (
            (torch.cuda, torch.cuda.random),
            (torch.xpu, torch.xpu.random),
            (torch.mtia, torch.mtia),
        ):
            if not device.is_available():
                monkeypatch.setattr(module, "_lazy_call", lambda *_, **__: None, raising=False)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bits of a sum depend on how it is split."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before or after, and room for as many versions of a function as a test has regions."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@pytest.fixture
def pretend_cuda() -> Iterator[None]:
    """Lets regions of "cuda", stock's and ours, be enabled where there is no GPU, for use with fake tensors."""
    with cuda.pretend_cuda():
        yield
