"""`tune`: what it finds, its budget, held-out batches, levels, directions, resumed tunings, ranks, and its errors."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.gloo_ranks import in_ranks
from torch_promote.errors import Fp32FailsError, NoiseFloorError, OptionError
from torch_promote.numerics.comparison import Site
from torch_promote.numerics.search import Candidates
from torch_promote.numerics.tuning import Tuning
from torch_promote.regions.defaults import RegisteredPolicy

# --- steps with custom ops that lose accuracy in a low dtype, with places and names drawn from a seed
#
# A site is a linear layer followed by a custom op in its own module. Autocast casts both: an override of one does not
# change the dtype of the other. A planted op computes `(x + big) - big`, which is x in float32 and loses all digits in
# bfloat16. The other ops copy.

_BIG = 4096.0
_registered: list[RegisteredPolicy] = []


def make_op(name: str, planted: bool, policy: str = "lower_precision_fp") -> Callable[[torch.Tensor], torch.Tensor]:
    """Registers an op, and its policy: by default, in the region's dtype."""

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return (x + _BIG) - _BIG if planted else x.clone()

    op.register_autograd(lambda ctx, gradient: gradient)
    op.register_fake(torch.empty_like)
    _registered.append(tp.register_policy(name, policy, replace=True))  # a seed makes the same names again
    return op


class Inner(nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Planted(nn.Module):
    """Branches with one op each, whose results' squares are summed up.

    Args:
        are_planted: For each branch, whether its op is planted.
        seed: The seed of the names and the weights.
        same_op: Whether all planted branches use one op, and all others another op.
        policy: The policy of all ops.

    Attributes:
        planted: The planted ops.
        places: The paths of the modules that call them.
    """

    def __init__(
        self, are_planted: Sequence[bool], seed: int, same_op: bool = False, policy: str = "lower_precision_fp"
    ) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        namespace = f"lib{_word(draw)}"
        shared = {planted: make_op(f"{namespace}::{_word(draw)}", planted, policy) for planted in (False, True)}
        ops = [shared[one] if same_op else make_op(f"{namespace}::{_word(draw)}", one, policy) for one in are_planted]
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Inner(op)) for op in ops)
        places = {f"branches.{number}.1": op._qualname for number, op in enumerate(ops) if are_planted[number]}
        self.planted, self.places = set(places.values()), set(places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x).float().square().mean() for branch in self.branches]).sum()


class Calls:
    """A step of a model that counts its calls, with a batch for each number."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.dtype = model, dtype
        self.count = 0

    def __call__(self, number: int) -> torch.Tensor:
        self.count += 1
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", self.dtype):
            return self.model(x)


def planted_step(sites: int, planted: int, seed: int, **options: Any) -> Calls:
    """Returns a step of branches with one site each, some of which are planted at random places."""
    places = set(random.Random(seed).sample(range(sites), planted))
    return Calls(Planted([number in places for number in range(sites)], seed, **options))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=10))


# --- a step that overflows in float16 where it multiplies, and needs one override


class Scaled(nn.Module):
    """Overflows in float16 where it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.linear(x) * 1e6 * 1e-6)).square().mean()


