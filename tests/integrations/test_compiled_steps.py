"""What is compiled: persistent casts of weights that a step writes end, and the cache on disk knows the policy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.persistent_casts import ours
from helpers.subprocesses import environment, run_python
from torch_promote.integrations import compile as integrations_compile

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "nothing_persists")

EYE = torch.eye(4)
Step = Callable[[], object]
#: Makes a step that changes a weight, given a function that compiles.
Maker = Callable[[nn.Parameter, Callable[..., Any]], Step]


class BehindPyTorchsBack(torch.optim.Optimizer):
    """Like optimizers of other libraries, it writes in a kernel that Dynamo and the dispatcher do not see."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {})
        self.memory = [(ctypes.c_float * weight.numel()).from_address(weight.data_ptr()) for weight in weights]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch._dynamo.graph_break()
        for memory in self.memory:
            memory[:] = [number - 1 for number in memory]


def in_place(write: Callable[[torch.Tensor], object]) -> Maker:
    def make(w: nn.Parameter, compiled: Callable[..., Any]) -> Step:
        return compiled(torch.no_grad()(lambda: write(w)))

    return make


STEPS: dict[str, Maker] = {
    "fused AdamW": lambda w, compiled: compiled(torch.optim.AdamW([w], lr=1.0, fused=True).step),
    "behind PyTorch's back": lambda w, compiled: compiled(BehindPyTorchsBack([w]).step),
    "sub_": in_place(lambda w: w.sub_(1)),
    "detach": in_place(lambda w: w.detach().sub_(1)),
}


@torch.no_grad()
def corner(w: torch.Tensor) -> float:
    """An element, read without a tensor over the weight's data: that would drop the casts."""
    return w.clone()[0, 0].item()


def product(w: torch.Tensor) -> float:
    with ours(), torch.no_grad():
        return (EYE @ w)[0, 0].item()


EVERYDAY = [*((name, "eager") for name in STEPS), ("fused AdamW", "aot_eager"), ("fused AdamW", "inductor")]
OTHERS = [(name, backend) for name in STEPS for backend in ("aot_eager", "inductor") if name != "fused AdamW"]


