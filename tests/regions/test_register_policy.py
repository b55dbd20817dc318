"""`register_policy`: cast policies of custom ops in every region, until they are removed."""

from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


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
    second = tp.register_policy(op, "float64", replace=True)
    assert dtype() is FP64
    first.remove()
    assert dtype() is FP64  # another has taken its place
    second.remove()
    second.remove()
    assert dtype() is FP32


def test_an_op_that_is_registered_already(op: str) -> None:
    with tp.register_policy(op, "fp32", device_type="cuda") as handle:
        for again in (op, op + ".default"):
            with pytest.raises(tp.PolicyError) as error:
                tp.register_policy(again, "lower")
            assert str(error.value) == (
                f"{again!r} with policy 'lower': {op} already has a registered policy on cuda, 'fp32'. Pass "
                "replace=True to replace it, or call remove() of the handle that register_policy returned."
            )
        with tp.register_policy(op, "lower", device_type="cpu"):
            assert len(tp.registered_policies()) == 2
        assert tp.registered_policies() == {(op, "cuda"): tp.CastPolicy.fp32}
        tp.register_policy(op, "lower", replace=True).remove()
        assert not tp.registered_policies()
        handle.remove()
    with tp.register_policy(op, "fp32", replace=True):  # there may be nothing to replace
        assert len(tp.registered_policies()) == 2


def test_device_types(op: str) -> None:
    with tp.register_policy(op, "fp16", device_type="cuda") as handle:
        assert handle.device_types == ("cuda",)
        assert list(tp.registered_policies()) == [(op, "cuda")]
        with tp.my_autocast("cpu"):
            assert product(torch.ones(2), torch.ones(2)).dtype is FP32
    assert repr(handle) == f"<lower_precision_fp for {op} on cuda>"


def test_stocks_registration_works_where_ours_does_not_apply() -> None:
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
        with tp.stock_autocast("cpu"):
            assert half(x).dtype is HALF
    assert dtype() is HALF
    assert dtype(overrides={"torch_promote_test_defaults::half": "fallthrough"}) is FP32
    with tp.register_policy("torch_promote_test_defaults::half", "fp16", device_type="cuda"):
        assert dtype() is HALF


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
def test_invalid_registrations_are_errors(op: str, arguments: tuple[object, object], message: str) -> None:
    with pytest.raises(tp.PolicyError) as caught:
        tp.register_policy(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert not tp.registered_policies()


def test_a_failed_call_registers_nothing() -> None:
    library = torch.library.Library("torch_promote_test_theirs", "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x, "AutocastPrivateUse1")
    try:
        with pytest.raises(tp.PolicyError, match="already has a kernel from another library"):
            tp.register_policy("torch_promote_test_theirs::op", "fp32")
        with pytest.raises(tp.PolicyError, match="already has a kernel from another library"):
            tp.set_default_policy(tp.Policy.stock().override({"torch_promote_test_theirs::op": "fp32"}))
    finally:
        library._destroy()
    assert tp.default_policy() is None
    assert not tp.registered_policies()
    with tp.register_policy("relu", "fp32"):
        assert ("aten::relu", "cpu") in tp.registered_policies()