def scaled(dtype: torch.dtype = torch.float16) -> tuple[Scaled, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = Scaled()
    return model, torch.autocast("cpu", dtype)(lambda: model(torch.ones(2, 4) + 0.1 * torch.randn(2, 4)))


# --- tunings in several processes, whose ranks use different batches


def _tuned(step: Any, model: torch.nn.Module, **options: Any) -> dict[str, Any]:
    tuning = tp.tune(step, model=model, **{"tolerance": 0.06, **options})
    return {
        "overrides": tuning.overrides,
        "errors": dict(tuning.errors),
        "trials": [(one.overrides, one.passed, dict(one.errors)) for one in tuning.trials],
        "order": [one.name for one in tuning.candidates],
        "runs": tuning.runs,
        "planted": getattr(model, "planted", None),
    }


def _of_rank(step: Calls, rank: int) -> Any:
    return lambda number: step(10 * number + rank)


def one_rank_fails(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 1 has a planted op, and needs an override."""
    step = planted_step(4, rank, seed=72)
    return _tuned(step, step.model)


def resumed(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second call repeats no trial."""
    file = Path(os.environ["TUNED_RANKS_FILE"])
    step = planted_step(4, 1, seed=73)
    first = _tuned(_of_rank(step, rank), step.model, resume=file)
    torch.distributed.barrier()
    return first, _tuned(_of_rank(step, rank), step.model, resume=file)


def different_models(rank: int, world_size: int) -> None:
    """The ranks run different ops."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh() if rank else nn.GELU())
    _tuned(Calls(model), model, tolerance=1e-6)


def one_rank_raises(rank: int, world_size: int) -> None:
    """The step raises on rank 1."""

    def step() -> torch.Tensor:
        if rank:
            raise ZeroDivisionError("mine")
        return torch.ones(())

    _tuned(step, nn.Linear(2, 2))


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    """Removes the policies of ops that the test makes."""
    yield
    while _registered:
        _registered.pop().remove()


# --- planted ops

MANY = [(5, 1), (5, 2), (8, 3), (20, 2), (40, 1), (40, 3), (60, 1), (60, 2), (60, 3)]


@pytest.mark.parametrize("level", ["op", "module", "site"])
@pytest.mark.parametrize(
    ("sites", "planted", "seed"),
    [
        (5, 1, 36),
        (9, 3, 66),
        *(pytest.param(*sizes, seed, marks=pytest.mark.slow) for sizes in MANY for seed in range(3)),
    ],
)
def test_planted_ops_are_found(sites: int, planted: int, seed: int, level: Any) -> None:
    step = planted_step(sites, planted, seed=seed, same_op=level != "op")
    tuning = tp.tune(step, model=step.model, tolerance=0.4 / sites, level=level)
    assert tuning.met
    assert step.count == tuning.runs <= tuning.budget
    model = step.model
    assert isinstance(model, Planted)
    if tuning.level == "op":
        assert tuning.overrides == dict.fromkeys(model.planted, "fp32")
    else:
        low = [site for site in tuning.comparison.sites if "bfloat16" in site.dtypes]
        candidates = Candidates(tp.Policy.stock(), model, tuning.level, "fp32", low, 0)
        places = candidates.overridden_places(tuning.overrides)
        assert {place for place, op in places if op in model.planted} == model.places
        assert len(places) == len(model.places)  # nothing besides
    assert tuning.certificate.kind in ("1-minimal", "minimum")
    assert tuning.certificate.violations == ()
    assert tuning.certificate.held_out is not None


class Cancelling(nn.Module):
    """The errors of two ops cancel: running only one of them in float32 is worse than none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ops = [make_op(f"cancels::op{number}", number < 3) for number in range(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *others = (op(self.linear(x)).float() for op in self.ops)
        return (first - second).abs().mean() + torch.stack(others).square().sum()


def test_violations_of_monotonicity_are_reported() -> None:
    torch.manual_seed(0)
    step = Calls(Cancelling())
    tuning = tp.tune(step, model=step.model, tolerance=0.1)
    assert tuning.met
    assert tuning.overrides == {"cancels::op2": "fp32"}
    failed = [trial for trial in tuning.trials if "cancels::op2" in trial.overrides and not trial.passed]
    assert bool(failed) == bool(tuning.certificate.violations)


@pytest.mark.parametrize("budget", [6, 7, 10, 60])
def test_no_budget_is_exceeded(budget: int) -> None:
    step = planted_step(8, 2, seed=21)
    tuning = tp.tune(step, model=step.model, tolerance=0.04, budget=budget, batches=2)
    assert step.count == 2 * tuning.runs <= 2 * budget
    assert isinstance(step.model, Planted)
    assert tuning.met
    assert set(tuning.overrides) >= step.model.planted
    assert tuning.certificate.held_out is not None
    if budget == 6:
        assert (len(tuning.overrides), tuning.certificate.kind) == (9, "passes")
        assert "budget of 6 runs was exhausted" in tuning.certificate.text
    if budget == 60:
        assert set(tuning.overrides) == step.model.planted


# --- metrics, checks and batches


def test_metrics_and_tolerances() -> None:
    model, _ = scaled()

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            y = model.linear(torch.ones(2, 4))
            return {"loss": y.square().mean(), "far": y * 1e6}

    def tune(**options: Any) -> tp.types.Tuning:
        tuning = tp.tune(step, model=model, **{"tolerance": 0.01, **options})
        assert tuning.overrides == {"aten::mul": "fp32"}
        return tuning

    assert set(tune(tolerance={"far": 0.01}).errors) == {"loss", "far"}
    assert tune(metric="far").tolerance == {"far": 0.01}
    assert tune(metric=lambda result: result["far"].sum()).tolerance == {"metric": 0.01}
    assert tune(metric=lambda result: result["far"].sum(), tolerance={"mine": 0.01}).tolerance == {"mine": 0.01}
    assert tune(tolerance={"loss": 0.5}, check=lambda result: bool(result["far"].isfinite().all())).met
    for options in ({"tolerance": {"loss": 0.01}}, {"metric": "loss"}):
        tuning = tp.tune(step, model=model, **{"tolerance": 0.01, **options})  # type: ignore[arg-type]
        assert "meets the tolerance" in tuning.reason
    with pytest.raises(Fp32FailsError, match="check returns false for the result of step"):
        tune(tolerance={"loss": 0.5}, check=lambda result: False)


def test_all_batches_are_judged() -> None:
    model = nn.Linear(4, 4)
    step = torch.autocast("cpu", torch.float16)(
        lambda number: (model(torch.ones(1, 4)) * (1e6 if number == 4 else 1.0)).square().mean()
    )
    assert tp.tune(step, model=model, tolerance=0.01, batches=2).reason
    assert tp.tune(step, model=model, tolerance=0.01, batches=5).overrides == {"aten::mul": "fp32"}


@pytest.mark.parametrize("budget", [60, 6])
def test_a_policy_that_needs_no_override_is_run_on_held_out_batches(budget: int) -> None:
    model = nn.Linear(4, 4)
    step = torch.autocast("cpu", torch.float16)(
        lambda number: (model(torch.ones(1, 4)) * (1e6 if number == 1 else 1.0)).square().mean()
    )
    tuning = tp.tune(step, model=model, tolerance=0.01, budget=budget)
    assert tuning.met == bool(tuning.overrides) == (budget == 60)
    assert not tuning.reason
    assert ("failed on held-out batches: overrides of no op." in " ".join(tuning.notes)) == tuning.met
    assert ("does not meet the tolerance on held-out batches" in tuning.certificate.text) == (not tuning.met)
    assert ("met in the search, but not on held-out batches" in str(tuning)) == (not tuning.met)


class Growing:
    """A step whose batch 0 needs one override, batch 1 two, and later batches three."""

    def __init__(self, namespace: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.names = [f"{namespace}::op{number}" for number in range(3)]
        self._ops = [make_op(name, planted=True) for name in self.names]
        self.count = 0

    def __call__(self, number: int) -> torch.Tensor:
        self.count += 1
        with torch.autocast("cpu"):
            y = self.model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            results = [op(y if index <= number else torch.zeros(4, 8)) for index, op in enumerate(self._ops)]
            return torch.stack([one.float().square().mean() for one in results]).sum()


@pytest.mark.parametrize("level", ["op", "site"])
@pytest.mark.parametrize("budget", [6, 10, 18, 60])
def test_held_out_batches_that_fail_become_part_of_the_tuning(level: Any, budget: int) -> None:
    step = Growing(f"growing_{level}_{budget}")
    tuning = tp.tune(step, model=step.model, tolerance=0.01, level=level, budget=budget)
    found = list(tuning.overrides if level == "op" else tuning.overrides[""])
    assert step.count == tuning.runs <= budget
    assert step.names[0] in found
    assert tuning.certificate.held_out is not None
    assert tuning.met == (tuning.certificate.held_out["loss"] <= 0.01)
    if budget == 10:
        assert not tuning.met
        assert any("Tune with more batches" in note for note in tuning.notes)
    if budget == 60:
        assert tuning.met
        assert set(found) == set(step.names)
        assert len([note for note in tuning.notes if "became part of the tuning" in note]) == 2


@pytest.mark.parametrize(
    ("raises", "why"),
    [(True, "the reference raised IndexError: 1 there."), (False, "the step gives the same results for the next")],
)
def test_there_may_be_no_other_batches(raises: bool, why: str) -> None:
    model = Scaled()

    def step(number: int) -> torch.Tensor:
        if raises and number > 0:
            raise IndexError(number)
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4))

    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert tuning.certificate.held_out is None
    assert f"There are no held-out batches: {why}" in tuning.certificate.text


def test_a_step_that_fails_under_an_override_is_a_failed_trial() -> None:
    """One that raises, and one that returns other names."""
    model, _ = scaled()

    def step(raises: bool) -> Any:
        with torch.autocast("cpu", torch.float16):
            far = model.linear(torch.ones(2, 4) + 0.1 * torch.randn(2, 4)) * 1e6
            result = model.head(torch.tanh(far * 1e-6)).square().mean()
            is_low = model.head(torch.ones(1, 4)).dtype is torch.float16
        if far.dtype is not torch.float32 or not is_low:
            return result
        if raises:
            raise TypeError("far and head differ")
        return {"loss": result, "far": far}

    for raises, text in ((True, "TypeError: far and head differ"), (False, "StepError: ")):
        tuning = tp.tune(functools.partial(step, raises), model=model, tolerance=0.01)
        assert tuning.met
        failed = [trial for trial in tuning.trials if trial.error]
        assert failed
        assert all(trial.error.startswith(text) and not trial.passed for trial in failed)


def test_a_step_that_raises_for_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(4, 4)

    def raising() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = (model(torch.ones(2, 4)) * 1e6).square().mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        return loss

    tuning = tp.tune(raising, model=model, tolerance=1e-2)
    assert (tuning.overrides, tuning.met) == ({"aten::mul": "fp32"}, True)
    assert "the loss is not finite" in tuning.trials[0].error
    with pytest.raises(FloatingPointError):
        tp.compare(raising, model=model)


# --- state, interrupts and the policy in force


@pytest.mark.parametrize("last", [1, 3, 5, 9])
def test_ctrl_c_returns_what_is_known(last: int) -> None:
    step = planted_step(5, 2, seed=33)
    model = step.model
    assert isinstance(model, Planted)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupted(number: int) -> torch.Tensor:
        if step.count == last:
            raise KeyboardInterrupt
        return step(number)

    if last == 1:
        with pytest.raises(KeyboardInterrupt):  # nothing is known
            tp.tune(interrupted, model=model, tolerance=0.04)
    else:
        tuning = tp.tune(interrupted, model=model, tolerance=0.04)
        assert tuning.interrupted
        assert "interrupted" in tuning.certificate.text
        assert set(tuning.overrides) >= (model.planted if last > 3 else set())
        assert last > 3 or (tuning.met, tuning.policy) == (False, tp.Policy.stock())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_overrides_come_on_top_of_the_policy_in_force() -> None:
    model, step = scaled()
    present = tp.Policy.stock().override({"tanh": "fp32"}).override_modules({"head": {"linear": "fp32"}})
    with present.apply_to(model), tp.install(policy=present):
        tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.policy == present.override({"aten::mul": "fp32"})
    present = tp.Policy.stock().override_modules({"*": {"mul": "fp16"}, "": {"mul": "fp16"}})
    with present.apply_to(model), tp.install(policy=present):
        tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert dict(tuning.policy.modules)[""] != dict(present.modules)[""]


def test_the_dtype_of_regions() -> None:
    model, _ = scaled()

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):  # made anew for each call
            return model(torch.ones(2, 4))

    assert tp.tune(step, model=model, tolerance=0.1).reason
    assert tp.tune(step, model=model, tolerance=0.1, dtype=torch.float16).overrides == {"aten::mul": "fp32"}


def test_the_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, step = scaled()
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal, progress, shown in ((False, True, False), (True, False, False), (True, True, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer, raising=False)
        tp.tune(step, model=model, tolerance=0.01, progress=progress)
        assert ("tune" in capsys.readouterr().err) is shown


# --- compiled steps


@pytest.mark.parametrize("factor", [1, 2])
def test_a_compiled_step_is_verified_compiled(factor: int) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        return lambda *args: [factor * one for one in graph(*args)]

    model, _ = scaled()
    compiled = torch.compile(model, backend=backend)
    step = torch.autocast("cpu", torch.float16)(lambda: compiled(torch.ones(2, 4) + 0.1 * torch.randn(2, 4)))
    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.trials[-1].why == "compiled"
    assert tuning.met is (factor == 1)
    assert tuning.certificate.compiled == {"loss": pytest.approx(factor - 1, abs=0.01)}
    assert bool(tuning.notes) is (factor == 2)
    with pytest.raises(OptionError, match="7 or more"):
        tp.tune(step, model=model, tolerance=0.01, budget=6)


# --- levels: modules and sites


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        return [torch.nn.functional.linear(x, x).dtype]


class Block(nn.Module):
    """Calls linear itself, and has children that do."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Leaf()
        self.mlps = nn.ModuleList([Leaf(), Leaf()])

    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        return [F.linear(x, x).dtype, *self.attn(x), *(one for mlp in self.mlps for one in mlp(x))]


class Root(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = Leaf()

    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        return [F.linear(x, x).dtype, *(one for block in self.blocks for one in block(x)), *self.head(x)]


F = nn.functional


def callers(blocks: int) -> list[str]:
    """The modules that call linear, in the order of the calls."""
    inside = [f"blocks.{number}{rest}" for number in range(blocks) for rest in ("", ".attn", ".mlps.0", ".mlps.1")]
    return ["", *inside, "head"]


def ran_in_float32(model: nn.Module, blocks: int, policy: tp.Policy) -> set[str]:
    with tp.my_autocast("cpu", policy=policy, model=model):
        dtypes = model(torch.ones(2, 2))
    return {name for name, dtype in zip(callers(blocks), dtypes, strict=True) if dtype is torch.float32}


BLOCKS = range(12)
TABLES = {"blocks.*": {"mm": "fp32"}, "**.attn": {"linear": "fp32"}, "head": {"mm": "fp32"}}


@pytest.mark.parametrize(
    ("chosen", "tables", "expected"),
    [
        ([f"blocks.{number}.attn" for number in BLOCKS], {}, {"blocks.*.attn"}),
        ([f"blocks.{number}.attn" for number in (1, 3, 4)], {}, {"blocks.[134].attn"}),
        ([f"blocks.{number}.mlps.{inner}" for number in BLOCKS for inner in range(2)], {}, {"blocks.*.mlps.*"}),
        (["blocks.2.attn", "head"], {}, {"blocks.2.attn", "head"}),
        ([*(f"blocks.{number}.attn" for number in BLOCKS), "head"], {}, {"blocks.*.attn", "head"}),
        *((seed, {}, None) for seed in range(4)),
        *((seed, TABLES, None) for seed in range(4)),
    ],
)
def test_exactly_the_chosen_sites_run_in_float32(
    chosen: int | list[str], tables: dict[str, dict[str, str]], expected: set[str] | None
) -> None:
    """Also if the policy has tables, some of them for patterns, which a table for a module's name would replace."""
    blocks = 2 if isinstance(chosen, int) else 12
    model, base = Root(blocks), tp.Policy.stock().override_modules(tables)
    already = ran_in_float32(model, blocks, base)
    assert already == ({f"blocks.{number}.attn" for number in range(blocks)} if tables else set())
    if isinstance(chosen, int):
        chosen = random.Random(chosen).sample(sorted(set(callers(blocks)) - already), 4)
    sites = [
        Site("aten::linear", "", module, 1, dtypes="float16", policy="lower_precision_fp") for module in callers(blocks)
    ]
    candidates = Candidates(base, model, "site", "fp32", sites, 0)
    overrides = candidates.overrides(f"{module or '(model)'}: aten::linear" for module in chosen)
    patterns = candidates.with_patterns(overrides)
    assert len(patterns) <= len(overrides)
    assert set(patterns) == (expected or set(patterns))
    assert {module for module, _ in candidates.overridden_places(patterns)} == set(chosen)
    for found in (overrides, patterns):
        assert ran_in_float32(model, blocks, candidates.policy(found)) == set(chosen) | already


def test_patterns_that_would_overlap() -> None:
    # "m.*" would select m.inner, to which "*.inner" gives another table.
    inner = {name: nn.ModuleDict({"inner": Leaf()}) for name in "ab"}
    model = nn.ModuleDict({**inner, "m": nn.ModuleDict({name: Leaf() for name in ("p", "q", "inner")})})
    places = [("a.inner", "aten::linear"), ("b.inner", "aten::linear"), ("m.p", "aten::mm"), ("m.q", "aten::mm")]
    sites = [Site(op, "", module, 1, dtypes="float16") for module, op in places]
    candidates = Candidates(tp.Policy.stock(), model, "site", "fp32", sites, 0)
    tables = candidates.overrides(one.name for one in candidates.all)
    assert set(candidates.with_patterns(tables)) == {"*.inner", "m.p", "m.q"}


def test_sites_that_cannot_have_the_override_are_named() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([Leaf()]), "off": Leaf(), "set": Leaf(), "free": Leaf()})
    tp.set_module_policy(model, {"set": "cuda"})
    base = tp.Policy.stock().override_modules({"off": "off"})
    sites = [
        *(Site("aten::linear", "", name, 1, dtypes="float16") for name in ("list", "list.0", "off", "set", "free")),
        Site("aten::add_", "Tensor", "free", 1, dtypes="float16"),
        Site("aten::mm", "", "free", 1, dtypes="float32"),
        Site("aten::mm", "", "free", 1, dtypes="float16", in_region=False),
    ]
    candidates = Candidates(base, model, "site", "fp32", sites, 0)
    assert [site.module for site in candidates.sites] == ["list.0", "free"]
    expected = (
        "forward is never called",
        "switches autocast off in 'off'",
        "set_module_policy has given",
        "add_.Tensor",
    )
    assert all(part in text for part, text in zip(expected, candidates.excluded, strict=True))


class Scale(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale / self.scale).tanh()


def test_calls_outside_of_modules_are_reached() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scale(2.0))
    step = torch.autocast("cpu", torch.float16)(lambda: (model(torch.randn(4, 4)) * 1e6).float().square().mean())
    tuning = tp.tune(step, model=model, tolerance=0.01, level="site")
    assert tuning.met
    assert tuning.overrides == {"": {"aten::mul": "fp32"}, "1": {"aten::mul": "fallthrough"}}


