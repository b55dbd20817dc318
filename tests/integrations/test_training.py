"""Training loops over PyTorch's modules, and tensors that are not plain: the same results as under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from helpers.program_comparison import Region, assert_like_stock, grads, values


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


#: Each takes a float32 batch of shape [3, 5, 16]. Others: helpers.models, of which tests/cache takes every one.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolution and batch norm": conv_net,
    "lstm": lambda: nn.LSTM(16, 12, num_layers=2, bidirectional=True, dropout=0.2),
    "encoder": encoder,
    "embedding": Embedded,
}


def total(outputs: Any) -> torch.Tensor:
    tensors = [t for t in tree_flatten(outputs)[0] if t is not None]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def or_error(run: Callable[[Region], Any]) -> Callable[[Region], Any]:
    """Compares the errors where stock raises, too: oneDNN has an LSTM in half precision for some processors only."""

    def run_or_raise(region: Region) -> Any:
        try:
            return run(region)
        except RuntimeError as error:
            return torch.empty(0), str(error)

    return run_or_raise


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_module_trains_as_under_stock(name: str, dtype: torch.dtype, backward_inside: bool) -> None:
    def train(region: Region) -> Any:
        model = MODELS[name]()
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

    assert_like_stock(or_error(train) if name == "lstm" else train)


@pytest.mark.parametrize("no_autograd", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_module_evaluates_as_under_stock(name: str, no_autograd: Callable[[], Any]) -> None:
    def evaluate(region: Region) -> Any:
        model = MODELS[name]().eval()
        x = torch.randn(3, 5, 16)
        with no_autograd(), region():
            around = model(x)
        with region(), no_autograd():
            within = model(x)
        return around, within

    assert_like_stock(or_error(evaluate) if name == "lstm" else evaluate)


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


# --- nested and sparse tensors, modes, and ops that others have registered


ALWAYS, JAGGED = (torch.strided, torch.jagged), (torch.jagged,)
#: What to compute, and the layouts for which PyTorch has it.
NESTED: dict[str, tuple[Callable[[torch.Tensor, nn.Linear], torch.Tensor], tuple[torch.layout, ...]]] = {
    "linear": (lambda x, layer: layer(x), ALWAYS),
    "linear and relu": (lambda x, layer: layer(torch.relu(layer(x))), ALWAYS),
    "softmax": (lambda x, layer: torch.softmax(layer(x), -1), ALWAYS),
    "matmul": (lambda x, layer: x @ layer.weight.t(), JAGGED),
    "layer norm": (lambda x, layer: F.layer_norm(layer(x), (8,)), JAGGED),
    "attention": (lambda x, layer: attend(layer(x)), JAGGED),
}


def attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in NESTED for layout in NESTED[name][1]])
def test_nested(name: str, layout: torch.layout) -> None:
    def train(region: Region) -> Any:
        layer, compute = nn.Linear(8, 8), NESTED[name][0]
        parts = [torch.randn(length, 8) for length in (3, 1, 4)]
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        with region():
            outputs = compute(x, layer), compute(x, layer)
        sums = [torch.cat(output.unbind()).float().square().sum() for output in outputs]
        (sums[0] + sums[1] * 0.5).backward()
        return outputs, grads(layer), x.grad

    assert_like_stock(train)


# --- sparse tensors

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SPARSE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sparse @ dense": lambda sparse, dense: sparse @ dense,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.addmm(torch.ones_like(dense), sparse, dense),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP64, FP64)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str, requires_grad: bool, layout: torch.layout, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """For some of these PyTorch has no kernel once autocast has made them bfloat16; then the errors are compared."""

    def compute(region: Region) -> Any:
        matrix = torch.randn(6, 6, dtype=dtypes[0]).relu().to_sparse(layout=layout).requires_grad_(requires_grad)
        dense = torch.randn(6, 6, dtype=dtypes[1], requires_grad=requires_grad)
        try:
            with region():
                result = SPARSE[name](matrix, dense)
            if requires_grad:
                result.float().sum().backward()
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error).partition("\n")[0]
        return result, dense.grad, matrix.grad

    assert_like_stock(compute, casts=dtypes[0] is FP32)


# --- modes


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(getattr(func, "__qualname__", repr(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_outside", [True, False])
def test_a_mode_sees_what_it_sees_under_stock(mode_outside: bool) -> None:
    """The same calls: modes do not see regions."""

    def train(region: Region) -> Any:
        model, mode = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2)), FunctionLog()
        x = torch.randn(4, 6)
        first, second = (mode, region()) if mode_outside else (region(), mode)
        with first, second:
            loss = model(x).square().sum() + model(-x).square().sum()
            loss.backward()
        return loss, grads(model), mode.log

    *_, log = assert_like_stock(train)
    assert log


# --- ops that others have registered


def test_custom_op_with_register_autocast() -> None:
    @torch.library.custom_op("torch_promote_test_tensors::product", mutates_args=())
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, weight.dtype))
        return x @ weight

    seen: list[Any] = []
    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.library.register_autocast("torch_promote_test_tensors::product", "cpu", torch.float16)

    def train(region: Region) -> Any:
        seen.clear()
        x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
        with region():
            outputs = product(x, weight), product(F.relu(x @ weight), weight.t())
            with region(enabled=False):
                outputs += (product(x, weight),)
        sum(output.float().square().sum() for output in outputs).backward()
        return outputs, grads(x, weight), list(seen)

    *_, dtypes = assert_like_stock(train)
    assert dtypes == [(torch.float16,) * 2, (torch.float16,) * 2, (torch.float32,) * 2]
