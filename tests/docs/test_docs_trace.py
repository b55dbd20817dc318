"""The code in docs/trace.md runs."""

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(
    r"```python\n(.*?)```", Path(__file__).parents[2].joinpath("docs", "trace.md").read_text("utf-8"), flags=re.DOTALL
)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_code_runs(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[block], "docs/trace.md", "exec"), {})
    written = {path.name for path in tmp_path.iterdir()}
    assert written == ({"run.html", "run.json", "run.csv", "run.trace.json"} if "save(" in BLOCKS[block] else set())


def test_there_is_code() -> None:
    assert len(BLOCKS) == 2