# --- direction "speed"


@pytest.mark.parametrize("budget", [7, 9, 12, 60])
def test_all_but_planted_ops_are_lowered(budget: int) -> None:
    step = planted_step(6, 2, seed=51, policy="fp32")
    model = step.model
    assert isinstance(model, Planted)
    tuning = tp.tune(step, model=model, tolerance=0.05, direction="speed", budget=budget)
    assert tuning.met
    assert step.count == tuning.runs <= budget
    assert not model.planted & set(tuning.overrides)
    assert tuning.found == tuple(one.name for one in tuning.candidates if one.name in tuning.overrides)
    if budget == 60:
        custom = {one.name for one in tuning.candidates if not one.name.startswith("aten::")}
        assert {name for name in tuning.overrides if not name.startswith("aten::")} == custom - model.planted
        assert set(tuning.overrides.values()) == {"lower_precision_fp"}
        assert tuning.certificate.kind == "1-minimal"
        assert "1-maximal" in tuning.certificate.text
        lowered = [site.bytes for site in tuning.comparison.sites if site.op in tuning.overrides]
        assert tuning.gain["bytes"] == sum(lowered) / 2


def test_everything_may_be_lowered() -> None:
    step = planted_step(3, 0, seed=53, policy="fp32")
    options: dict[str, Any] = {"tolerance": 0.05, "direction": "speed", "formats": ("fp32", "lower"), "budget": 7}
    tuning = tp.tune(step, model=step.model, **options)
    assert tuning.met
    assert len(tuning.overrides) == len(tuning.candidates)
    assert tuning.certificate.text.startswith("It is 1-maximal: all candidates are lowered.")


