"""flex_attention, a higher-order operator for which PyTorch has autocast kernels: it follows policies as ops do."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.subprocesses import output_of
from torch_promote.observe.observer import observe_dispatch

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
BIAS = torch.linspace(-1, 1, 256).view(16, 16)
MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)


def tensors(dtype: torch.dtype = FP32, heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, 16, 16, generator=generator).to(dtype) for count in (4, heads, heads)]


def compiled(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return function if backend is None else torch.compile(function, backend=backend)


# --- the stock policy gives stock's bits

CALLS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "plain": (flex_attention, tensors()),
    "score_mod that captures": (
        lambda *x: flex_attention(*x, score_mod=lambda s, b, h, i, j: s + BIAS[i, j]),
        tensors(),
    ),
    "block mask": (lambda *x: flex_attention(*x, block_mask=MASK, scale=0.5), tensors()),
    "grouped queries": (lambda *x: flex_attention(*x, enable_gqa=True, return_lse=True), tensors(heads=2)),
    "float16": (flex_attention, tensors(HALF)),
    "double": (flex_attention, tensors(torch.float64)),
}


def run(name: str, region: Any, mode: Any, backend: str | None) -> Any:
    call, inputs = CALLS[name]
    function = compiled(call, backend)
    with mode(), region:
        return function(*inputs)


@functools.cache
def of_stock(name: str, mode: Any, backend: str | None) -> Any:
    """Stock's result; unless Inductor compiles, that of code that is not compiled, which has the same bits."""
    return run(name, tp.stock_autocast("cpu"), mode, backend if backend == "inductor" else None)


NO_GRAD, INFERENCE = torch.no_grad, torch.inference_mode
#: That a compiled call keeps its arguments does not depend on their dtypes: the everyday run compiles one call.
EVERYDAY = [*((name, NO_GRAD, None) for name in CALLS), ("plain", INFERENCE, None)]
EVERYDAY += [("score_mod that captures", NO_GRAD, "aot_eager")]
CASES = itertools.product(CALLS, (NO_GRAD, INFERENCE), (None, "aot_eager", "inductor"))


@pytest.mark.parametrize(
    ("name", "mode", "backend"),
    [pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.slow) for case in CASES],
)
def test_the_result_is_stocks(name: str, mode: Any, backend: str | None, request: pytest.FixtureRequest) -> None:
    if backend == "inductor":
        request.getfixturevalue(backend)
    assert_same(run(name, tp.my_autocast("cpu"), mode, backend), of_stock(name, mode, backend))


