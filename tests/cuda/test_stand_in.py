"""The stand-in device itself: its results are the CPU's, and its counts are correct."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_promote as tp
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("stand_in")


def on(value: object, device: str) -> object:
    """The same tensors on a device, as leaves."""
    if isinstance(value, Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, list | tuple):
        return type(value)(on(element, device) for element in value)
    return value


CALLS: dict[str, tuple[Callable[..., object], Callable[[], list[object]]]] = {
    "product": (torch.mm, lambda: [torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)]),
    "broadcast": (torch.add, lambda: [torch.randn(3, 1), torch.randn(4, requires_grad=True)]),
    "with a number": (lambda x: 2 * x + 1.5, lambda: [torch.randn(3, requires_grad=True)]),
    "0-dim of the CPU": (lambda x: x * torch.tensor(2.0), lambda: [torch.randn(3)]),
    "two results": (torch.max, lambda: [torch.randn(3, 4, requires_grad=True), 1]),
    "a list of tensors": (torch.cat, lambda: [[torch.randn(2, 3, requires_grad=True), torch.randn(1, 3)]]),
    "views": (lambda x: x.t()[1:].unsqueeze(0).expand(2, -1, -1), lambda: [torch.randn(3, 4, requires_grad=True)]),
    "split": (lambda x: x.split(2), lambda: [torch.randn(5, requires_grad=True)]),
    "indices": (lambda x, i: x[i], lambda: [torch.randn(5, 2, requires_grad=True), torch.tensor([0, 4, 0])]),
    "a mask": (lambda x: x[x > 0], lambda: [torch.randn(9, requires_grad=True)]),
    "conjugate": (lambda x: x.conj() @ x.mH, lambda: [torch.randn(2, 2, dtype=torch.complex64, requires_grad=True)]),
    "imaginary part": (lambda x: x.conj().imag + 1, lambda: [torch.randn(3, dtype=torch.complex64)]),
    "softmax": (torch.softmax, lambda: [torch.randn(3, 4, requires_grad=True), -1]),
    "convolution": (
        nn.functional.conv2d,
        lambda: [torch.randn(1, 2, 6, 6, requires_grad=True), torch.randn(3, 2, 3, 3, requires_grad=True)],
    ),
    "depthwise convolution": (
        lambda x, w: nn.functional.conv3d(x, w, groups=2),
        lambda: [torch.randn(1, 2, 4, 4, 4, requires_grad=True), torch.randn(2, 1, 2, 2, 2, requires_grad=True)],
    ),
    "transposed convolution": (
        nn.functional.conv_transpose2d,
        lambda: [torch.randn(1, 2, 6, 6, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)],
    ),
    "loss of sequences": (
        lambda x: nn.functional.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]).to(x.device), [5], [2]),
        lambda: [torch.randn(5, 1, 3, requires_grad=True)],
    ),
    "norm": (
        lambda x, w: nn.functional.layer_norm(x, (4,), w),
        lambda: [torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)],
    ),
    "foreach": (lambda *x: torch._foreach_mul(list(x), 2.0), lambda: [torch.randn(3), torch.randn(2, 2)]),
    "inverse": (torch.linalg.inv, lambda: [torch.eye(3) + 0.1 * torch.ones(3, 3)]),
    "attention": (
        nn.functional.scaled_dot_product_attention,
        lambda: [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)],
    ),
}


@pytest.fixture(autouse=True)
def one_attention() -> Iterator[None]:
    """Disables the CPU's fused attention kernel, which the device lacks."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def run(call: Callable[..., object], arguments: list[object]) -> list[Tensor | None]:
    """The results, and the gradients of all leaves."""
    result = call(*arguments)
    results = list(result) if isinstance(result, tuple | list) else [result]
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(arguments) if getattr(leaf, "requires_grad", False)]
    if leaves:
        sum(r.abs().sum() for r in results if r.requires_grad).backward()
    return [*results, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_the_cpus(name: str) -> None:
    call, make = CALLS[name]
    arguments = make()
    expected = run(call, arguments)
    actual = run(call, on(arguments, "cuda"))
    assert len(actual) == len(expected) > 0
    for ours, cpus in zip(actual, expected, strict=True):
        assert ours.device == torch.device("cuda", 0)
        assert ours.stride() == cpus.stride()
        assert_same(ours.cpu().contiguous(), cpus.contiguous())


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(5), lambda: torch.full((2,), 3.0), lambda: torch.tril_indices(3, 3)]
)
def test_factories_make_what_they_make_on_the_cpu(make: Callable[[], Tensor]) -> None:
    expected = make()
    with torch.device("cuda"):
        actual = make()
    assert actual.is_cuda
    assert_same(actual.cpu(), expected)


