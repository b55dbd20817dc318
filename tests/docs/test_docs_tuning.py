"""The code in docs/tuning.md runs, and each block by itself."""

import re
from pathlib import Path

import pytest

TEXT = Path(__file__).parents[2].joinpath("docs", "tuning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
WRITTEN = [{"comparison.html", "comparison.json"}, {"mine.toml", "tuning.html"}, set[str](), {"mine.toml"}]


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_code_runs(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[block], "docs/tuning.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == WRITTEN[block]
    assert capsys.readouterr().out


def test_there_is_code() -> None:
    assert len(BLOCKS) == len(WRITTEN)
