"""torch.compile: functions called in regions, and regions inside functions, ours and installed ones, in one graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from benchmarks.cases import Settings
from benchmarks.measures import count_compiled, on_its_own
from benchmarks.programs import subject
from benchmarks.suites import PLACES
from helpers.comparison import assert_same
from helpers.probes import leaves_no_trace
from helpers.program_comparison import Region, assert_like_stock, ours, stock
from helpers.subprocesses import run_python
from helpers.thread_state import thread_state
from torch_promote.regions.promotion import PromotionEvent

HALF = torch.float16

#: As many as a body may need: it uses each once.
Weights = tuple[torch.Tensor, ...]
#: Code with regions in it.
Body = Callable[[Region, torch.Tensor, Weights], Any]
#: Where a compiled function is called: a maker of regions and its arguments, or outside of any region.
Place = tuple[Region, dict[str, Any]] | None


def compute(x: torch.Tensor, weights: Weights) -> Any:
    """Ops of three policies, and dtypes that show in the results."""
    hidden = x @ weights[0]
    joined = torch.cat([hidden, x], dim=-1)
    return hidden, joined, F.mse_loss(hidden, torch.zeros_like(hidden)), torch.softmax(x @ weights[1], -1)


def inputs() -> tuple[torch.Tensor, Weights]:
    return torch.randn(3, 6), tuple(torch.randn(6, 6, requires_grad=True) for _ in range(6))


def with_gradients(function: Callable[..., Any], x: torch.Tensor, weights: Weights) -> Any:
    """Outputs and gradients.

    No weight is used twice: in compiled code each use has its own cast, which changes the bits of gradient sums.
    """
    outputs = function(x, weights)
    loss = sum(leaf.float().square().sum() for leaf in tree_leaves(outputs))
    return outputs, torch.autograd.grad(loss, weights, allow_unused=True)


def called_in(place: Place, function: Callable[..., Any], x: torch.Tensor, weights: Weights) -> Any:
    """Outputs and gradients of a call in a region.

    The backward is called there too: a compiled function has the backward of the region that it was called in.
    """
    with place[0](**place[1]) if place is not None else contextlib.nullcontext():
        return with_gradients(function, x, weights)


pytestmark = pytest.mark.usefixtures("fresh_dynamo", "nothing_installed")

#: What "eager" runs is a part of what "aot_eager" does.
BACKENDS = pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
of_torch = functools.partial(torch.autocast, "cpu")


# --- a compiled function, called in different regions

#: Regions to call it in, one after the other; None is no region. Each comes again later, to be found compiled.
PROGRAM: list[Place] = [
    None,
    (ours, {}),
    (ours, {"dtype": HALF}),
    (ours, {"enabled": False}),
    (stock, {}),
    (ours, {"overrides": {"matmul": "fp32"}}),
    (ours, {"overrides": {"matmul": "fp32", "cat": "fp16"}}),
    (stock, {"dtype": HALF}),
    (ours, {"policy": tp.Policy.stock().override({"matmul": HALF})}),
    (ours, {"dtype": HALF, "overrides": {"matmul": "fp32"}}),
    (ours, {"overrides": {"matmul": "fallthrough", "mm": "fallthrough"}}),
    None,
]


@BACKENDS
def test_compiled_function_called_in_different_regions(backend: str) -> None:
    args = inputs()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    frames = []
    for _ in range(2):
        for place in PROGRAM:
            assert_same(called_in(place, compiled, *args), called_in(place, compute, *args), what=str(place))
        frames.append(counter.frame_count)
    assert frames[1] == frames[0], "a region that has been seen is compiled for once"


INTS, SINGLE = torch.arange(3, dtype=torch.int32), torch.full((3,), 0.1)


def promotes(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x + y
    w = x.clone()
    w += torch.ones((), dtype=w.dtype)
    number = torch.where(x > y, x, 2.5), torch.where(x > y, 0.1, x), torch.where(x > y, 0.1, 2)
    chosen = torch.where(x > y, x, y), number
    return z, z * 2.5, torch.cat([x, y]), w, chosen, torch.special.hermite_polynomial_h(0.1, x)


@BACKENDS
def test_a_function_is_compiled_anew_for_each_promotion_rule(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(promotes, backend=counter, fullgraph=True)
    for rule in (None, "torch", "numpy", "jax", None, "numpy", "torch", "jax"):
        with nullcontext() if rule is None else tp.promotion(rule):
            assert_same(compiled(INTS, SINGLE), promotes(INTS, SINGLE))
    assert counter.frame_count == 4


def test_what_a_rule_refuses_is_refused_while_compiling() -> None:
    compiled = torch.compile(torch.add, backend="aot_eager")
    with tp.promotion("strict"), pytest.raises(Exception, match=r"Write x.to\(torch.float32\) for the int32 tensor"):
        compiled(INTS, SINGLE)
    with tp.promotion("strict"):
        assert torch.equal(compiled(SINGLE, SINGLE), SINGLE + SINGLE)


def test_the_lint_reports_the_line_once_while_compiling() -> None:
    events: list[PromotionEvent] = []

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    compiled = compile_(function)
    with tp.promotion("torch", on_promotion=events.append):
        for _ in range(2):
            compiled(SINGLE.half(), SINGLE)
    assert [(event.filename, event.lineno) for event in events] == [(__file__, function.__code__.co_firstlineno + 1)]


# --- regions inside a compiled function. That our wrappers do the casts is the same in all, and is asked once.


def simple(region: Region, x: torch.Tensor, w: Weights) -> Any:
    before = x @ w[2]
    with region():
        inside = compute(x, w)
    return before, inside, x @ w[3]


def nested(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        outer = x @ w[0]
        with region(dtype=HALF):
            inner = x @ w[1]
            with region(enabled=False):
                off = x @ w[2]
            again = x @ w[3]
        return outer, inner, off, again, x @ w[4]


def decorated_inside(region: Region, x: torch.Tensor, w: Weights) -> Any:
    @region(dtype=HALF)
    def body(x: torch.Tensor) -> torch.Tensor:
        return x @ w[0]

    return body(x), x @ w[1]


def exception(region: Region, x: torch.Tensor, w: Weights) -> Any:
    try:
        with region():
            hidden = x @ w[0]
            raise ValueError
    except ValueError:
        return hidden, x @ w[1]


def made_outside(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        first = x @ w[0]
    with region():
        return first, x @ w[1], x @ w[2]


def regions_of(body: Body, region: Region) -> Region:
    """What a body enters: `made_outside` gets the same object each time."""
    scope = region(dtype=HALF)
    return (lambda: scope) if body is made_outside else region


BODIES: tuple[Body, ...] = (simple, nested, decorated_inside, exception, made_outside)


@pytest.mark.parametrize(
    ("body", "backend"), [*((body, "aot_eager") for body in BODIES), (simple, "eager")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_region_inside(body: Body, backend: str) -> None:
    """In one graph, and with the bits of eager, ours and stock's, wherever the compiled function is called."""

    def run(region: Region) -> Any:
        args, inner = inputs(), regions_of(body, region)

        def function(x: torch.Tensor, weights: Weights) -> Any:
            return body(inner, x, weights)

        compiled = function if region is stock else torch.compile(function, backend=backend, fullgraph=True)
        results = []
        for place in (None, (region, {"dtype": HALF}), (region, {"enabled": False})):
            results.append(called_in(place, compiled, *args))
            assert_same(results[-1], called_in(place, function, *args), what=f"compiled against eager in {place}")
        return results

    assert_like_stock(run, casts=body is simple)


