"""Random programs are recorded without an effect on them; recordings of two runs are equal, and read as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torch_promote as tp
from fuzz.calls import Ours
from fuzz.drawing import draw_program, script_of
from fuzz.running import compiled, outcome_of, quiet

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


def notes_of(function: Any) -> tuple[Any, ...]:
    outcome = outcome_of(function, Ours("cpu"), "cpu")
    return outcome.notes, outcome.error, outcome.left


@pytest.mark.parametrize("first", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_recordings_of_random_programs(first: int, tmp_path: Path) -> None:
    paths = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    compared = 0
    for number in range(first, first + (40 if first == 0 else 400)):
        program = draw_program(3, number, "cpu")
        function, title = compiled(program), script_of(program, str(number))
        found = []
        with quiet():
            plain = notes_of(function)
            for path in paths:
                with tp.trace(record=path) as report:
                    found.append(notes_of(function))
        assert found == [plain, plain], title
        if not report.calls:
            continue
        one, other = map(tp.load, paths)
        assert other.text() == report.text(), title
        difference = tp.diff(one, other)
        assert difference.equal, f"{title}\n{difference}"
        compared += difference.compared - difference.unknown
    assert compared > 500
