"""Where ours differs from stock: each program runs under both. A fix in PyTorch makes its test fail.

docs/differences.md names the programs; `pytest -k PROGRAM` runs one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import CastCount, Program, Region, X, casts_made, half, ours, stock
from helpers.probes import in_thread
from helpers.subprocesses import Program as Process
from helpers.subprocesses import output_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
F8 = torch.float8_e4m3fn

#: The programs, with what each gives under stock and under ours: a value, or the type of an error.
PROGRAMS: dict[str, tuple[Program, Any, Any]] = {}


def gives(stock: Any, ours: Any) -> Callable[[Program], Program]:
    """Adds a program to `PROGRAMS`."""

    def add(program: Program) -> Program:
        PROGRAMS[program.__name__] = program, stock, ours
        return program

    return add


def outcome(program: Program, region: Region) -> Any:
    try:
        return program(region)
    except Exception as error:
        return type(error)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4))


def ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (2, 2))).to(dtype)


# --- where stock breaks


@gives(stock=(1, False), ours=(5, True))
def a_weight_updated_in_a_region(region: Region) -> Any:
    """Five steps of SGD in one region: how many losses differ, and whether they are those of a region for each step."""

    def losses(region: Region, steps_in_one_region: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        optimizer, result = torch.optim.SGD(model.parameters(), lr=0.5), []
        for start in range(0, 5, steps_in_one_region):
            with region():
                for _ in range(start, min(start + steps_in_one_region, 5)):
                    optimizer.zero_grad()
                    loss = model(X).float().pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    result.append(loss.item())
        return result

    in_one = losses(region, 5)
    return len(set(in_one)), in_one == losses(region, 1) == losses(stock, 1)


@gives(stock=(False, False), ours=(True, True))
def a_weight_whose_data_is_assigned_in_a_region(region: Region) -> Any:
    w = weight()
    with region():
        X @ w
        w.data = torch.randn(16, 4)
        assigned = torch.equal(X @ w, half(X) @ half(w))
        with torch.no_grad():
            w.add_(1)
        return assigned, torch.equal(X @ w, half(X) @ half(w))


@gives(stock=RuntimeError, ours=True)  # "same dtype": the outer region's cast meets an activation in the inner dtype
def a_weight_used_in_a_nested_region_of_another_dtype(region: Region) -> Any:
    w = weight()
    with region(BF16):
        X @ w
        with region(FP16):
            result = X @ w
    return result.dtype is FP16 and torch.equal(result, half(X, FP16) @ half(w, FP16))


@gives(stock=BF16, ours=FP16)
def a_weight_and_a_leaf_used_in_a_nested_region_of_another_dtype(region: Region) -> Any:
    w, x = weight(), X.clone().requires_grad_()
    with region(BF16):
        x @ w
        with region(FP16):
            return (x @ w).dtype


@gives(stock=RuntimeError, ours=FP16)
def a_weight_used_in_two_threads_of_two_dtypes(region: Region) -> Any:
    w = weight()

    def other() -> torch.dtype:
        with region(FP16):
            return (X @ w).dtype

    with region(BF16):
        X @ w
        return in_thread(other)


@gives(stock=2, ours=1)
def casts_around_another_threads_region(region: Region) -> Any:
    w = weight()

    def other() -> None:
        with region():
            pass

    with CastCount(of=w) as count, region():
        X @ w
        in_thread(other)
        X @ w
    return count.casts


@gives(stock=60, ours=0)
def dropped_weights_alive_in_the_region(region: Region) -> Any:
    dropped = []
    with region():
        for _ in range(60):
            w = weight()
            X @ w
            dropped.append(weakref.ref(w))
            del w
        return sum(ref() is not None for ref in dropped)


@gives(stock=True, ours=False)
def on_after_one_object_was_nested_in_itself(region: Region) -> Any:
    once = region()

    def run() -> bool:
        with once, once:
            pass
        return torch.is_autocast_enabled("cpu")

    return in_thread(run)


ALIKE = {(FP16, FP16): FP16, (F8, F8): F8}
MIXED = [(FP16, BF16), (BF16, FP16), (FP16, FP32), (FP32, FP16), (F8, BF16), (BF16, F8), (F8, FP32)]


@gives(  # "Unexpected floating ScalarType": in one order of float32 and float16 only
    stock=[*[RuntimeError] * 5, FP32, *[RuntimeError] * 3],
    ours=[*ALIKE.values(), *[FP32] * len(MIXED)],
)
def promote_of_every_mixture(region: Region) -> Any:
    def cat(dtypes: tuple[torch.dtype, ...], region: Region) -> torch.dtype:
        with region(BF16):
            return torch.cat([torch.ones(2, dtype=dtype) for dtype in dtypes]).dtype

    return [outcome(functools.partial(cat, dtypes), region) for dtypes in (*ALIKE, *MIXED)]


@gives(stock=[False] * 3, ours=[True] * 3)
def decorated_bodies_that_run_in_steps(region: Region) -> Any:
    def is_on() -> bool:
        return torch.is_autocast_enabled("cpu")

    @region()
    async def coroutine() -> bool:
        await asyncio.sleep(0)
        return is_on()

    @region()
    def generator() -> Generator[bool, None, None]:
        yield is_on()

    @region()
    async def async_generator() -> AsyncGenerator[bool, None]:
        yield is_on()

    async def first() -> bool:
        steps = async_generator()
        result = await anext(steps)
        await steps.aclose()
        return result

    return [asyncio.run(coroutine()), next(generator()), asyncio.run(first())]


@gives(stock=False, ours=True)
def requires_grad_after_a_use_below_autograd(region: Region) -> Any:
    w = weight()

    class During(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                with region():
                    X @ w
            return func(*args, **(kwargs or {}))

    with region():
        with During():
            torch.relu(X)
        return (X @ w).requires_grad


# --- differences by choice


def nesting_after_one_exit_too_many(region: Region) -> Any:
    open_and_ended = region()
    with open_and_ended:
        pass
    open_and_ended.__exit__(None, None, None)
    return torch.autocast_increment_nesting() - 1


@gives(stock=-1, ours=tp.errors.RegionError)
def a_region_that_is_not_open_ends(region: Region) -> Any:
    with ThreadPoolExecutor(1) as pool:  # stock's nesting is wrong for good
        return pool.submit(nesting_after_one_exit_too_many, region).result()


def records(region: Region, dtype: torch.dtype) -> list[str]:
    """As recorded; the table that the profiler prints merges an op with an only child of its name."""
    with region(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.mm(ones(dtype), ones(dtype))
    return [event.name() for event in profiler.profiler.kineto_results.events()]  # type: ignore[union-attr]


@gives(stock=2, ours=1)
def records_of_an_op_with_nothing_to_cast(region: Region) -> Any:
    return records(region, BF16).count("aten::mm")


@gives(stock={"aten::_to_copy"}, ours={"torch_promote::cast"})
def records_of_a_cast(region: Region) -> Any:
    return set(records(region, FP32)) & {"torch_promote::cast", "aten::_to_copy"}


@gives(stock={"ToCopyBackward0"}, ours={"CastBackward"})
def names_of_the_nodes_of_casts(region: Region) -> Any:
    w = torch.randn(16, 4, requires_grad=True)
    with region():
        of_weight, of_activation = ones(BF16, 8, 16) @ w, torch.mm(w * 2, ones(BF16, 4, 4))
    assert of_weight.grad_fn is not None
    assert of_activation.grad_fn is not None
    return {of_weight.grad_fn.next_functions[1][0].name(), of_activation.grad_fn.next_functions[0][0].name()}  # type: ignore[union-attr]


@gives(stock=True, ours=False)
def the_node_of_a_cast_outlives_its_graph(region: Region) -> Any:
    w = torch.randn(16, 4, requires_grad=True)
    with region():
        node = (ones(BF16, 8, 16) @ w).grad_fn.next_functions[1][0]  # type: ignore[union-attr]
        node.metadata["seen"] = True  # type: ignore[union-attr]
        del node
        again = (ones(BF16, 8, 16) @ w).grad_fn.next_functions[1][0]  # type: ignore[union-attr]
        return "seen" in again.metadata  # type: ignore[union-attr]


@gives(stock=1, ours=2)
def casts_of_a_weight_made_in_inference_mode(region: Region) -> Any:
    with torch.inference_mode():
        w = nn.Parameter(torch.ones(2, 2))

    def program(region: Region) -> None:
        with region(), torch.no_grad():
            torch.mm(w, w)

    return casts_made(program, region)


def casts_of_kinds_of_weights(region: Region) -> Any:
    """The casts of a frozen weight, of a view, and of a weight in inference mode."""
    low = ones(BF16, 4, 4)

    def frozen(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        with region():
            torch.mm(w, w), torch.mm(low, w)

    def view(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4))
        with region():
            torch.mm(w.t(), low), torch.mm(low, w.t())

    def inference(region: Region) -> None:
        w = nn.Parameter(torch.randn(4, 4))
        with region(), torch.inference_mode():
            torch.mm(low, w), torch.mm(low, w)

    return [casts_made(program, region) for program in (frozen, view, inference)]


@gives(stock=[3, 2, 2], ours=[3, 2, 2])
def casts_of_kinds_of_weights_by_default(region: Region) -> Any:
    return casts_of_kinds_of_weights(region)


@gives(stock=None, ours=[[1, 2, 1]] * 2)
def casts_of_kinds_of_weights_in_a_mode_that_is_named(region: Region) -> Any:
    if region is stock:  # it has no modes
        return None
    return [casts_of_kinds_of_weights(functools.partial(region, cache=cache)) for cache in ("persistent", "all")]


# --- the same on purpose: what both give


def in_a_region(call: Callable[[], Any]) -> Program:
    def program(region: Region) -> Any:
        with region():
            return call()

    return program


SAME: dict[str, tuple[Callable[[], Any], Any]] = {
    "mm_of_float8": (lambda: torch.mm(ones(F8), ones(BF16)).dtype, BF16),
    "mm_of_double": (lambda: torch.mm(ones(FP64), ones(FP64)).dtype, FP64),
    "cat_of_double": (lambda: torch.cat([ones(FP64), ones(BF16)]).dtype, FP64),
    "exp_on_the_cpu": (lambda: torch.tensor([100.0], dtype=FP16).exp().item(), float("inf")),
    "mv_of_mixed": (lambda: torch.mv(ones(BF16), ones(FP32, 2)).dtype, RuntimeError),
    "in_place": (lambda: ones(FP32).addmm_(ones(BF16), ones(FP32)).dtype, RuntimeError),
    "with_out": (lambda: torch.mm(ones(FP32), ones(FP32), out=torch.empty(2, 2)).dtype, FP32),
}
PROGRAMS |= {name: (in_a_region(call), both, both) for name, (call, both) in SAME.items()}


@gives(stock=(FP16, True), ours=(FP16, True))
def a_disabled_region_sets_the_dtype(region: Region) -> Any:
    with region(FP16, enabled=False):
        product = torch.mm(ones(FP32), ones(FP32))
        return torch.get_autocast_dtype("cpu"), torch.equal(product, ones(FP32) * 2)


@pytest.mark.parametrize(("program", "of_stock", "of_ours"), PROGRAMS.values(), ids=PROGRAMS)
def test_program(program: Program, of_stock: Any, of_ours: Any) -> None:
    assert outcome(program, stock) == of_stock
    assert outcome(program, ours) == of_ours


# --- device types, dtypes and errors of a region


@pytest.mark.usefixtures("pretend_cuda")
def test_the_arguments_of_a_region() -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64, F8, torch.float4_e2m1fn_x2):
        assert torch.autocast("cuda", dtype).fast_dtype is dtype
        with pytest.warns(UserWarning, match="not supported"):
            torch.autocast("cpu", dtype)
        for device_type in ("cuda", "cpu"):
            with pytest.raises(tp.errors.DtypeError, match=r"is not a floating dtype|needs a scale"):
                tp.my_autocast(device_type, dtype)
    assert torch.autocast("hpu", enabled=False).device == "hpu"
    with pytest.raises(
        tp.errors.UnsupportedDeviceError, match=r"no device type 'hpu'.* torch\.autocast\('hpu'\) serves"
    ):
        tp.my_autocast("hpu", enabled=False)
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
def test_promote_under_a_double_autocast_dtype_has_an_answer() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 2, device="cuda")
        with tp.stock_autocast("cuda", FP64), pytest.raises(RuntimeError, match="promote type is double"):
            torch.addcmul(x, x, x)
        with tp.my_autocast("cuda", FP64):
            assert torch.addcmul(x, x, x).dtype is FP32


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


# --- stock's regions and ours inside one another


@pytest.mark.parametrize("stock_is_outer", [True, False])
def test_a_weight_used_in_both_has_two_casts(stock_is_outer: bool) -> None:
    """In ours inside stock's, and in stock's inside a disabled region of ours: autograd sums two casts in float32."""
    x = torch.randn(8, 8)

    def program(region: Region) -> torch.Tensor:
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(8, 8))
        with stock() if stock_is_outer else region():
            y = x @ w
            if stock_is_outer:
                with region():
                    z = x @ w
            else:
                with region(enabled=False), stock():
                    z = x @ w
        (y.square() + z).float().sum().backward()
        assert w.grad is not None
        return w.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert casts_made(program, ours) == casts_made(program, stock) + 1
    one, two = program(stock), program(ours)
    assert torch.equal(one, one.bfloat16().float())  # summed in bfloat16
    assert not torch.equal(two, two.bfloat16().float())
    torch.testing.assert_close(two, one, rtol=0.02, atol=0.02)


# --- processes of their own: deadlocks, event loops, interrupts, forks

REENTRANT = """
    import torch, torch_promote as tp
    from torch.utils._python_dispatch import TorchDispatchMode

    x, w, other = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    class During(TorchDispatchMode):
        busy = False
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {{}}))
            if func is torch.ops.aten._to_copy.default and args[0] is w and not self.busy:
                self.busy = True
                print("in the cast", flush=True)
                {action}
                self.busy = False
            return result

    with {region}("cpu"):
        with During():
            y = x @ w
    print("done", y.dtype)
