"""The end of casts where a region could deadlock: under PyTorch's lock, at process exit, and in a fork."""

from __future__ import annotations

import pytest

from helpers.subprocesses import output_of


def test_a_region_entered_inside_stocks_cast_does_not_deadlock() -> None:
    result = output_of(
        """
        import torch, torch_promote as tp
        from torch.utils._python_dispatch import TorchDispatchMode
        w, inner, x = (torch.ones(4, 4, requires_grad=grad) for grad in (True, True, False))
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._to_copy.default and args[0] is w:
                    with tp.my_autocast("cpu"):
                        x @ inner
                return func(*args, **(kwargs or {}))
        with torch.autocast("cpu"), Mode():
            x @ w
        print(tp.cache_info()["entries"])
        """
    )
    assert result == "0\n"


@pytest.mark.parametrize("where", ["main", "thread", "suspended"])
def test_a_process_may_end_inside_regions(where: str) -> None:
    result = output_of(
        f"""
        import threading, torch, torch_promote as tp
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        def enter():
            torch.autocast("cpu").__enter__()
            tp.my_autocast("cpu").__enter__()
            x @ w
            ready.set()
            if {where!r} == "thread":
                threading.Event().wait()
        def steps():
            with tp.my_autocast("cpu"):
                yield x @ w
        ready = threading.Event()
        if {where!r} == "thread":
            threading.Thread(target=enter, daemon=True).start()
            ready.wait()
        elif {where!r} == "suspended":
            kept = tp.my_autocast("cpu")(steps)()
            next(kept)
        else:
            enter()
        print("done")
        """,
        finalize=True,
    )
    assert result == "done\n"


def test_after_a_fork_both_processes_notice() -> None:
    result = output_of(
        """
        import os, sys, torch, torch_promote as tp
        torch.set_num_threads(1)
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        with tp.my_autocast("cpu"):
            x @ w
            child = os.fork()
            w.data.mul_(3)
            torch.clear_autocast_cache()
            fresh = (x @ w)[0, 0].item() == 12
            if child == 0:
                os._exit(fresh)
            print(fresh, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert result == "True 1\n"


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_the_end_of_a_region_waits_for_no_cast_that_needs_the_gil(seconds: int) -> None:
    """Stock casts while it holds its lock, and a dispatch mode called by the cast needs the GIL."""
    result = output_of(
        """
        import sys, threading, time, torch, torch_promote as tp
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        torch.set_num_threads(1)
        x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
        end = time.monotonic() + float(sys.argv[1])

        def stock():
            while time.monotonic() < end:
                with Mode(), torch.autocast("cpu"):
                    x @ torch.nn.Parameter(x)

        def ours():
            while time.monotonic() < end:
                with tp.my_autocast("cpu"):
                    x @ w

        threads = [threading.Thread(target=stock), threading.Thread(target=ours)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
        """,
        str(seconds),
    )
    assert result == "done\n"
