"""The extension keeps a bounded number of overrides and promotion rules, and shares equal ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.subprocesses import run_python
from torch_promote import _C
from torch_promote.native.region_spec import RegionSpec
from torch_promote.reference.promotion_rules import make_rule
from torch_promote.regions import promotion_tables as hooks
from torch_promote.regions.arguments import policy_number
from torch_promote.regions.base import Region

POLICIES = ("fp16", "fp32", "promote", "fallthrough", "keep")
OPS = ("softmax.int", *(f"{op}.default" for op in ("mm", "bmm", "addmm", "mv", "dot", "exp", "log")))
#: Not among `different_overrides`.
UNUSUAL = {"mm.default": "keep", "exp.default": torch.float64}
#: What csrc/policy/policy_registry.h keeps, and of changes and tables an eighth more before it drops that.
MOST_CHANGES, MOST_TABLES, MOST_COMPOSITIONS = 16384, 1024, 16384


def different_overrides() -> Iterator[dict[str, str]]:
    for policies in itertools.product(POLICIES, repeat=len(OPS)):
        yield dict(zip(OPS, policies, strict=True))


def sizes(name: str) -> int:
    return _C.registry_sizes()[name]


@pytest.mark.slow
def test_different_overrides_are_dropped_and_may_be_used_again() -> None:
    asked = list(itertools.islice(different_overrides(), 3 * MOST_TABLES))
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    for overrides in asked:
        with tp.my_autocast("cpu", overrides=overrides):
            pass
    assert sizes("policy tables") <= MOST_TABLES + MOST_TABLES // 8 + 1
    assert sizes("policy changes") <= MOST_CHANGES + MOST_CHANGES // 8
    for overrides in (asked[0], asked[-1]):
        with tp.my_autocast("cpu", overrides={**overrides, "mm.default": "fp32"}):
            assert torch.mm(x, x).dtype is torch.float32


@pytest.mark.slow
def test_an_open_region_keeps_its_policy_while_others_are_dropped() -> None:
    x = torch.ones(2, 2)
    with tp.my_autocast("cpu", overrides={"mm.default": torch.float64, "relu.default": torch.float64}):
        for overrides in itertools.islice(different_overrides(), 3 * MOST_TABLES):
            with tp.my_autocast("cpu", overrides=overrides):
                assert torch.relu(x).dtype is torch.float64
        assert torch.mm(x, x).dtype is torch.float64


def test_open_regions_keep_their_policies_if_the_bound_is_reached() -> None:
    asked = list(itertools.islice(different_overrides(), MOST_TABLES + 2 * (MOST_TABLES // 8)))
    dtypes = [(torch.float64, torch.float32)[number % 2] for number in range(200)]
    x, seen = torch.ones(2, 2), []

    def look(*_: object) -> None:
        seen.append(torch.mm(x, x).dtype)

    with contextlib.ExitStack() as stack:
        for overrides, dtype in zip(asked, dtypes, strict=False):
            stack.enter_context(tp.my_autocast("cpu", overrides={**overrides, "mm.default": dtype}))
            stack.push(look)
        for overrides in asked[len(dtypes) :]:
            with tp.my_autocast("cpu", overrides=overrides):
                pass
    assert seen == dtypes[::-1]
    assert sizes("policy tables") <= MOST_TABLES + MOST_TABLES // 8 + len(dtypes)


def test_compositions_are_forgotten_and_made_again() -> None:
    regions = [tp.my_autocast("cpu", overrides=one) for one in itertools.islice(different_overrides(), 300)]
    for region in regions:  # from here on there are no new tables
        with region:
            pass
    for outer in regions[:150]:
        with outer:
            for inner in regions[150:]:
                with inner:
                    pass
            assert sizes("compositions") <= MOST_COMPOSITIONS
    assert sizes("compositions") < 150 * 150


def use_other_changes() -> None:
    for overrides in itertools.islice(different_overrides(), MOST_CHANGES + MOST_CHANGES // 8 + 100):
        policy_number(None, overrides)
    assert sizes("policy changes") <= MOST_CHANGES + MOST_CHANGES // 8 + 100


def test_regions_keep_their_changes_if_the_bound_is_reached() -> None:
    asked = list(itertools.islice(different_overrides(), MOST_CHANGES + MOST_CHANGES // 8))
    regions = [tp.my_autocast("cpu", overrides={**one, "mm.default": torch.float64}) for one in asked[:2200]]
    for overrides in asked[len(regions) :]:
        policy_number(None, overrides)
    x = torch.ones(2, 2)
    for region in regions:
        with region:
            assert torch.mm(x, x).dtype is torch.float64
    assert sizes("policy changes") <= MOST_CHANGES + MOST_CHANGES // 8 + len(regions)


@pytest.mark.slow
def test_changes_that_nothing_holds_are_dropped_and_regions_of_their_numbers_say_so() -> None:
    region = Region(RegionSpec(policy_change=policy_number(None, UNUSUAL)).pack())
    use_other_changes()
    with pytest.raises(RuntimeError, match=r"16384 others have been used since this one\. Make the region anew"):
        region.__enter__()
    with tp.my_autocast("cpu", overrides=UNUSUAL):
        assert torch.exp(torch.ones(2)).dtype is torch.float64


@pytest.mark.slow
def test_what_enters_regions_later_keeps_its_change() -> None:
    x, module = torch.ones(2), nn.Softmax(0)
    tp.set_module_policy(module, {"": {"softmax.int": torch.float64}})
    region = tp.my_autocast("cpu", overrides=UNUSUAL)
    copied = copy.deepcopy(tp.my_autocast("cpu", overrides={**UNUSUAL, "log.default": "keep"}))
    decorated = tp.my_autocast("cpu", overrides={**UNUSUAL, "mv.default": "keep"})(torch.exp)
    promoted = tp.promotion("numpy", matmul=True, kinds=None)
    leaf = torch.ones(2, 2, requires_grad=True)
    with tp.my_autocast("cpu", overrides={**UNUSUAL, "dot.default": "fp32"}):
        checkpointed = checkpoint(lambda x: torch.exp(x).sin().sum(), leaf, use_reentrant=False)
    with tp.my_autocast("cpu"):
        of_stock = checkpoint(lambda x: torch.mm(x, x).float().sum(), leaf, use_reentrant=False)

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tp.promotion("numpy"):
            return x.int() + x.half()

    assert compiled(x).dtype is torch.float64
    tp.install(overrides={"exp.default": torch.float64, "dot.default": "keep"})
    try:
        use_other_changes()
        with torch.autocast("cpu"):
            assert torch.exp(x).dtype is torch.float64
    finally:
        tp.uninstall()
    for one in (region, copied):
        with one:
            assert torch.exp(x).dtype is torch.float64
    assert decorated(x).dtype is torch.float64
    with tp.my_autocast("cpu"):
        assert module(x).dtype is torch.float64
    checkpointed.backward()
    with region:
        of_stock.backward()
    assert compiled(x).dtype is torch.float64
    with promoted:
        assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float64


@pytest.mark.slow
def test_a_change_is_dropped_after_its_last_holder() -> None:
    regions = [tp.my_autocast("cpu", overrides=UNUSUAL) for _ in range(3)]
    packed = regions[0]._packed
    use_other_changes()
    with Region(packed):
        del regions[1:]
    use_other_changes()
    with Region(packed):
        regions.clear()
    use_other_changes()
    with pytest.raises(RuntimeError, match="was dropped"):
        Region(packed).__enter__()


def test_equal_overrides_are_one() -> None:
    before = sizes("policy changes")
    numbers = set()
    for _ in range(300):
        numbers.add(policy_number(tp.Policy.stock().override({"mm.default": "fp32"}), {"exp.default": "fp16"}))
    assert len(numbers) == 1
    assert sizes("policy changes") <= before + 1


def rule(kind: torch.dtype = torch.float32, name: str = "mine") -> tp.reference.promotion_rules.PromotionRule:
    return make_rule(name, {(torch.int32, torch.float16): kind}, over="torch")


def test_equal_rules_are_one() -> None:
    assert rule() is rule()
    assert rule() is not rule(torch.float64)
    assert rule() is not rule(name="other")
    known = len(hooks._known)
    for _ in range(300):
        with tp.promotion(rule()):
            assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    assert len(hooks._known) <= known + 1


def test_different_rules_are_dropped() -> None:
    made = []
    for number in range(60):
        with tp.promotion(mine := rule(name=f"rule {number}")):
            torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)
        made.append(weakref.ref(mine.build))
    gc.collect()
    assert len(hooks._known) < 60
    assert sum(one() is not None for one in made) < 60


def test_regions_keep_their_rules() -> None:
    regions = [tp.promotion(rule(torch.float64, f"kept {number}")) for number in range(60)]
    for region in regions:
        with region:
            assert (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype is torch.float64


def test_a_checkpoint_keeps_its_rule() -> None:
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with tp.promotion(rule(torch.float64, "of a checkpoint")):
        y = checkpoint(lambda x: (torch.ones(2, dtype=torch.int32) + x).sin(), x, use_reentrant=False)
    for number in range(60):
        tp.promotion(rule(name=f"after a checkpoint {number}"))
    y.sum().backward()
    assert y.dtype is torch.float64


def promoted() -> torch.dtype:
    return (torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)).dtype


def make_other_rules() -> None:
    for number in range(2 * hooks._KEPT):
        tp.promotion(rule(name=f"other {number}"))


def test_an_open_region_keeps_its_rule_after_its_object_is_gone() -> None:
    tp.promotion(rule(torch.float64, "open")).__enter__()
    try:
        for _ in range(2):
            make_other_rules()
            assert promoted() is torch.float64
    finally:
        _C.suspend_regions(0)
    make_other_rules()
    assert "open" not in {known.rule.name for known in hooks._known.values()}


# PyTorch carries the state of a thread to the task, which waits until the region has ended. The process ends without
# waiting for PyTorch's threads, which may abort otherwise.
CARRIED = """
import os, sys, threading, torch
import torch_promote as tp
from torch_promote.regions import promotion_tables as hooks
from torch_promote.reference.promotion_rules import make_rule

