"""A crosscheck of whole programs: correct code gives no mismatch, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import in_thread
from torch_promote import _C
from torch_promote.errors import DecoratorError, DispatchObserverError, OptionError
from torch_promote.observe.observer import _prepare

levels = pytest.mark.parametrize("level", ["dtype", "bits"])
KEY = torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY)
X, W = torch.linspace(-1, 2, 16).view(4, 4), torch.linspace(2, -1, 16).view(4, 4).requires_grad_()
SIN, COS, TAN = "aten.sin.default", "aten.cos.default", "aten.tan.default"


def is_on() -> bool:
    """Whether the dispatch observer is on in this thread."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    observer = _C.swap_observer(None)
    _C.swap_observer(observer)
    assert included == (observer is not None)
    return included


@pytest.fixture(autouse=True)
def off_before_and_after() -> Iterator[None]:
    assert not is_on()
    yield
    assert not is_on()


def checked(level: Any) -> Any:
    return contextlib.nullcontext() if level is None else tp.crosscheck(level=level)


# --- training steps


def pictures() -> nn.Module:
    """A small convolutional net with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4),
    )  # fmt: skip


#: Functions that make the model, its input and target, and the optimizer.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], Any]] = {
    "conv": (pictures, lambda: torch.randn(3, 3, 8, 8), lambda: torch.randint(4, (3,)), torch.optim.SGD),
    "text": (
        lambda: nn.Sequential(
            nn.Embedding(20, 16), nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 20), nn.Flatten(0, 1)
        ),
        lambda: torch.randint(20, (2, 8)),
        lambda: torch.randint(20, (16,)),
        torch.optim.Adam,
    ),
}


def train(name: str, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Trains a model for three steps, and returns everything that a crosscheck could change."""
    make, inputs, targets, optimizer_class = MODELS[name]
    torch.manual_seed(3)
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    seen: list[Any] = []
    before = tp.cache_info()
    for _ in range(3):
        x, y = inputs(), targets()
        with tp.my_autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
            seen.append({what: count - before[what] for what, count in tp.cache_info().items()})
        loss.backward()
        seen += [(p.grad.clone(), p.grad.stride()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [*seen, *(p.detach() for p in model.parameters()), *model.buffers(), *states, torch.get_rng_state()]


@levels
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    ("region", "dtype"),  # the everyday run has each of both once
    [
        ("step", torch.bfloat16),
        ("all", torch.float16),
        pytest.param("step", torch.float16, marks=pytest.mark.slow),
        pytest.param("all", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_training_has_no_mismatch_and_does_not_change(name: str, dtype: Any, region: str, level: Any) -> None:
    # In one region around all steps, weights change, and stock would use their old casts.
    def run() -> list[Any]:
        with tp.my_autocast("cpu", dtype=dtype) if region == "all" else contextlib.nullcontext():
            return train(name, dtype)

    plain = run()
    with tp.crosscheck(level=level) as report:
        assert_same(run(), plain)
    assert report.mismatches == [], str(report)
    assert report.coverage >= 0.99, str(report)
    assert report.known_gaps.total() == report.stock_raised.total() == report.not_compared.total() == 0
    assert level == "dtype" or report.with_stock >= report.with_policy  # and calls of ours that no policy applies to
    assert report.with_policy["aten.linear.default"] >= 3


# --- with other features of PyTorch: tests/reading/test_trace_odd_programs.py has programs for every tool


@levels
def test_a_graph_with_symbolic_shapes(level: Any) -> None:
    def graph() -> str:
        return make_fx(lambda a: (a @ a).relu().sum(), tracing_mode="symbolic")(X).code

    with tp.my_autocast("cpu"):
        plain = graph()
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        assert graph() == plain
    assert report.mismatches == []
    assert report.calls > 0


@levels
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_around_and_inside(level: Any, backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def step(a: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return model(a).float().sum()

    def inside(a: torch.Tensor) -> torch.Tensor:
        with tp.crosscheck(level=level) as report:
            result = step(a)
        assert report.mismatches == []
        return result

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        torch._dynamo.reset()
        model.zero_grad()
        loss = run(X)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = gradients(step)
    with tp.crosscheck(level=level) as report:
        assert_same(gradients(torch.compile(step, backend=backend)), plain)
    assert report.mismatches == []
    assert_same(gradients(torch.compile(inside, backend=backend)), plain)
    torch._dynamo.reset()


def test_watchers_see_the_same_calls() -> None:
    """Modes, subclasses and hooks on saved tensors do not see what the check does."""
    log: list[str] = []

    def logged(self: Any, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log.append(str(f) if isinstance(self, TorchDispatchMode) else getattr(f, "__name__", str(f)))
        return f(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        __torch_function__ = logged

    class Ops(TorchDispatchMode):
        __torch_dispatch__ = logged

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(getattr(f, "__name__", str(f)))
            return super().__torch_function__(f, types, args, kwargs)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        log.append("saved")
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    logs = []
    for level in (None, "dtype", "bits"):
        W.grad = None  # otherwise autograd adds to it
        with tp.my_autocast("cpu"), checked(level), hooks:
            with Functions(), Ops():
                ((X @ W) + 1).sum().backward()
            (W @ X.as_subclass(Logged)).as_subclass(torch.Tensor).float().sum().backward()  # type: ignore[arg-type]
        logs.append(list(log))
        log.clear()
    assert logs[0] == logs[1] == logs[2]
    assert {"aten.mm.default", "aten._to_copy.default", "matmul", "saved"} <= set(logs[0])


def test_what_is_not_compared_with_stock() -> None:
    with FakeTensorMode() as mode, tp.crosscheck(level="bits") as fake, tp.my_autocast("cpu"):
        y = mode.from_tensor(X) @ mode.from_tensor(X)
    assert (y.dtype, set(fake.not_compared)) == (torch.bfloat16, {"fake tensors have no bits"})
    with tp.crosscheck(level="bits") as twice, tp.my_autocast("cpu"):
        assert type(TwoTensor(X, X.clone()) @ W.detach()) is TwoTensor
    assert set(twice.not_compared) == {"a dispatch mode or a tensor subclass would see the call twice"}
    with tp.crosscheck(level="bits") as random, tp.my_autocast("cpu"):
        torch.linalg.lstsq(torch.randn(5, 3), torch.randn(5, 2))
    assert random.not_compared == {"PyTorch does not repeat its bits": 1}
    assert fake.mismatches == twice.mismatches == random.mismatches == []


# --- errors


@levels
def test_errors_of_ops_pass_unchanged(level: Any) -> None:
    def fails() -> None:
        with tp.my_autocast("cpu"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))

    with pytest.raises(RuntimeError) as plain:
        fails()
    with tp.crosscheck(level=level) as report:
        with pytest.raises(RuntimeError) as checked:
            fails()
        assert torch.ones(2).sum() == 2  # and the check goes on
    assert (type(checked.value), str(checked.value)) == (type(plain.value), str(plain.value))
    names = [[frame.name for frame in traceback.extract_tb(e.value.__traceback__)] for e in (plain, checked)]
    assert names[0] == names[1]
    assert (report.mismatches, report.checked["aten.sum.default"]) == ([], 1)


REFUSED = {
    "shapes": lambda: torch.ones(2) + torch.ones(3),
    "split": lambda: torch.ones(()).split(2),
    "unbind": lambda: torch.ones(()).unbind(),
    "unsafe_split": lambda: torch.ones(2).unsafe_split(1, 3),
    "shapes of out": lambda: torch.ones(1).add_(torch.ones(2)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_a_call_that_pytorch_refuses_is_no_mismatch(call: Callable[[], Any]) -> None:
    with tp.crosscheck() as report, pytest.raises((RuntimeError, IndexError)):
        call()
    assert not report.mismatches


def test_a_promotion_rule_does_not_act_inside_an_op_with_a_policy() -> None:
    with tp.promotion("strict"), tp.my_autocast("cpu"), tp.crosscheck() as report:
        torch.nn.functional.cross_entropy(torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2))
    assert not report.mismatches


def test_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"^'bit' is not a level of crosscheck\. Closest: bits\. Legal: "):
        tp.crosscheck(level="bit")  # type: ignore[arg-type]
    with pytest.raises(DecoratorError, match=r"^crosscheck is not a decorator: the caller could not read its report"):
        tp.crosscheck(level="bits")(lambda: pytest.fail("it ran"))

    def taken() -> None:
        raise RuntimeError("tried to register multiple backend fallbacks")

    _prepare.cache_clear()
    monkeypatch.setattr(_C, "register_dispatch_observer", taken)
    with pytest.raises(DispatchObserverError, match="another library has registered a fallback on it"), tp.crosscheck():
        pass


# --- blocks


def test_nested_blocks_check_once_and_add_up() -> None:
    x = torch.ones(2)
    with tp.crosscheck() as outer:
        x.sin()
        with contextlib.suppress(ZeroDivisionError), tp.crosscheck(level="bits") as inner:
            x.cos()
            raise ZeroDivisionError
        assert is_on()
        x.tan()
    assert (inner.checked, outer.checked) == ({COS: 1}, {SIN: 1, COS: 1, TAN: 1})
    x.sin()
    assert outer.calls == 3


def test_blocks_may_end_in_any_order() -> None:
    """As those of asyncio's tasks do."""
    x = torch.ones(2)
    with tp.crosscheck() as around:
        first, second = tp.crosscheck(), tp.crosscheck()
        first.__enter__()
        report = second.__enter__()
        x.sin()
        first.__exit__(None, None, None)
        assert is_on()
        x.cos()
        second.__exit__(None, None, None)
        x.tan()
    assert report.checked == {SIN: 1, COS: 1}
    assert around.checked == {SIN: 1, COS: 1, TAN: 1}


def test_a_block_cannot_end_in_another_thread() -> None:
    here = tp.crosscheck()
    report = here.__enter__()

    def elsewhere() -> int:
        with tp.crosscheck() as own:
            with pytest.raises(DispatchObserverError, match="was not entered in this thread, so it cannot end here"):
                here.__exit__(None, None, None)
            assert is_on()
            torch.ones(2).sin()
        return own.checked[SIN]

    assert in_thread(elsewhere) == 1
    torch.ones(2).cos()
    here.__exit__(None, None, None)
    assert (report.checked[SIN], report.checked[COS]) == (0, 1)


def test_two_threads_check_at_once() -> None:
    barrier = threading.Barrier(2, timeout=30)

    def work(name: str) -> Any:
        x = torch.ones(2)
        with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
            for _ in range(20):
                barrier.wait()
                getattr(x, name)()
        return report.checked

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, ("sin", "cos"))) == [{SIN: 20}, {COS: 20}]


# --- memory


class Mark:
    """Something that a node of the graph holds."""


class Marked(torch.autograd.Function):
    """The identity, with a node whose lifetime can be checked."""

    marks: ClassVar[weakref.WeakSet[Mark]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark = Mark()
        Marked.marks.add(ctx.mark)
        return x.clone()


def test_no_tensor_or_graph_outlives_its_result() -> None:
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
        for _ in range(4):
            result = F.log_softmax(F.linear(x, Marked.apply(w)), 1)
        assert len(Marked.marks) == 1
        alive = [weakref.ref(tensor) for tensor in (x, w, result)]
        del x, w, result
        tp.clear_cache()
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3
        assert len(Marked.marks) == 0
    assert report.with_stock["aten.log_softmax.int"] == 4
