"""What docs/overrides.md says about policy files and policies is true."""

import re
from pathlib import Path

import torch_promote as tp

TEXT = Path(__file__).parents[2].joinpath("docs", "overrides.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_file_can_be_read(tmp_path: Path) -> None:
    text, with_modules = (text for kind, text in BLOCKS if kind == "toml")
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    policy = tp.Policy.load(path)
    assert policy.lookup("linalg_norm.ord_str", "cuda") is tp.CastPolicy.fp32
    assert policy.lookup("softmax.int", "cpu") is tp.CastPolicy.lower_precision_fp
    path.write_text(with_modules, encoding="utf-8")
    tables = {"blocks.*.attn": {"linear": "float16"}, "head": "fp32"}
    assert tp.Policy.load(path) == tp.Policy.stock().override_modules(tables)


def test_every_policy_is_explained() -> None:
    assert "@@" not in TEXT
    for policy in tp.CastPolicy:
        assert f"`{policy.value}`" in TEXT
    for name in tp.Policy.names():
        assert f"`{name}`" in TEXT