def beside_our_own(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with tp.my_autocast("cpu", overrides={"softmax": "fp16"}):
        first = x @ w[0], torch.softmax(x, -1)
        with region(dtype=HALF):
            second = x @ w[1], torch.softmax(x, -1)
    with region(), tp.my_autocast("cpu", HALF):
        return first, second, x @ w[2]


MARKED: dict[str, Any] = {"overrides": {"matmul": "fp32"}}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        *((body, {}) for body in (simple, made_outside, beside_our_own)),
        (simple, MARKED),
        *(pytest.param(body, {}, marks=pytest.mark.slow) for body in BODIES[1:-1]),
        *(pytest.param(body, MARKED, marks=pytest.mark.slow) for body in (*BODIES[1:], beside_our_own)),
        (nested, {"policy": "off"}),
        pytest.param(nested, {"cache": "all"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_installed_region_inside(body: Body, arguments: dict[str, Any]) -> None:
    args, inner = inputs(), regions_of(body, of_torch)

    def function(x: torch.Tensor, weights: Weights) -> Any:
        return body(inner, x, weights)

    compiled = compile_(function)
    with leaves_no_trace(), tp.install(**arguments):
        for place in (None, (ours, {"dtype": HALF}), (of_torch, {})):
            assert_same(called_in(place, compiled, *args), called_in(place, function, *args), what=str(place))


@BACKENDS
def test_overrides_inside(backend: str) -> None:
    def function(x: torch.Tensor, w: Weights) -> Any:
        with ours(overrides={"matmul": "fp32"}):
            first = x @ w[0]
            with ours(dtype=HALF, overrides={"softmax": "fp16"}):
                second = torch.softmax(x, -1), x @ w[1], torch.mm(x, w[2])
        with ours(overrides={"matmul": HALF}):
            return first, second, x @ w[3]

    args = inputs()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for place in (None, (ours, {}), (ours, {"overrides": {"matmul": "keep"}}), (stock, {}), None):
        assert_same(called_in(place, compiled, *args), called_in(place, function, *args), what=str(place))


def test_promotion_regions_inside() -> None:
    outside = tp.promotion("numpy")

    @compile_
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        with tp.promotion("numpy"):
            first = x + y
        with outside:
            second = x + y
        with tp.promotion("jax", matmul=True):
            third = x[None].float() @ y[:, None].half()
        return first, second, third, x + y

    dtypes = [result.dtype for result in function(INTS, SINGLE)]
    assert dtypes == [torch.float64, torch.float64, torch.float32, torch.float32]


# --- subclasses, explicit calls of the methods


class WithInit(tp.my_autocast):
    def __init__(self, enabled: bool) -> None:
        super().__init__("cpu", HALF, enabled=enabled)


class WithMethods(tp.my_autocast):
    def __enter__(self) -> Any:
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)


def inside(make: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        with make():
            return x @ x

    return function


def subclass_made_outside() -> Callable[[torch.Tensor], torch.Tensor]:
    class Late(tp.my_autocast):
        """Defined when Dynamo has been imported."""

    region = Late("cpu", HALF)
    return inside(lambda: region)


def by_methods(x: torch.Tensor) -> torch.Tensor:
    region = tp.my_autocast("cpu", HALF)
    region.__enter__()
    product = x @ x
    region.__exit__(None, None, None)
    return product


def on_a_stack(x: torch.Tensor) -> torch.Tensor:
    with ExitStack() as stack:
        stack.enter_context(tp.my_autocast("cpu", HALF))
        return x @ x


#: PyTorch 2.14 and later break the graph at a region on an ExitStack; under stock every release does.
BREAKS_ON_A_STACK = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)

#: A function, and whether Dynamo compiles all of it.
WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "subclass with __init__": (inside(lambda: WithInit(True)), True),
    "subclass with methods": (inside(lambda: WithMethods("cpu", HALF)), False),
    "subclass, made outside": (subclass_made_outside(), True),
    "explicit methods": (by_methods, True),
    "ExitStack": (on_a_stack, not BREAKS_ON_A_STACK),
}


@pytest.mark.parametrize(("function", "fullgraph"), WAYS.values(), ids=WAYS)
def test_however_the_region_is_made_and_entered(function: Any, fullgraph: bool) -> None:
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    with leaves_no_trace():
        assert [compiled(torch.ones(2, 2)).dtype for _ in range(2)] == [HALF] * 2


# --- graph breaks and exceptions: no region is left open


def break_inside(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        first = x @ w[0]
        torch._dynamo.graph_break()
        second = x @ w[1]
    return first, second, x @ w[2]


def break_in_the_inner_of_two(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        first = x @ w[0]
        with region(dtype=HALF):
            second = x @ w[1]
            torch._dynamo.graph_break()
            third = x @ w[2]
        fourth = x @ w[3]
    return first, second, third, fourth, x @ w[4]


@pytest.mark.parametrize(
    "body",
    [pytest.param(break_inside, marks=pytest.mark.slow), break_in_the_inner_of_two],
    ids=lambda body: body.__name__,
)
def test_graph_break(body: Body) -> None:
    """Against stock's compiled code, and against eager where that has eager's bits."""
    args = inputs()

    def compiled(region: Region) -> Any:
        return torch.compile(on_its_own(lambda x, weights: body(region, x, weights)), backend="aot_eager")

    under_ours, under_stock = compiled(ours), compiled(stock)
    for arguments in (None, {"dtype": HALF}, None):
        mine, stocks = ((region, arguments) if arguments is not None else None for region in (ours, stock))
        with leaves_no_trace():
            result = called_in(mine, under_ours, *args)
        assert_same(result, called_in(stocks, under_stock, *args), what=f"compiled, in {arguments}")
        eager = called_in(stocks, lambda x, weights: body(stock, x, weights), *args)
        assert_same(result, eager, what=f"eager, in {arguments}")


class PlannedError(Exception):
    pass


def raises_while_traced(x: torch.Tensor) -> torch.Tensor:
    raise PlannedError


raises_when_run = torch._dynamo.disable(raises_while_traced)


@pytest.mark.parametrize("raising", [raises_while_traced, raises_when_run], ids=["traced", "run"])
@pytest.mark.parametrize("around", [False, True])
def test_exception_leaves_the_compiled_function(raising: Callable[..., Any], around: bool) -> None:
    def function(x: torch.Tensor, w: Weights) -> Any:
        with ours():
            hidden = x @ w[0]
            with ours(dtype=HALF, overrides={"matmul": "fp32"}):
                hidden = hidden + x @ w[1]
                return raising(hidden)

    compiled = torch.compile(function, backend="aot_eager")
    with ours(enabled=around):
        before = thread_state()
        for _ in range(2):
            with pytest.raises(PlannedError):
                compiled(*inputs())
            assert thread_state() == before


# --- install and remove between calls, and while a function is compiled


@pytest.mark.parametrize("body", [simple, made_outside, pytest.param(decorated_inside, marks=pytest.mark.slow)])
def test_every_change_of_the_installation_recompiles(body: Body) -> None:
    args, inner = inputs(), regions_of(body, of_torch)
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: torch.Tensor, weights: Weights) -> Any:
        return body(inner, x, weights)

    compiled = torch.compile(function, backend=counter, fullgraph=True)

    def check(recompiles: bool) -> None:
        before = counter.frame_count
        assert_same(with_gradients(compiled, *args), with_gradients(function, *args))
        assert (counter.frame_count > before) == recompiles

    check(True)
    handles = []
    for arguments in (MARKED, {"overrides": {"matmul": HALF}}, {}):
        for recompiles in (True, False):
            handles.append(tp.install(**arguments))
            check(recompiles)
    while handles:
        for recompiles in (False, True):
            handles.pop().remove()
            check(recompiles)


@pytest.mark.parametrize("change", [tp.install, lambda: tp.installed().remove()])  # type: ignore[union-attr]
def test_a_change_of_the_installation_by_a_backend_is_an_error(change: Any) -> None:
    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        change()
        return module.forward

    with tp.install(**MARKED) as installation:
        with leaves_no_trace(), pytest.raises(Exception, match=r"[Ii]nstall.*was called while torch\.compile compiles"):
            torch.compile(inside(of_torch), backend=backend, fullgraph=True)(torch.ones(2, 2))
        assert tp.installed() is installation


# --- a compiled step is the same code as under stock: graphs, graph breaks, guards


TINY = Settings(tiny=True)
#: Where the region is an object from outside: ours checks its type and its contents, stock which object it is.
OBJECTS = ("one region object", "decorated")


class Graphs:
    """A backend that runs the aten graphs unchanged, and stores their code."""

    def __init__(self) -> None:
        self.code: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.code.append(graph.code)
        return make_boxed_func(graph.forward)


def steps(run: Callable[..., Any], x: torch.Tensor) -> None:
    """Two training steps and two forwards, so that all versions are compiled."""
    for _ in range(2):
        run(x).float().sum().backward()
    with torch.no_grad():
        for _ in range(2):
            run(x)


#: The others are made of these: a region object is decorated code's, too, and one of several regions is inside.
EVERY_DAY = [("MLP", place) for place in PLACES if place not in ("region inside", "decorated")]


@pytest.mark.parametrize(
    ("model", "place"),
    [
        pytest.param(model, place, marks=() if (model, place) in EVERY_DAY else pytest.mark.slow)
        for model in ("MLP", "Llama-like", "conv net")
        for place in PLACES
    ],
)
def test_the_same_graphs(model: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    compile_ = torch.compile
    for region in (tp.stock_autocast, tp.my_autocast):
        graphs, made = Graphs(), subject(model, TINY)
        monkeypatch.setattr(torch, "compile", functools.partial(compile_, backend=graphs.backend))
        run = PLACES[place](made.net, region)
        found.append((graphs.code, count_compiled(lambda made=made, run=run: steps(run, made.x))))
    (stock_graphs, stock_counts), (our_graphs, our_counts) = found
    assert len(stock_graphs) >= 3  # forward, backward, and the forward without a gradient
    assert our_graphs == stock_graphs
    frames = our_counts["frames"]
    our_counts["guards"] -= frames if place in OBJECTS else 0
    assert our_counts == stock_counts


# --- the backward of a compiled function


def product(region: Region, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    return x @ weights[0]


def in_float32(region: Region, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    with region(enabled=False):
        return x @ weights[0]


def in_two_regions(region: Region, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    with region():
        return in_float32(region, x, weights)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("region", [ours, stock])
def test_the_backward_of_an_inner_region_that_is_disabled(region: Region, dynamic: bool) -> None:
    """If the outer region is around the call, AOTAutograd traces the backward in it, which disregards the inner one."""
    args = inputs()

    def compiled(body: Body, around: contextlib.AbstractContextManager[Any]) -> Any:
        torch._dynamo.reset()
        function = functools.partial(torch.compile(body, backend="aot_eager", dynamic=dynamic), region)

        def call(*args: Any) -> Any:
            with around:
                return function(*args)

        return with_gradients(call, *args)

    eager = with_gradients(functools.partial(in_two_regions, region), *args)
    outputs, gradients = compiled(in_float32, region())
    assert_same(outputs, eager[0])
    assert not torch.equal(gradients[0], eager[1][0]), "PyTorch has mended it: delete it from docs/differences.md"
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        assert_same(compiled(in_float32, region()), eager)
    assert_same(compiled(in_two_regions, nullcontext()), eager)


@pytest.mark.parametrize("region", [ours, stock, functools.partial(torch.autocast, "cpu")])
def test_a_backward_in_a_region_around_it_alone(region: Region) -> None:
    """As in eager mode, it casts. But the backward of a graph that opens our regions contains its casts."""
    functions = {body: torch.compile(body, backend="aot_eager") for body in (in_two_regions, product)}
    with tp.install():
        for body, function in functions.items():
            args = inputs()
            mine, eager = (each(region, *args).float().sum() for each in (function, body))
            casts = body is product or region is stock
            with region():
                gradient = torch.autograd.grad(mine, args[1][0])
            with region() if casts else nullcontext():
                assert_same(gradient, torch.autograd.grad(eager, args[1][0]))


BACKWARD_INSIDE = """
import torch, torch_promote as tp
from torch import nn
from torch._inductor.lowering import make_fallback
make_fallback(torch.ops.aten.sum)

def gradients(dynamic):
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(1025, 2))
    model = nn.Sequential(normed, nn.Linear(2, 1))
    def step(x):
        with tp.my_autocast("cpu", torch.float16, policy="cuda"):
            model(x).sum().backward()
    torch._dynamo.reset()
    (step if dynamic is None else torch.compile(step, dynamic=dynamic))(torch.randn(2, 1025))
    return [weight.grad for weight in model.parameters()]

for dynamic in (False, True):
    for mine, eager in zip(gradients(dynamic), gradients(None)):
        torch.testing.assert_close(mine, eager)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_a_backward_in_a_region_that_the_compiled_function_opens() -> None:
    """Inductor compiles it with autocast off, and PyTorch runs it with autocast on. Under `cuda`, sum has a policy."""
    done = run_python(BACKWARD_INSIDE)  # a PyTorch built for CUDA warns that there is none
    assert done.stdout == "equal\n", done.stderr
