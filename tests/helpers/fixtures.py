"""Fixtures of all tests, and what happens before the first."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from helpers import under_install
from helpers.installed import installed_marked, nothing_installed
from helpers.subprocesses import end_warm_pythons
from helpers.thread_state import thread_state
from torch_promote.parity import model as cuda
from torch_promote.reference.dtypes import dtype_name

__all__ = ["installed_marked", "nothing_installed"]  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    under_install.watch(config)


def pytest_sessionfinish() -> None:
    end_warm_pythons()


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_frozen() -> None:
    """The garbage collector does not scan what was there before a file's tests: the collected tests, imported modules.

    These are millions of objects, and `gc.collect` in a test would take up to a second.
    """
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
    """Checks that no weight has persistent casts before the test, and clears them after it."""
    tp.clear_cache()
    yield
    tp.clear_cache()
    info = tp.cache_info()
    assert (info["persistent_entries"], info["persistent_bytes"]) == (0, 0)


@pytest.fixture
def no_cast_checks() -> Iterator[None]:
    """TORCH_PROMOTE_CHECK_CASTS=1 would add to counts of kernels and bytes, and raise for stale casts on purpose."""
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


@pytest.fixture(autouse=True, scope="session")
def no_timings_of_guards() -> Iterator[None]:
    """Dynamo does not time the guards of each frame that it compiles, for its statistics.

    It empties the processor's caches first, which takes 20 ms for each frame.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True)
def threads() -> None:
    """Uses one thread, because the bits of a sum depend on how threads split it, unless OMP_NUM_THREADS is set."""
    number = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has one for each level of nesting
    torch.set_num_threads(int(number or 1))
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=dtype_name)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Runs the test under each default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Clears compiled code before and after, and raises the limit on versions of a function."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def inductor() -> None:
    """Skips tests that compile with Inductor where it cannot: without a C++ compiler, or with a space in its paths.

    Elsewhere, Inductor knows the vector instructions from then on, and looks for them in no new cache folder.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        if any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise
        pytest.skip("this machine has no C++ compiler, which Inductor needs")
    if spaced := [path for path in (*torch.__path__, tempfile.gettempdir()) if " " in path]:
        pytest.skip(f"Inductor does not quote the path {spaced[0]!r}, and g++ fails: make test VENV=/other/path")
    pick_vec_isa()


@pytest.fixture
def pretend_cuda() -> Iterator[None]:
    """Allows enabled regions of "cuda", stock's and ours, without a GPU, for use with fake tensors."""
    with cuda.pretend_cuda():
        yield


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Products are those of PyTorch's own code and BLAS, whatever instructions the CPU has."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    yield
    torch._C._set_mkldnn_enabled(was_enabled)
