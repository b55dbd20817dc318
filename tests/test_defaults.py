"""What holds for a whole program: default policies, and ops that join them."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_utils import freeze_rng_state

import torch_promote as tp
from torch_promote import _C

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Nothing is left set by a test."""
    assert tp.default_policy() is None
    assert not tp.registered_policies()
    with freeze_rng_state():
        yield
    tp.set_default_policy(None)
    assert not tp.registered_policies()
    with tp.my_autocast("cpu"):
        assert _C.policy_is_stock()


@pytest.fixture(scope="module")
def op() -> Iterator[str]:
    """A custom op that multiplies, with a gradient and a fake kernel."""

    @torch.library.custom_op("torch_promote_test_defaults::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    product.register_fake(lambda a, b: torch.empty_like(a * b))
    product.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return "torch_promote_test_defaults::product"


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.torch_promote_test_defaults.product(a, b)
    return result


def exp_dtype() -> torch.dtype:
    """float32 under CUDA's list, float16 under the CPU's."""
    return torch.exp(torch.ones(2, dtype=HALF)).dtype


# --- the default policy


def test_regions_start_from_the_default() -> None:
    assert tp.set_default_policy("cuda") is None
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32
        with tp.my_autocast("cpu"):
            assert exp_dtype() is FP32
        with tp.my_autocast("cpu", policy="stock"):
            assert exp_dtype() is HALF
        with torch.autocast("cpu"):
            assert exp_dtype() is FP32
        assert exp_dtype() is FP32
    assert exp_dtype() is HALF
    assert tp.set_default_policy(None) == tp.Policy.named("cuda")
    with tp.my_autocast("cpu"):
        assert exp_dtype() is HALF


def test_overrides_come_on_top_of_the_default() -> None:
    tp.set_default_policy("cuda")
    with tp.my_autocast("cpu", overrides={"exp": "float64"}):
        assert exp_dtype() is FP64
        with tp.my_autocast("cpu", overrides={"log": "float64"}):
            assert exp_dtype() is FP64
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32


def test_open_regions_keep_theirs() -> None:
    with tp.my_autocast("cpu"):
        tp.set_default_policy("cuda")
        assert exp_dtype() is HALF
        with tp.my_autocast("cpu"):
            assert exp_dtype() is HALF
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32
        tp.set_default_policy(None)
        assert exp_dtype() is FP32
    with tp.my_autocast("cpu"):
        assert exp_dtype() is HALF


def test_every_thread_has_it() -> None:
    tp.set_default_policy("cuda")
    seen: list[torch.dtype] = []

    def run() -> None:
        with tp.my_autocast("cpu"):
            seen.append(exp_dtype())

    thread = threading.Thread(target=run)
    with tp.my_autocast("cpu", policy="stock"):
        thread.start()
        thread.join()
    assert seen == [FP32]


def test_stock_regions_are_stock_s() -> None:
    tp.set_default_policy("cuda")
    with torch.autocast("cpu"):
        assert exp_dtype() is HALF
    with tp.my_autocast("cpu"):
        pass
    with torch.autocast("cpu"):
        assert exp_dtype() is HALF


@pytest.mark.parametrize("outer", [{}, {"policy": "cuda"}, {"overrides": {"log": "fp32"}}])
def test_nothing_is_left_in_pytorch_s_state(outer: dict[str, object]) -> None:
    def state() -> object:
        devices = torch._C._autocast_supported_devices()
        return [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    before = state()
    tp.set_default_policy("fp32_safe")
    with contextlib.suppress(KeyError), tp.my_autocast("cpu", **outer):  # type: ignore[arg-type]
        inside = state()
        with tp.my_autocast("cpu"):
            assert state() == inside
        raise KeyError
    assert state() == before


def test_regions_that_end_out_of_order() -> None:
    tp.set_default_policy("cuda")
    first = tp.my_autocast("cpu", overrides={"log": "float64"})
    second = tp.my_autocast("cpu", overrides={"sqrt": "float64"})
    x = torch.ones(2, dtype=HALF)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (torch.log(x).dtype, torch.sqrt(x).dtype, exp_dtype()) == (FP32, FP64, FP32)
    second.__exit__(None, None, None)
    assert (torch.log(x).dtype, exp_dtype()) == (HALF, HALF)


def test_steps_of_coroutines() -> None:
    @tp.my_autocast("cpu")
    async def work(results: list[torch.dtype]) -> None:
        results.append(exp_dtype())
        await asyncio.sleep(0)
        results.append(exp_dtype())

    async def main() -> list[torch.dtype]:
        results: list[torch.dtype] = []
        await asyncio.gather(work(results), work(results))
        assert exp_dtype() is HALF
        return results

    tp.set_default_policy("cuda")
    assert asyncio.run(main()) == [FP32] * 4


def test_gradients_that_autograd_s_threads_compute() -> None:
    tp.set_default_policy("cuda")
    seen: list[torch.dtype] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(exp_dtype())
            return grad

    x = torch.ones(2, requires_grad=True)
    with tp.my_autocast("cpu"):
        Looks.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [FP32]


def test_compiled_functions_see_a_change() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return torch.exp(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    x = torch.ones(2, dtype=HALF)
    for policy, dtype in ((None, HALF), ("cuda", FP32), (None, HALF), ("cuda", FP32)):
        tp.set_default_policy(policy)
        assert inside(x).dtype is dtype
        with tp.my_autocast("cpu"):
            assert around(x).dtype is dtype


def test_export_refuses_a_default_that_the_graph_could_not_hold() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with tp.my_autocast("cpu"):
                return torch.exp(x)

    tp.set_default_policy("cuda")
    with pytest.raises(tp.RegionError, match="cannot be exported"):
        torch.export.export(Model(), (torch.ones(2),), strict=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cudda", "no policy is called 'cudda'. Closest: cuda."),
        ("nowhere/policy.toml", "nowhere/policy.toml"),
        ({"mm": "fp32"}, "a policy is a Policy, a name or the path of a policy file, got"),
        (3, "got 3 of type int"),
    ],
)
def test_a_wrong_default_changes_nothing(value: object, message: str) -> None:
    tp.set_default_policy("cuda")
    with pytest.raises(tp.PolicyError) as caught:
        tp.set_default_policy(value)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert tp.default_policy() == tp.Policy.named("cuda")


# --- the environment


def imported(policy: str, code: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_PROMOTE_POLICY": policy}
    program = f"import torch, torch_promote as tp\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_environment_names_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp.Policy.stock().override({"exp": "float64"}).save(path)
    code = "with tp.my_autocast('cpu'): print(torch.exp(torch.ones(2, dtype=torch.float16)).dtype)"
    for policy, dtype in (("cuda", "torch.float32"), (str(path), "torch.float64"), ("", "torch.float16")):
        result = imported(policy, code)
        assert (result.returncode, result.stdout.strip()) == (0, dtype), result.stderr


def test_a_wrong_environment_is_an_error_at_the_import(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('format = 1\n\n[cpu]\nsofmax = "fp32"\n')
    for policy, messages in {
        "cudda": ["TORCH_PROMOTE_POLICY is 'cudda'", "Closest: cuda"],
        str(path): [f"TORCH_PROMOTE_POLICY is {str(path)!r}", f"{path}:4", "softmax"],
    }.items():
        result = imported(policy)
        assert result.returncode == 1
        for message in messages:
            assert message in result.stderr.splitlines()[-1] or message in result.stderr


# --- ops that join


def test_a_custom_op_follows_the_region(op: str) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with tp.register_policy(op, "fp16"):
        for dtype in (BF16, HALF):
            with tp.my_autocast("cpu", dtype):
                result = product(a, b)
            assert result.dtype is dtype
            result.sum().backward()
        assert torch.equal(a.grad, torch.full((2,), 6.0)) if a.grad is not None else False
        with tp.my_autocast("cpu", enabled=False):
            assert product(a, b).dtype is FP32
        with tp.my_autocast("cpu", policy="cuda"):
            assert product(a, b).dtype is BF16
        with tp.my_autocast("cpu", policy="off"):
            assert product(a, b).dtype is FP32
        with tp.my_autocast("cpu", overrides={op: "float64"}):
            assert product(a, b).dtype is FP64
        with tp.my_autocast("cpu", policy=tp.Policy.stock().override({op: "float64"})):
            assert product(a, b).dtype is FP64
    with tp.my_autocast("cpu"):
        assert product(a, b).dtype is FP32


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("fp16", (BF16, BF16)),
        ("fp32", (FP32, FP32)),
        ("promote", (FP32, HALF)),
        ("float64", (FP64, FP64)),
        ("keep", (FP32, HALF)),
        ("fallthrough", (FP32, HALF)),
    ],
)
def test_every_policy(op: str, policy: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    half = torch.ones(2, dtype=HALF)
    with tp.register_policy(op, policy), tp.my_autocast("cpu"):
        assert (product(half, torch.ones(2)).dtype, product(half, half).dtype) == dtypes


def test_a_banned_op(op: str) -> None:
    with (
        tp.register_policy(op, "banned"),
        tp.my_autocast("cpu"),
        pytest.raises(RuntimeError, match="product is banned under autocast on cpu"),
    ):
        product(torch.ones(2), torch.ones(2))


def test_change_and_remove(op: str) -> None:
    x = torch.ones(2)

    def dtype() -> torch.dtype:
        with tp.my_autocast("cpu"):
            return product(x, x).dtype

    first = tp.register_policy(op, "fp16")
    second = tp.register_policy(op, "float64")
    assert dtype() is FP64
    first.remove()
    assert dtype() is FP64  # another has taken its place
    second.remove()
    second.remove()
    assert dtype() is FP32


def test_device_types(op: str) -> None:
    with tp.register_policy(op, "fp16", device_types="cuda") as handle:
        assert handle.devices == ("cuda",)
        assert list(tp.registered_policies()) == [(op, "cuda")]
        with tp.my_autocast("cpu"):
            assert product(torch.ones(2), torch.ones(2)).dtype is FP32
    assert repr(handle) == f"<lower_precision_fp for {op} on cuda>"


def test_stock_s_registration_works_where_ours_has_no_say() -> None:
    @torch.library.custom_op("torch_promote_test_defaults::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    half.register_autocast("cpu", HALF)
    x = torch.ones(2)

    def dtype(**policy: object) -> torch.dtype:
        with tp.my_autocast("cpu", **policy):  # type: ignore[arg-type]
            return half(x).dtype  # type: ignore[no-any-return]

    assert dtype() is HALF
    with tp.register_policy("torch_promote_test_defaults::half", "fp16"):
        assert dtype() is BF16
        with torch.autocast("cpu"):
            assert half(x).dtype is HALF
    assert dtype() is HALF
    assert dtype(overrides={"torch_promote_test_defaults::half": "fallthrough"}) is FP32
    with tp.register_policy("torch_promote_test_defaults::half", "fp16", device_types="cuda"):
        assert dtype() is HALF


def test_a_compiled_function_sees_the_op_s_policy(op: str) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    a = torch.ones(2, requires_grad=True)
    for policy, dtype in ((None, FP32), ("fp16", BF16), ("float64", FP64), (None, FP32)):
        with contextlib.ExitStack() as stack:
            if policy is not None:
                stack.enter_context(tp.register_policy(op, policy))
            with tp.my_autocast("cpu"):
                result = compiled(a, a)
            assert result.dtype is dtype
            result.sum().backward()
            assert a.grad is not None
            assert a.grad.dtype is FP32
            a.grad = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch_promote_test_defaults::prodct", "fp32"), "torch_promote_test_defaults::prodct"),
        (("torch_promote_test_defaults::product", "fp23"), "no cast policy is called 'fp23'"),
        (("torch_promote_test_defaults::product", "match_self"), "torch_promote_test_defaults::product cannot use"),
        (("torch_promote_test_defaults::product", torch.int8), "torch.int8 is not a floating dtype"),
        (("mm.default", "fp16"), "this is what PyTorch's autocast does"),
    ],
)
def test_what_cannot_be_registered(op: str, arguments: tuple[object, object], message: str) -> None:
    with pytest.raises(tp.PolicyError) as caught:
        tp.register_policy(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert not tp.registered_policies()


def test_a_device_type_that_is_not_there(op: str) -> None:
    with pytest.raises(tp.UnsupportedDeviceError, match="no device type 'cdua'"):
        tp.register_policy(op, "fp32", device_types="cdua")


def test_what_fails_leaves_nothing_set() -> None:
    library = torch.library.Library("torch_promote_test_theirs", "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x, "AutocastPrivateUse1")
    try:
        with pytest.raises(tp.PolicyError, match="has a kernel of another library's"):
            tp.register_policy("torch_promote_test_theirs::op", "fp32")
        with pytest.raises(tp.PolicyError, match="has a kernel of another library's"):
            tp.set_default_policy(tp.Policy.stock().override({"torch_promote_test_theirs::op": "fp32"}))
    finally:
        library._destroy()
    assert tp.default_policy() is None
    assert not tp.registered_policies()
    with tp.register_policy("relu", "fp32"):
        assert ("aten::relu", "cpu") in tp.registered_policies()


def test_stock_s_own_policy_takes_the_place_of_another() -> None:
    x = torch.ones(2, 2)

    def dtype() -> torch.dtype:
        with tp.my_autocast("cpu"):
            return torch.mm(x, x).dtype

    first = tp.register_policy("mm.default", "fp32")
    assert dtype() is FP32
    tp.register_policy("mm.default", "fp16")
    assert dtype() is BF16
    assert not tp.registered_policies()
    first.remove()
