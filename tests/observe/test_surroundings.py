"""What a trace says of unobserved computations, and `watch_steps`."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.optim import optimizer as torchs
from torch.utils.data import DataLoader

import torch_promote as tp
from torch_promote.observe import surroundings
from torch_promote.observe.surroundings import watch_steps
from torch_promote.reading.trace import trace
from torch_promote.recording import recorder

_get_hook = torch._C._dynamo.eval_frame.set_guard_complete_hook


def test_threads() -> None:
    """However they are started, and with the profiler that the program has set for them."""
    profiled: list[str] = []
    threading.setprofile(lambda frame, event, argument: profiled.append(threading.current_thread().name))
    try:
        with trace() as report:
            thread = threading.Thread(target=torch.ones, args=(2,), name="a name")
            thread.start()
            thread.join()
            for pool in (ThreadPool(1), ThreadPoolExecutor(1, "pool")):
                with pool:
                    pool.map(torch.ones, (2,))
    finally:
        threading.setprofile(None)
    assert report.calls == []
    threads = 1 + 4 + 1  # a ThreadPool has three more than its workers
    assert [sentence.partition(".")[0] for sentence in report.not_seen] == [f"Threads started in the block: {threads}"]
    assert report.content().verdict.endswith(f" Threads that were not traced: {threads}.")
    assert {"a name", "pool_0"} <= set(profiled)


def test_threads_that_a_region_does_not_reach() -> None:
    found: list[torch.dtype] = []

    def work() -> None:
        found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    def started(block: Any) -> str:
        with trace() as report, block:
            for _ in range(2):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        return str(report.not_seen[0]).partition("Open a block in each thread.")[2]

    start = threading.Thread.start
    said = started(tp.my_autocast("cpu"))
    assert re.fullmatch(
        r" Autocast was on where 2 of them were started \(region at test_surroundings.py:\d+\)\. A region acts "
        r"only in the thread that opens it: open one in each thread\.",
        said,
    )
    assert "were started (a region)" in started(torch.autocast("cpu"))
    assert started(tp.my_autocast("cpu", enabled=False)) == started(contextlib.nullcontext()) == ""
    assert set(found) == {torch.float32}
    assert threading.Thread.start is start


def test_other_code_may_put_a_start_of_threads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # which is what there is afterwards
    started: list[threading.Thread] = []
    with trace():
        before = threading.Thread.start

        def theirs(self: threading.Thread) -> None:
            started.append(self)
            before(self)

        threading.Thread.start = theirs  # type: ignore[method-assign]
    for _ in range(2):
        with trace() as report, tp.my_autocast("cpu"):
            thread = threading.Thread(target=len, args=("",))
            thread.start()
            thread.join()
        assert "Autocast was on where 1 of them were started" in str(report.not_seen[0])
        assert threading.Thread.start is theirs
    assert len(started) == 2


def test_what_python_does_not_count_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(multiprocessing.process, "_process_counter")
    with trace() as report:
        threading.setprofile(None)
    (sentence,) = report.not_seen
    assert sentence.startswith("Whether the block has started and ended threads or processes is unknown: other code ")


@torch._inductor.config.patch(compile_threads=2)
def test_threads_of_inductor_run_no_ops() -> None:
    AsyncCompile.pool.cache_clear()
    ended = threading.Event()

    def read() -> None:
        ended.wait()

    read.__module__ = SubprocPool.__module__  # a pool of processes reads in such a thread
    with trace() as report:
        AsyncCompile.pool().submit(int).result()
        threading.Thread(target=read).start()
    ended.set()
    assert report.not_seen == []


def test_workers_of_a_data_loader() -> None:
    with trace() as report:
        for _ in DataLoader(range(4), num_workers=1, multiprocessing_context="fork"):
            pass
    assert any("workers of a DataLoader: 1." in sentence for sentence in report.not_seen)


def test_compiled_functions() -> None:
    function = torch.compile(lambda x: (x.sin() + 1).cos(), backend="eager")
    x = torch.ones(3)
    function(x)
    with trace() as report:
        function(x)
        with trace() as inner:
            function(x)
            function(x)
        x.exp()
    assert report.not_seen[0].startswith("Calls of compiled functions: at least 3.")
    assert inner.not_seen[0].startswith("Calls of compiled functions: at least 2.")
    assert _get_hook(None) is None


#: PyTorch's wrapper of compiled functions, with the variables that the trace reads.
WRAPPER = """
def wrap(fn):
    def compile_wrapper(*args, **kwargs):
        cleanups = []
        compiled_code_ran(True)
        result = fn(*args, **kwargs)
        for one in cleanups:
            one()
        return result
    return compile_wrapper