def test_random_numbers_are_the_cpus() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert_same(torch.randn(4, device="cuda").cpu(), expected)


def test_tensors_show_their_values_and_numbers() -> None:
    x = torch.tensor([1.0, 2.0], device="cuda")
    assert repr(x) == "tensor([1., 2.], device='cuda:0')"
    assert x.tolist() == [1.0, 2.0]
    assert x.sum().item() == 3.0


def test_forward_mode_derivatives_are_the_cpus() -> None:
    def tangent(device: str) -> Tensor:
        torch.manual_seed(0)
        source, direction, weight = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4).to(device)
        with forward_ad.dual_level():
            base = torch.ones(4, 4, device=device)
            part = base[:2].t()
            base.mul_(forward_ad.make_dual(source.to(device), direction.to(device)))
            return forward_ad.unpack_dual(torch.softmax(weight @ part, 0)).tangent

    actual = tangent("cuda")
    assert actual.is_cuda
    assert_same(actual.cpu(), tangent("cpu"))


# --- views, writes


def test_views_share_storage_and_a_write_into_one_is_seen() -> None:
    x = torch.zeros(2, 3, device="cuda")
    row, flat = x[1], x.view(-1)
    assert row._is_view()
    assert row.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    before = x._version
    row.add_(1)
    flat[0] = 5
    assert x.tolist() == [[5, 0, 0], [1, 1, 1]]
    assert x._version == row._version == before + 2


def test_in_place_returns_the_tensor_itself() -> None:
    x = torch.ones(3, device="cuda")
    address = x.data_ptr()
    assert x.add_(1).mul_(2) is x
    assert x.data_ptr() == address
    assert x.tolist() == [4, 4, 4]


def test_out_is_written_and_resized() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    out = torch.empty(0, device="cuda")
    assert torch.add(x, x, out=out) is out
    assert_same(out.cpu(), 2 * x.cpu())
    values, places = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    torch.max(x, 1, out=(values, places))
    assert (values.tolist(), places.tolist()) == ([2, 5], [2, 2])
    part = torch.zeros(4, device="cuda")
    torch.mul(x[0], 2, out=part[1:])
    assert part.tolist() == [0, 0, 2, 4]


def test_storages_are_set_and_resized() -> None:
    x = torch.arange(4.0, device="cuda")
    y = torch.empty(0, device="cuda")
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1, 3]
    y.set_(x.untyped_storage())
    assert y.tolist() == [0, 1, 2, 3]
    assert x.resize_(2).tolist() == [0, 1]
    assert x.resize_(6).tolist()[:2] == [0, 1]
    y.set_()
    assert y.shape == (0,)
    x.data = torch.full((2,), 7.0, device="cuda")
    assert x.tolist() == [7, 7]


def test_a_deep_copy_is_on_the_device() -> None:
    x = torch.arange(4.0, device="cuda:1").requires_grad_()
    y = copy.deepcopy(x)
    assert y.device == x.device
    assert y.requires_grad
    assert y.tolist() == x.tolist()
    assert y.data_ptr() != x.data_ptr()


def test_inference_mode() -> None:
    normal = torch.ones(2, 2, device="cuda")
    with torch.inference_mode():
        made = torch.randn(2, 2, device="cuda") @ normal
        view_of_normal, view_of_made = normal[0], made[0].t()
        normal.add_(1)
        made.add_(1)
    assert made.is_inference()
    assert view_of_made.is_inference()
    assert not view_of_normal.is_inference()
    assert normal.tolist() == [[2, 2], [2, 2]]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        made.add_(1)


# --- programs


