"""`check_casts`: a stale cast raises, in every cache mode and for every kind of tensor, and nothing else changes."""

from __future__ import annotations

import ctypes
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.casts import ours
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, loss_of, made, region_of
from helpers.subprocesses import environment, run_python
from torch_promote.checking.check_casts import check_casts
from torch_promote.errors import StaleCastError

pytestmark = pytest.mark.usefixtures("nothing_persists")

check_casts_module = sys.modules[check_casts.__module__]
EVERY_MODE = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
EYE = torch.eye(4)


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 2, 16).view(4, 4), requires_grad=requires_grad)


def over_numpy() -> tuple[Any, nn.Parameter]:
    """An array, and a frozen weight over its memory."""
    array = torch.linspace(-2, 2, 16).view(4, 4).numpy()
    return array, nn.Parameter(torch.from_numpy(array), requires_grad=False)


def fused_sgd(w: nn.Parameter) -> torch.optim.Optimizer:
    w.grad = torch.ones_like(w)
    return torch.optim.SGD([w], lr=1.0, fused=True)


# --- writes that the cache does not detect


def trained_weight(cache: str) -> Iterator[torch.Tensor]:
    w = weight()
    with ours(cache=cache):
        yield EYE @ w
        w.data.mul_(2)
        yield EYE @ w


def weight_over_an_array(cache: str) -> Iterator[torch.Tensor]:
    array, w = over_numpy()
    with ours(cache=cache):
        yield EYE @ w
        array *= 2
        yield EYE @ w


def between_regions(cache: str) -> Iterator[torch.Tensor]:
    w = weight(requires_grad=False)
    for _ in range(2):
        with ours(cache=cache), torch.no_grad():
            yield EYE @ w
        ctypes.memset(w.data_ptr(), 0, w.nbytes)


def activation(cache: str) -> Iterator[torch.Tensor]:
    x = EYE * 1.5
    other = torch.ones(4, 2, dtype=torch.bfloat16)
    with ours(cache=cache):
        yield x @ other
        x.data.mul_(2)
        yield x @ other


