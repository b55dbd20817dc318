"""`find_nonfinite` reports no fault in correct programs, and does not change their results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite

DTYPES = [torch.float16, torch.bfloat16]


def gpt() -> tuple[nn.Module, Tensor]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        from gpt.model import GPT, Config
    finally:
        sys.path.pop(0)
    return GPT(Config(symbols=20, context=16, width=32)), torch.randint(0, 20, (4, 16))


def conv() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(200, 5),
    )
    return model, torch.randn(4, 3, 16, 16)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        # oneDNN has no float16 LSTM on every machine.
        with torch.backends.mkldnn.flags(enabled=torch.get_autocast_dtype("cpu") is not torch.float16):
            return self.out(self.lstm(x)[0])


def lstm() -> tuple[nn.Module, Tensor]:
    return _Recurrent(), torch.randn(3, 7, 8)


class _Masked(nn.Module):
    """A transformer with a causal mask of -inf, padding, and attention with masks of the lowest number."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        padding = torch.zeros(x.shape[:2]).masked_fill(torch.arange(length) == length - 1, -torch.inf)
        x = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        x = x + self.attention(x, x, x, attn_mask=causal, need_weights=True)[0]
        lowest = (1 - torch.ones(length, length).tril()) * torch.finfo(torch.float32).min
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=lowest)
        scores = (x @ x.transpose(1, 2)).masked_fill(causal < 0, torch.finfo(torch.float16).min) + causal
        return self.out(scores.softmax(-1).to(x.dtype) @ x)


def transformer() -> tuple[nn.Module, Tensor]:
    return _Masked(), torch.randn(3, 6, 16)


MODELS = [gpt, conv, lstm, transformer]


def train(
    make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype, scale: float | None, watched: bool = True
) -> tuple[NonfiniteReport | None, list[Tensor]]:
    """Trains for three steps; returns the report, the losses and the weights."""
    torch.manual_seed(1)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
    losses = []

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            with tp.my_autocast("cpu", dtype):
                y = model(x).flatten(0, -2)
                loss = nn.functional.cross_entropy(y, torch.arange(len(y)) % y.shape[-1])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())

    if not watched:
        run()
        return None, [*losses, *model.parameters()]
    with find_nonfinite(model) as report:
        run()
    return report, [*losses, *model.parameters()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MODELS)
def test_no_alarm_and_the_same_bits(make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype) -> None:
    report, results = train(make, dtype, None)
    assert report is not None
    assert not report.found, str(report)
    assert report.checked > 100
    expected = train(make, dtype, None, watched=False)[1]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_gradients_that_only_the_scale_makes_infinite_are_benign(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    report, results = train(make, torch.float16, 2.0**30)
    assert report is not None
    assert not report.found, str(report)
    skipped = [one for one in report.benign if one.kind == "GradScaler"]
    assert skipped
    assert all(one.scaled == one.unscaled * one.scale for one in skipped if one.unscaled)
    for one in skipped:
        assert str(one).endswith(f": {one.scaled:.4g} with the scale {one.scale:g}, {one.unscaled:.4g} without")
    expected = train(make, torch.float16, 2.0**30, watched=False)[1]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_checkpoint_is_no_alarm() -> None:
    model, x = transformer()
    with find_nonfinite(model) as report, tp.my_autocast("cpu"):
        checkpoint(model, x, use_reentrant=False).float().sum().backward()
    assert not report.found, str(report)


def test_allocations_are_not_checked() -> None:
    with find_nonfinite() as report:
        memory = torch.empty(3)
        memory.fill_(torch.nan)
        torch.empty_like(memory).copy_(torch.ones(3))
        torch.baddbmm(torch.full((1, 2, 2), torch.inf), torch.ones(1, 2, 2), torch.ones(1, 2, 2), beta=0)
    assert report.origin is not None
    assert report.origin.op == "aten::fill_"
