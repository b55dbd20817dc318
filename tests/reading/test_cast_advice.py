"""What a trace says of casts: of what kind a tensor is, and which cache would have reused a cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote import _C
from torch_promote.reading.findings import savings
from torch_promote.reading.trace_report import TraceReport
from torch_promote.report.base import Table

X = torch.randn(3, 2, 4)

#: Modules with their arguments, and how often they cast a weight or a view of one, and anything else.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], tuple[int, int]]] = {
    "GRU": (lambda: nn.GRU(4, 4, 2), (X,), (8, 8)),
    "GRU, initial state": (lambda: nn.GRU(4, 4, 2), (X, torch.randn(2, 2, 4)), (8, 8)),
    "GRU, both ways": (lambda: nn.GRU(4, 4, bidirectional=True), (X,), (8, 8)),
    "GRU, packed": (lambda: nn.GRU(4, 4), (nn.utils.rnn.pack_padded_sequence(X, [3, 2]),), (4, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 4), (X[0], X[1]), (4, 2)),
    "RNN": (lambda: nn.RNN(4, 4, 2, nonlinearity="relu"), (X,), (8, 3)),
    "LSTM, projection": (lambda: nn.LSTM(4, 4, proj_size=2), (X,), (4 + 3, 5)),  # a view for each step
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), (X, X + 1, X + 2), (8, 3)),  # views of one weight
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODULES)
def test_only_weights_are_weights(name: str) -> None:
    make, args, expected = MODULES[name]
    with tp.trace() as report, tp.my_autocast("cpu"):
        make()(*args)
    weights = sum(one.made for one in report.casts() if one.kind == "weight")
    assert (weights, report.total.casts - weights) == expected
    assert {one.kind for one in report.casts()} == {"weight", "activation"}


Region = Callable[[], AbstractContextManager[Any]]
W1, W2 = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
FROZEN = nn.Parameter(torch.randn(8, 8), requires_grad=False)
Y = torch.randn(4, 8)


def one_region(region: Region) -> None:
    with region():
        nn.functional.linear(Y, W1)
        nn.functional.linear(Y, W2)


def two_regions(region: Region) -> None:
    for weight in (W1, W2):
        with region():
            nn.functional.linear(Y, weight)


def nested_regions(region: Region) -> None:
    with region():
        two_regions(region)


def one_view(region: Region) -> None:
    view = Y.view(2, 2, 8)
    with region():
        nn.functional.linear(view, W1)
        nn.functional.linear(view, W2)


def two_views(region: Region) -> None:
    with region():
        nn.functional.linear(Y.view(2, 2, 8), W1)
        nn.functional.linear(Y.view(2, 2, 8), W2)


def four_others_between(region: Region) -> None:
    with region():
        for tensor in (Y, *(Y + i for i in range(4)), Y):
            nn.functional.linear(tensor, W1)


def three_others_between(region: Region) -> None:
    with region():
        for tensor in (Y, *(Y + i for i in range(3)), Y):
            nn.functional.linear(tensor, W1)


def written_in_between(region: Region) -> None:
    tensor = Y.clone()
    with region():
        nn.functional.linear(tensor, W1)
        tensor.add_(1)
        nn.functional.linear(tensor, W2)


def memory_of_numpy(region: Region) -> None:
    tensor = torch.from_numpy(Y.numpy())
    with region():
        nn.functional.linear(tensor, W1)
        nn.functional.linear(tensor, W2)


def inference_tensor(region: Region) -> None:
    with torch.inference_mode():
        tensor = Y.clone()
        with region():
            nn.functional.linear(tensor, W1)
            nn.functional.linear(tensor, W2)


def with_gradients(region: Region) -> None:
    with region():
        hidden = torch.sin(Y @ W1).float()
        (nn.functional.linear(hidden, W1).sum() + nn.functional.linear(hidden, W2).sum()).backward()


def in_a_generator(region: Region) -> None:
    def steps() -> Iterator[torch.Tensor]:
        with region():
            yield nn.functional.linear(Y, W1)
            yield nn.functional.linear(Y, W2)

    for _ in steps():
        pass


def views_of_weights(region: Region) -> None:
    for _ in range(2):
        with region():
            torch.mm(Y, W1.t())
            torch.mm(Y + 1, W1.t())


def weights_of_two_regions(region: Region) -> None:
    for _ in range(2):
        with region():
            nn.functional.linear(Y + 1, W1)


def frozen_weights(region: Region) -> None:
    with region():
        nn.functional.linear(Y, FROZEN)
        nn.functional.linear(Y + 1, FROZEN)


def updated_weights(region: Region) -> None:
    optimizer = torch.optim.SGD([W1], lr=0.1)
    for _ in range(2):
        with region():
            nn.functional.linear(Y + 1, W1).sum().backward()
        optimizer.step()


#: Programs, with the casts that cache="all" and cache="persistent" avoid, compared with the default.
PROGRAMS: dict[Callable[[Region], None], tuple[int, int]] = {
    one_region: (1, 0),
    two_regions: (0, 0),
    nested_regions: (1, 0),
    one_view: (1, 0),
    two_views: (0, 0),
    four_others_between: (0, 0),
    three_others_between: (1, 0),
    written_in_between: (0, 0),
    memory_of_numpy: (0, 0),
    inference_tensor: (0, 0),
    with_gradients: (1, 0),
    in_a_generator: (1, 0),
    views_of_weights: (0, 0),
    weights_of_two_regions: (0, 1),
    frozen_weights: (0, 1),
    updated_weights: (0, 0),
}


def traced(program: Callable[[Region], None], region: Region) -> TraceReport:
    tp.clear_cache()
    with tp.trace() as report:
        program(region)
    return report


def advised(report: TraceReport) -> tuple[int, ...]:
    return tuple(
        sum(one.casts for one in savings(report.calls) if f'cache="{mode}"' in one.remedy)
        for mode in ("all", "persistent")
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_cache_avoids_what_is_said(program: Callable[[Region], None]) -> None:
    expected = PROGRAMS[program]
    reports = {mode: traced(program, lambda mode=mode: tp.my_autocast("cpu", cache=mode)) for mode in _C.CACHE_MODES}
    assert advised(reports["weights"]) == expected
    before, with_all, persistent = (reports[mode].total.casts for mode in ("weights", "all", "persistent"))
    # cache="all" keeps frozen weights, too
    assert before - with_all in (expected[0], sum(expected))
    assert before - persistent == expected[1]
    assert advised(reports["all"])[0] == 0
    assert advised(reports["persistent"])[1] == 0
    stock = traced(program, lambda: torch.autocast("cpu"))
    assert advised(stock) == expected


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("where", ["ops", "casts"])
def test_a_step_changes_its_weights(optimizer: Any, fused: bool | None, where: Any) -> None:
    """Also where a fused optimizer leaves the versions of weights as they were. Frozen weights do not change."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    steps = optimizer([*model[0].parameters(), *model[1].parameters()], lr=0.1, fused=fused)
    with tp.trace(model, where=where) as report:
        for _ in range(3):
            with tp.my_autocast("cpu"):
                loss = model(Y).float().sum()
            loss.backward()
            steps.step()
            steps.zero_grad()
    advised = {(call.module, cast.argument) for call in report.calls for cast in call.casts if cast.avoidable}
    assert advised == {("1", "weight"), ("1", "bias")}