"""
REENTRANT_ACTIONS = {
    "a nested region": "with {region}('cpu'): x @ other",
    "clearing the cache": "{clear}()",
}
KINDS = {
    "stock": {"region": "tp.stock_autocast", "clear": "torch.clear_autocast_cache"},
    "ours": {"region": "tp.my_autocast", "clear": "tp.clear_cache"},
}


@pytest.mark.parametrize("action", [pytest.param("a nested region", marks=pytest.mark.slow), "clearing the cache"])
def test_autocast_may_be_used_while_a_weight_is_cast(action: str) -> None:
    scripts = {
        kind: REENTRANT.format(**names, action=REENTRANT_ACTIONS[action].format(**names))
        for kind, names in KINDS.items()
    }
    assert output_of(scripts["ours"], compiler=True) == "in the cast\ndone torch.bfloat16\n"
    read, write = os.pipe()
    process = Process(scripts["stock"], stdout=write, compiler=True)  # a dispatch mode imports Dynamo
    os.close(write)
    with open(read, "rb", buffering=0) as output:
        assert output.readline() == b"in the cast\n"  # once it is there, what is left takes no time
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        assert output.read() == b""


AWAITING = """
    import asyncio, torch, torch_promote as tp

    async def holder():
        with {region}("cpu"):
            await asyncio.sleep(0)
            inside.append(torch.is_autocast_enabled("cpu"))
            await asyncio.sleep(0)

    async def other():
        for _ in range(2):
            outside.append(torch.is_autocast_enabled("cpu"))
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(holder(), other())

    for _ in range(2):
        inside, outside = [], []
        asyncio.run(both())
        print(inside, outside)
