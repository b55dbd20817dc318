"""Module policies on PyTorch modules that do more than call their children: tied weights, LSTM, attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.comparison import assert_same
from torch_promote.regions.module_policies import module_policies, set_module_policy

ours = functools.partial(tp.my_autocast, "cpu")


def test_head_tied_with_the_embedding() -> None:
    """As language models have it: one weight, used in lower precision and in float32."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(7, 8), nn.Linear(8, 8)
            self.lm_head = nn.Linear(8, 7, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor, head: Callable[..., Any] | None = None) -> torch.Tensor:
            hidden = self.mix(self.embed(tokens))
            scores = nn.functional.linear(hidden, self.embed.weight)  # in lower precision, from the cast cache
            return (self.lm_head if head is None else head)(scores @ self.embed.weight)

    def gradients(policies: dict[Any, Any], head: Any = None) -> list[Any]:
        torch.manual_seed(0)
        model = Language()
        if policies:
            set_module_policy(model, policies)
        with ours():
            logits = model(torch.arange(6), None if head is None else functools.partial(head, model))
        logits.float().square().sum().backward()
        assert model.lm_head.weight is model.embed.weight
        return [logits, *(parameter.grad for parameter in model.parameters())]

    def in_float32(model: Language, hidden: torch.Tensor) -> torch.Tensor:
        with ours(enabled=False):
            return model.lm_head(hidden.float())

    result = gradients({"lm_head": "fp32"})
    assert result[0].dtype is torch.float32
    assert_same(result, gradients({}, in_float32))


def test_lstm() -> None:
    def run(policy: Any, packed: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.LSTM(4, 3, batch_first=True)
        if policy:
            set_module_policy(model, {nn.LSTM: policy})
        x = torch.randn(2, 5, 4)
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True) if packed else x
        with ours() if policy else contextlib.nullcontext():
            output, state = model(x.to(torch.bfloat16) if policy else x)
        output = output.data if packed else output
        output.sum().backward()
        return [output.dtype, *(hidden.dtype for hidden in state), len(list(model.parameters()))]

    for packed in (False, True):
        assert run("fp32", packed) == run(None, packed)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("child", ["linear1", "self_attn", "norm1"])
def test_encoder_layer_does_not_pass_its_modules_by(child: str, training: bool) -> None:
    """In evaluation PyTorch runs the whole layer as one op, unless a module of it has a hook."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    called = []
    set_module_policy(layer, {child: "fp32"})
    inside = layer.get_submodule(child)
    kind = type(inside)
    original = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is inside:
            called.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), ours():
        patch.setattr(kind, "forward", forward)
        layer(torch.randn(2, 3, 8))
    assert called == [False], "it ran, with autocast off"


def test_attention() -> None:
    def run(policy: Any) -> Any:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 3, 8)
        if policy:
            set_module_policy(attention, {"": policy})
        with ours() if policy else contextlib.nullcontext():
            output, _ = attention(x, x, x, need_weights=False)
        output.sum().backward()
        return [output, *(parameter.grad for parameter in attention.parameters())]

    assert_same(run("fp32"), run(None))


def test_weights_that_an_attention_reads_itself() -> None:
    """Its out_proj is never called: selecting it by class skips it, by name raises."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    set_module_policy(layer, {nn.Linear: "fp32"})
    assert list(module_policies(layer)) == ["linear1", "linear2"]
    with pytest.raises(tp.PolicyError, match="whose forward is never called"):
        set_module_policy(layer, {"self_attn.out_proj": "fp32"})
