"""`check_casts` compares every reused cast, of every kind of tensor, without side effects."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.casts import ours
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, loss_of, made, region_of
from torch_promote import _C
from torch_promote.checking.check_casts import check_casts

pytestmark = pytest.mark.usefixtures("nothing_persists")

MODES = ("weights", "persistent", "all")
EVERY_MODE = pytest.mark.parametrize("cache", MODES)
X = torch.linspace(-1, 1, 8 * 16).view(8, 16)


def trainable() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 2, 16 * 4).view(16, 4))


def over_numpy() -> tuple[Any, nn.Parameter]:
    """An array, and a frozen weight over its memory."""
    array = torch.linspace(-2, 2, 16 * 4).view(16, 4).numpy()
    return array, nn.Parameter(torch.from_numpy(array), requires_grad=False)


# --- what is compared


@EVERY_MODE
@EVERY_MODEL
def test_all_uses_of_kept_casts_are_compared(name: str, cache: str) -> None:
    model, x = made(name)
    before = tp.cache_info()["hits"]
    with check_casts() as checks:
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            loss.backward()
    assert (checks.checked, checks.skipped) == (tp.cache_info()["hits"] - before, 0)
    if name == "tied":
        assert checks.checked > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_every_dtype(dtype: torch.dtype) -> None:
    weight = trainable()
    with check_casts() as checks, ours(overrides={"dropout": dtype}):
        torch.dropout(weight, 0.5, False)
        torch.dropout(weight, 0.5, False)
        assert checks.checked == 1
        weight.data.mul_(2)
        with pytest.raises(tp.errors.StaleCastError, match=f"to {str(dtype).removeprefix('torch.')} has stale data"):
            torch.dropout(weight, 0.5, False)


def test_a_cast_to_float32() -> None:
    weight = nn.Parameter(trainable().half())
    with check_casts() as checks, ours(cache="all", overrides={"matmul": torch.float32}):
        X @ weight
        X @ weight
    assert checks.checked == 1


def test_a_functorch_wrapper_is_looked_into() -> None:
    array, _ = over_numpy()
    weight = torch.from_numpy(array)

    def loss(w: torch.Tensor) -> torch.Tensor:
        y = X @ w
        if write:
            array[:] *= 2
        return (y + X @ w).sum()

    for write in (False, True):
        with check_casts() as checks, ours(), pytest.raises(tp.errors.StaleCastError) if write else nullcontext():
            torch.func.grad(loss)(weight)
        assert (checks.checked, checks.skipped) == (1, 0)


class Opaque(torch.Tensor):
    """A wrapper that does not expose the tensors inside it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return cls(result) if isinstance(result, torch.Tensor) else result


