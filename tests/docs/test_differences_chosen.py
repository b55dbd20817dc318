"""Deliberate differences from stock, and deliberate similarities.

docs/differences.md names these tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import torch_promote as tp
from helpers.casts import Region, casts_made, half, ours, stock

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
F8 = torch.float8_e4m3fn


def ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (2, 2))).to(dtype)


# --- differences


@pytest.mark.usefixtures("pretend_cuda")
def test_promote_under_a_double_autocast_dtype_has_an_answer() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 2, device="cuda")
        with tp.stock_autocast("cuda", FP64), pytest.raises(RuntimeError, match="promote type is double"):
            torch.addcmul(x, x, x)
        with tp.my_autocast("cuda", FP64):
            assert torch.addcmul(x, x, x).dtype is FP32


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_an_autocast_dtype_that_is_not_floating_is_refused(dtype: torch.dtype) -> None:
    assert torch.autocast("cuda", dtype).fast_dtype is dtype
    with pytest.warns(UserWarning, match="not supported"):
        torch.autocast("cpu", dtype)
    for device_type in ("cuda", "cpu"):
        with pytest.raises(tp.errors.DtypeError, match="is not a floating dtype"):
            tp.my_autocast(device_type, dtype)


def test_device_types_without_a_column_are_refused() -> None:
    assert torch.autocast("mps", enabled=False).device == "mps"
    with pytest.raises(
        tp.errors.UnsupportedDeviceError, match=r"no device type 'mps'.* torch\.autocast\('mps'\) serves"
    ):
        tp.my_autocast("mps", enabled=False)


@pytest.mark.usefixtures("pretend_cuda")
def test_one_region_takes_several_device_types_or_none() -> None:
    with pytest.raises(ValueError, match="device_type"):
        torch.autocast(["cpu", "cuda"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device_type"):
        torch.autocast()  # type: ignore[call-arg]
    with tp.my_autocast(["cpu", "cuda"]):
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cuda")
    with tp.my_autocast():
        assert torch.is_autocast_enabled("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("pretend_cuda")
def test_a_banned_op_says_which_op_and_what_to_do() -> None:
    def message(region: Any) -> str:
        with FakeTensorMode(), region:
            x = torch.ones(2, 2, device="cuda")
            with pytest.raises(RuntimeError) as error:
                nn.functional.binary_cross_entropy(x, x)
        return str(error.value)

    assert "aten::binary_cross_entropy" not in message(tp.stock_autocast("cuda"))
    of_ours = message(tp.my_autocast("cuda"))
    assert of_ours.startswith("aten::binary_cross_entropy is banned under autocast on cuda")
    assert "BCEWithLogitsLoss" in of_ours
    assert "my_autocast(enabled=False)" in of_ours


def test_ending_a_region_that_is_not_open_is_an_error() -> None:
    def nesting_after_one_exit_too_many() -> int:
        region = tp.stock_autocast("cpu")
        with region:
            pass
        region.__exit__(None, None, None)
        return torch.autocast_increment_nesting() - 1

    with ThreadPoolExecutor(1) as pool:  # its nesting is wrong for good
        assert pool.submit(nesting_after_one_exit_too_many).result() == -1
    region = tp.my_autocast("cpu")
    with region:
        pass
    with pytest.raises(tp.errors.RegionError, match="is not open in this thread"):
        region.__exit__(None, None, None)


def test_an_op_with_nothing_to_cast_is_dispatched_once() -> None:
    def records(region: Region) -> int:
        x = ones(BF16)
        with region(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.mm(x, x)
        # As recorded; the table that the profiler prints merges an op with an only child of its name.
        return [event.name() for event in profiler.profiler.kineto_results.events()].count("aten::mm")  # type: ignore[union-attr]

    assert records(stock) == 2
    assert records(ours) == 1


def cast_nodes(region: Region, w: torch.Tensor) -> list[Any]:
    """The nodes of a weight's casts in two graphs, the first of which is gone when the second begins."""
    nodes = []
    with region():
        for _ in range(2):
            product = ones(BF16, 8, 16) @ w
            assert product.grad_fn is not None
            nodes.append(product.grad_fn.next_functions[1][0])
    return nodes


def test_a_casts_node_has_a_name_of_its_own() -> None:
    w = torch.randn(16, 4, requires_grad=True)
    assert [node.name() for node in cast_nodes(stock, w)] == ["ToCopyBackward0"] * 2
    assert [node.name() for node in cast_nodes(ours, w)] == ["CastBackward"] * 2
    with ours():
        (activation,) = torch.mm(w * 2, ones(BF16, 4, 4)).grad_fn.next_functions[:1]  # type: ignore[union-attr]
    assert activation[0].name() == "CastBackward"


def test_the_node_of_a_cast_lives_as_long_as_its_graph() -> None:
    def lives_on(region: Region) -> bool:
        w = torch.randn(16, 4, requires_grad=True)
        with region():
            node = (ones(BF16, 8, 16) @ w).grad_fn.next_functions[1][0]  # type: ignore[union-attr]
            node.metadata["seen"] = True
            del node
            again = (ones(BF16, 8, 16) @ w).grad_fn.next_functions[1][0]  # type: ignore[union-attr]
            return "seen" in again.metadata

    assert (lives_on(stock), lives_on(ours)) == (True, False)