"""


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("", None),
        ("fn", "read"),
        ("args", "read"),
        ("kwargs", "read"),
        ("cleanups", "return"),
        ("result", "return"),
        ("compile_wrapper", "read and return"),
    ],
)
def test_what_pytorch_does_not_say_of_compiled_functions_is_unknown(name: str, unknown: str | None) -> None:
    made: dict[str, Any] = {"compiled_code_ran": surroundings._compiled_code_ran}
    source = re.sub(rf"\b{name}\b", "renamed", WRAPPER) if name else WRAPPER
    exec(compile(source, surroundings._COMPILING, "exec"), made)
    with trace(values=True) as report:
        made["wrap"](torch.exp)(torch.ones(2))
    said = [str(one).partition(":")[0] for one in report.not_seen if one.kind == "unknown"]
    assert said == ([] if unknown is None else [f"What compiled functions {unknown} is unknown"])


def test_a_compiled_function_runs_on_if_its_arguments_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("no")

    function = torch.compile(lambda x: x + 1, backend="aot_eager")
    monkeypatch.setattr(recorder, "_referred_to", refuse)
    with trace(values=True) as report:
        assert function(torch.ones(2)).tolist() == [2, 2]
    assert "Parts of the recording are unknown (begin_compiled): RuntimeError: no." in report.not_seen


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_a_trace_says_of_a_compiled_model(
    backend: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if backend == "inductor":
        request.getfixturevalue(backend)
    # A folder of another name than the usual one, whose contents save time.
    usual = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()))
    usual.mkdir(exist_ok=True)
    (tmp_path / "cache").symlink_to(usual)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.ones(4, 8)

    def inside() -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return model(x)  # type: ignore[no-any-return]

    compiled = torch.compile(model if place == "around" else inside, backend=backend)

    def step() -> None:
        with tp.my_autocast("cpu", enabled=place == "around"):
            y = compiled(x) if place == "around" else compiled()
        y.float().square().sum().backward()

    with trace(model) as first:  # it compiles
        step()
    assert [one.partition(". ")[0] for one in first.not_seen] == ["Calls of compiled functions: at least 1"]
    with trace(model) as report:
        step()
    text = f"{report}\n{report.explain('(model)')}"
    assert "Autocast was off" not in text
    assert "autocast off by" not in text
    assert [one.partition(". ")[0] for one in report.not_seen] == ["Calls of compiled functions: at least 1"]
    (linear,) = report.calls.where(op="linear") or [None]
    of_graph = [call for call in report.calls if call.policy_source == "compiled code"]
    if backend == "eager":
        assert linear is not None
        assert linear.policy_name == "lower_precision_fp"
        assert not of_graph
    else:
        assert linear is None
        assert {call.phase for call in of_graph} >= {"forward"}
        assert {call.name for call in of_graph} & {"aten::addmm", "aten::addmm.out"}
        assert not {call.name for call in of_graph} & {"aten::square", "aten::sum"}  # of the loss
        assert report.content().verdict.endswith("The casts of compiled functions are part of their graphs.")


def test_a_graph_is_not_the_model() -> None:
    compiled, model = torch.compile(lambda x: (x @ x).relu(), backend="aot_eager"), nn.Sequential(nn.Linear(4, 4))
    compiled(torch.ones(4, 4))
    with trace() as report:
        compiled(torch.ones(4, 4))
        model(torch.ones(4, 4))
    assert {call.module for call in report.calls.where(op="linear")} == {"0"}


def test_the_phase_of_a_compiled_step() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    step = torch.compile(torch.optim.SGD([weight], lr=0.1, foreach=False).step, backend="aot_eager")
    step()
    with trace() as report:
        step()
    assert {call.phase for call in report.calls} == {"optimizer"}


def test_a_hook_of_the_program_is_called_and_put_back() -> None:
    seen: list[bool] = []

    def hook(hit: bool) -> bool:
        seen.append(hit)
        return hit

    function = torch.compile(lambda x: x.tan() + 2, backend="eager")
    _get_hook(hook)
    try:
        with trace():
            function(torch.ones(2))
            function(torch.ones(2))
        assert _get_hook(None) is hook
    finally:
        _get_hook(None)
    assert seen[-1] is True


def test_a_model_that_was_not_called() -> None:
    model, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    with trace(model) as report:
        other(torch.ones(1, 2))
    assert len(report.not_seen) == 1
    assert report.not_seen[0].startswith("The given model was not called in the block, so calls have no module")
    for called in (model, model[0]):
        with trace(model) as report:
            other(torch.ones(1, 2))
            called(torch.ones(1, 2))
        assert report.not_seen == []
    with trace() as report:
        other(torch.ones(1, 2))
    assert report.not_seen == []


def test_listeners_come_and_go_at_a_step() -> None:
    """PyTorch raises if a hook adds another one during the iteration. Hooks registered later are called as well."""
    told: list[str] = []
    weight, before = torch.nn.Parameter(torch.ones(1)), len(torchs._global_optimizer_post_hooks)
    with contextlib.ExitStack() as blocks, contextlib.ExitStack() as inner:

        def first(optimizer: torch.optim.Optimizer) -> None:
            told.append("first")
            if len(told) == 1:
                inner.enter_context(watch_steps(lambda optimizer: told.append("inner")))
            else:
                inner.close()

        blocks.enter_context(watch_steps(first))
        handle = torchs.register_optimizer_step_post_hook(lambda *args: told.append("program"))
        blocks.callback(handle.remove)
        for _ in range(3):
            torch.optim.SGD([weight], lr=0.1).step()
            assert len(torchs._global_optimizer_post_hooks) == before + 2, "one for all listeners"
    assert told == ["first", "program", "inner", "first", "program", "first", "program"]
    assert len(torchs._global_optimizer_post_hooks) == before
