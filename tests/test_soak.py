"""`make soak` (tests/soak/): what it measures, leaks that it must find, and a few iterations of each feature."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import run_python
from torch_promote.native import module_tables
from torch_promote.regions import unused_overrides, watching

FOLDER = Path(__file__).with_name("soak")


@pytest.fixture(autouse=True)
def quiet_in_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.UnusedOverrideWarning)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def soaking(load: Any) -> ModuleType:
    return load("soaking")


# --- every feature leaves the registries as they were

ROUNDS = 3


def sizes(load: Any) -> dict[str, int]:
    gc.collect()
    return dict(load("registries").registry_sizes())


def test_no_feature_leaves_anything_in_a_registry_without_limit(load: Any) -> None:
    features, alone = load("features").FEATURES, load("tool_features").ALONE
    names = [name for name in features if name not in alone]
    assert len(names) > 15

    def run(first: int) -> None:
        for number in range(first, first + ROUNDS):
            for name in names:
                features[name](random.Random(number), number)

    ops = [op for kind in ("OPS", "PATTERNS", "FUNCTIONS") for op in getattr(load("features"), kind)]
    for policy in ("keep", "lower", "fp32"):  # so that no op gets its number later
        tp.my_autocast("cpu", overrides=dict.fromkeys(ops, policy))
    run(0)
    before = sizes(load)
    run(8)  # which uses the names of the custom ops again
    after = sizes(load)
    grown = {name: (before.get(name, 0), size) for name, size in after.items() if size > before.get(name, 0)}
    limits = {name: load("registries").limit_of(name) for name in grown}
    assert [name for name, limit in limits.items() if limit is None] == []
    # Of a registry of what is in use, other tests may hold entries.
    assert [name for name, limit in limits.items() if limit is not None and after[name] - before[name] > limit] == []


# --- bounds of registries


def test_numbers_of_module_tables_that_nothing_holds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tables, "_MOST_KEPT", most := 8)
    monkeypatch.setattr(module_tables, "_drop_at", 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    kept = tp.Policy.stock().override_modules({"0": {"linear": "float16"}})
    region = tp.my_autocast("cpu", policy=kept, model=model)
    ops = ("exp", "log", "tanh", "sin", "cos", "mm", "bmm")
    for chosen in itertools.islice(itertools.combinations(ops, 3), 2 * most + 10):
        policy = tp.Policy.stock().override_modules({"0": dict.fromkeys(chosen, "fp32")})
        with tp.my_autocast("cpu", policy=policy, model=torch.nn.Sequential(torch.nn.Linear(2, 2))):
            pass
    held = sum(1 for number in module_tables._tables if module_tables._kept.get(number))
    assert len(module_tables._tables) <= 2 * most + held
    assert set(module_tables._kept) <= set(module_tables._tables)
    with region:  # which holds its number
        assert module_tables.tables_in_force() == kept.modules
        assert model(torch.ones(1, 2)).dtype is torch.float16


def test_the_line_of_an_old_override_is_dropped_and_no_other() -> None:
    def region_of(number: int) -> tp.my_autocast:
        code = compile("region = tp.my_autocast('cpu', overrides={'mm': 'fp32'})", f"<a line {number}>", "exec")
        space: dict[str, Any] = {"tp": tp, "__name__": "lines"}
        exec(code, space)
        return space["region"]

    for number in range(unused_overrides._MOST_LINES + 1):
        region_of(number)
    files = [line.filename for line in unused_overrides._lines.values() if line is not None]
    assert len(files) <= unused_overrides._MOST_LINES
    assert len(files) > unused_overrides._MOST_LINES * 3 / 4
    assert files[-1] == f"<a line {unused_overrides._MOST_LINES}>"


# --- planted leaks


def soak_of(soaking: ModuleType, function: Any, monkeypatch: pytest.MonkeyPatch, iterations: int = 56) -> Any:
    monkeypatch.setitem(soaking.FEATURES, "planted", function)
    result = soaking.soak(["planted"], iterations, 0, full=False, readings=8)
    return {one.name: one.verdict for one in result.judge()}


def test_a_leak_of_memory_is_found(soaking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    verdicts = soak_of(soaking, lambda draw, number: kept.append(torch.ones(64)), monkeypatch)
    assert (verdicts["allocated"], verdicts["tensors"]) == ("grows", "grows")


def test_a_leak_of_objects_is_found(soaking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    verdicts = soak_of(soaking, lambda draw, number: kept.append(tp.my_autocast("cpu", cache="all")), monkeypatch)
    assert (verdicts["ours"], verdicts["python blocks"]) == ("grows", "grows")


def test_a_leak_in_a_registry_is_named(soaking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_watchers", [])
    verdicts = soak_of(soaking, lambda draw, number: watching._watchers.append(print), monkeypatch)
    assert [name for name, verdict in verdicts.items() if verdict == "grows" and name.startswith("registry")] == [
        "registry regions.watching._watchers"
    ]


def test_without_a_leak_everything_is_flat(soaking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = soak_of(soaking, lambda draw, number: torch.ones(2), monkeypatch)
    assert {name for name, verdict in verdicts.items() if verdict not in ("flat", "bounded")} <= {"python blocks"}


# --- the slope and its verdict


@pytest.mark.parametrize(("slope", "verdict"), [(0.0, "flat"), (0.9, "flat"), (1.5, "grows")])
def test_verdict_of_a_noisy_series(load: Any, slope: float, verdict: str) -> None:
    draw = random.Random(0)
    iterations = list(range(0, 20_000, 200))
    values = [1000 * draw.random() + slope * at + (50_000 if at < 3_000 else 0) for at in iterations]
    growth = load("growth").growth_of(iterations, values)
    assert growth.low < slope < growth.high
    assert growth.verdict(1.0) == verdict


def test_a_short_noisy_series_is_unclear(load: Any) -> None:
    growth = load("growth").growth_of(range(8), [0, 9, 2, 7, 0, 9, 3, 8])
    assert growth.verdict(0.5) == "unclear"


def test_a_slope_needs_readings(load: Any) -> None:
    with pytest.raises(ValueError, match="a slope needs 3 readings after the warm-up, got 2"):
        load("growth").growth_of([0, 10, 20], [1, 1, 1])


def test_the_growth_of_stock_is_subtracted(load: Any) -> None:
    def run(slope: float, verdict: str) -> Any:
        return {
            "measures": {
                "allocated": dict.fromkeys(("slope", "low", "high"), slope) | {"bound": 32.0, "verdict": verdict}
            }
        }

    verdict_of = load("each").verdict_of
    assert verdict_of(run(1000, "grows"), run(1000, "grows")) == "flat"
    assert verdict_of(run(1200, "grows"), run(1000, "grows")) == "allocated grows (1.2e+03)"
    assert verdict_of(run(0, "flat"), None) == "flat"


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = ["--iterations", "16", "--only", "modules", "--not-full", "--json", str(tmp_path / "found.json")]
    done = run_python(code, str(FOLDER), *arguments)
    assert done.returncode in (0, 1), done.stderr
    assert "16 iterations with seed 0: modules 16" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["counts"] == {"modules": 16}
    assert len(found["series"]["allocated"]) == len(found["iterations"]) == 9