def test_a_step_that_speed_does_not_apply_to() -> None:
    step = planted_step(3, 1, seed=55)
    with pytest.raises(Fp32FailsError, match=r'even before more ops are lowered: loss .* direction="accuracy"'):
        tp.tune(step, model=step.model, tolerance=0.05, direction="speed")
    step = Calls(nn.Linear(8, 1))
    tuning = tp.tune(step, model=step.model, tolerance=0.5, direction="speed", metric=lambda result: result.sum())
    assert tuning.reason.startswith("no op that may be lowered runs in float32")
    assert (tuning.met, tuning.gain, tuning.overrides) == (True, {}, {})


# --- resumed tunings


class Killed(BaseException):
    pass


def until(step: Calls, last: int) -> Callable[[int], torch.Tensor]:
    """A step that is killed in its call with a number."""

    def killed(number: int) -> torch.Tensor:
        if step.count == last:
            raise Killed
        return step(number)

    return killed


def tuned(step: Any, model: nn.Module, file: Path | None, **options: Any) -> tp.types.Tuning:
    return tp.tune(step, model=model, **{"tolerance": 0.04, "resume": file, **options})


def test_a_killed_tuning_loses_at_most_one_trial(tmp_path: Path) -> None:
    step = planted_step(8, 2, seed=61)
    whole = tuned(step, step.model, None)
    total = step.count
    for last in (4, 7, total - 1, total + 1):
        file = tmp_path / f"{last}.json"
        step.count = 0
        if last < total:
            with pytest.raises(Killed):
                tuned(until(step, last), step.model, file)
        else:
            tuned(step, step.model, file)
        step.count = 0
        torch.manual_seed(12345)  # a state that the step does not read
        again = tuned(step, step.model, file)
        assert min(last, total) + step.count <= total + 2  # the reference runs again, which does not count
        assert again.met
        assert (again.overrides, again.policy, again.noise_floor) == (whole.overrides, whole.policy, whole.noise_floor)
        assert again.runs <= whole.runs + 1
        assert [one.overrides for one in again.trials] == [one.overrides for one in whole.trials]
        assert again.certificate.text == whole.certificate.text
        assert again.comparison.to_dict() == whole.comparison.to_dict()


