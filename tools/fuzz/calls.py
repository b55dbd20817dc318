"""What the source of a program calls."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import torch_promote as tp


class CastsByHand(TorchFunctionMode):
    """Casts the arguments of functions and calls them with autocast off, as overrides of these ops do."""

    def __init__(self, device: str, overrides: dict[str, str]) -> None:
        super().__init__()
        self.device, self.overrides = device, overrides

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        policy = self.overrides.get(re.sub("^__(.*)__$", r"\1", function.__name__))  # __matmul__
        if policy is None or not torch.is_autocast_enabled(self.device):
            return function(*args, **(kwargs or {}))
        lower = torch.get_autocast_dtype(self.device)
        dtype = {"lower": lower, "fp32": torch.float32}.get(policy) or getattr(torch, policy)
        with tp.stock_autocast(self.device, enabled=False):
            return function(*cast(args, dtype), **(kwargs or {}))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating tensors, except for float64."""
    if isinstance(value, (tuple, list)):
        return type(value)(cast(one, dtype) for one in value)
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if eligible else value


class Stock:
    """Makes stock's regions."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, cache: str | None = None, policy: str = "", overrides: Any = None, **options: Any) -> Any:
        if cache is not None:
            options["cache_enabled"] = cache != "none"
        if policy == "off":
            options["enabled"] = False
        region = tp.stock_autocast(self.device, **options)
        return region if overrides is None else self.both(region, overrides)

    @contextlib.contextmanager
    def both(self, region: Any, overrides: dict[str, str]) -> Iterator[None]:
        """A region, and casts by hand."""
        with region, CastsByHand(self.device, overrides):
            yield

    def weights_were_written(self) -> None:
        """Stock would use stale casts (docs/differences.md, row 1)."""
        torch.clear_autocast_cache()

    def set_module_policy(self, model: nn.ModuleList, at: str, policy: Any) -> None:
        """What tp.set_module_policy does, by hand."""
        module = model[int(at)]
        forward, device = type(module).forward, self.device

        def by_hand(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(device):
                return forward(module, *args, **kwargs)
            if isinstance(policy, dict):
                with CastsByHand(device, policy):
                    return forward(module, *args, **kwargs)
            with tp.stock_autocast(device, enabled=False):
                return forward(module, *(cast(args, torch.float32) if policy == "fp32" else args), **kwargs)

        module.forward = by_hand  # type: ignore[method-assign]


class Ours:
    """Makes regions of ours."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, **options: Any) -> Any:
        return tp.my_autocast(self.device, **options)

    def weights_were_written(self) -> None:
        """The cache sees it."""

    def set_module_policy(self, model: nn.ModuleList, at: str, policy: Any) -> None:
        tp.set_module_policy(model, {at: policy})


def custom_functions(device: str) -> tuple[Any, Any]:
    """Functions with custom_fwd: one with autocast on in forward and backward, one with an input in float16."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device)
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            return x * 0.5 + (x @ x.t() @ x * 0.1).to(x.dtype)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return grad * 0.5 + (x @ x.t() @ grad.to(x.dtype)).to(grad.dtype)

    class ScaledInHalf(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=torch.float16)
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 0.5

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 0.5

    return Scaled, ScaledInHalf


def use_up_sequence_numbers() -> None:
    """Makes the order of a backward the same in every run.

    Each thread counts its autograd nodes, and the backward runs nodes with larger numbers first. Nodes of new threads
    have small numbers. So the nodes of this thread must all have larger ones.
    """
    a = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        a.neg()


def in_thread(function: Callable[[], None]) -> None:
    """Runs a function in another thread, and waits."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed.pop()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """With deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """On another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def gradient_of_gradient(loss: Tensor, a: Tensor) -> list[Tensor | None]:
    """The loss and its gradient; adds the gradient of that one's square to the weights."""
    if not loss.requires_grad:
        return [loss]
    (first,) = torch.autograd.grad(loss, a, create_graph=True, allow_unused=True)
    if first is not None and first.requires_grad:
        first.square().sum().backward()
    return [loss, first]


@contextlib.contextmanager
def stepping_each(m: nn.Module) -> Iterator[None]:
    """Steps each weight as soon as its gradient is ready."""
    optimizers = {p: torch.optim.SGD([p], lr=0.03) for p in m.parameters() if p.requires_grad}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def let_go(device: str) -> None:
    """Frees what a program no longer uses: garbage, and the last backward's gradients, which may have graphs."""
    gc.collect()
    if device == "cuda":  # its thread frees them a moment after the backward has returned
        leaf = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)


def swap(one: Tensor, other: Tensor) -> None:
    """Swaps two weights. PyTorch refuses while something refers to one of them."""
    let_go(one.device.type)
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(one, other)


def capture(function: Callable[[], Tensor], m: nn.Module, graphs: list[Any], warm_up: int, reuse: bool) -> None:
    """Captures a function in a CUDA graph."""
    for _ in range(warm_up):
        function()
    for p in m.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    graph = graphs.pop()[0] if reuse and graphs else torch.cuda.CUDAGraph()
    let_go("cuda")  # a capture refuses nodes of autograd from outside
    with torch.cuda.graph(graph):
        result = function()
    graphs.append((graph, result))
    for p in m.parameters():  # so that nothing outside refers to the graph's memory
        p.grad = None


def replay(graphs: list[Any], note: Any, times: int, on_a_stream: bool) -> None:
    """Replays all graphs."""
    for graph, result in graphs:
        for _ in range(times):
            with torch.cuda.stream(torch.cuda.Stream()) if on_a_stream else contextlib.nullcontext():
                graph.replay()
            note(result)


def drop_graph(graphs: list[Any], reset: bool) -> None:
    """Frees the last graph."""
    if graphs:
        graph, _ = graphs.pop()
        if reset:
            graph.reset()
        del graph
        gc.collect(0)
