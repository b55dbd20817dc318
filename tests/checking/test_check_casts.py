"""`check_casts`: a stale cast raises, in every cache mode and kind of tensor, and a valid one is compared unnoticed."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
from helpers.subprocesses import environment
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


# --- stale casts


def trained_weight(cache: str) -> Iterator[torch.Tensor]:
    weight = trainable()
    with ours(cache=cache):
        yield X @ weight
        weight.data.mul_(2)
        yield X @ weight


def weight_over_an_array(cache: str) -> Iterator[torch.Tensor]:
    array, weight = over_numpy()
    with ours(cache=cache):
        yield X @ weight
        array *= 2
        yield X @ weight


def between_regions(cache: str) -> Iterator[torch.Tensor]:
    array, weight = over_numpy()
    for _ in range(2):
        with ours(cache=cache), torch.no_grad():
            yield X @ weight
        array *= 2


def view(cache: str) -> Iterator[torch.Tensor]:
    array, weight = over_numpy()
    rows = weight.t()
    with ours(cache=cache):
        yield X[:, :4] @ rows
        array *= 2
        yield X[:, :4] @ rows


def activation(cache: str) -> Iterator[torch.Tensor]:
    x = X * 1.5
    other = torch.ones(16, 2, dtype=torch.bfloat16)
    with ours(cache=cache):
        yield x @ other
        x.data.mul_(2)
        yield x @ other


STALE = [
    (trained_weight, "weights"),
    (trained_weight, "persistent"),
    (trained_weight, "all"),
    (weight_over_an_array, "all"),
    (view, "persistent"),
    (view, "all"),
    (activation, "all"),
]


@pytest.mark.parametrize(("program", "cache"), STALE)
def test_a_stale_cast_raises(program: Callable[[str], Iterator[torch.Tensor]], cache: str) -> None:
    with check_casts(False):
        first, second = program(cache)
    assert torch.equal(first, second), "the cache detects this write: nothing is stale"
    run = program(cache)
    with check_casts() as checks:
        next(run)
        with pytest.raises(tp.StaleCastError, match=f"cache mode: {cache}"):
            next(run)
    assert checks.checked == 1


def test_a_write_that_the_cache_detects_is_none() -> None:
    for cache in MODES:
        weight = trainable()
        with check_casts() as checks, ours(cache=cache):
            for _ in range(3):
                X @ weight
                with torch.no_grad():
                    weight.mul_(2)
                X @ weight
        assert checks.checked >= 2


def test_a_zero_that_changes_its_sign_and_a_nan() -> None:
    weight = nn.Parameter(torch.tensor([[0.0, float("nan")]]))
    with check_casts() as checks, ours():
        for _ in range(3):
            torch.ones(1, 1) @ weight
        assert checks.checked == 2
        weight.data.neg_()
        with pytest.raises(tp.StaleCastError, match=r"the first at \[0, 0\]: 0\.0 instead of -0\.0"):
            torch.ones(1, 1) @ weight


def test_the_stale_cast_is_dropped_and_the_state_restored() -> None:
    for cache in MODES:
        weight = trainable()
        with check_casts(), ours(cache=cache):
            X @ weight
            weight.data.mul_(2)
            for _ in range(2):  # the second time it is a use of a new cast
                try:
                    y = X @ weight
                except tp.StaleCastError:
                    continue
            assert torch.equal(y, X.bfloat16() @ weight.detach().bfloat16())


# --- the error


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def raised(model: nn.Module, write: Callable[[], object], cache: str = "weights") -> tp.StaleCastError:
    with check_casts(), ours(cache=cache):
        model(X)
        write()
        with pytest.raises(tp.StaleCastError) as caught:
            model(X)
    return caught.value


def test_the_error_names_the_weight_the_mode_and_both_lines() -> None:
    model = nn.ModuleDict({"encoder": Encoder()})
    error = raised(model["encoder"], lambda: model["encoder"].layers[1].weight.data.mul_(2))
    assert error.weight == "encoder.layers.1.weight (Parameter, 16 x 16, float32)"
    assert (error.dtype, error.mode) == ("bfloat16", "weights")
    # The lines of the user's module, not those of nn.Linear.
    for line in (error.first_line, error.this_line):
        assert line.endswith("in forward: x = layer(x)")
        assert __file__ in line
    text = str(error)
    for part in (
        error.weight,
        "cache mode: weights",
        error.first_line,
        "clear_cache()",
        'cache="none"',
        "docs/casts.md",
    ):
        assert part in text
    assert str(pickle.loads(pickle.dumps(error))) == text


def test_each_line_is_its_own() -> None:
    weight = trainable()
    with check_casts(), ours():
        first = X @ weight  # the first cast
        weight.data.mul_(2)
        with pytest.raises(tp.StaleCastError) as caught:
            first + X @ weight
    assert caught.value.first_line.endswith(": first = X @ weight  # the first cast")
    assert caught.value.this_line.endswith(": first + X @ weight")


def test_what_is_no_parameter_of_a_module_has_no_name() -> None:
    for program, cache, text in (
        (trained_weight, "weights", "a Parameter (16 x 4, float32)"),
        (view, "all", "a view (4 x 16, float32) of a Parameter"),
        (activation, "all", "a Tensor (8 x 16, float32)"),
    ):
        with check_casts(), pytest.raises(tp.StaleCastError) as caught:
            list(program(cache))
        assert caught.value.weight == text


def test_a_cast_from_before_the_check() -> None:
    weight = trainable()
    with ours():
        with check_casts(False):
            X @ weight
        weight.data.mul_(2)
        with check_casts(), pytest.raises(tp.StaleCastError, match="unknown: it was made before the check began"):
            X @ weight


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
    with check_casts() as checks, ours(overrides={"clone": dtype}):
        torch.clone(weight)
        torch.clone(weight)
        assert checks.checked == 1
        weight.data.mul_(2)
        with pytest.raises(tp.StaleCastError, match=f"to {str(dtype).removeprefix('torch.')} has stale data"):
            torch.clone(weight)


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
        with check_casts() as checks, ours(), pytest.raises(tp.StaleCastError) if write else nullcontext():
            torch.func.grad(loss)(weight)
        assert (checks.checked, checks.skipped) == (1, 0)


class Pair(torch.Tensor):
    """A wrapper of one tensor, as DTensor is one of its local tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return cls(result) if isinstance(result, torch.Tensor) else result


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
            return torch.Tensor._make_subclass(cls, result) if func is torch.ops.aten._to_copy.default else result