class Converting(nn.Module):
    """Converts what a linear layer returns, and passes it to the next, as adapters in float32 do."""

    def __init__(self, converts: bool, device: str = "cpu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.converts, self.device = converts, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.converts:
                x = x.type_as(layer.weight)
        return x.to(torch.get_autocast_dtype(self.device))


def of_conversions(model: nn.Module, path: Path | None = None) -> TraceReport:
    with tp.trace(model) as report, torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(4, 8))
    if path is None:
        return report
    report.save(path)
    return tp.load(path)


@pytest.mark.parametrize("is_read", [False, True])
def test_conversions_that_autocast_undoes(is_read: bool, tmp_path: Path) -> None:
    report = of_conversions(Converting(True), tmp_path / "a.jsonl.gz" if is_read else None)
    line = Converting.forward.__code__.co_firstlineno
    widened, lowered = f"test_cast_advice.py:{line + 4}", f"test_cast_advice.py:{line + 5}"
    without = of_conversions(Converting(False))
    undone = report.total.casts - without.total.casts  # those that leaving the conversion out avoids
    assert undone == 2
    table = next(part for part in report.content().parts if getattr(part, "title", "").startswith("Conversions"))
    assert isinstance(table, Table)
    assert list(table.rows) == [
        (widened, "bfloat16 -> float32", ["(model)"], 3, 3 * 4 * 8 * 4, f"casts it back to bfloat16: {undone} casts"),
        (lowered, "float32 -> bfloat16", ["(model)"], 1, 4 * 8 * 2, None),
    ]
    assert f"{widened}, bfloat16 -> float32 (3)" in dict(report.explain("type_as").facts)["conversions"]
    assert "Conversions that the program makes" not in str(without)


@pytest.mark.parametrize(("device", "other"), [("cuda", True), ("cpu", False)])
def test_a_lower_dtype_that_no_region_has(device: str, other: bool) -> None:
    facts = {name: values for name, *values in of_conversions(Converting(True, device)).content().facts}
    line = f"test_cast_advice.py:{Converting.forward.__code__.co_firstlineno + 5}"
    assert ("float16" in facts) == other
    if other:
        assert facts["float16"] == [f"from {line}", "the first conversion to it; no region has this dtype"]
