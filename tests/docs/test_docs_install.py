"""The tests that docs/install.md names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = ROOT.joinpath("docs", "install.md").read_text(encoding="utf-8")


def test_the_tests_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.joinpath("tests").glob("*/test_install*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in tests} == set()