"""


def test_a_region_held_across_an_await_does_not_show_in_other_tasks() -> None:
    """In separate processes, because the first region that a process enters in an event loop matters as well."""
    output = {kind: output_of(AWAITING.format(**names)) for kind, names in KINDS.items()}
    assert output["stock"] == "[True] [True, True]\n" * 2
    assert output["ours"] == "[True] [False, False]\n" * 2


#: Interrupts a loop of empty regions at different moments, and prints how often a region stayed open.
INTERRUPTED = """
import signal, sys, torch, torch_promote as tp
from torch_promote import _C

class Interrupt(Exception): pass
def interrupt(*_): raise Interrupt
signal.signal(signal.SIGALRM, interrupt)
kinds = {"stock": tp.stock_autocast, "my_autocast": tp.my_autocast, "promotion": lambda device: tp.promotion("numpy")}
region = kinds[sys.argv[1]]("cpu")
left_open = 0
for number in range(int(sys.argv[2])):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + number % 97 * 1.3e-6)
        while True:
            with region:
                pass
    except Interrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _C.depth() > 0:
        left_open += 1
        _C.suspend_regions(0)
    elif torch.is_autocast_enabled("cpu"):
        left_open += 1
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()
print(left_open)
"""


def left_open(kind: str, interrupts: int) -> int:
    return int(output_of(INTERRUPTED, kind, str(interrupts)))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="not tried on this version of CPython")
def test_an_interrupt_leaves_no_region_open() -> None:
    assert left_open("stock", 300) > 0
    assert left_open("my_autocast", 800) == 0
    assert left_open("promotion", 800) == 0


FORKED = """
import os, signal, threading, warnings, torch, torch_promote as tp
from torch.utils._python_dispatch import TorchDispatchMode

warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)  # Python 3.12 warns wherever threads run
x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
casting, forked = threading.Event(), threading.Event()
class During(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and not casting.is_set():
            casting.set(); forked.wait()
        return func(*args, **(kwargs or {{}}))

def train():
    with {region}("cpu"), During(): x @ w

thread = threading.Thread(target=train)
thread.start(); casting.wait()
child = os.fork()
if child == 0:
    signal.alarm(3)
    with {region}("cpu"): pass
    os._exit(0)
forked.set(); thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_may_fork_while_a_thread_casts_a_weight() -> None:
    ends = {kind: output_of(FORKED.format(**names), compiler=True) for kind, names in KINDS.items()}
    assert ends == {"stock": f"{-signal.SIGALRM}\n", "ours": "0\n"}  # stock's child hung
