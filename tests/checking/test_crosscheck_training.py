"""Whole training steps of common models under a crosscheck: all calls are checked, and the results do not change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import torch_promote as tp
from helpers.comparison import assert_same

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt.model import GPT, Config

STEPS = 3


class Sequences(nn.Module):
    """An LSTM classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.symbol(ids))[0][:, -1])


class Translation(nn.Module):
    """PyTorch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.symbol(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)


def pictures() -> nn.Module:
    """A small convolutional net with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4),
    )  # fmt: skip


class Text(nn.Module):
    """The GPT of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(Config(symbols=20, width=16, heads=2, layers=2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).transpose(1, 2)


#: Functions that make the model, its input and target, and the optimizer.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], Any]] = {
    "transformer": (
        Translation,
        lambda: torch.randint(20, (2, 5)),
        lambda: torch.randint(20, (2, 5)),
        torch.optim.AdamW,
    ),
    "lstm": (Sequences, lambda: torch.randint(20, (3, 7)), lambda: torch.randint(4, (3,)), torch.optim.RMSprop),
    "conv": (pictures, lambda: torch.randn(3, 3, 8, 8), lambda: torch.randint(4, (3,)), torch.optim.SGD),
    "gpt": (Text, lambda: torch.randint(20, (2, 8)), lambda: torch.randint(20, (2, 8)), torch.optim.Adam),
}
models = pytest.mark.parametrize("name", MODELS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture
def lstm_without_onednn() -> Iterator[None]:
    """Disables oneDNN, whose float16 LSTM kernels are not available on every machine."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def train(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Trains a model, and returns everything that a crosscheck could change."""
    make, inputs, targets, optimizer_class = MODELS[name]
    torch.manual_seed(3)
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    losses, caches, gradients = [], [], []
    before = tp.cache_info()
    for _ in range(STEPS):
        x, y = inputs(), targets()
        with tp.my_autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
            caches.append({what: count - before[what] for what, count in tp.cache_info().items()})
        loss.backward()
        gradients += [p.grad.as_strided(p.grad.shape, p.grad.stride()).clone() for p in model.parameters()]
        strides = [p.grad.stride() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {
        "losses": losses,
        "gradients": gradients,
        "strides of gradients": strides,
        "weights": [p.detach() for p in model.parameters()],
        "buffers": list(model.buffers()),
        "random state": torch.get_rng_state(),
        "cache": caches,
        "optimizer": [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)],
    }


@dtypes
@models
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("region", ["step", "all"])
def test_a_training_has_no_mismatch(name: str, dtype: torch.dtype, region: str, request: pytest.FixtureRequest) -> None:
    if name == "lstm" and dtype is torch.float16:
        request.getfixturevalue("lstm_without_onednn")
    with tp.crosscheck(level="bits") as report:
        if region == "all":
            # One region around all steps: weights change inside it, and stock would use their old casts.
            with tp.my_autocast("cpu", dtype=dtype):
                train(name, dtype)
        else:
            train(name, dtype)
    assert report.mismatches == [], str(report)
    assert report.coverage >= 0.99, str(report)
    assert report.known_gaps.total() == 0
    assert report.stock_raised.total() == 0
    assert report.not_compared.total() == 0
    assert report.with_stock >= report.with_policy  # and calls of our wrappers that no policy applies to
    assert report.with_policy["aten.linear.default"] >= STEPS
    assert report.checked.total() > 100 * STEPS


@pytest.mark.parametrize("level", ["dtype", "bits"])
@models
def test_a_crosscheck_changes_nothing(name: str, level: Any) -> None:
    plain = train(name, torch.bfloat16)
    with tp.crosscheck(level=level):
        checked = train(name, torch.bfloat16)
    for what, value in plain.items():
        assert_same(checked[what], value, what)


def test_onednn_errors_are_unchanged() -> None:
    """LSTMs in float16, on a machine that has no instructions for it."""
    model, x = Sequences(), torch.randint(20, (3, 7))

    def outcome() -> Any:
        try:
            return model.eval()(x).detach()
        except RuntimeError as error:
            return str(error)

    with tp.stock_autocast("cpu", torch.float16):
        stock = outcome()
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu", torch.float16):
        assert_same(outcome(), stock)
    assert report.mismatches == []
    assert report.with_policy["aten.mkldnn_rnn_layer.default"] >= 1


def test_stock_autocast_is_checked_too() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with tp.crosscheck(level="bits") as report, tp.stock_autocast("cpu"):
        layer(x).sum().backward()
    assert report.mismatches == []
    assert report.with_policy["aten.linear.default"] == 1
    assert report.with_stock.total() == 0  # it is stock