class Net(nn.Module):
    """A model in which two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


def train(net: nn.Module, device: str) -> list[Tensor]:
    net = copy.deepcopy(net).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    tokens = torch.arange(10, device=device).view(2, 5) % 7
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(p.detach().cpu() for p in net.parameters())]


def test_training_a_transformer_gives_the_cpus_bits() -> None:
    net = Net()
    for ours, cpus in zip(train(net, "cuda"), train(net, "cpu"), strict=True):
        assert_same(ours, cpus)


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
def test_softmax_of_halves_in_float32(op: Callable[..., Tensor]) -> None:
    half = torch.randn(3, 4, dtype=torch.float16).requires_grad_()
    x = half.detach().cuda().requires_grad_()
    expected, actual = op(half.float(), -1), op(x, -1, dtype=torch.float32)
    weights = torch.randn(3, 4)
    (expected * weights).sum().backward()
    (actual * weights.cuda()).sum().backward()
    assert_same(actual.detach().cpu(), expected.detach())
    assert_same(x.grad.cpu(), half.grad)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_fused_cells_are_close_to_the_cpus_which_are_not_fused(cell: type[nn.Module]) -> None:
    net, x = cell(5, 6, 2), torch.randn(4, 3, 5)
    on_device = copy.deepcopy(net).cuda()
    expected, actual = net(x)[0], on_device(x.cuda())[0]
    torch.testing.assert_close(actual.cpu(), expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (actual * weights.cuda()).sum().backward()
    for ours, cpus in zip(on_device.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), cpus.grad)


def test_tied_weights_stay_tied() -> None:
    net = Net().cuda()
    assert net.head.weight is net.embedding.weight
    assert all(p.is_cuda for p in net.parameters())


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_backward_runs_on_a_thread_of_the_device(device: str) -> None:
    threads = []
    x = torch.ones(2, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: threads.append((threading.get_native_id(), torch.cuda.current_device())))
    y.sum().backward()
    [(thread, current)] = threads
    assert thread != threading.get_native_id()
    assert current == torch.device(device).index


def test_autocast_regions_of_stock_and_ours_are_on() -> None:
    x, w = torch.randn(3, 4, device="cuda"), torch.randn(4, 5, device="cuda", requires_grad=True)
    for region in (tp.stock_autocast("cuda"), tp.my_autocast("cuda")):
        with region:
            assert (x @ w).dtype == torch.float16
            assert torch.exp(x.half()).dtype == torch.float32
    (half,) = torch.autograd.grad((x.half() @ w.half()).sum(), w)
    with tp.my_autocast("cuda"):
        (actual,) = torch.autograd.grad((x @ w).sum(), w)
    assert_same(actual, half)


def test_an_op_inside_a_kernel_sees_no_autocast() -> None:
    """The kernels are the CPU's, and a region of the CPU must not act inside of them."""
    x = torch.randn(30, 4, device="cuda")
    expected = torch.cdist(x.cpu(), x.cpu())
    with tp.stock_autocast("cpu"):
        assert_same(torch.cdist(x, x).cpu(), expected)


def test_grad_scaler() -> None:
    w = torch.ones(2, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), torch.amp.GradScaler("cuda", init_scale=4.0)
    assert scaler.is_enabled()
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    assert w.tolist() == [0, 0]
    w.grad.fill_(float("inf"))
    scaler.update()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [0, 0]
    assert scaler.get_scale() == 2.0


def test_pytorchs_own_tests_may_set_a_stream_by_its_ids() -> None:
    """`CudaNonDefaultStream` of torch.testing._internal does, around each test of test_cuda.py."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    ids = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    torch._C._cuda_setStream(**ids)
    try:
        assert torch.cuda.current_stream() == stream
    finally:
        torch.cuda.set_stream(before)
    torch._C._cuda_setDevice(0)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_allocator_backend() == "native"
    assert torch._C._cuda_getCompiledVersion() >= 11000


def test_ops_of_lists_increase_versions_as_on_a_gpu() -> None:
    tensor = torch.ones(2, device="cuda")
    torch._foreach_mul_([tensor], 2.0)
    torch._foreach_copy_([tensor], [tensor + 1])
    with torch.no_grad():
        torch._foreach_add_([tensor], [tensor])
    assert tensor._version == 3
    assert tensor.tolist() == [6, 6]
