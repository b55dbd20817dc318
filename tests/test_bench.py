"""The benchmark runs and says what it timed. What it finds is for a quiet machine to say, not for a test."""

from __future__ import annotations

import json

import pytest

from torch_promote import bench, cli


@pytest.mark.parametrize("suite", bench.SUITES)
def test_every_case_gives_a_ratio_between_its_quartiles(suite: str) -> None:
    results = list(bench.run(suite, rounds=3))
    assert results
    for result in results:
        assert result.suite == suite
        assert 0 < result.low <= result.ratio <= result.high
        assert result.ours_ns > 0
        assert result.stock_ns > 0


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--suite", "region", "--rounds", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rounds"] == 2
    assert {result["suite"] for result in data["results"]} == {"region"}


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--suite", "region", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "ours / stock" in out
    assert "construct, enter, exit" in out


@pytest.mark.parametrize("rounds", ["1", "-3", "many"])
def test_a_wrong_number_of_rounds(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--rounds", rounds])
    assert end.value.code == 2
    assert "2 or more" in capsys.readouterr().err
