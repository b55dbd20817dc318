"""A trace contains the calls and casts that an independent TorchDispatchMode sees and the reference plans."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.counting_mode import CountingMode, count_both_ways, counts_of
from helpers.plan_from_report import differences
from helpers.traced_programs import PROGRAMS, Block, Region, database_steps, with_half_of
from torch_promote.parity.samples import op_database
from torch_promote.reading.trace import trace

OVERRIDES = {"linear": "fp32", "softmax": "lower_precision_fp", "add": "promote", "mm": torch.float16, "sum": "fp32"}
NOTHING = {"linear": "fallthrough", "softmax": "keep", "layer_norm": "fallthrough", "addcmul": "promote"}


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    with tp.register_policy("relu", "fp32"), tp.register_policy("matmul", "fp32"), tp.my_autocast("cpu"):
        yield


@contextlib.contextmanager
def _default() -> Iterator[None]:
    before = tp.set_default_policy("cuda")
    try:
        with tp.my_autocast("cpu"):
            yield
    finally:
        tp.set_default_policy(before)


@contextlib.contextmanager
def _two(outer: Region, inner: Region) -> Iterator[None]:
    with outer(), inner():
        yield


REGIONS: dict[str, Region] = {
    "my_autocast": lambda: tp.my_autocast("cpu"),
    "overrides": lambda: tp.my_autocast(
        "cpu", overrides={"linear": torch.float16, "layer_norm": "fp32", "add": "fp32"}
    ),
    "cache=all": lambda: tp.my_autocast("cpu", cache="all"),
    "no cache": lambda: tp.my_autocast("cpu", cache_enabled=False),
    "stock": lambda: torch.autocast("cpu"),
    "none": contextlib.nullcontext,
}
#: Regions that may cast nothing.
OTHER_REGIONS: dict[str, Region] = {
    "float16": lambda: tp.my_autocast("cpu", torch.float16),
    "more overrides": lambda: tp.my_autocast("cpu", overrides=OVERRIDES),
    "casting nothing": lambda: tp.my_autocast("cpu", overrides=NOTHING),
    "nested": lambda: _two(
        OTHER_REGIONS["more overrides"],
        lambda: tp.my_autocast("cpu", torch.float16, overrides={"linear": "fallthrough"}),
    ),
    "register_policy": _registered,
    "default policy": _default,
    "install": lambda: _two(tp.install, lambda: torch.autocast("cpu")),
}
#: Entries of the op database that run something above the mode and inside of an op, which a trace does not look into.
NOT_EQUAL = {
    "fft.hfft": "PyTorch copies a conjugated input for a kernel that does not take it",
    **dict.fromkeys(("fft.hfft2", "fft.hfftn", "linalg.eig", "linalg.eigvals", "polar"), "as fft.hfft"),
    "nn.functional.linear_cross_entropy.chunked": "the autograd kernel of a custom op detaches its results",
    "nn.functional.linear_cross_entropy.chunked_none": "as nn.functional.linear_cross_entropy.chunked",
}
#: Conversions that are neither casts nor the program's: those of scaled_dot_product_attention; and casts in a formula.
OTHER_CONVERSIONS = {("transformer", None): 10, ("double backward", "overrides"): -4}
#: Results whose memory is uninitialized, or which PyTorch does not repeat.
NOT_REPEATED = ("empty", "new_empty", "resize", "bernoulli", "__rpow__")
EVERYDAY = ["mm", "exp", "cat", "softmax", "nn.functional.hinge_embedding_loss", "masked.var", "unravel_index", "lu"]
EVERYDAY += ["svd", "to_sparse", "nn.functional.ctc_loss", "view_as_complex"]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_and_casts_are_those_of_a_mode(name: str, region: str) -> None:
    torch.manual_seed(0)
    report, mode = count_both_ways(lambda: PROGRAMS[name](REGIONS[region]))
    assert counts_of(report) == mode.counts
    assert report.total.calls == len(report.calls)
    assert report.not_seen == []
    assert list(differences(report.calls)) == []
    made = sum(not cast.reused for call in report.calls for cast in call.casts)
    other = 0 if region == "none" else OTHER_CONVERSIONS.get((name, None), 0)
    assert made == mode.casts - OTHER_CONVERSIONS.get((name, region), other)
    assert (made > 0) == (region != "none")
    assert report.total.casts == made


@pytest.mark.parametrize(("name", "region"), with_half_of(PROGRAMS, OTHER_REGIONS))
def test_calls_are_as_planned(name: str, region: str) -> None:
    torch.manual_seed(0)
    with trace() as report:
        PROGRAMS[name](OTHER_REGIONS[region])
    assert len(report.calls) > 30
    assert list(differences(report.calls)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["weights", "persistent", "all", "none"])
@pytest.mark.usefixtures("nothing_persists")
def test_an_lstm_which_some_processors_refuse(cache: str, dtype: torch.dtype) -> None:
    """In half precision, oneDNN has none for them. The error is stock's, and a trace has the call and its casts."""
    model, x = torch.nn.LSTM(4, 5), torch.randn(3, 2, 4)

    def ending(region: Any) -> Any:
        try:
            with region:
                loss = model(x)[0].float().square().sum()
        except RuntimeError as error:
            return str(error)
        loss.backward()
        return [loss, *(weight.grad for weight in model.parameters())]

    expected = ending(tp.stock_autocast("cpu", dtype))
    model.zero_grad()
    with trace() as report:
        got = ending(tp.my_autocast("cpu", dtype, cache=cache))
    assert_same(got, expected)
    (call,) = report.calls.where(op="mkldnn_rnn_layer")
    assert call.error == isinstance(expected, str)
    assert [cast.kind for cast in call.casts] == ["activation", *["weight"] * 4, *["activation"] * 2]
    assert list(differences(report.calls)) == []


