"""Training loops over PyTorch's own modules: the same losses, gradients and parameters as under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils._pytree import tree_flatten

from helpers.program_comparison import Region, assert_like_stock, grads, values


class Attention(nn.Module):
    """Self-attention; its second output, the weights, is None unless asked for."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.need_weights)


class Embedded(nn.Module):
    """Tokens to logits with one weight at both ends, as language models have it; the tokens are the signs of x."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x > 0).sum(-1) % 7
        return F.linear(self.embedding(tokens), self.embedding.weight)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 16))


def conv_net() -> nn.Module:
    image, block = nn.Unflatten(1, (1, 5)), (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(image, *block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


BOTH = (torch.bfloat16, torch.float16)
#: Each takes a float32 batch of shape [3, 5, 16], and is trained in these dtypes.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.dtype, ...]]] = {
    "mlp": (mlp, BOTH),
    "convolution and batch norm": (conv_net, BOTH),
    # oneDNN has no LSTM in float16 for most processors.
    "lstm": (lambda: nn.LSTM(16, 12, num_layers=2, bidirectional=True, dropout=0.2), (torch.bfloat16,)),
    "gru": (lambda: nn.GRU(16, 12, num_layers=2), BOTH),
    "attention": (lambda: Attention(need_weights=False), BOTH),
    "attention with weights": (lambda: Attention(need_weights=True), BOTH),
    "encoder": (encoder, BOTH),
    "embedding": (Embedded, BOTH),
}


def total(outputs: Any) -> torch.Tensor:
    tensors = [t for t in tree_flatten(outputs)[0] if t is not None]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, dtypes) in MODELS.items() for dtype in dtypes])
def test_module_trains_as_under_stock(name: str, dtype: torch.dtype, backward_inside: bool) -> None:
    def train(region: Region) -> Any:
        model = MODELS[name][0]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for _ in range(2):
            x = torch.randn(3, 5, 16, requires_grad=True)
            with region(dtype=dtype):
                outputs = model(x)
                loss = total(outputs)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            seen.append((outputs, loss, grads(model, x)))
            optimizer.step()
            optimizer.zero_grad()
        return seen, values(model.state_dict().values())

    assert_like_stock(train)


@pytest.mark.parametrize("no_autograd", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_module_evaluates_as_under_stock(name: str, no_autograd: Callable[[], Any]) -> None:
    def evaluate(region: Region) -> Any:
        model = MODELS[name][0]().eval()
        x = torch.randn(3, 5, 16)
        with no_autograd(), region():
            around = model(x)
        with region(), no_autograd():
            within = model(x)
        return around, within

    assert_like_stock(evaluate)


def scaled_training(region: Region) -> Any:
    """A float16 loop with GradScaler, with clipping; the scale is too large at first, so that steps are skipped."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    seen = []
    for _ in range(6):
        x, target = torch.randn(8, 16), torch.randn(8, 16)
        optimizer.zero_grad()
        with region(dtype=torch.float16):
            loss = F.mse_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss, norm, grads(model), scaler.get_scale()))
    return seen, values(model.parameters()), scaler.state_dict()


def test_grad_scaler() -> None:
    seen, _, _ = assert_like_stock(scaled_training)
    scales = [scale for *_, scale in seen]
    assert min(scales) < 2.0**24, "no step was skipped"
    assert len(set(scales)) > 2, "the scale never grew again"
