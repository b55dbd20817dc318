"""A crosscheck combined with other PyTorch features: it works, and has no side effects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same

LEVELS = [None, "dtype", "bits"]
levels = pytest.mark.parametrize("level", ["dtype", "bits"])


def checked(level: Any) -> Any:
    return contextlib.nullcontext() if level is None else tp.crosscheck(level=level)


def same_with_and_without(code: Callable[[], Any], level: Any) -> tp.CrosscheckReport:
    """Runs code with and without the check, under my_autocast, and compares the results."""
    with tp.my_autocast("cpu"):
        plain = code()
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        result = code()
    assert_same(result, plain)
    assert report.mismatches == []
    assert report.calls > 0
    return report


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 4)


@pytest.fixture
def w() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


@levels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(level: Any, mode: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    def code() -> torch.Tensor:
        with mode():
            y = x @ w
            y[0] = 2
            return y.add_(1)

    report = same_with_and_without(code, level)
    assert report.with_policy["aten.matmul.default"] == 1


@levels
def test_function_transforms(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    def loss(v: torch.Tensor) -> torch.Tensor:
        return (v @ w).sin().float().sum()

    codes: list[Callable[[], Any]] = [
        lambda: vmap(loss)(x),
        lambda: vmap(lambda v: torch.rand_like(v) * (v @ w), randomness="different")(x).shape,
        lambda: grad(loss)(x),
        lambda: jvp(loss, (x,), (x,)),
        lambda: jacrev(loss)(x[0]),
        lambda: hessian(loss)(x[0]),
        lambda: vmap(grad(loss))(x),
    ]
    for code in codes:
        assert same_with_and_without(code, level).checked.total() > 0


@levels
def test_modules_and_subclasses_are_made_inside(level: Any, x: torch.Tensor) -> None:
    """A tensor that becomes a Parameter or another subclass must not have a Python object before that."""

    class Marked(torch.Tensor):
        pass

    def code() -> list[Any]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        assert isinstance(layer.weight, nn.Parameter)
        assert isinstance((x + 1).as_subclass(Marked), Marked)
        assert isinstance(Marked([1.0, 2.0]), Marked)
        assert isinstance(FakeTensorMode().from_tensor(x), torch.Tensor)
        return [layer(x).detach(), nn.Parameter(x * 2).detach()]

    same_with_and_without(code, level)


@levels
def test_fake_tensors(level: Any, w: torch.Tensor) -> None:
    plain = w.detach()
    with FakeTensorMode() as mode, tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        fake = mode.from_tensor(plain)
        y = (fake @ fake).sin()
    assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, (4, 4))
    assert report.mismatches == []
    assert report.checked["aten.mm.default"] >= 1
    assert set(report.not_compared) == ({"fake tensors have no bits"} if level == "bits" else set())


@levels
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_the_same_graph(level: Any, tracing_mode: str, x: torch.Tensor) -> None:
    def trace() -> str:
        return make_fx(lambda a: (a @ a).relu().sum(), tracing_mode=tracing_mode)(x).code

    with tp.my_autocast("cpu"):
        plain = trace()
        with tp.crosscheck(level=level) as report:
            assert trace() == plain
    assert report.mismatches == []
    assert report.checked.total() > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@levels
def test_compile_around_and_inside(level: Any, backend: str, x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def step(a: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return model(a).float().sum()

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        model.zero_grad()
        loss = run(x)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    def inside(a: torch.Tensor) -> torch.Tensor:
        with tp.crosscheck(level=level) as report:
            result = step(a)
        assert report.mismatches == []
        return result

    plain = gradients(step)
    torch._dynamo.reset()
    with tp.crosscheck(level=level) as report:
        assert_same(gradients(torch.compile(step, backend=backend)), plain)
    assert report.mismatches == []
    torch._dynamo.reset()
    assert_same(gradients(torch.compile(inside, backend=backend)), plain)
    torch._dynamo.reset()


@levels
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_checkpoint(level: Any, reentrant: bool, backward_inside: bool, x: torch.Tensor, w: torch.Tensor) -> None:
    def forward() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        result = checkpoint(lambda a: torch.dropout(torch.relu(a @ w), 0.5, True) @ w, leaf, use_reentrant=reentrant)
        return torch.stack([result.float().sum(), leaf.sum()])

    def gradients(level: Any) -> list[Any]:
        torch.manual_seed(1)
        w.grad = None
        with checked(level) as report:
            with tp.my_autocast("cpu"):
                loss = forward().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        assert report is None or report.mismatches == []
        assert w.grad is not None
        return [loss.detach(), w.grad.clone()]

    assert_same(gradients(level), gradients(None))


@levels
def test_hooks_on_saved_tensors_see_them_once(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    counts = []
    for chosen in (None, level):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), checked(chosen), tp.my_autocast("cpu"):
            (x @ w).sum()
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0
    disabled = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with disabled, tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        x @ w
    assert report.with_policy.total() == 1


@levels
def test_autograd_functions(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return g.float() @ b.t(), a.t() @ g.float()

    report = same_with_and_without(lambda: torch.autograd.grad(Product.apply(x, w).sum(), w), level)
    assert report.with_policy["aten.matmul.default"] == 3  # in forward and backward; x needs no gradient, but gets one
    assert report.checked["aten.mm.default"] >= 2


@levels
def test_custom_ops(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    name = f"torch_promote_tests::scale_{level}"

    @torch.library.custom_op(name, mutates_args=())
    def scale(a: torch.Tensor, label: str, by: list[float]) -> torch.Tensor:
        return a * by[0]

    scale.register_autograd(lambda ctx, g: (g * 2, None, None))
    report = same_with_and_without(lambda: torch.autograd.grad(scale(w, "by", [2.0]).sum(), w), level)
    assert dict(report.no_rule) == {f"torch_promote_tests.scale_{level}.default": 1}


@levels
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_layouts(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    sparse, nested = x.to_sparse(), torch.nested.nested_tensor(parts)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    codes: list[Callable[[], Any]] = [
        lambda: [torch.mm(sparse, w.detach()), (sparse + sparse).to_dense(), sparse.coalesce().values()],
        lambda: torch.sparse.mm(sparse, sparse).to_dense(),
        lambda: list((nn.functional.linear(nested, w.detach()) * 2).unbind()),
        lambda: nn.functional.linear(jagged, w.detach()).values() * 2,
        lambda: [torch.relu(quantized).dequantize(), torch.cat([quantized, quantized]).int_repr()],
    ]
    for code in codes:
        same_with_and_without(code, level)


@levels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_the_same(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    weight = w.detach()

    def trace() -> str:
        with tp.my_autocast("cpu"):
            return str(torch.jit.trace(lambda a: (a @ weight).relu(), (x,), check_trace=False).graph)

    plain = trace()
    with tp.crosscheck(level=level) as report:
        assert trace() == plain
    assert report.mismatches == []
    assert report.with_policy.total() == 0  # what is traced is not checked


@levels
def test_wrapper_subclasses_run_once(level: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        y = TwoTensor(x, x.clone()) @ w.detach() + 1
    assert type(y) is TwoTensor
    assert report.mismatches == []
    reason = "a dispatch mode or a tensor subclass would see the call twice"
    assert set(report.not_compared) == ({reason} if level == "bits" else set())


@pytest.mark.parametrize("backward", [False, True])
def test_functions_of_subclasses_are_called_as_before(backward: bool, x: torch.Tensor) -> None:
    class Logged(torch.Tensor):
        log: list[str] = []  # noqa: RUF012 (one for all)

        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Logged.log.append(getattr(f, "__name__", str(f)))
            return super().__torch_function__(f, types, args, kwargs)

    logged = x.as_subclass(Logged)
    logs = []
    for level in LEVELS:
        leaf = torch.ones(4, 4, requires_grad=True)
        with checked(level), tp.my_autocast("cpu"):
            loss = (leaf @ logged).as_subclass(torch.Tensor).float().sum()  # type: ignore[arg-type]
            if backward:
                Logged.log.clear()
                loss.backward()
        logs.append(list(Logged.log))
        Logged.log.clear()
    assert logs[0] == logs[1] == logs[2]
    assert backward or logs[0]


def test_modes_see_the_same_calls(x: torch.Tensor, w: torch.Tensor) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(getattr(f, "__name__", str(f)))
            return f(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(str(f))
            return f(*args, **(kwargs or {}))

    log: list[str] = []
    logs = []
    for level in LEVELS:
        w.grad = None
        with tp.my_autocast("cpu"), checked(level), Functions(), Ops():
            ((x @ w) + 1).sum().backward()
        logs.append(list(log))
        log.clear()
    assert logs[0] == logs[1] == logs[2]
    assert {"aten.mm.default", "aten._to_copy.default"} <= set(logs[0])
    assert "matmul" in logs[0]
