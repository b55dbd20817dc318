"""A trace of a step of FSDP2, in one process over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.gloo_ranks import in_ranks
from helpers.traced_fsdp import a_step


@pytest.mark.slow
def test_a_step_of_fsdp2(tmp_path: Path) -> None:
    (results,) = in_ranks({"step": a_step}, 1, tmp_path)
    found = results["step"]
    assert isinstance(found, dict), found
    assert (found["more"], found["fewer"], found["differences"]) == ({}, {}, [])
    assert {"0.mix", "0.norm", "1.down"} <= set(found["modules"])
    assert found["casts"][0] == found["casts"][1] > 0
    assert found["calls"] > 200