def test_module_policies_are_as_planned() -> None:
    model = torch.nn.Sequential(Block(), Block())
    tp.set_module_policy(model, {"1": {"linear": "fp32", "softmax": torch.float16}, "0.up": {"linear": "fallthrough"}})
    with trace(model) as report:
        with tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
            output = model(torch.randn(2, 3, 8))
        output.float().sum().backward()
    assert list(differences(report.calls)) == []
    policies = {call.policy_name for call in report.calls.where(op="linear")}
    assert policies == {"lower_precision_fp", "fp32", "fallthrough"}


@pytest.mark.parametrize("region", REGIONS)
def test_calls_in_inference_mode(region: str) -> None:
    """In separate runs, because in inference mode PyTorch passes a whole composite op to a mode first."""
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 8), Block().eval()
    with torch.inference_mode(), REGIONS[region](), CountingMode() as mode:
        model(x)
    with torch.inference_mode(), trace() as report, REGIONS[region]():
        model(x)
    casts = sum(not cast.reused for call in report.calls for cast in call.casts)
    assert report.calls.where(op="aten::linear")
    if region == "none":
        views = Counter(
            {"aten::view": counts_of(report)["aten::_reshape_alias"]}
        )  # PyTorch makes no alias under a mode
        assert counts_of(report) + views == mode.counts + Counter({"aten::_reshape_alias": views.total()})
    else:
        assert casts == report.total.casts > 0
        assert counts_of(report)["aten::_to_copy"] == casts


def test_hooks_for_saved_tensors() -> None:
    x = torch.randn(3, 3, requires_grad=True)

    def program() -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved * 1), tp.my_autocast("cpu"):
            loss = torch.softmax(x @ x, -1).exp().sum()
        loss.backward()

    report, mode = count_both_ways(program)
    assert counts_of(report) == mode.counts
    assert mode.counts["aten::clone"] == mode.counts["aten::mul.Tensor"] - 1 == 4


def test_conversions_of_the_program_are_no_casts() -> None:
    x = torch.ones(2, 2)

    def program() -> None:
        with tp.my_autocast("cpu"):
            torch.mm(x.bfloat16(), x).float().to(torch.float16)

    report, mode = count_both_ways(program)
    assert mode.counts["aten::_to_copy"] == 4
    assert [str(cast) for call in report.calls for cast in call.casts] == ["mat2: float32 -> bfloat16, 8 bytes"]


def test_which_of_two_casts_is_reused() -> None:
    """With a weight and an activation of the same shape, the cache has only the weight's cast."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with trace() as report, tp.my_autocast("cpu"):
        for _ in range(2):
            torch.mm(weight, x)
            torch.mm(x, weight.t())
            torch.mm(x + 0, weight)
    casts = [[(cast.kind, cast.reused) for cast in call.casts] for call in report.calls.where(op="mm")]
    new, kept, activation = ("weight", False), ("weight", True), ("activation", False)
    assert casts == [
        [new, activation],
        [activation, ("weight", False)],
        [activation, kept],
        [kept, activation],
        [activation, ("weight", False)],
        [activation, kept],
    ]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.mm(grad, ctx.saved_tensors[0]), None


def test_what_a_backward_casts_is_a_gradient_or_a_weight() -> None:
    x, weight = torch.ones(2, 2, requires_grad=True), torch.nn.Parameter(torch.ones(2, 2))
    with trace() as report, tp.my_autocast("cpu"):
        _Product.apply(x, weight).sum().backward()
    (product,) = report.calls.where(op="mm", phase="backward")
    assert [cast.kind for cast in product.casts] == ["gradient", "weight"]


def test_a_tensor_that_changed_is_not_cast_again() -> None:
    x, other = torch.ones(2, 2), torch.ones(2, 2)
    with trace() as report, tp.my_autocast("cpu"):
        for changes in (0, 0, 1, 0):
            x.add_(changes) if changes else None
            torch.mm(x, other)
    casts = [call.casts for call in report.calls.where(op="mm")]
    assert [[cast.earlier for cast in one] for one in casts] == [[0, 0], [1, 1], [0, 2], [1, 3]]
    assert len({cast.tensor for one in casts for cast in one}) == 2


def test_printing_is_no_call_of_the_program() -> None:
    x = torch.ones(3)
    report, mode = count_both_ways(lambda: (str(x), x + 1, repr(x)))
    assert counts_of(report) == mode.counts == {"aten::add.Tensor": 1}


def _check_samples(name: str, most: int) -> None:
    """A trace has the calls that a mode counts, and changes neither results, gradients nor errors."""
    region = REGIONS["my_autocast"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = (database_steps(name, most) for _ in range(3))  # each on tensors of its own
        for (label, alone), (_, traced), (_, counted) in zip(*runs, strict=True):
            report, mode = count_both_ways(lambda step=counted: step(region))
            assert name in NOT_EQUAL or counts_of(report) == mode.counts, label
            expected = alone(region)
            with trace():
                got = traced(region)
            if isinstance(expected, str) or isinstance(got, str):
                assert got == expected, label
            elif not name.startswith(NOT_REPEATED):
                for ours, plain in zip(tree_leaves(got), tree_leaves(expected), strict=True):
                    assert_same(ours, plain)


@pytest.mark.parametrize("name", EVERYDAY)
def test_calls_and_outcomes_of_an_entry_of_the_op_database(name: str) -> None:
    _check_samples(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(op_database()))
def test_calls_and_outcomes_of_all_entries_of_the_op_database(name: str) -> None:
    _check_samples(name, 9)