@pytest.mark.parametrize(
    ("policy", "backend", "is_one"),
    [
        ("stock", None, True),
        ("stock", "aot_eager", False),
        ("off", None, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("stock", None, False), ("stock", "aot_eager", True), ("off", None, True)]
        ),
        *(pytest.param("off", "aot_eager", is_one, marks=pytest.mark.slow) for is_one in (False, True)),
    ],
)
def test_the_gradients_are_stocks(
    policy: str, is_one: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, PyTorch refuses the backward, because Inductor lacks it. The backward of the operator works."""
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)

    def run(region: Any, backend: str | None) -> Any:
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        leaves = leaves[:1] * 3 if is_one else leaves
        function = compiled(flex_attention, backend)
        with region:
            output = function(*leaves)
        output.float().square().sum().backward()
        return output.detach(), [leaf.grad for leaf in leaves]

    expected = tp.stock_autocast("cpu", enabled=policy == "stock")
    assert_same(run(tp.my_autocast("cpu", policy=policy), backend), run(expected, None))


# --- other policies

POLICIES: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, BF16),
    ({"dtype": HALF}, HALF),
    ({"enabled": False}, FP32),
    ({"policy": "off"}, FP32),
    ({"policy": "cuda"}, BF16),
    ({"policy": "off", "overrides": {"flex_attention": "lower"}}, BF16),
    ({"overrides": {flex_attention: "fp32"}}, FP32),
    ({"overrides": {"*attention*": HALF}}, HALF),
    ({"overrides": {"flex_attention": "fallthrough"}}, FP32),
    ({"overrides": {"flex_attention": "keep"}}, FP32),
    ({"overrides": {"flex_attention": "promote"}}, FP32),
    ({"overrides": {"scaled_dot_product_attention": "fp32"}}, BF16),
]


# Without ids: the text of the function in them has its address.
@pytest.mark.parametrize(("arguments", "expected"), POLICIES)
def test_it_follows_the_policy(arguments: dict[str, Any], expected: torch.dtype) -> None:
    casts = [tensor.to(expected) for tensor in tensors()]
    with tp.my_autocast("cpu", **arguments):
        result = flex_attention(*tensors())
    assert_same(result, flex_attention(*casts))


@pytest.mark.parametrize("places", [(3, 0, 3, 7, 0), pytest.param((3, 0, 1, 3, 6, 7, 0), marks=pytest.mark.slow)])
def test_compiled_code_follows_the_policy_of_each_call(places: tuple[int, ...]) -> None:
    function = compiled(flex_attention, "aot_eager")
    for arguments, expected in (POLICIES[place] for place in places):
        with tp.my_autocast("cpu", **arguments):
            assert function(*tensors()).dtype is expected


def test_a_banned_call_raises() -> None:
    with tp.my_autocast("cpu", overrides={"flex_attention": "banned"}), pytest.raises(RuntimeError) as error:
        torch.ops.higher_order.flex_attention(*tensors(), lambda s, *_: s, MASK.as_tuple(), 1.0, {})
    assert "aten::flex_attention is banned under autocast on cpu: the current policy bans it." in str(error.value)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return flex_attention(x, x, x)  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ["off", "fp32", {"flex_attention": "fp32"}, {"flex_attention": "keep"}], ids=str)
def test_it_follows_the_policy_of_a_module(policy: Any) -> None:
    model = nn.Sequential(Attention(), Attention())
    tp.set_module_policy(model, {"1": policy})
    with tp.my_autocast("cpu"):
        between = model[0](tensors()[0])
        assert (between.dtype, model[1](tensors()[0]).dtype) == (BF16, FP32)


# --- reports


def test_a_trace_shows_its_policy_and_casts() -> None:
    model = Attention()
    with tp.trace(model) as report:
        with tp.my_autocast("cpu"):
            model(tensors()[0])
        with tp.my_autocast("cpu", overrides={"flex_attention": HALF}):
            model(tensors()[0])
    [first, second] = [call for call in report.calls if call.op == "aten::flex_attention"]
    assert (first.policy, first.policy_source) == (tp.CastPolicy.lower_precision_fp, "PyTorch's table")
    assert [cast.argument for cast in first.casts] == ["query", "key", "value"]
    assert second.policy is HALF
    assert second.policy_source.startswith("region at ")
    assert {tensor.dtype for tensor in second.ran_with} == {HALF}


@pytest.mark.parametrize("level", ["dtype", "bits"])
def test_crosscheck_checks_its_casts(level: Any) -> None:
    with tp.crosscheck(level=level) as report:
        for overrides in ({}, {"flex_attention": "fp32"}):
            with tp.my_autocast("cpu", overrides=overrides):
                flex_attention(*tensors())
    assert report.ok, report
    assert report.with_policy["aten.flex_attention.default"] == 2


def test_it_is_cast_once_in_a_call() -> None:
    """Its autograd kernel calls the operator again."""
    names = []

    class Names:
        def begin(self, op: Any, args: Any) -> None:
            names.append(str(op))

    with observe_dispatch(Names()), tp.my_autocast("cpu"):  # type: ignore[arg-type]
        torch.ops.higher_order.flex_attention(*tensors(), lambda s, *_: s, MASK.as_tuple(), 1.0, {})
    assert names.count("aten.flex_attention.default") == 1


# --- PyTorch's other higher-order operators

WITH_KERNELS = """
import importlib, pkgutil, torch, torch._higher_order_ops as package
for found in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"{package.__name__}.{found.name}")
import torch._inductor, torch._prims.rng_prims
operators = torch._ops._higher_order_ops
keys = {name: [str(key) for key in one.py_kernels if "Autocast" in str(key)] for name, one in operators.items()}
print(len(operators) > 30, {name: sorted(found) for name, found in keys.items() if found})
"""


def test_no_other_operator_has_autocast_kernels() -> None:
    """If PyTorch adds kernels for one, this package has to replace them."""
    kernels = ["DispatchKey.AutocastCPU", "DispatchKey.AutocastCUDA"]
    assert output_of(WITH_KERNELS, compiler=True).strip() == f"True {{'flex_attention': {kernels}}}"
