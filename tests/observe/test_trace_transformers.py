"""Small models of Hugging Face's transformers, from configs: counts and plans. Skipped where it is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.counting_mode import count_both_ways, counts_of
from helpers.plan_from_report import differences
from helpers.traced_programs import Region

pytestmark = pytest.mark.slow

#: How far conversions are not casts: attention and norms of these models convert inside of ops and on their own.
TOKENS = torch.arange(12).reshape(2, 6)


def _llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def _bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.BertForMaskedLM(config)


def _t5(transformers: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[Any], Any]] = {"llama": _llama, "bert": _bert, "t5": _t5}
REGIONS: dict[str, Region] = {
    "my_autocast": lambda: tp.my_autocast("cpu"),
    "overrides": lambda: tp.my_autocast("cpu", overrides={"linear": torch.float16, "softmax": "fp32", "add": "fp32"}),
    "stock": lambda: torch.autocast("cpu"),
    "none": contextlib.nullcontext,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_model(name: str, region: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = MODELS[name](transformers)
    model.set_attn_implementation(attention)

    def step() -> None:
        with REGIONS[region]():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()

    step()
    report, mode = count_both_ways(step, model)
    assert counts_of(report) == mode.counts
    assert list(differences(report.calls)) == []
    made = sum(not cast.reused for call in report.calls for cast in call.casts)
    assert report.total.casts == made <= mode.casts
    assert (made > 0) == (region != "none")
    modules = dict(model.named_modules())
    assert {call.module for call in report.calls} <= set(modules)
    assert len({call.module for call in report.calls.where(phase="backward")}) > 8
