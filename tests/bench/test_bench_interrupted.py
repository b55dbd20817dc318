"""`torch-promote bench` interrupted by Ctrl-C: it prints the cases that are finished, and exits with 130."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.command_line import Capture, terminal_of_80_columns
from torch_promote.bench import Case, Result
from torch_promote.bench.cases import Prepared
from torch_promote.bench.figures import Spread
from torch_promote.cli import bench as cli_bench
from torch_promote.cli.program import main

__all__ = ["terminal_of_80_columns"]  # a fixture


def _results(count: int) -> Iterator[Result]:
    for number in range(count):
        case = Case("region", f"case {number}", lambda settings: Prepared({}))
        yield Result(case, Spread(0.5, 0.4, 0.6), times_ns={"ours": Spread(1, 1, 1), "stock": Spread(2, 2, 2)})
    raise KeyboardInterrupt


@pytest.mark.parametrize("count", [1, 2])
def test_it_prints_what_is_finished(count: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "run", lambda cases, settings: _results(count))
    assert main(["bench", "--suite", "region"]) == 130
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("case ")][1:] == [
        ["case", str(number)] for number in range(count)
    ]
    assert lines[-1] == f"Interrupted after {count} of 8 cases."
    assert main(["bench", "--suite", "region", "--json"]) == 130
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (data["interrupted"], data["cases"], len(data["results"])) == (True, 8, count)


def test_before_the_first_case_there_is_nothing_to_print(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "run", lambda cases, settings: _results(0))
    assert main(["bench", "--suite", "region"]) == 130
    assert capsys.readouterr().out == ""