class Pair(Opaque):
    """A wrapper of one tensor, as DTensor is one of its local tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
            return torch.Tensor._make_subclass(cls, result) if func is torch.ops.aten._to_copy.default else result


class OpaquePair(Pair):
    """Takes the method back that exposes the tensors."""

    __tensor_flatten__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Pair, Tagged])
def test_subclasses(kind: Any) -> None:
    inner = torch.linspace(-2, 2, 16 * 4).view(16, 4)
    weight = Pair(inner) if kind is Pair else torch.Tensor._make_subclass(Tagged, inner, True)
    with check_casts() as checks, ours():
        X @ weight
        X @ weight
        assert (checks.checked, checks.skipped) == (1, 0)
        inner.data.mul_(2)
        with pytest.raises(tp.errors.StaleCastError):
            X @ weight


def test_a_part_of_another_shape() -> None:
    weight = Pair(torch.ones(16, 4))
    with check_casts(), ours():
        X @ weight
        weight.inner = torch.ones(8, 4)  # behind PyTorch's back: nothing says that the wrapper has changed
        with pytest.raises(tp.errors.StaleCastError, match=r"its shape is \(16, 4\), that of a fresh cast \(8, 4\)"):
            X @ weight


@pytest.mark.parametrize("opaque", [Opaque, OpaquePair])
def test_wrappers_of_what_cannot_be_compared_are_counted(opaque: Any) -> None:
    weight = Pair(opaque(torch.ones(16, 4)))
    with check_casts() as checks, ours():
        for _ in range(3):
            X @ weight
    assert (checks.checked, checks.skipped) == (0, 2)


def test_tensors_that_cannot_be_compared_are_counted() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), check_casts() as fake, ours():
        weight = nn.Parameter(torch.ones(16, 4))
        for _ in range(3):
            torch.ones(8, 16) @ weight
    assert (fake.checked, fake.skipped) == (0, 2)
    opaque = Opaque(torch.ones(16, 4))
    with check_casts() as checks, ours():
        for _ in range(2):
            X @ opaque
    assert checks.checked == 0


# --- threads


def test_a_backward_that_recomputes() -> None:
    weight = trainable()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight) + (x @ weight)

    x = X.clone().requires_grad_() * 1
    with check_casts() as checks, ours():
        y = checkpoint(block, x, use_reentrant=False)
        assert checks.checked == 1
        weight.data.mul_(2)
        with pytest.raises(tp.errors.StaleCastError, match=r"y\.sum\(\)\.backward\(\)|in block"):
            y.sum().backward()


def test_threads_that_write_what_others_read() -> None:
    """A write that the cache detects raises nothing, even if it happens between a use and its comparison."""
    weight = nn.Parameter(torch.zeros(256, 256))
    x = torch.ones(2, 256)
    stop, errors = threading.Event(), []

    def serve() -> None:
        try:
            while not stop.is_set():
                with ours(cache="persistent"), torch.no_grad():
                    x @ weight
        except tp.errors.StaleCastError as error:
            errors.append(error)

    with check_casts() as checks:
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        with torch.no_grad():
            for _ in range(300):
                weight.add_(1)
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert checks.checked > 0


# --- a check is not noticed


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def numbers_of(y: torch.Tensor) -> list[tuple[str, int]]:
    """The nodes of a graph, with their sequence numbers counted from the first."""
    found, todo = {}, [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = node._sequence_nr()
            todo += [child for child, _ in node.next_functions]
    least = min(found.values())
    return sorted((node.name(), number - least) for node, number in found.items() if number < 2**62)


def trace_of(name: str, cache: str, watch: str) -> Any:
    model, x = made(name)
    before = tp.cache_info()
    torch.manual_seed(3)
    log = Log() if watch == "mode" else nullcontext()
    cross = tp.crosscheck() if watch == "crosscheck" else nullcontext()
    prof = torch.profiler.profile(profile_memory=True, acc_events=True) if watch == "profiler" else nullcontext()
    seen = []
    with log, cross as report, prof as profile:
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            if watch != "profiler":
                seen.append(numbers_of(loss))
            loss.backward()
    seen.append([loss.detach(), *(p.grad for p in model.parameters()), *(p._version for p in model.parameters())])
    seen.append([torch.rand(1), [_C.has_backend_meta(p) for p in model.parameters()]])
    seen.append({key: value - before[key] for key, value in tp.cache_info().items()})
    if watch == "mode":
        seen.append(log.ops)  # type: ignore[union-attr]
    if watch == "crosscheck":
        seen.append((report.calls, dict(report.checked), report.mismatches))
    if watch == "profiler":
        # Casts that end together are freed in the order of their addresses, as under stock.
        seen.append(sorted((event.name, event.cpu_memory_usage) for event in profile.events()))
    tp.clear_cache()
    return seen


@pytest.mark.parametrize("watch", ["nobody", "mode", "crosscheck", "profiler"])
@EVERY_MODE
@pytest.mark.parametrize("name", ["tied", "frozen", "qkv"])
def test_a_check_has_no_side_effects(name: str, cache: str, watch: str) -> None:
    with check_casts(False):
        unchecked = trace_of(name, cache, watch)
    with check_casts() as checks:
        checked = trace_of(name, cache, watch)
    assert_same(checked, unchecked)
    assert checks.checked > 0 or cache == "weights" or watch == "mode"


def test_an_inference_mode() -> None:
    weight = nn.Parameter(torch.ones(16, 4), requires_grad=False)
    with check_casts() as checks, torch.inference_mode():
        for _ in range(3):
            with ours(cache="persistent"):
                y = X @ weight
    assert checks.checked == 2
    assert y.is_inference()


def test_compiled_code_around_a_kept_cast(fresh_dynamo: None) -> None:
    """A cached cast is used between two graphs; Dynamo must not compile the functions that the check calls."""
    weight = trainable()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        torch._dynamo.graph_break()
        return y + eager(x)

    @torch._dynamo.disable(recursive=False)
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x @ weight + x @ weight

    compiled = torch.compile(step, backend="eager")
    with check_casts() as checks, ours():
        compiled(X)
    assert checks.checked > 0
    assert not [name for name in torch._dynamo.utils.counters["frames"] if "hook" in name]
