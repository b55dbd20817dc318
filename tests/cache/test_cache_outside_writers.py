"""Weights in shared memory, collectives, replays, and the writes that the modes do not detect."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_promote as tp
from helpers.casts import CastCount, Region, ours, stock
from helpers.process_groups import end_group

EYE = torch.eye(4)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    tp.clear_cache()
    yield
    tp.clear_cache()


def frozen(data: torch.Tensor | None = None) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4) if data is None else data, requires_grad=False)


def persistent_casts_of(w: torch.Tensor) -> int:
    with ours(cache="persistent"), torch.no_grad():
        EYE @ w
    return tp.cache_info()["persistent_entries"]


def numpy_memory(_: Path) -> torch.Tensor:
    return torch.from_numpy(np.ones((4, 4), np.float32))


def buffer_memory(_: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(64), dtype=torch.float32).view(4, 4)


def dlpack_memory(_: Path) -> torch.Tensor:
    return torch.from_dlpack(np.ones((4, 4), np.float32))


def shared_memory(_: Path) -> torch.Tensor:
    return torch.ones(4, 4).share_memory_()


def shared_file(folder: Path) -> torch.Tensor:
    (folder / "shared").write_bytes(bytes(64))
    return torch.from_file(str(folder / "shared"), shared=True, size=16).view(4, 4)


def part_of_a_storage(_: Path) -> torch.Tensor:
    return torch.empty(0).set_(torch.ones(32).untyped_storage()[:64]).view(4, 4)


def private_file(folder: Path) -> torch.Tensor:
    (folder / "private").write_bytes(bytes(64))
    return torch.from_file(str(folder / "private"), shared=False, size=16).view(4, 4)


def mapped_checkpoint(folder: Path) -> torch.Tensor:
    torch.save({"first": torch.zeros(5), "w": torch.ones(4, 4)}, folder / "checkpoint")
    return torch.load(folder / "checkpoint", mmap=True)["w"]


@pytest.mark.parametrize(
    "memory", [numpy_memory, buffer_memory, dlpack_memory, shared_memory, shared_file, part_of_a_storage]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_casts_of_a_weight_in_others_memory_end_with_the_region(
    memory: Callable[[Path], torch.Tensor], requires_grad: bool, tmp_path: Path
) -> None:
    w = nn.Parameter(memory(tmp_path).float(), requires_grad=requires_grad)
    assert persistent_casts_of(w) == 0


@pytest.mark.parametrize("memory", [private_file, mapped_checkpoint])
def test_casts_of_a_weight_in_a_privately_mapped_file_persist(
    memory: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    w = frozen(memory(tmp_path))  # in an assert, pytest would hold the first tensor too
    assert persistent_casts_of(w) == 1


def test_a_weight_that_is_moved_to_shared_memory() -> None:
    w = frozen()
    assert persistent_casts_of(w) == 1
    w.share_memory_()
    (ctypes.c_float * 16).from_address(w.data_ptr())[0] = 5.0
    with ours(cache="persistent"), torch.no_grad():
        assert (EYE @ w)[0, 0] == 5


def by_address(w: torch.Tensor) -> None:
    (ctypes.c_float * 16).from_address(w.data_ptr())[:] = [2.0] * 16


def by_dlpack(w: torch.Tensor) -> None:
    torch.from_dlpack(w.detach()).fill_(2) if w.requires_grad else torch.from_dlpack(w).fill_(2)


def by_set(w: torch.Tensor) -> None:
    torch.empty(0).set_(w).fill_(2)


def by_set_to_storage(w: torch.Tensor) -> None:
    torch.empty(0).set_(w.untyped_storage(), 0, (4, 4)).fill_(2)


def by_storage(w: torch.Tensor) -> None:
    w.untyped_storage().copy_(torch.full((4, 4), 2.0).untyped_storage())


def by_data_of_a_view(w: torch.Tensor) -> None:
    w[:].data.fill_(2)


def is_detected(w: torch.Tensor, write: Callable[[Any], None], region: Region, **cache: str) -> bool:
    with region(**cache), torch.no_grad():
        EYE @ w
        write(w)
        return (EYE @ w)[0, 0].item() == 2


SHARING = [by_dlpack, by_set, by_set_to_storage, by_storage]


@pytest.mark.usefixtures("stale_casts_on_purpose")
@pytest.mark.parametrize("write", [by_address, *SHARING, by_data_of_a_view])
def test_the_default_mode_misses_no_write_that_stock_detects(write: Callable[[Any], None]) -> None:
    """Both keep only the casts of trainable weights."""
    for region in (ours, stock):
        assert is_detected(frozen(), write, region)
        assert not is_detected(nn.Parameter(torch.ones(4, 4)), write, region)


@pytest.mark.parametrize("write", SHARING)
@pytest.mark.parametrize("trainable", [False, True])
def test_persistent_casts_end_when_memory_is_shared(write: Callable[[Any], None], trainable: bool) -> None:
    w = nn.Parameter(torch.ones(4, 4), requires_grad=trainable)
    for _ in range(2):
        with ours(cache="persistent"), torch.no_grad():
            EYE @ w
        write(w)
        with ours(cache="persistent"), torch.no_grad():
            assert (EYE @ w)[0, 0] == 2
        with torch.no_grad():
            w.fill_(1)


@pytest.mark.parametrize("write", SHARING)
def test_casts_of_all_end_when_memory_is_shared(write: Callable[[Any], None]) -> None:
    assert is_detected(frozen(), write, ours, cache="all")


@pytest.mark.parametrize("cache", ["persistent", "all"])
def test_a_tensor_that_shares_memory_may_write_later(cache: str) -> None:
    w = frozen()
    with ours(cache=cache), torch.no_grad():
        EYE @ w
        shared = torch.from_dlpack(w)
        EYE @ w
        shared.fill_(2)
        assert (EYE @ w)[0, 0] == 2


@pytest.mark.parametrize("cache", ["persistent", "all"])
def test_dlpack_refuses_a_weight_that_requires_a_gradient_as_in_stock(cache: str) -> None:
    w = nn.Parameter(torch.ones(4, 4))
    with ours(cache=cache):
        EYE @ w
        with pytest.raises(BufferError, match="require gradient"):
            torch.from_dlpack(w)


@pytest.mark.usefixtures("stale_casts_on_purpose")
@pytest.mark.parametrize("write", [by_address, by_data_of_a_view])
@pytest.mark.parametrize("cache", ["persistent", "all"])
def test_the_other_modes_miss_these_writes_until_the_cache_is_cleared(write: Callable[[Any], None], cache: str) -> None:
    w = frozen()
    assert not is_detected(w, write, ours, cache=cache)
    tp.clear_cache()
    with ours(cache=cache), torch.no_grad():
        assert (EYE @ w)[0, 0] == 2


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    end_group()


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "broadcast": lambda w: dist.broadcast(w, 0),
    "all_reduce, asynchronous": lambda w: dist.all_reduce(w, async_op=True).wait(),  # type: ignore[union-attr]
    "all_reduce": dist.all_reduce,
    "all_gather": lambda w: dist.all_gather([w], torch.full((4, 4), 2.0)),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w, torch.full((4, 4), 2.0)),
    "scatter": lambda w: dist.scatter(w, [torch.full((4, 4), 2.0)]),
    "reduce_scatter_tensor": lambda w: dist.reduce_scatter_tensor(w, torch.full((4, 4), 2.0)),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("cache", ["persistent", "all"])
def test_a_collective_drops_the_casts_of_its_tensors(collective: Callable[[torch.Tensor], object], cache: str) -> None:
    """In one process some collectives write the old values, so the test counts casts instead of comparing values.

    It counts the casts made, not those kept: while a thread of gloo still has a view of the tensor, the cache does not
    keep a new cast of it.
    """
    w, other = frozen(), frozen()
    with ours(cache=cache), torch.no_grad():
        EYE @ w, EYE @ other
        collective(w)
        with CastCount(w) as of_w, CastCount(other) as of_other:
            assert (EYE @ w)[0, 0] == w.clone()[0, 0]
            EYE @ other
        assert (of_w.casts, of_other.casts) == (1, 0)


@pytest.mark.usefixtures("one_process")
def test_a_collective_between_regions() -> None:
    w = frozen()
    assert persistent_casts_of(w) == 1
    dist.all_gather_into_tensor(w, torch.full((4, 4), 2.0))
    assert tp.cache_info()["persistent_entries"] == 0
    with ours(cache="persistent"), torch.no_grad():
        assert (EYE @ w)[0, 0] == 2


def test_a_replay_of_a_graph_drops_casts_beyond_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(graph, "replay", lambda self: by_address(self.writes))
    for method in ("capture_begin", "capture_end"):
        monkeypatch.setattr(graph, method, getattr(graph, method))  # to be restored
    tp.integrations.cuda_graphs.watch_replays()
    w, replayed = frozen(), Captured()
    replayed.writes = w
    assert persistent_casts_of(w) == 1
    with ours(cache="persistent"), torch.no_grad():
        EYE @ w
        graph.replay(replayed)
        assert (EYE @ w)[0, 0] == 2


class Captured:
    """A replacement for a CUDA graph, which needs a GPU."""

    writes: torch.Tensor
