"""The stand-in device itself: its threads, streams and counts, on which other tests rely."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_backward_runs_on_a_thread_of_the_device(device: str) -> None:
    threads = []
    x = torch.ones(2, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: threads.append((threading.get_native_id(), torch.cuda.current_device())))
    y.sum().backward()
    [(thread, current)] = threads
    assert thread != threading.get_native_id()
    assert current == torch.device(device).index


def test_streams_are_of_the_thread_and_reach_the_backward() -> None:
    stream = torch.cuda.Stream()
    default = torch.cuda.current_stream()
    assert default == torch.cuda.default_stream() != stream
    seen = []
    x = torch.ones(2, device="cuda", requires_grad=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        y = x * 2
    y.register_hook(lambda _: seen.append(torch.cuda.current_stream()))
    y.sum().backward()
    assert seen == [default, stream]


def test_events_and_recorded_memory_are_counted() -> None:
    x, stream = torch.ones(2, device="cuda"), torch.cuda.Stream()
    with cuda_stand_in.counting() as counts:
        stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(stream)
    assert (counts.events_recorded, counts.events_waited_for, counts.data_ptrs_recorded) == (1, 1, 1)


# --- counts


def test_kernels_are_counted_and_views_are_none() -> None:
    x = torch.randn(4, 4, device="cuda")
    with cuda_stand_in.counting() as counts:
        x.t()[1:].unsqueeze(0).view(1, 3, 4)
    assert counts.total == 0
    with cuda_stand_in.counting() as counts:
        (x @ x).add_(1).relu().half()
    assert sorted(counts.kernels) == ["aten::add_.Tensor", "aten::copy_", "aten::mm", "aten::relu"]
    assert counts.total == 4


# --- casts


def casts_of(counts: cuda_stand_in.Counts) -> list[tuple[str, str, int, int]]:
    return [(cast.source, cast.target, cast.read, cast.written) for cast in counts.casts]


def test_casts_are_counted_with_their_bytes_and_copies_in_one_dtype_are_none() -> None:
    x = torch.randn(4, 4, device="cuda")
    with cuda_stand_in.counting() as counts:
        x.half().float().clone().t().contiguous()
        x.double()
        x + x.bool()
    assert casts_of(counts) == [
        ("Float", "Half", 64, 32),
        ("Half", "Float", 32, 64),
        ("Float", "Double", 64, 128),
        ("Float", "Bool", 64, 16),
    ]
    with cuda_stand_in.counting() as counts:
        torch.ones(4).cuda().half().cpu()
    assert casts_of(counts) == [("Float", "Half", 16, 8)]


def test_a_planted_wrong_cast_is_found() -> None:
    x, w = torch.randn(3, 4, device="cuda"), torch.randn(5, 4, device="cuda", requires_grad=True)

    def products(region: object) -> tuple[Tensor, Tensor]:
        with region:
            result = nn.functional.linear(x, w)
        return result, torch.autograd.grad(result.float().sum(), w)[0]

    for ours, stock in zip(products(tp.my_autocast("cuda")), products(tp.stock_autocast("cuda")), strict=True):
        assert_same(ours, stock)
    wrong = tp.my_autocast("cuda", overrides={"linear": "fp32"})
    with pytest.raises(AssertionError):
        assert_same(products(wrong)[0], products(tp.stock_autocast("cuda"))[0])
    with tp.crosscheck() as report, wrong:
        nn.functional.linear(x, w)
    assert list(report.mismatches) == []
