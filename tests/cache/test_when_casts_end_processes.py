"""The end of casts where a region could deadlock: under PyTorch's lock, at process exit, and in a fork."""

from __future__ import annotations

import pytest

from helpers.subprocesses import output_of, run_python


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


FIRST_IN_A_KERNEL = """
import threading, torch, torch_promote as tp

def end_a_region_and_clear():
    with tp.my_autocast("cpu", enabled=False):
        pass
    torch.clear_autocast_cache()

def kernel(x):
    assert torch.mm(w, x).dtype is torch.bfloat16
    thread = threading.Thread(target=end_a_region_and_clear)
    thread.start()
    thread.join()
    return x.clone()

w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
library = torch.library.Library("aten", "IMPL")
library.impl("hardswish", kernel, "CPU")
with tp.my_autocast("cpu"):
    torch.nn.functional.hardswish(x)
print("ended")
"""


def test_the_first_cast_of_a_process_is_made_inside_a_kernel() -> None:
    """There no sentinel is planted; the end of a region in another thread plants one."""
    done = run_python(FIRST_IN_A_KERNEL)  # PyTorch warns of the kernel
    assert (done.returncode, done.stdout.strip()) == (0, "ended")


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


# A kernel in Python makes the empty cast that gets the sentinel: a fork in it comes at the worst moment.
FORK_WHILE_A_SENTINEL_IS_PLANTED = """
import os, signal, sys, threading, torch, torch_promote as tp

torch.set_num_threads(1)
w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
planting, forked = threading.Event(), threading.Event()


def to_copy(tensor, *, dtype=None, **options):
    if tensor.numel() == 0 and not planting.is_set():
        planting.set()
        in_kernel()
    return torch.empty_like(tensor, dtype=dtype).copy_(tensor)


def end_a_region():
    with tp.my_autocast("cpu", enabled=False):
        pass


def end_with(found):
    if child == 0:
        os._exit(found)
    print(found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()


def fork():
    global child
    child = os.fork()
    if child == 0:
        signal.alarm(20)


library = torch.library.Library("aten", "IMPL")
"""

BY_ANOTHER_THREAD = """
in_kernel = forked.wait

with tp.my_autocast("cpu"):
    x @ w
    library.impl("_to_copy", to_copy, "CPU")
    worker = threading.Thread(target=end_a_region)
    worker.start()
    planting.wait(20)
    fork()
    forked.set()
    if child != 0:
        worker.join()
    end_with(tp.cache_info()["entries"])
"""

BY_THE_THREAD_THAT_FORKS = """
in_kernel = fork

with torch.autocast("cpu"):
    with tp.my_autocast("cpu"):
        library.impl("_to_copy", to_copy, "CPU")
        x @ w
    for _ in range(3):
        with tp.my_autocast("cpu"):
            x @ w
    end_with(tp.cache_info()["hits"])
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [
        # In the child that thread is gone. Nobody could tell when the casts end, so they are dropped.
        (BY_ANOTHER_THREAD, "1 0"),
        # It goes on in both processes.
        (BY_THE_THREAD_THAT_FORKS, "3 3"),
    ],
    ids=["another thread", "the thread that forks"],
)
def test_a_fork_while_a_sentinel_is_planted(program: str, found: str) -> None:
    done = run_python(FORK_WHILE_A_SENTINEL_IS_PLANTED + program)  # PyTorch warns of the kernel
    assert (done.returncode, done.stdout.strip()) == (0, found), done.stderr


REGIONS_IN_THE_KERNEL_OF_A_CAST = """
import threading, torch, torch_promote as tp

w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
ready, go_on = threading.Event(), threading.Event()


def to_copy(tensor, *, dtype=None, **options):
    with torch.autocast("cpu", enabled=False), tp.my_autocast("cpu", enabled=False):
        return torch.empty_like(tensor, dtype=dtype).copy_(tensor)


def hold_a_cast():
    with tp.my_autocast("cpu"):
        x @ w
        ready.set()
        go_on.wait()


library = torch.library.Library("aten", "IMPL")
library.impl("_to_copy", to_copy, "CPU")
thread = threading.Thread(target=hold_a_cast)
thread.start()
ready.wait()
for _ in range(3):
    with tp.my_autocast("cpu", enabled=False):
        pass  # its end plants a sentinel, for the thread
go_on.set()
thread.join()
print("ended")
"""


def test_the_kernel_of_a_cast_may_use_regions() -> None:
    done = run_python(REGIONS_IN_THE_KERNEL_OF_A_CAST, timeout=60)  # PyTorch warns of the kernel
    assert (done.returncode, done.stdout.strip()) == (0, "ended")


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
