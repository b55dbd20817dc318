"""Ranks of a process group that tune together agree on each verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers import tuned_ranks
from helpers.gloo_ranks import in_ranks
from torch_promote.errors import TuningError
from torch_promote.numerics.trials import Agreement


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes this process rank 0 of two. The list has the replies of rank 1."""
    theirs: list[Any] = []

    def gather(found: list[Any], value: Any) -> None:
        found[:] = [value, theirs.pop(0)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return theirs


def test_an_error_of_another_rank_is_raised(two_ranks: list[Any]) -> None:
    group = Agreement()
    two_ranks += ["", "ValueError: mine", "ValueError: mine"]
    group.raise_together(None)
    with pytest.raises(TuningError, match="rank 1 raised ValueError: mine"):
        group.raise_together(None)
    with pytest.raises(KeyError, match="ours"):
        group.raise_together(KeyError("ours"))


def test_a_trial_passes_if_it_does_on_all_ranks(two_ranks: list[Any]) -> None:
    group = Agreement()
    two_ranks += [(True, {"loss": 0.5}, ""), (False, {"loss": math.inf}, "ValueError: mine"), (True, {"loss": 0.1}, "")]
    assert group.verdict(True, {"loss": 0.2}, "") == (True, {"loss": 0.5}, "")
    assert group.verdict(True, {"loss": 0.2}, "") == (False, {"loss": math.inf}, "rank 1: ValueError: mine")
    assert group.verdict(False, {"loss": 0.2}, "") == (False, {"loss": 0.2}, "")


def test_the_order_is_that_of_the_first_rank(two_ranks: list[Any]) -> None:
    group = Agreement()
    two_ranks += [["b", "a"], ["a", "c"]]
    assert group.order(["a", "b"]) == ["a", "b"]
    with pytest.raises(TuningError, match="ranks 0 and 1 run different ops in a lower dtype: b, c on only one of them"):
        group.order(["a", "b"])


def test_without_a_process_group_everybody_agrees() -> None:
    group = Agreement()
    assert (group.rank, group.ranks) == (0, 1)
    assert group.verdict(False, {}, "text") == (False, {}, "text")
    assert group.order(["b", "a"]) == ["b", "a"]
    assert group.of_first_rank(3) == 3


@pytest.mark.slow
def test_ranks_that_tune_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("verdicts", "one_rank_fails", "resumed", "different_models", "one_rank_raises")
    monkeypatch.setenv("TUNED_RANKS_FILE", str(tmp_path / "resume.json"))
    first, second = in_ranks({name: getattr(tuned_ranks, name) for name in names}, 2, tmp_path)
    for name in ("verdicts", "one_rank_fails"):
        assert first[name] == second[name], name
        assert set(first[name]["overrides"]) == first[name]["planted"]
    assert first["resumed"] == second["resumed"]
    once, again = first["resumed"]
    assert again["trials"] == once["trials"]
    assert again["runs"] == once["runs"]  # a run to see that nothing has changed does not count
    for rank in (first, second):
        assert rank["different_models"].startswith("TuningError: ranks 0 and 1 run different ops in a lower dtype")
    assert first["one_rank_raises"] == "TuningError: rank 1 raised ZeroDivisionError: mine"
    assert second["one_rank_raises"] == "ZeroDivisionError: mine"