class Opaque(Pair):
    """A wrapper that does not say what it consists of."""

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
        with pytest.raises(tp.StaleCastError):
            X @ weight


def test_what_cannot_be_compared_is_counted() -> None:
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


def test_every_thread_is_checked() -> None:
    errors: list[Exception] = []

    def serve() -> None:
        try:
            list(trained_weight("weights"))
        except tp.StaleCastError as error:
            errors.append(error)

    with check_casts() as checks:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert checks.checked == len(errors) == 1


def test_a_backward_that_recomputes() -> None:
    weight = trainable()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight) + (x @ weight)

    x = X.clone().requires_grad_() * 1
    with check_casts() as checks, ours():
        y = checkpoint(block, x, use_reentrant=False)
        assert checks.checked == 1
        weight.data.mul_(2)
        with pytest.raises(tp.StaleCastError, match=r"y\.sum\(\)\.backward\(\)|in block"):
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
        except tp.StaleCastError as error:
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
        seen.append([(event.name, event.cpu_memory_usage) for event in profile.events()])
    tp.clear_cache()
    return seen


@pytest.mark.parametrize("watch", ["nobody", "mode", "crosscheck", "profiler"])
@EVERY_MODE
@pytest.mark.parametrize("name", ["tied", "chunks", "frozen", "qkv"])
def test_a_check_is_not_noticed(name: str, cache: str, watch: str) -> None:
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


# --- blocks


def test_the_block_entered_last_decides() -> None:
    with check_casts(False) as outer, check_casts() as inner:
        with check_casts(False) as off:
            list(trained_weight("weights"))
        with pytest.raises(tp.StaleCastError):
            list(trained_weight("weights"))
    assert (outer.checked, inner.checked, off.checked) == (1, 1, 0)


def test_blocks_may_end_in_any_order() -> None:
    with check_casts(False):
        first, second = check_casts(), check_casts()
        for block in (first, second):
            block.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(tp.StaleCastError):
            list(trained_weight("weights"))
        second.__exit__(None, None, None)
        list(trained_weight("weights"))
        assert (first.checked, second.checked) == (0, 1)


def test_a_bad_argument() -> None:
    with pytest.raises(tp.OptionError, match=r"enabled is 'yes', which is not a bool\. Legal: True, False\."):
        tp.check_casts("yes")  # type: ignore[arg-type]


# --- the environment

PROGRAM = """
import torch, torch_promote as tp
w = torch.nn.Parameter(torch.ones(4, 4))
with tp.my_autocast("cpu"):
    torch.ones(4, 4) @ w
    w.data.mul_(2)
    torch.ones(4, 4) @ w
print("not detected")
"""


@pytest.mark.parametrize(
    ("value", "end"),
    [
        ("1", "StaleCastError: the cast of a Parameter (4 x 4, float32) to bfloat16 has stale data"),
        ("0", "not detected"),
        ("on", "TORCH_PROMOTE_CHECK_CASTS is 'on'. Legal: 1 (check every reused cast), 0."),
    ],
)
def test_the_environment(value: str, end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(TORCH_PROMOTE_CHECK_CASTS=value),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert end in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (value == "0")


def test_compiled_code_around_a_kept_cast(fresh_dynamo: None) -> None:
    """Between two graphs a kept cast is used; Dynamo must not compile the functions that the check calls."""
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
