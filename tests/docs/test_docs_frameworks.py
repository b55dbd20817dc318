"""The recipe of docs/frameworks.md for models in bfloat16 does what the page says."""

from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.doc_blocks import blocks

(RECIPE,) = (block for block in blocks() if block.page == "docs/frameworks.md" and 'policy="off"' in block.text)


def test_a_module_policy_in_a_region_with_the_policy_off() -> None:
    names: dict[str, Any] = {}
    exec(compile(RECIPE.text, str(RECIPE), "exec"), names)
    body, head, tokens = names["model"]["body"], names["model"]["lm_head"], names["tokens"]
    hidden = body(tokens)
    expected = nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    assert torch.equal(names["logits"], expected)
    assert head(hidden).dtype is torch.bfloat16, "without a region, the policy has no effect"
    with tp.my_autocast("cpu", policy="off"):
        assert torch.equal(body(tokens), hidden), "the region casts nothing by itself"


def test_the_module_policy_fp32_does_not_cast_weights() -> None:
    model, tokens = nn.Sequential(nn.Linear(4, 8)).bfloat16(), torch.randn(2, 4, dtype=torch.bfloat16)
    tp.set_module_policy(model, {"0": "fp32"})
    with tp.my_autocast("cpu", policy="off"), pytest.raises(RuntimeError, match="must have the same dtype"):
        model(tokens)