{region}

go_on = threading.Event()

@torch.jit.ignore
def seen(x: torch.Tensor) -> torch.Tensor:
    go_on.wait()
    return look()

@torch.jit.script
def task(x):
    return seen(x)

@torch.jit.script
def start(x):
    return torch.jit.fork(task, x)

with region():
    inside, task = look().dtype, start(torch.ones(1))
others()
go_on.set()
print(inside, task.wait().dtype, look().dtype, flush=True)
os._exit(0)
"""

RULES = """
look = lambda: torch.ones(2, dtype=torch.int32) + torch.ones(2, dtype=torch.float16)
made = iter(range(1000))

def region():
    kind = {(torch.int32, torch.float16): torch.float64}
    return tp.promotion(make_rule(f"rule {next(made)}", kind, over="torch"))

def others():
    for _ in range(int(sys.argv[1]) * 2 * hooks._KEPT):
        region()
"""

OVERRIDES = """
import itertools

look = lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2))
region = lambda: tp.my_autocast("cpu", overrides={"mm.default": torch.float64})

def others():
    ops = [f"{op}.default" for op in ("exp", "log", "sin", "cos", "tan", "relu", "neg")]
    policies = itertools.product(("fp16", "fp32", "keep"), repeat=len(ops))
    for row in itertools.islice(policies, 1300 * int(sys.argv[1])):
        with tp.my_autocast("cpu", overrides=dict(zip(ops, row))):
            pass
