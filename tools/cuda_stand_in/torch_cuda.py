"""Replaces the functions that torch.cuda calls in a CUDA build of PyTorch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from cuda_stand_in import device as stand_in

#: An H100's: kernels and tests that ask find every dtype supported.
CAPABILITY = (9, 0)
MEMORY = 16 << 30


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)


class CUDAGraph:
    """torch.cuda.CUDAGraph. Captured kernels run at each replay, not during the capture."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: int | None = None
        self._pool = graph_pool_handle()

    def __del__(self) -> None:
        self.reset()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self.reset()
        self._pool = pool or self._pool
        stream = current_stream()
        self._graph = stand_in.c().stand_in_graph_begin(stream.device_index, stream.stream_id)

    def capture_end(self) -> None:
        stand_in.c().stand_in_graph_end(self._graph)

    def replay(self) -> None:
        stand_in.c().stand_in_graph_replay(self._graph)

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            stand_in.c().stand_in_graph_free(graph)

    def pool(self) -> tuple[int, int]:
        return self._pool


_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


def _index(device: Any = None) -> int:
    return torch.cuda._utils._get_device_index(device, optional=True)


def _as_cuda(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _as_cuda(torch.accelerator.current_stream(torch.device("cuda", _index(device))))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.CUDA.value)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        device = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)


def set_stream_of_ids(stream_id: int, device_index: int, device_type: int) -> None:
    set_stream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def is_current_stream_capturing() -> bool:
    stream = current_stream()
    return bool(stand_in.c().stand_in_is_capturing(stream.device_index, stream.stream_id))


def exchange_device(index: int) -> int:
    before = torch.accelerator.current_device_index()
    if index >= 0:
        torch.accelerator.set_device_index(index)
    return before


def get_device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name="stand-in", major=major, minor=minor, total_memory=MEMORY, multi_processor_count=1, warp_size=32
    )


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(state)


_stock_clone = torch.UntypedStorage.clone


def clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """torch.UntypedStorage.clone, which PyTorch's Python code only defines for the devices it was built with."""
    if storage.device.type != "cuda":
        return _stock_clone(storage)
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)


def nothing(*_: Any, **__: Any) -> None:
    pass


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def provide() -> None:
    """Replaces the functions in all modules that have them."""
    of_torch_cuda = {
        "_lazy_init": nothing,
        "init": nothing,
        "is_available": yes,
        "is_initialized": yes,
        "is_bf16_supported": yes,
        "device_count": lambda: stand_in.c().stand_in_device_count(),
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_properties": get_device_properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: "stand-in",
        "synchronize": nothing,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "is_current_stream_capturing": is_current_stream_capturing,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "Event": Event,
        "empty_cache": nothing,
        "_sleep": nothing,
        "memory_allocated": lambda device=None: stand_in.live_bytes(_index(device)),
        "max_memory_allocated": lambda device=None: stand_in.peak_bytes(_index(device)),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "reset_peak_memory_stats": lambda device=None: stand_in.c().stand_in_reset_peak(),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_allocator_backend": lambda: "native",
    }
    for name, function in of_torch_cuda.items():
        for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    torch._C._host_emptyCache = nothing
    torch.backends.cuda.is_built = yes
    torch.backends.cudnn.is_acceptable = no  # the original warns
    torch.UntypedStorage.clone = clone_storage
    # What PyTorch's own tests call.
    torch._C._cuda_setStream = set_stream_of_ids
    torch._C._cuda_setDevice = torch.accelerator.set_device_index
    torch._C._cuda_getCompiledVersion = lambda: 12060
    # What releases before 2.13 ask.
    torch._C._cuda_isCurrentStreamCapturing = is_current_stream_capturing
