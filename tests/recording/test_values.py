"""The statistics of `trace(values=True)` are exact, and do not affect the program."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from torch_promote.reading.trace import trace
from torch_promote.recording.recorder import Recorder
from torch_promote.recording.values import EMPTY, Measurer, Values

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
#: Magnitudes at which a share starts or ends.
EDGES = (0.0, 2.0**-24, 2.0**-25, 65504.0, 65520.0, 2.0**-133, 2.0**-134, (2 - 2.0**-8) * 2.0**127, 3.4e38, 2.0**-149)


def statistics(tensor: torch.Tensor) -> Values:
    """What is counted of a tensor."""
    return dataclasses.replace(Values.of(tensor), digest="", l2=None, sketch="")


def counted_one_by_one(tensor: torch.Tensor) -> Values:
    """The statistics by a loop in float64, and by PyTorch's own casts."""
    numbers = tensor.double().flatten().tolist()
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    nonzero = [number for number in finite if number]
    exponents: dict[int, int] = {}
    for number in nonzero:
        exponent = max(math.frexp(number)[1] - 1, -1023 if tensor.dtype is torch.float64 else -127)
        exponents[exponent] = exponents.get(exponent, 0) + 1

    def share(condition: Any) -> float:
        return sum(map(condition, numbers)) / len(numbers)

    def cast(dtype: torch.dtype) -> tuple[float, float]:
        pairs = list(zip(numbers, tensor.to(dtype).double().flatten().tolist(), strict=True))
        under = sum(before != 0 and after == 0 for before, after in pairs)
        over = sum(math.isfinite(before) and math.isinf(after) for before, after in pairs)
        return under / len(pairs), over / len(pairs)

    tiny, largest = torch.finfo(tensor.dtype).smallest_normal, torch.finfo(tensor.dtype).max
    return Values(
        len(numbers),
        max(finite, default=None),
        min(nonzero, default=None),
        share(lambda number: number == 0),
        share(math.isinf),
        share(math.isnan),
        share(lambda number: 0 < abs(number) < tiny),
        *cast(torch.float16),
        *cast(torch.bfloat16),
        tuple(sorted(exponents.items())),
        share(lambda number: abs(number) == largest),
    )


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Tensors of any bits, and of values next to the edges."""
    dtype = draw(st.sampled_from(list(INTEGERS)))
    integer = INTEGERS[dtype]
    limits = torch.iinfo(integer)
    edges = torch.tensor([*EDGES, math.inf, math.nan], dtype=torch.float64).to(dtype).view(integer).tolist()
    near = st.builds(
        lambda edge, by: max(limits.min, min(limits.max, edge + by)), st.sampled_from(edges), st.integers(-2, 2)
    )
    bits = draw(st.lists(near | st.integers(limits.min, limits.max), min_size=1, max_size=30))
    return torch.tensor(bits, dtype=integer).view(dtype)


@settings(deadline=None)
@given(tensors())
def test_statistics_equal_a_loop_in_float64(tensor: torch.Tensor) -> None:
    assert statistics(tensor) == counted_one_by_one(tensor)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=20), st.sampled_from(EDGES[1:]))
def test_shares_of_float64_follow_its_casts_by_way_of_float32(steps: list[int], edge: float) -> None:
    (bits,) = struct.unpack("<q", struct.pack("<d", edge))
    tensor = torch.tensor([bits + step for step in steps], dtype=torch.int64).view(torch.float64)
    assert statistics(tensor) == counted_one_by_one(tensor)


@pytest.mark.parametrize("size", [1, 63, 1020, 1021, 1022, 3500])
@pytest.mark.parametrize("dtype", list(INTEGERS))
def test_rows_of_all_kinds(dtype: torch.dtype, size: int) -> None:
    """Rows with few exponents, with many, with zeros, subnormal numbers, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(size)
    normal, place = torch.randn(size, generator=generator, dtype=torch.float64), torch.arange(size)
    rows = {
        "few exponents": normal,
        "zeros and few": normal.relu(),
        "zeros alone": normal * 0.0,
        "at most 48 exponents": normal.sign() * torch.pow(2.0, (place % 48 - 24).double()),
        "49 exponents": normal.sign() * torch.pow(2.0, (place % 49 - 24).double()),
        "many and zeros": torch.where(place % 7 == 0, 0.0, normal * torch.pow(2.0, (place % 200 - 100).double())),
        "subnormal": normal * torch.finfo(dtype).smallest_normal / 16,
        "infinite": torch.where(place % 500 == 3, math.inf, normal),
        "NaN": torch.where(place % 3 == 0, math.nan, normal),
    }
    for name, row in rows.items():
        tensor = row.to(dtype)
        assert statistics(tensor) == counted_one_by_one(tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_large_tensors_are_measured_in_pieces_and_by_threads(dtype: torch.dtype) -> None:
    size = 4096 * 1021 + 5000  # more than a piece
    tensor = torch.randn(size).mul_(torch.arange(size) % 30).to(dtype)
    found = Values.of(tensor)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            assert Values.of(tensor) == found
    finally:
        torch.set_num_threads(threads)


def test_layouts_and_views() -> None:
    tensor = torch.randn(4, 6)
    expected = counted_one_by_one(tensor)
    column_major = tensor.t().contiguous().t()
    imaginary = torch.view_as_complex(torch.stack([tensor, tensor], -1)).conj().imag
    assert imaginary.is_neg()
    for same in (tensor, column_major, imaginary, torch.nn.Parameter(tensor)):
        assert statistics(same) == expected
        assert Values.of(same) == Values.of(tensor if same is not imaginary else -tensor)
    assert statistics(tensor[::2, ::3]) == counted_one_by_one(tensor[::2, ::3])
    assert Values.of(tensor[:1].expand(5, 6)).count == 30
    assert Values.of(tensor.to_sparse()).count == 24
    assert statistics(tensor.to_sparse_csr()) == expected
    assert Values.of(torch.nested.nested_tensor([tensor[0], tensor[1, :2]])).count == 8
    assert Values.of(torch.nested.nested_tensor([tensor[0], tensor[1, :2]], layout=torch.jagged)).count == 8


def test_values_are_computed_when_they_are_asked_for_and_copied_as_others() -> None:
    tensor = torch.randn(2000)
    for alike in (copy.copy, copy.deepcopy, lambda values: pickle.loads(pickle.dumps(values)), dataclasses.replace):
        assert alike(Values.of(tensor)) == Values.of(tensor)
    fields = dataclasses.asdict(Values.of(tensor))
    assert fields["digest"] == Values.of(tensor).digest
    assert not [name for name in fields if name.startswith("_")]
    with pytest.raises(AttributeError, match="no attribute 'maximum'"):
        _ = Values.of(tensor).maximum  # type: ignore[attr-defined]


def test_small_dtypes() -> None:
    tensor = torch.tensor([1.0, 448.0, 2.0**-9, 0.0]).to(torch.float8_e4m3fn)
    found = Values.of(tensor)
    assert (found.amax, found.min_nonzero, found.zeros, found.underflows) == (448.0, 2.0**-9, 0.25, 0.25)
    assert found.saturated == 0.25


def test_tensors_without_floating_point_numbers_have_no_statistics() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for tensor in (
        torch.ones(3, device="meta"),
        fake,
        quantized,
        torch.zeros(3).to_sparse(),
        torch.zeros(3).to_mkldnn(),
    ):
        assert Values.of(tensor) == EMPTY
    for tensor in (
        torch.ones(3, dtype=torch.int64),
        torch.ones(3) > 0,
        torch.ones(3, dtype=torch.complex64),
        torch.ones(0),
    ):
        assert statistics(tensor) == EMPTY
    assert torch.vmap(lambda x: Values.of(x).count + x)(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A training step with dropout."""
    with tp.my_autocast("cpu"):
        loss = torch.nn.functional.dropout(model(torch.ones(4, 8)), 0.5).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_calls_get_the_values_of_their_results_and_the_program_notices_nothing() -> None:
    model, optimizer = model_and_optimizer()
    expected = [step(model, optimizer) for _ in range(2)], [weight.clone() for weight in model.parameters()]
    model, optimizer = model_and_optimizer()
    with trace(model, values=True) as report:
        losses = [step(model, optimizer) for _ in range(2)]
        mine = torch.tensor([[1.0, 1e-9], [0.0, 70000.0]]) * 1
        last = len(report.calls) - 1
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected[1], strict=True))
    assert report.steps == 2
    assert all(len(report.values.get(number, ())) == len(call.outputs) for number, call in enumerate(report.calls))
    assert report.values[last] == (Values.of(mine),)
    (linear,) = report.values_of(report.calls.where(op="linear")[0])
    assert linear.count == 32
    assert linear.exponents


def test_an_attribute_that_another_thread_has_computed_meanwhile() -> None:
    values = Values.of(torch.ones(2))
    assert values.amax == Values.__getattr__(values, "amax")  # type: ignore[attr-defined]


def _views() -> None:
    x = torch.randn(4, 6) * 2
    for view in (x.view(24), x.t(), x.detach().reshape(2, 12), x.unsqueeze(0).permute(2, 0, 1), x.mT.contiguous().mT):
        view.exp()
    x.contiguous().to(torch.float32).sum()
    torch.randn(3, 1).mul(2).expand(3, 5)[:, :3].t()


def _parts_and_overlaps() -> None:
    x = torch.randn(4, 4) * 2
    x.mT.sum()
    x[1:].reshape(3, 4)
    x.diagonal().sum()
    x.as_strided((4, 4), (0, 1))
    x.as_strided((16,), (0,))
    x.view(torch.int32)
    x.chunk(2)[0].view(-1)
    torch.view_as_real(torch.randn(8, dtype=torch.complex64) * 2)
    torch.view_as_complex(torch.randn(8, 2) * 2).conj().imag.exp()
    torch._neg_view(torch.randn(8) * 2).exp()


def _in_place() -> None:
    x = torch.randn(4, 4) * 2
    y = x.view(16)
    x.add_(1)
    y.view(2, 8)
    y[3:5].zero_()
    x.t()
    torch.add(x, 1, out=x)
    x.view(-1)
    torch._foreach_mul_([x, y], 3)
    y.view(4, 4)
    x.data.mul_(2)
    x.view(-1)
    x.set_(torch.randn(4, 4))
    x.t()
    x.resize_(2, 2)
    x.view(-1)


def _written_by_kernels() -> None:
    embedding = torch.nn.Embedding(5, 3)
    norm = torch.nn.BatchNorm1d(3)
    out = norm(embedding(torch.tensor([1, 1, 3])))
    out.square().sum().backward()
    assert embedding.weight.grad is not None
    embedding.weight.grad.view(-1).t()
    assert norm.running_mean is not None
    norm.running_mean.view(3)
    torch.nn.functional.dropout(out.detach(), 0.5).t()


def _without_versions() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4) * 2
        x.t()
        x.mul_(3)
        x.view(-1)


@pytest.mark.parametrize("program", [_views, _parts_and_overlaps, _in_place, _written_by_kernels, _without_versions])
def test_views_have_the_values_of_what_they_are_views_of(
    program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are known are not measured again."""
    expected: list[list[Values]] = []
    measured, add, values_of = [0], Recorder._add, Measurer.values

    def checked(self: Any, of: Any, facts: Any, call: Any, args: Any, tensors: Any) -> None:
        expected.append([Values.of(one) for one in tensors])
        before = measured[0]
        add(self, of, facts, call, args, tensors)
        measured.append(measured[0] - before)

    def counted(self: Any, tensor: torch.Tensor) -> Values:
        measured[0] += 1
        return values_of(self, tensor)

    monkeypatch.setattr(Recorder, "_add", checked)
    monkeypatch.setattr(Measurer, "values", counted)
    torch.manual_seed(0)
    with trace(values=True) as report:
        program()
    for number, (call, values) in enumerate(zip(report.calls, expected, strict=True)):
        for found, known in zip(report.values.get(number, ()), values, strict=True):
            assert found in (known, EMPTY), call
    assert 0 in measured[1:]


def test_modes_and_version_counters_do_not_notice() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def program(traced: bool) -> tuple[list[str], int]:
        weight = torch.ones(3, requires_grad=True)
        with Names() as seen, torch.autocast("cpu"):
            if traced:
                with trace(values=True):
                    weight.exp().sum().backward()
            else:
                weight.exp().sum().backward()
        return seen.names, weight._version

    assert program(True) == program(False)