def test_another_budget(tmp_path: Path) -> None:
    step = planted_step(8, 2, seed=71)
    small = tuned(step, step.model, tmp_path / "larger.json", budget=8)
    assert small.certificate.kind == "passes"
    large = tuned(step, step.model, tmp_path / "larger.json", budget=60)
    assert large.certificate.kind != "passes"
    assert step.count <= 61
    killed = until(step, step.count + large.runs - 2)  # before the runs on held-out batches
    with pytest.raises(Killed):
        tuned(killed, step.model, tmp_path / "smaller.json")
    again = tuned(step, step.model, tmp_path / "smaller.json", budget=large.runs - 2)
    assert (again.overrides, again.met, again.certificate.held_out) == (large.overrides, True, None)
    assert again.certificate.text.endswith("The budget left no run for held-out batches.")


def test_held_out_batches_that_failed_become_part_of_a_resumed_tuning(tmp_path: Path) -> None:
    model, _ = scaled()

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            y = model.linear(torch.full((2, 4), 1.0 + number))
            return (y * 1e6).float().square().mean() + (y / 1e-6 if number else y).float().square().mean()

    first = tuned(step, model, tmp_path / "file.json", budget=8, tolerance=0.01)
    assert (first.met, list(first.overrides)) == (False, ["aten::mul"])
    again = tuned(step, model, tmp_path / "file.json", tolerance=0.01)
    assert (again.met, list(again.overrides)) == (True, ["aten::linear"])
    assert any("became part of the tuning" in note for note in again.notes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tolerance": 0.05}, "belongs to another tuning, with tolerance=0.04 instead of 0.05"),
        ({"level": "module"}, "level='op' instead of 'module'"),
        ({"dtype": torch.float16}, "dtype=None instead of 'torch.float16'"),
        ({"model": nn.Linear(2, 2)}, "parameters="),
        ({}, "with policy="),
        ({"other weights": True}, "gives other results"),
        ({"text": "{"}, "was not written by tune"),
        ({"text": "[]"}, "was not written by tune"),
        ({"text": '{"format": 2}'}, "was not written by tune"),
        ({"text": '{"format": 1, "identity": {}, "runs": 3}'}, "has format 1; this release reads format 2"),
    ],
)
def test_an_unsuitable_file_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    file, step = tmp_path / "file.json", planted_step(3, 1, seed=64)
    tuned(step, step.model, file, budget=6)
    file.write_text(options.get("text", file.read_text()))
    if options.get("other weights"):
        with torch.no_grad():
            next(step.model.parameters()).add_(1)
    given = {key: value for key, value in options.items() if key in ("tolerance", "level", "dtype")}
    before = file.read_text()
    with tp.install(policy=None if options else "cuda"), pytest.raises(OptionError, match=text):
        tuned(step, options.get("model", step.model), file, **given)
    assert file.read_text() == before


