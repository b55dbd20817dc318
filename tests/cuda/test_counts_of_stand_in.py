"""The devices, streams and counts of the stand-in, and the processes that have it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp
from helpers.comparison import assert_same
from helpers.subprocesses import environment

pytestmark = pytest.mark.usefixtures("stand_in")


# --- devices and streams


def test_two_devices() -> None:
    x, y = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    assert torch.cuda.device_count() == 2
    assert (y + 1).device == torch.device("cuda", 1)
    assert y.to("cuda:0").add_(x).tolist() == [2, 2]
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"found at least two devices, cuda:0 and cuda:1"):
        x + y
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:1 and cuda:0"):
        torch.cat([y, x])


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


def test_a_capturing_stream_says_so() -> None:
    other = torch.cuda.Stream()
    with cuda_stand_in.capturing():
        assert torch.cuda.is_current_stream_capturing()
        assert torch._C._cuda_isCurrentStreamCapturing()
        with torch.cuda.stream(other):
            assert not torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.is_current_stream_capturing()


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


def test_bytes_are_counted_on_their_device() -> None:
    gc.collect()
    with cuda_stand_in.counting() as counts:
        x = torch.empty(256, device="cuda")
        y = x + 1
        del y
        z = torch.empty(10, device="cuda:1")
        view = x[:3]
    assert (counts.peak_bytes, counts.kept_bytes) == (2048, 1024)
    assert cuda_stand_in.live_bytes(1) == z.nbytes == 40
    del x
    assert cuda_stand_in.live_bytes() == torch.cuda.memory_allocated()
    del view
    assert torch.cuda.memory_allocated() + 1024 == counts.kept_bytes + cuda_stand_in.live_bytes()


def test_a_resized_out_counts() -> None:
    with cuda_stand_in.counting() as counts:
        out = torch.empty(0, device="cuda")
        torch.arange(100, out=out)
    assert counts.kept_bytes == out.nbytes == 400
    with cuda_stand_in.counting() as counts:
        del out
    assert counts.kept_bytes == -400


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
    assert [cast.widens for cast in counts.casts] == [False, True, True, False]
    assert [cast.launch for cast in counts.casts] == sorted({cast.launch for cast in counts.casts})
    with cuda_stand_in.counting() as counts:
        torch.ones(4).cuda().half().cpu()
    assert casts_of(counts) == [("Float", "Half", 16, 8)]


def test_casts_of_leaves_and_of_the_backward_are_told_apart() -> None:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    with cuda_stand_in.counting() as counts:
        (weight.t().half() @ weight.half() @ (weight * 2).half()).float().sum().backward()
    forward = [cast for cast in counts.casts if not cast.backward]
    assert [cast.of_leaf for cast in forward] == [True, True, False, False]
    assert [cast.address == weight.data_ptr() for cast in forward] == [True, True, False, False]
    assert [(cast.source, cast.of_leaf) for cast in counts.casts if cast.backward] == [
        ("Float", False),
        *[("Half", False)] * 3,
    ]


def test_casts_count_in_a_block_only() -> None:
    x = torch.ones(4, device="cuda")
    x.half()
    with cuda_stand_in.counting() as counts:
        pass
    assert counts.casts == []


def test_allocated_bytes_count_what_is_freed_too() -> None:
    with cuda_stand_in.counting() as counts:
        for _ in range(3):
            torch.empty(100, device="cuda")
        torch.empty(7, device="cuda:1")
    assert (counts.allocated_bytes, counts.peak_bytes, counts.kept_bytes) == (1200, 400, 0)


# --- ops of lists


def lists(count: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    sources = [torch.randn(2, number, device="cuda") for number in range(1, count + 1)]
    return [torch.empty_like(source, dtype=torch.bfloat16) for source in sources], sources


def test_a_list_that_is_copied_at_once_is_one_kernel_and_a_cast_for_each_tensor() -> None:
    targets, sources = lists()
    with cuda_stand_in.counting() as counts:
        torch._foreach_copy_(targets, sources)
    assert counts.kernels == {"aten::_foreach_copy_": 1}
    assert casts_of(counts) == [("Float", "BFloat16", source.nbytes, source.nbytes // 2) for source in sources]
    assert len({cast.launch for cast in counts.casts}) == 1
    for target, source in zip(targets, sources, strict=True):
        assert_same(target, source.bfloat16())


@pytest.mark.parametrize("why", ["another dtype", "another device", "other strides", "gaps", "another shape"])
def test_a_list_that_cuda_copies_one_by_one_counts_so(why: str) -> None:
    targets, sources = lists()
    other = {
        "another dtype": lambda source: source.double(),
        "another device": lambda source: source.to("cuda:1"),
        "other strides": lambda source: source.t().contiguous().t(),
        "gaps": lambda source: torch.stack([source, source], -1)[..., 0],
        "another shape": lambda source: source[:1],
    }[why]
    sources[1] = other(sources[1])
    with cuda_stand_in.counting() as counts:
        torch._foreach_copy_(targets, sources)
    assert counts.kernels == {"aten::copy_": 3}
    assert len(counts.casts) == len({cast.launch for cast in counts.casts}) == 3
    for target, source in zip(targets, sources, strict=True):
        assert_same(target, source.to(target.device, torch.bfloat16).expand_as(target).contiguous())


def test_lists_are_copied_from_the_host() -> None:
    targets, sources = lists()
    torch._foreach_copy_(targets, [source.cpu() for source in sources])
    for target, source in zip(targets, sources, strict=True):
        assert_same(target, source.bfloat16())


def test_other_ops_of_lists_are_one_kernel() -> None:
    _, tensors = lists()
    with cuda_stand_in.counting() as counts:
        more = torch._foreach_add(tensors, 1)
        torch._foreach_mul_(more, tensors)
        torch._foreach_zero_(more)
    assert counts.kernels == {"aten::_foreach_add.Scalar": 1, "aten::_foreach_mul_.List": 1, "aten::_foreach_zero_": 1}
    assert all(tensor.count_nonzero() == 0 for tensor in more)


def test_a_captured_list_is_copied_at_each_replay() -> None:
    targets, sources = lists()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._foreach_copy_(targets, sources)
    for source in sources:
        source.fill_(3)
    with cuda_stand_in.counting() as counts:
        graph.replay()
    assert counts.kernels == {"aten::_foreach_copy_": 1}
    assert all((target == 3).all() for target in targets)


# --- what it is for


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


def test_processes_that_multiprocessing_spawns_have_it() -> None:
    program = """
import multiprocessing, operator, torch
if __name__ == "__main__":
    import cuda_stand_in
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(torch.cuda.is_available), pool.apply(torch.cuda.device_count))
"""
    done = subprocess.run(
        [sys.executable, "-m", "cuda_stand_in", "-c", program],
        env=environment(),
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "2"]


def test_too_late_is_an_error_with_the_remedy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch, cuda_stand_in as s; s.start()"],
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert "PyTorch is already imported" in done.stderr
    assert "before `import torch`" in done.stderr
