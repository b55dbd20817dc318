"""Custom ops in a crosscheck: the registered fake is the rule, and a kernel that contradicts it is a mismatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

import torch_promote as tp
from torch_promote.checking.expectation import has_fake

Define = Callable[..., Any]


@pytest.fixture
def define() -> Iterator[Define]:
    """Defines `fakes::op` with a kernel for the CPU and, if asked, a fake. Returns the op."""
    library = torch.library.Library("fakes", "FRAGMENT")
    count = 0

    def make(
        kernel: Callable[..., Any],
        fake: Callable[..., Any] | None = None,
        schema: str = "(Tensor x) -> Tensor",
        meta: Callable[..., Any] | None = None,
    ) -> Any:
        nonlocal count
        count += 1
        name = f"op{count}"
        library.define(f"{name}{schema}")
        library.impl(name, kernel, "CPU")
        if fake is not None:
            torch.library.register_fake(f"fakes::{name}", fake, lib=library)
        if meta is not None:
            library.impl(name, meta, "Meta")
        return getattr(torch.ops.fakes, name).default

    yield make
    library._destroy()


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_that_does_what_the_fake_says_is_checked(define: Define) -> None:
    op = define(lambda x: x * 2, like)
    with tp.crosscheck() as report:
        op(torch.ones(2, 3).t())
    assert report.ok
    assert (report.by_fake[str(op)], report.no_rule[str(op)], report.coverage) == (1, 0, 1.0)
    assert "checked against their fakes" in str(report)
    assert report.to_dict()["by_fake"] == {str(op): 1}


@pytest.mark.parametrize(
    ("kernel", "kind", "expected", "got"),
    [
        (lambda x: (x * 2).double(), "dtype", "float32, as the op's registered fake has", "float64"),
        (lambda x: x[:1] * 2, "shape", "result[0] of shape [2, 3], as the op's registered fake has", "of shape [1, 3]"),
        (
            lambda x: (x * 2).t().contiguous().t(),
            "strides",
            "result[0] with strides (3, 1), as the op's registered fake has",
            "result[0] with (1, 2)",
        ),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_kernel_that_contradicts_the_fake(define: Define, kernel: Any, kind: str, expected: str, got: str) -> None:
    op = define(kernel, like)
    with tp.crosscheck() as report:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        op(torch.ones(2, 3))
    (mismatch,) = report.mismatches
    assert (mismatch.op, mismatch.kind, mismatch.expected) == (str(op), kind, expected)
    assert got in mismatch.got
    assert f"{__file__}:{line}" in mismatch.where


def test_each_of_several_results(define: Define) -> None:
    schema = "(Tensor x, Tensor[] more) -> (Tensor, Tensor[])"
    op = define(
        lambda x, more: (x * 2, [y.half() for y in more]),
        lambda x, more: (torch.empty_like(x), [torch.empty_like(y) for y in more]),
        schema,
    )
    with tp.crosscheck() as report:
        op(torch.ones(2), [torch.ones(1).half(), torch.ones(1)])
    assert report.mismatches[0].expected == "float32, float16, float32, as the op's registered fake has"
    assert report.mismatches[0].got == "float32, float16, float16"


def test_an_op_without_a_fake_stays_without_a_rule(define: Define) -> None:
    op = define(lambda x: x.double())
    with tp.crosscheck() as report:
        op(torch.ones(2))
    assert report.ok
    assert (report.no_rule[str(op)], report.by_fake.total()) == (1, 0)
    assert "fakes" not in str(report).partition("without a rule")[0]


def test_a_kernel_on_the_key_meta_is_a_fake(define: Define) -> None:
    op = define(lambda x: x.double(), meta=like)
    with tp.crosscheck() as report:
        op(torch.ones(2))
    assert [mismatch.kind for mismatch in report.mismatches] == ["dtype"]


def test_a_fake_that_raises(define: Define) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("only for matrices")

    op = define(lambda x: x * 2, refuse)
    with tp.crosscheck() as report:
        op(torch.ones(2))
    (mismatch,) = report.mismatches
    assert mismatch.kind == "error"
    assert mismatch.expected == "an error: the op's registered fake raises ValueError: only for matrices"


def test_if_kernel_and_fake_both_raise_nothing_is_reported(define: Define) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("only for matrices")

    op = define(refuse, refuse)
    with tp.crosscheck() as report, pytest.raises(ValueError, match="only for matrices"):
        op(torch.ones(2))
    assert report.ok


def test_sizes_that_depend_on_data(define: Define) -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((torch.library.get_ctx().new_dynamic_size(), 2))

    right = define(lambda x: x[x > 0][:, None].expand(-1, 2).clone(), positive)
    wrong = define(lambda x: x[x > 0][:, None].clone(), positive)
    with tp.crosscheck() as report:
        right(torch.ones(3))
        wrong(torch.ones(3))
    assert [(mismatch.op, mismatch.kind) for mismatch in report.mismatches] == [(str(wrong), "shape")]


def test_other_arguments_than_tensors_reach_the_fake(define: Define) -> None:
    seen = []

    def fake(x: torch.Tensor, others: dict[str, torch.Tensor], count: int) -> torch.Tensor:
        seen.append((type(others["a"]), count))
        return torch.empty_like(others["a"])

    op = define(
        lambda x, others, count: x * others["a"] * count,
        fake,
        schema="(Tensor x, Dict(str, Tensor) others, int count) -> Tensor",
    )
    with tp.crosscheck() as report:
        op(torch.ones(2), {"a": torch.ones(2)}, 3)
    assert (report.mismatches, report.by_fake[str(op)]) == ([], 1)
    assert seen == [(FakeTensor, 3)]


def test_a_layout_that_fakes_have_not_is_compared_by_dtype(define: Define) -> None:
    op = define(lambda x: x.to_sparse(), like)
    wrong = define(lambda x: x.double().to_sparse(), like)
    with tp.crosscheck() as report:
        op(torch.ones(2))
        wrong(torch.ones(2))
    assert [(one.op, one.kind) for one in report.mismatches] == [(str(wrong), "dtype")]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_a_fake_that_does_not_say(define: Define) -> None:
    def depends_on_data(x: torch.Tensor) -> torch.Tensor:
        assert x.sum() > 0
        return like(x)

    op, of_quantized = define(lambda x: x * 2, depends_on_data), define(lambda x: x, like)
    library = torch.library.Library("fakes", "FRAGMENT")
    try:
        library.impl(of_quantized.name().removeprefix("fakes::"), lambda x: x, "QuantizedCPU")
        with tp.crosscheck() as report:
            op(torch.ones(2))
            of_quantized(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    finally:
        library._destroy()
    assert report.mismatches == []
    assert (report.no_rule[str(op)], report.no_rule[str(of_quantized)]) == (1, 1)


def test_the_fake_sees_what_autocast_casts(define: Define) -> None:
    op = define(lambda x, w: x * w, lambda x, w: torch.empty_like(x), "(Tensor x, Tensor w) -> Tensor")
    name = op._schema.name
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={name: "lower_precision_fp"}):
        assert op(x, w).dtype is torch.bfloat16
    assert report.ok
    assert report.by_fake[str(op)] == 2  # autocast calls the op again
    assert report.with_policy[str(op)] == 1


def test_ops_of_torch_library_custom_op() -> None:
    @torch.library.custom_op("fakes_of_custom_op::plain", mutates_args=())
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.double()

    op = torch.ops.fakes_of_custom_op.plain.default
    assert not has_fake(op)  # custom_op registers one that raises
    with tp.crosscheck() as report:
        plain(torch.ones(2))
    assert report.ok
    plain.register_fake(like)
    assert has_fake(op)
    with tp.crosscheck() as report:
        plain(torch.ones(2, requires_grad=True))
    assert [mismatch.kind for mismatch in report.mismatches] == ["dtype"]


def test_the_fake_runs_unseen(define: Define) -> None:
    """The ops that the fake calls are not checked, change no random state and meet no mode of the caller."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    op = define(lambda x: x.clone(), lambda x: torch.rand_like(x))
    before = torch.get_rng_state()
    with tp.crosscheck(raise_on_mismatch=True) as report, Mode():
        op(torch.ones(2))
    assert not any("rand" in name for name in [*seen, *report.checked])
    assert torch.equal(torch.get_rng_state(), before)


def test_ops_of_pytorch_have_no_fake() -> None:
    assert not any(map(has_fake, (torch.ops.aten.mm.default, torch.ops.aten.linear.default)))