@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (1.001, True)])
def test_a_resumed_step_with_noise_may_differ_by_it(tmp_path: Path, factor: float, refused: bool) -> None:
    model = Scaled()
    count = itertools.count()
    step = torch.autocast("cpu", torch.float16)(lambda: model(torch.ones(2, 4)) * (1 + 1e-6 * (next(count) % 3)))
    first = tuned(step, model, tmp_path / "file.json", tolerance=0.01)
    assert first.noise_floor["loss"] > 0
    with torch.no_grad():
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    if refused:
        with pytest.raises(OptionError, match="the step gives other results than when the file"):
            tuned(step, model, tmp_path / "file.json", tolerance=0.01)
    else:
        assert tuned(step, model, tmp_path / "file.json", tolerance=0.01).overrides == first.overrides


# --- ranks


@pytest.mark.slow
def test_ranks_that_tune_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("one_rank_fails", "resumed", "different_models", "one_rank_raises")
    monkeypatch.setenv("TUNED_RANKS_FILE", str(tmp_path / "resume.json"))
    first, second = in_ranks({name: globals()[name] for name in names}, 2, tmp_path)
    ours, theirs = first["one_rank_fails"], second["one_rank_fails"]
    assert {**ours, "planted": theirs["planted"]} == theirs
    assert set(theirs["overrides"]) == theirs["planted"] != set()
    assert first["resumed"] == second["resumed"]
    once, again = first["resumed"]
    assert again == once  # the run to see that nothing has changed does not count
    for rank in (first, second):
        assert rank["different_models"].startswith("TuningError: ranks 0 and 1 run different ops in a lower dtype")
    assert first["one_rank_raises"] == "TuningError: rank 1 raised ZeroDivisionError: mine"
    assert second["one_rank_raises"] == "ZeroDivisionError: mine"


