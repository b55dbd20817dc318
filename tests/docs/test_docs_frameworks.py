"""The recipe of docs/frameworks.md for models in bfloat16 does what the page says."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_promote as tp

TEXT = Path(__file__).parents[2].joinpath("docs", "frameworks.md").read_text(encoding="utf-8")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(4, 8, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.body(tokens))
        return logits


@pytest.fixture
def recipe() -> str:
    (text,) = (text for text in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if 'policy="off"' in text)
    return text.replace('"cuda"', '"cpu"')


def test_a_module_policy_in_a_region_with_the_policy_off(recipe: str) -> None:
    model, tokens = Model(), torch.randn(2, 4, dtype=torch.bfloat16)
    plain = model(tokens)
    logits: list[torch.Tensor] = []
    names = {"tp": tp, "model": model, "tokens": tokens, "targets": None}
    exec(recipe, {**names, "loss_function": lambda output, targets: logits.append(output)})
    hidden, head = model.body(tokens), model.lm_head
    assert torch.equal(logits[0], nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float()))
    assert torch.equal(model(tokens), plain), "without a region, the policy has no effect"
    with tp.my_autocast("cpu", policy="off"):
        assert torch.equal(model.body(tokens), hidden), "the region casts nothing by itself"


def test_the_module_policy_fp32_does_not_cast_weights() -> None:
    model, tokens = Model(), torch.randn(2, 4, dtype=torch.bfloat16)
    tp.set_module_policy(model, {"lm_head": "fp32"})
    with tp.my_autocast("cpu", policy="off"), pytest.raises(RuntimeError, match="must have the same dtype"):
        model(tokens)