@pytest.mark.parametrize(
    ("name", "backend"), [*EVERYDAY, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_a_compiled_step_drops_the_casts_of_what_it_writes(name: str, backend: str) -> None:
    w = nn.Parameter(torch.full((4, 4), 8.0))
    w.grad = torch.ones_like(w)
    step = STEPS[name](w, lambda function: torch.compile(function, backend=backend))
    seen = []
    for _ in range(4):
        assert product(w) == pytest.approx(corner(w), rel=1e-2)
        seen.append(product(w))
        step()
    assert len(set(seen)) == 4, seen


COMPILED_FIRST = """
import torch, torch_promote as tp
w, eye = torch.nn.Parameter(torch.ones(4, 4)), torch.eye(4)
w.grad = torch.ones_like(w)
steps = [torch.compile(torch.optim.SGD([w], lr=1.0, fused=True).step, backend=b) for b in ("eager", "aot_eager")]
for step in steps:
    step()
for step in (*steps, *steps):
    with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
        print((eye @ w)[0, 0].item(), end=" ")
    step()
"""


def test_a_step_that_was_compiled_before_the_first_region() -> None:
    done = run_python(COMPILED_FIRST, compiler=True, timeout=200)
    assert done.stdout.split() == ["-1.0", "-2.0", "-3.0", "-4.0"], done.stderr


# --- the hook after steps


class Stepped(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        return "stepped"


WEIGHT = nn.Parameter(torch.ones(2))
GROUPS: dict[str, list[Any]] = {
    "no group": [],
    "a group without weights": [{"lr": 1}],
    "something else among the weights": [{"params": [None, WEIGHT, "x"]}],
    "an iterator": [{"params": iter([WEIGHT])}],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_step_returns_whatever_the_groups_hold(groups: list[Any]) -> None:
    optimizer = Stepped([WEIGHT], {})
    optimizer.param_groups = groups
    assert optimizer.step() == "stepped"


def test_a_step_on_fake_weights_of_a_device_that_pytorch_lacks() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    assert weight._version == 1


# --- AOTAutograd's cache on disk does not serve code that was compiled for another policy


#: Where a region writes the fingerprint of its policy; csrc/policy/policy_registry.h, NOTE [ Policy fingerprint ].
SLOTS = ("privateuseone", "ipu", "maia", "hpu", "mtia")
#: PyTorch caches graphs with regions only if they are marked as safe.
SAFE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}


def squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x  # Inductor calls ATen for it and its cast, and nothing has to be built by a C++ compiler


def squared_in_a_region(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return x @ x


def compiled_under(overrides: dict[str, Any]) -> torch.dtype:
    """In a region whose fingerprint is planted: it equals that of others."""
    with tp.my_autocast("cpu", overrides=overrides):
        for slot in SLOTS:
            torch.set_autocast_dtype(slot, torch.int8)
        return torch.compile(squared, fullgraph=True)(torch.ones(4, 4)).dtype


def compiled_installed(overrides: dict[str, Any]) -> torch.dtype:
    """The region is in the graph."""
    with tp.install(overrides=overrides):
        return torch.compile(squared_in_a_region, fullgraph=True)(torch.ones(4, 4)).dtype


@pytest.mark.usefixtures("nothing_installed", "fresh_dynamo", "inductor")
@pytest.mark.parametrize("has_digest", [True, False])
@pytest.mark.parametrize("compiled", [compiled_under, compiled_installed])
def test_each_policy_has_entries_of_its_own(
    compiled: Callable[[dict[str, Any]], torch.dtype], has_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may share the cache, and two policies in 33 million share a fingerprint."""
    if not has_digest:
        monkeypatch.setattr(integrations_compile, "digests", [])
    counters = torch._dynamo.utils.counters["aot_autograd"]

    def found(override: object) -> tuple[torch.dtype, int]:
        """The result's dtype, and hits in the cache on disk."""
        torch._dynamo.reset()
        before = counters["autograd_cache_hit"]
        return compiled({"matmul": override}), counters["autograd_cache_hit"] - before

    with (
        fresh_cache(),
        torch._inductor.config.patch(unsafe_marked_cacheable_functions=SAFE, fallback_by_default=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        assert found("fp32") == (torch.float32, 0)
        # Without the digest, what was compiled for the other policy is served.
        assert found(torch.float16) == ((torch.float16, 0) if has_digest else (torch.float32, 1))
        assert found("fp32") == (torch.float32, 1)


PLAIN_PROGRAM = """
import sys, torch
if "import" in sys.argv:
    import torch_promote
@torch.compile
def function(x):
    return x @ x  # no C++ compiler is needed
function(torch.ones(8, 8))
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.parametrize("first", ["compiler", pytest.param("package", marks=pytest.mark.slow)])
def test_an_import_alone_leaves_the_keys_of_the_disk_cache_as_they_are(first: str, tmp_path: Path) -> None:
    """A process that imports the package and opens no region finds entries of processes without the package."""
    hits = []
    for arguments in ([], ["import"]):
        variables = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        compiler = not arguments or first == "compiler"  # whether the compiler is imported before the package
        done = run_python(PLAIN_PROGRAM, *arguments, env=variables, compiler=compiler, quiet=True, timeout=250)
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout.split()[-1]))
    assert hits == [0, 1]


def test_regions_are_known_to_dynamo_after_the_first_use_of_a_cache_mode() -> None:
    """Both the regions and the cache mode wait for its import."""
    code = """
        import torch, torch_promote as tp
        with tp.my_autocast("cpu", cache="persistent"):
            pass
        assert "torch._dynamo" not in __import__("sys").modules
        def function(x):
            with tp.my_autocast("cpu", overrides={"matmul": "float64"}):
                return x @ x
        print(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype)
    """
    done = run_python(code, timeout=240)
    assert done.stdout == "torch.float64\n", done.stderr