# --- errors


def test_noise() -> None:
    model, step = scaled()
    seeds, count = itertools.count(), itertools.count()

    def noisy(scale: float) -> torch.Tensor:
        return step() * (1 + scale * next(count))

    def random_step() -> torch.Tensor:
        return step() * torch.rand((), generator=torch.Generator().manual_seed(next(seeds)))

    with pytest.raises(NoiseFloorError, match=r"differ by more than the tolerance: loss 0.0\d+ \(tolerance 0.001\)"):
        tp.tune(functools.partial(noisy, 0.01), model=model, tolerance=1e-3)
    with pytest.raises(NoiseFloorError, match=r"first: the results of aten::rand\.generator in \(model\), call 1"):
        tp.tune(random_step, model=model, tolerance=1e-3)
    tuning = tp.tune(functools.partial(noisy, 1e-6), model=model, tolerance=0.01)
    assert tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert 0 < tuning.noise_floor["loss"] < 1e-4
    assert any("not exactly repeatable" in note for note in tuning.notes)


def test_a_step_that_float32_does_not_cure() -> None:
    model, step = scaled()
    calls = itertools.count()

    def other() -> torch.Tensor:
        return step() + (1 if next(calls) > 2 else 0)

    with pytest.raises(Fp32FailsError, match=r"with all candidates in float32 the result is: loss \S+ \(tolerance"):
        tp.tune(other, model=model, tolerance=1e-4)