STALE = [
    (trained_weight, "weights"),
    (trained_weight, "persistent"),
    (trained_weight, "all"),
    (weight_over_an_array, "all"),
    (between_regions, "persistent"),
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
        with pytest.raises(StaleCastError, match=f"cache mode: {cache}"):
            next(run)
    assert checks.checked == 1


#: Yields a product of EYE with a weight, and the weight. (Comparing must not make an alias of the weight.)
Program = Iterator[tuple[torch.Tensor, torch.Tensor]]


def used(w: nn.Parameter, cache: str = "persistent") -> tuple[torch.Tensor, nn.Parameter]:
    with ours(cache=cache), torch.no_grad():
        return EYE @ w, w


def compiled_fused_step() -> Program:
    w = weight()
    step = torch.compile(fused_sgd(w).step, backend="eager")
    for _ in range(3):
        yield used(w)
        step()


def fused_kernel() -> Program:
    w, averages = weight(), (torch.zeros(4, 4), torch.zeros(4, 4))
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    for _ in range(3):
        yield used(w)
        with torch.no_grad():
            lists = [[w], [torch.ones(4, 4)], *([average] for average in averages), [], [torch.ones(())]]
            torch._fused_adamw_(*lists, **rates, amsgrad=False, maximize=False)


def promotion_around_a_loop() -> Program:
    w = weight()
    with tp.promotion("torch"):
        for _ in range(3):
            yield used(w, "weights")
            w.data.sub_(0.25)


def in_one_region(write: Callable[[nn.Parameter], object], cache: str = "weights") -> Program:
    w = weight()
    with ours(cache=cache):
        yield EYE @ w, w
        write(w)
        yield EYE @ w, w


def clear_autocast_cache(w: nn.Parameter) -> None:
    w.data.mul_(3)
    torch.clear_autocast_cache()


def step_with_autocast_off(w: nn.Parameter) -> None:
    with ours(enabled=False):
        fused_sgd(w).step()


def step_in_another_thread(w: nn.Parameter) -> None:
    thread = threading.Thread(target=fused_sgd(w).step)
    thread.start()
    thread.join()


def frozen(write: Callable[[nn.Parameter], object]) -> Program:
    w = weight(requires_grad=False)
    for _ in range(2):
        yield used(w)
        write(w)
        yield used(w)


HIDDEN: dict[str, Callable[[], Program]] = {
    "compiled fused step": compiled_fused_step,
    "fused kernel": fused_kernel,
    "promotion around a loop": promotion_around_a_loop,
    "clear_autocast_cache": lambda: in_one_region(clear_autocast_cache),
    "step with autocast off": lambda: in_one_region(step_with_autocast_off),
    "step in another thread": lambda: in_one_region(step_in_another_thread),
    "from_dlpack": lambda: frozen(lambda w: torch.from_dlpack(w).mul_(2)),
    "set_": lambda: frozen(lambda w: torch.empty(0).set_(w).mul_(2)),
    "untyped_storage": lambda: frozen(lambda w: w.untyped_storage().copy_(torch.ones(4, 4).untyped_storage())),
    "memset": lambda: frozen(lambda w: ctypes.memset(w.data_ptr(), 0, w.nbytes)),
    "data of a view": lambda: frozen(lambda w: w.t().data.mul_(2)),
}


@pytest.mark.parametrize("program", HIDDEN.values(), ids=HIDDEN)
def test_a_use_is_right_or_raises(program: Callable[[], Program], fresh_dynamo: None) -> None:
    uses = 0
    try:
        with check_casts():
            for product, w in program():
                uses += 1
                assert torch.equal(product.detach(), w.to(torch.bfloat16)), "a stale cast was used"
    except StaleCastError:
        uses += 1
    assert uses >= 2


def test_clear_cache_is_the_remedy() -> None:
    with check_casts() as checks:
        for product, w in HIDDEN["memset"]():
            assert torch.equal(product, w.to(torch.bfloat16))
            tp.clear_cache()
    assert checks.checked == 0


@EVERY_MODE
def test_the_stale_cast_is_dropped(cache: str) -> None:
    w = weight()
    with check_casts(), ours(cache=cache):
        EYE @ w
        w.data.mul_(2)
        with pytest.raises(StaleCastError):
            EYE @ w
        assert torch.equal(EYE @ w, EYE.bfloat16() @ w.detach().bfloat16())


# --- what does not raise


@EVERY_MODE
@EVERY_MODEL
def test_all_uses_of_cached_casts_are_compared(name: str, cache: str) -> None:
    model, x = made(name)
    before = tp.cache_info()["hits"]
    with check_casts() as checks:
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            loss.backward()
    assert (checks.checked, checks.skipped) == (tp.cache_info()["hits"] - before, 0)
    assert name != "tied" or checks.checked > 0


@EVERY_MODE
def test_a_detected_write_does_not_raise(cache: str) -> None:
    w = weight()
    with check_casts() as checks, ours(cache=cache):
        for _ in range(3):
            EYE @ w
            with torch.no_grad():
                w.mul_(2)
            EYE @ w
    assert checks.checked >= 2 or cache != "weights"


def test_bits_are_compared() -> None:
    w = nn.Parameter(torch.tensor([[0.0, float("nan")]]))
    with check_casts() as checks, ours():
        for _ in range(3):
            torch.ones(1, 1) @ w
        assert checks.checked == 2
        w.data.neg_()
        with pytest.raises(StaleCastError, match=r"the first at \[0, 0\]: 0\.0 instead of -0\.0"):
            torch.ones(1, 1) @ w


# --- kinds of tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_every_dtype(dtype: torch.dtype) -> None:
    w = weight()
    with check_casts() as checks, ours(overrides={"dropout": dtype}):
        for _ in range(2):
            torch.dropout(w, 0.5, False)
        assert checks.checked == 1
        w.data.mul_(2)
        with pytest.raises(StaleCastError, match=f"to {str(dtype).removeprefix('torch.')} has stale data"):
            torch.dropout(w, 0.5, False)


@pytest.mark.parametrize("write", [False, True])
def test_a_functorch_wrapper(write: bool) -> None:
    array, w = over_numpy()

    def loss(w: torch.Tensor) -> torch.Tensor:
        y = EYE @ w
        if write:
            array[:] *= 2
        return (y + EYE @ w).sum()

    with check_casts() as checks, ours(), pytest.raises(StaleCastError) if write else nullcontext():
        torch.func.grad(loss)(w.data)
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


@pytest.mark.parametrize("kind", [Pair, Tagged])
def test_subclasses(kind: Any) -> None:
    inner = torch.linspace(-2, 2, 16).view(4, 4)
    w = Pair(inner) if kind is Pair else torch.Tensor._make_subclass(Tagged, inner, True)
    with check_casts() as checks, ours():
        for _ in range(2):
            EYE @ w
        assert (checks.checked, checks.skipped) == (1, 0)
        inner.data.mul_(2)
        with pytest.raises(StaleCastError):
            EYE @ w


def test_tensors_that_cannot_be_compared_are_counted() -> None:
    with FakeTensorMode(), check_casts() as fake, ours():
        w = weight()
        for _ in range(3):
            torch.ones(4, 4) @ w
    assert (fake.checked, fake.skipped) == (0, 2)
    hidden = Pair(Opaque(torch.ones(4, 4)))
    with check_casts() as opaque, ours():
        for _ in range(3):
            EYE @ hidden
    assert (opaque.checked, opaque.skipped) == (0, 2)


# --- the error


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_error_names_the_weight_the_mode_and_both_lines() -> None:
    model = nn.ModuleDict({"encoder": Encoder()})
    with check_casts(), ours():
        model["encoder"](EYE)
        model["encoder"].layers[1].weight.data.mul_(2)
        with pytest.raises(StaleCastError) as caught:
            model["encoder"](EYE)
    error = caught.value
    assert error.weight == "encoder.layers.1.weight (Parameter, 4 x 4, float32)"
    assert (error.dtype, error.mode) == ("bfloat16", "weights")
    for line in (error.first_line, error.this_line):  # those of the user's module, not of nn.Linear
        assert line.startswith(f"{__file__}:")
        assert line.endswith("in forward: x = layer(x)")
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


def test_a_cast_from_before_the_check_and_a_weight_without_a_name() -> None:
    w = weight()
    with ours():
        with check_casts(False):
            EYE @ w
        w.data.mul_(2)
        with check_casts(), pytest.raises(StaleCastError, match="made before the check began") as caught:
            EYE @ w
    assert caught.value.weight == "a Parameter (4 x 4, float32)"


# --- blocks, threads and the environment


def test_the_block_entered_last_decides() -> None:
    with check_casts(False) as outer, check_casts() as inner:
        with check_casts(False) as off:
            list(trained_weight("weights"))
        with pytest.raises(StaleCastError):
            list(trained_weight("weights"))
    assert (outer.checked, inner.checked, off.checked) == (1, 1, 0)
    with check_casts(False):
        first, second = check_casts(), check_casts()
        for block in (first, second):
            block.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(StaleCastError):
            list(trained_weight("weights"))
        second.__exit__(None, None, None)
        list(trained_weight("weights"))
    assert (first.checked, second.checked) == (0, 1)
    with pytest.raises(tp.errors.OptionError, match=r"enabled is 'yes', which is not a bool\. Legal: True, False\."):
        tp.check_casts("yes")  # type: ignore[arg-type]


def test_every_thread_is_checked() -> None:
    errors: list[Exception] = []

    def serve() -> None:
        try:
            list(trained_weight("weights"))
        except StaleCastError as error:
            errors.append(error)

    with check_casts() as checks:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert checks.checked == len(errors) == 1


def test_a_backward_that_recomputes() -> None:
    w = weight()
    x = EYE.clone().requires_grad_() * 1
    with check_casts() as checks, ours():
        y = checkpoint(lambda x: (x @ w) + (x @ w), x, use_reentrant=False)
        assert checks.checked == 1
        w.data.mul_(2)
        with pytest.raises(StaleCastError, match=r"y\.sum\(\)\.backward\(\)|lambda"):
            y.sum().backward()


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
    ran = run_python(PROGRAM, env=environment(TORCH_PROMOTE_CHECK_CASTS=value))
    assert end in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (value == "0")


# --- side effects


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def trace_of(name: str, cache: str, watch: str) -> Any:
    """What someone who watches two steps of a model sees of them."""
    model, x = made(name)
    before = tp.cache_info()
    torch.manual_seed(3)
    log = Log() if watch == "mode" else nullcontext()
    cross = tp.crosscheck() if watch == "crosscheck" else nullcontext()
    prof = torch.profiler.profile(profile_memory=True, acc_events=True) if watch == "profiler" else nullcontext()
    with log, cross as report, prof as profile:
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            loss.backward()
    seen = [loss.detach(), *(p.grad for p in model.parameters()), *(p._version for p in model.parameters())]
    seen += [torch.rand(1), {key: value - before[key] for key, value in tp.cache_info().items()}]
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
@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_a_check_has_no_side_effects(name: str, cache: str, watch: str) -> None:
    with check_casts(False):
        unchecked = trace_of(name, cache, watch)
    with check_casts() as checks:
        checked = trace_of(name, cache, watch)
    assert_same(checked, unchecked)
    assert checks.checked > 0 or cache == "weights" or watch == "mode"


def test_compiled_code_around_a_cached_cast(fresh_dynamo: None) -> None:
    """A cached cast is used between two graphs; Dynamo must not compile the functions that the check calls."""
    w = weight()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return y + eager(x)

    @torch._dynamo.disable(recursive=False)
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x @ w + x @ w

    compiled = torch.compile(step, backend="eager")
    with check_casts() as checks, ours():
        compiled(EYE)
    assert checks.checked > 0
    assert not [name for name in torch._dynamo.utils.counters["frames"] if "hook" in name]
