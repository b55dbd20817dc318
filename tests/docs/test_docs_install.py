"""The code in docs/install.md runs, and the tests that it names exist."""

import re
from pathlib import Path

import pytest

import torch_promote as tp

ROOT = Path(__file__).parents[2]
TEXT = ROOT.joinpath("docs", "install.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("nothing_installed")
def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(text, "docs/install.md", "exec"), {})
    assert "<torch_promote.install(overrides={'softmax': 'fp16'})>" in capsys.readouterr().out
    assert tp.installed() is None


def test_the_tests_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.joinpath("tests").glob("*/test_install*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in tests} == set()