def test_an_op_that_no_override_reaches() -> None:
    """It writes float32 numbers to a float16 tensor. Its policy casts them first, and fp32 is not legal for it."""

    def kernel(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.copy_(x / 1e6)

    model, step = scaled()

    def overflowing(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16), torch.no_grad():
            far = torch.ops.tuned.written_(torch.zeros(4, dtype=torch.float16), torch.full((4,), 1e6)).float().mean()
        return far if number < 0 else step() + (far if number else 0)

    with torch.library._scoped_library("tuned", "DEF") as library:
        library.define("written_(Tensor(a!) out, Tensor x) -> Tensor(a!)")
        library.impl("written_", kernel, "CompositeExplicitAutograd")
        with tp.register_policy("tuned::written_", "match_self"):
            with pytest.raises(Fp32FailsError, match=r"no op that can get an override .* No override for tuned::w"):
                tp.tune(lambda: overflowing(-1), model=model, tolerance=0.1)
            tuning = tp.tune(overflowing, model=model, tolerance=0.01)  # fails on held-out batches, whatever is chosen
    assert not tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.certificate.kind == "minimum"
    assert any("Tune with more batches" in note for note in tuning.notes)
    assert not any("became part of the tuning" in note for note in tuning.notes)


@pytest.mark.parametrize("recorded", [True, False])
def test_ops_of_a_backward_in_the_region_are_candidates(recorded: bool) -> None:
    """Such as of a gradient penalty, the residual of a differential equation, or a misplaced `loss.backward()`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=recorded)
            return slope.square().mean()

    comparison = tp.compare(step, model=model)
    assert "aten::mm" in {site.op for site in comparison.sites}
    assert not comparison.not_aligned
    tuning = tp.tune(step, model=model, tolerance=1e-4)
    assert (tuning.overrides, tuning.certificate.kind) == ({"aten::linear": "fp32", "aten::mm": "fp32"}, "minimum")
    assert tuning.errors == {"loss": 0}
    with pytest.raises(Fp32FailsError, match=r'no set of the candidates .* choose level "op"'):
        tp.tune(step, model=model, tolerance=1e-4, level="module")


def test_results_that_are_padded_with_nan_are_tuned() -> None:
    model, step = scaled(torch.bfloat16)
    tuning = tp.tune(lambda: {"loss": step(), "padded": torch.tensor([1.0, math.nan])}, model=model, tolerance=0.5)
    assert tuning.met
    with pytest.raises(Fp32FailsError, match="NaN or inf in the reference: padded"):
        tp.tune(lambda: {"loss": step(), "padded": torch.tensor([math.inf, math.nan])}, model=model, tolerance=0.5)


def test_nothing_to_tune(tmp_path: Path) -> None:
    model, step = scaled(torch.bfloat16)

    def tune(step: Callable[[], Any] = step) -> Tuning:
        return tp.tune(step, model=model, tolerance=0.5)

    tuning = tune()
    assert re.search(r"meets the tolerance without an override: loss \S+ \(tolerance 0.5\)", tuning.reason)
    assert (tuning.met, tuning.overrides, tuning.found, tuning.runs) == (True, {}, (), 5)
    assert tuning.certificate.held_out is not None
    assert tuning.policy == tp.Policy.stock()
    assert [trial.why for trial in tuning.trials] == ["gate", "held out"]
    assert 0 < tuning.errors["loss"] < 0.5
    assert "Nothing to tune: the current policy meets the tolerance" in str(tuning)
    for name in ("tuning.json", "tuning.html", "mine.toml"):
        tuning.save(tmp_path / name)
    assert Tuning.load(tmp_path / "tuning.json").to_dict() == tuning.to_dict()
    assert tp.Policy.load(tmp_path / "mine.toml") == tp.Policy.stock()
    with tp.install(policy="off"):
        assert "which casts no op" in tune().reason
    assert "No call ran in another dtype" in tune(lambda: model(torch.ones(1, 4)).sum()).reason


FORMATS = r"formats must be \('fp32', 'lower'\) or \('lower', 'float8'\), where any float8 policy may take the place.*"
SPEED = {"direction": "speed"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tolerance": 0}, r"must be a finite number above 0 \(relative to the"),
        ({"tolerance": -1}, "finite number above 0"),
        ({"tolerance": math.nan}, "finite number above 0"),
        ({"tolerance": {}}, "finite number above 0"),
        ({"tolerance": {"los": 1e-3}}, r"tolerance names 'los', and step\(\) returned 'loss'. Closest: loss."),
        ({"budget": 5}, "must be 6 or more, got 5: tune makes so"),
        ({"budget": 6, "direction": "speed"}, "7 or more, got 6"),
        ({"level": "ops"}, r"level must be 'op' or 'module' or 'site', got 'ops'. Closest: op."),
        ({"direction": "fast"}, "direction must be 'accuracy' or 'speed', got 'fast'."),
        ({"metric": "los"}, r"metric='los': step\(\) returned no such name. Closest: loss. Legal: loss."),
        ({"metric": 3}, "metric must be a function"),
        ({"check": 3}, "check must be a function"),
        ({"seed": 0.5}, "seed must be an int"),
        ({"resume": "/no/such/folder/file.json"}, "there is no folder of that name"),
        (
            {"formats": ("lower", "float8")},
            r'is for direction="speed", got direction="accuracy".* Give direction="speed" as well',
        ),
        ({"formats": ("fp32", "float8"), **SPEED}, FORMATS + r"got \('fp32', 'float8'\)\. Tune from flo"),
        ({"formats": ("float8", "lower"), **SPEED}, FORMATS + "and tune it from there to float8"),
        ({"formats": ("lower", "float8:mx"), **SPEED}, FORMATS + "'float8:mx': PyTorch has no product"),
        ({"formats": "float8", **SPEED}, FORMATS + "got 'float8'. Give a pair"),
        ({"formats": ("lower",), **SPEED}, FORMATS + "Give a pair"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], text: str) -> None:
    model, step = scaled()
    with pytest.raises(OptionError, match=text) as error:
        tp.tune(step, **{"model": model, "tolerance": 0.1, **arguments})
    assert type(error.value) is OptionError