def test_frozen_weights_are_cast_once_if_the_mode_is_named() -> None:
    low = ones(BF16, 4, 4)

    def frozen(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        with region():
            torch.mm(w, w), torch.mm(low, w)

    def view(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4))
        with region():
            torch.mm(w.t(), low), torch.mm(low, w.t())

    assert (casts_made(frozen, stock), casts_made(frozen, ours)) == (3, 3)
    assert (casts_made(view, stock), casts_made(view, ours)) == (2, 2)
    for cache in ("persistent", "all"):
        region = functools.partial(ours, cache=cache)
        assert (casts_made(frozen, region), casts_made(view, region)) == (1, 2)  # views are cast as under stock


def test_casts_of_weights_made_in_inference_mode_are_kept_if_the_mode_is_named() -> None:
    low = ones(BF16, 4, 4)

    def program(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4))
        with region(), torch.inference_mode():
            torch.mm(low, w), torch.mm(low, w)

    assert (casts_made(program, stock), casts_made(program, ours)) == (2, 2)
    for cache in ("persistent", "all"):
        assert casts_made(program, functools.partial(ours, cache=cache)) == 1


def test_a_cast_has_a_record_of_its_own_in_the_profiler() -> None:
    def records(region: Region) -> set[str]:
        with region(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.mm(ones(FP32), ones(FP32))
        names = {event.name() for event in profiler.profiler.kineto_results.events()}  # type: ignore[union-attr]
        return names & {"torch_promote::cast", "aten::_to_copy"}

    assert records(stock) == {"aten::_to_copy"}
    assert records(ours) == {"torch_promote::cast"}


def test_a_weight_made_in_inference_mode_is_cast_at_every_use() -> None:
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.ones(2, 2))

    def program(region: Region) -> None:
        with region(), torch.no_grad():
            torch.mm(weight, weight)

    assert (casts_made(program, stock), casts_made(program, ours)) == (1, 2)


# --- the same on purpose: what each gives, or the error that it raises


def mm_of_float8(region: Region) -> Any:
    with region():
        return torch.mm(ones(F8), ones(BF16)).dtype


def mm_of_double(region: Region) -> Any:
    with region():
        return torch.mm(ones(FP64), ones(FP64)).dtype


def cat_of_double(region: Region) -> Any:
    with region():
        return torch.cat([ones(FP64), ones(BF16)]).dtype


def exp_on_the_cpu(region: Region) -> Any:
    with region(FP16):
        return torch.tensor([100.0], dtype=FP16).exp().item()


def mv_of_mixed(region: Region) -> Any:
    with region():
        return torch.mv(ones(BF16), ones(FP32, 2)).dtype


def in_place(region: Region) -> Any:
    with region():
        return ones(FP32).addmm_(ones(BF16), ones(FP32)).dtype


def with_out(region: Region) -> Any:
    with region():
        return torch.mm(ones(FP32), ones(FP32), out=torch.empty(2, 2)).dtype


def assert_has_two_casts(use: Callable[[Region, Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`use` multiplies by a weight in a region of stock and in another one. If that is ours, it makes a second cast."""

    def program(region: Region) -> torch.Tensor:
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(8, 8))
        y, z = use(region, w)
        (y.square() + z).float().sum().backward()
        assert w.grad is not None
        return w.grad

    assert casts_made(program, ours) == casts_made(program, stock) + 1
    one, two = program(stock), program(ours)
    assert torch.equal(one, one.bfloat16().float())  # summed in bfloat16
    assert not torch.equal(two, two.bfloat16().float())
    torch.testing.assert_close(two, one, rtol=0.02, atol=0.02)


def test_a_weight_used_in_stock_and_in_ours_inside_it_has_two_casts() -> None:
    x = torch.randn(8, 8)

    def use(inner: Region, w: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with stock():
            y = x @ w
            with inner():
                return y, x @ w

    assert_has_two_casts(use)


def test_a_weight_used_in_stock_inside_a_disabled_region_of_ours_has_two_casts() -> None:
    x = torch.randn(8, 8)

    def use(outer: Region, w: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with outer():
            y = x @ w
            with outer(enabled=False), stock():
                return y, x @ w

    assert_has_two_casts(use)


SAME: dict[Callable[[Region], Any], Any] = {
    mm_of_float8: BF16,
    mm_of_double: FP64,
    cat_of_double: FP64,
    exp_on_the_cpu: float("inf"),
    mv_of_mixed: RuntimeError,
    in_place: RuntimeError,
    with_out: FP32,
}


@pytest.mark.parametrize(("run", "expected"), SAME.items(), ids=lambda run: getattr(run, "__name__", ""))
def test_is_as_in_stock(run: Callable[[Region], Any], expected: Any) -> None:
    def outcome(region: Region) -> Any:
        try:
            return run(region)
        except Exception as error:
            return type(error)

    assert outcome(stock) == outcome(ours) == expected


def test_without_cuda_a_region_of_cuda_is_disabled_as_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    for region in (tp.stock_autocast, tp.my_autocast):
        with pytest.warns(UserWarning, match="CUDA is not available"), region("cuda"):
            assert not torch.is_autocast_enabled("cuda")


def test_a_disabled_region_sets_the_dtype_as_in_stock() -> None:
    for region in (stock, ours):
        with region(FP16, enabled=False):
            assert torch.get_autocast_dtype("cpu") is FP16
            assert torch.equal(torch.mm(ones(FP32), ones(FP32)), half(ones(FP32), FP32) * 2)