"""


@pytest.mark.parametrize(
    ("region", "kept", "dropped"),
    [
        (RULES, "torch.float64 torch.float64 torch.float16", "torch.float64 torch.float16 torch.float16"),
        (OVERRIDES, "torch.float64 torch.float64 torch.float32", "torch.float64 torch.bfloat16 torch.float32"),
    ],
    ids=["rules", "overrides"],
)
def test_a_task_whose_policy_was_dropped_runs_under_stocks(
    tmp_path: Path, region: str, kept: str, dropped: str
) -> None:
    (tmp_path / "carried.py").write_text(CARRIED.replace("{region}", region))  # TorchScript reads the source
    for others, seen in (("0", kept), ("1", dropped)):
        done = run_python("import runpy, sys; runpy.run_path(sys.argv.pop(1))", str(tmp_path / "carried.py"), others)
        assert (done.returncode, done.stdout.strip()) == (0, seen), done.stderr


def test_more_rules_of_one_content_than_a_fingerprint_tells_apart() -> None:
    """Rules that are equal, and not made by make_rule, are different objects."""
    import dataclasses

    for _ in range(300):
        with tp.promotion(dataclasses.replace(rule())):
            pass


def test_defaults_are_unchanged_if_the_second_policy_is_unknown() -> None:
    registered = policy_number(None, {"relu.default": "fp32"})
    before = sizes("policy changes")
    with pytest.raises(RuntimeError, match="there is no policy change with the number"):
        _C.set_defaults(registered, 2**24 - 1)
    with tp.my_autocast("cpu"):
        assert torch.relu(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert sizes("policy changes") == before


@pytest.mark.slow
def test_a_compiled_graph_keeps_the_change_of_its_region() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", overrides={**UNUSUAL, "bmm.default": "keep"}):
            return torch.exp(x)

    assert run(torch.ones(2)).dtype is torch.float64
    use_other_changes()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert run(torch.ones(2)).dtype is torch.float64
