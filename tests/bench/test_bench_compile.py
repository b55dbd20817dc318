"""The suite `compile`: its cases, its counts, and the command's table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of, wide
from torch_promote.bench import Case, Result, Settings, list_cases, run
from torch_promote.bench.cases import COMPILE, LOW, OURS, STOCK
from torch_promote.bench.compiling import count_calls_of_compiler, count_compiled, on_its_own
from torch_promote.bench.steps import forward, subject
from torch_promote.bench.suite_compile import PLACES

__all__ = ["terminal_of_80_columns", "wide"]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TINY = Settings(rounds=2, slice_seconds=0, tiny=True)
CASES = {case.name: case for case in list_cases(TINY, [COMPILE])}


def test_it_runs_only_if_named() -> None:
    assert CASES
    assert COMPILE not in {case.suite for case in list_cases(TINY)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "MLP, forward" else pytest.mark.slow, id=name) for name in CASES],
)
def test_every_case_runs(name: str) -> None:
    [result] = run([CASES[name]], TINY)
    assert set(result.times_ns) == {STOCK, OURS}
    assert result.ratio is not None
    counts = {contender: dict(result.measured[contender].compiled) for contender in (STOCK, OURS)}
    assert counts[STOCK]["kernels"] > 0
    assert counts[STOCK]["graphs"] >= 1
    for compiled in counts.values():
        del compiled["guards"]  # tests/integrations/test_compile_costs.py
    if name.endswith("compilation"):
        assert 0 < counts[OURS].pop("calls") <= 1.02 * counts[STOCK].pop("calls")
    assert counts[OURS] == counts[STOCK]
    assert result.measured[OURS].peak_bytes == result.measured[STOCK].peak_bytes > 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that Dynamo makes. They run as they are, because Inductor takes seconds for each."""
    made: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return made


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_region_is_compiled_code_has_the_bits_of_eager_code(
    place: str, graphs: list[torch.fx.GraphModule]
) -> None:
    made = subject("MLP", TINY)
    with tp.stock_autocast("cpu", LOW), torch.no_grad():
        y = made.net(made.x)
        square = y @ y.mT
    expected = {"several regions": square.float().relu() + 1, "graph break in a region": square.relu()}.get(place, y)
    for autocast in (tp.stock_autocast, tp.my_autocast):
        step = forward(PLACES[place](made.net, autocast), made.x)
        assert torch.equal(step(), expected)
        assert graphs
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(step(), expected)
        graphs.clear()


def test_a_compilation_is_of_a_training_step_and_begins_anew_each_time(graphs: list[torch.fx.GraphModule]) -> None:
    prepared = CASES["MLP, compilation"].prepare(TINY)
    assert list(prepared.timers) == [STOCK, OURS]
    for timer in prepared.timers.values():
        for _ in range(2):
            assert timer() > 0
            [graph] = graphs
            assert any(node.target is torch.nn.functional.linear for node in graph.graph.nodes)
            graphs.clear()
    counts = {name: dict(found.compiled) for name, found in prepared.measure().items()}
    calls = {name: found.pop("calls") for name, found in counts.items()}
    assert min(calls.values()) > 1000
    assert [found["graphs"] for found in counts.values()] == [1, 1]


def test_counts() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(function, backend="eager")
    once = count_compiled(lambda: compiled(torch.ones(3)))
    assert once.pop("guards") > 0
    assert once == {"kernels": 0, "graphs": 2, "graph_breaks": 1, "frames": 2}
    twice = count_compiled(lambda: [compiled(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)])
    assert (twice["graphs"], twice["frames"]) == (4, 4)


def test_calls_of_the_compiler() -> None:
    def chain(x: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            x = x * 2
        return x

    def calls(length: int) -> int:
        compiled = torch.compile(on_its_own(chain), backend="eager")
        compiled(torch.ones(3), length)
        return count_calls_of_compiler(lambda: compiled(torch.ones(3), length))

    short, again, long = calls(2), calls(2), calls(40)
    assert abs(again - short) <= 0.001 * short
    assert long > 1.5 * short


def test_copies_of_a_function_share_nothing_compiled() -> None:
    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number

    copies = [torch.compile(on_its_own(function), backend="eager") for _ in range(2)]
    assert count_compiled(lambda: [copy(torch.ones(3), 2) for copy in copies])["frames"] == 2
    shared = [torch.compile(function, backend="eager") for _ in range(2)]
    assert count_compiled(lambda: [copy(torch.ones(3), 2) for copy in shared])["frames"] == 1
    assert torch.equal(copies[0](torch.ones(3), 3), torch.full((3,), 3.0))


def test_the_command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("bench", "--suite", "compile", "--case", "MLP, forward", "--rounds", "2")
    monkeypatch.setattr("torch_promote.cli.bench.Settings", lambda *_, **__: TINY)
    kept: dict[tuple[str, ...], list[Result]] = {}

    def run_once(cases: Sequence[Case], settings: Settings) -> list[Result]:
        """Inductor takes seconds for a case, so the second command shows the results of the first."""
        names = tuple(case.name for case in cases)
        if names not in kept:
            kept[names] = list(run(cases, settings))
        return kept[names]

    monkeypatch.setattr("torch_promote.cli.bench.run", run_once)
    [result] = json_of(capsys, *arguments)["results"]
    assert list(result["compiled"]) == [STOCK, OURS]
    assert list(result["compiled"][STOCK]) == ["kernels", "graphs", "graph_breaks", "frames", "guards"]
    text = text_of(capsys, *arguments)
    for word in ("ours / stock", "contender", "kernels", "graphs"):
        assert word in text
    assert re.search(r"MLP, forward: stock +\d+ +1 +0 +1 +\d+", text)


def test_it_is_for_the_cpu(capsys: Capture) -> None:
    assert "suite compile compiles for the CPU" in error_of(capsys, "bench", "--suite", "compile", "--device", "cuda")
