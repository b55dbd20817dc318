"""Digests tell bits apart, and sketches estimate distances, whatever the difference is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_promote.recording.values import Values, distance

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.int8)


def digest(tensor: torch.Tensor) -> str:
    return Values.of(tensor).digest


@settings(deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(2, 3000),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.integers(0, 2999), st.integers(-2, 2) | st.sampled_from([2**31, 2**63])), max_size=8),
    st.booleans(),
)
def test_digests_are_equal_if_the_bits_are(
    dtype: torch.dtype, size: int, seed: int, changes: list[tuple[int, int]], swaps: bool
) -> None:
    """Changes are of units in the last place and of signs, next to and far from each other, and swaps."""
    integer = INTEGERS[dtype.itemsize]
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**62), 2**62, (size,), generator=generator).to(integer)
    changed = bits.clone()
    for place, by in changes:
        place %= size
        if swaps:
            changed[[place, (place + by) % size]] = changed[[(place + by) % size, place]]
        else:
            changed[place] ^= torch.tensor((by + 2**63) % 2**64 - 2**63).to(integer)
    one, other = bits.view(dtype), changed.view(dtype)
    assert (digest(one) == digest(other)) == torch.equal(bits, changed)
    gaps = torch.empty(size, 3, dtype=integer).copy_(changed[:, None])[:, 1].view(dtype)
    assert digest(gaps) == digest(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_changes_that_cancel_out_in_plain_sums(dtype: torch.dtype) -> None:
    integer = INTEGERS[dtype.itemsize]
    tensor = torch.randn(50, 1021, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {digest(tensor)}
    made = 1
    for step in (1, 2, 50, 1020, 1021, 2042):
        for unit in (1, 1 << (8 * dtype.itemsize - 1)):
            bits = tensor.clone().view(integer).view(-1)
            for place, times in ((7, 1), (7 + step, -2), (7 + 2 * step, 1)):  # the second differences are 0
                bits[place] ^= torch.tensor(unit - (unit >> 63 << 64)).to(integer) if unit > 1 else 0
                bits[place] += times if unit == 1 else 0
            found.add(digest(bits.view(dtype)))
            made += 1
    for other in (-tensor, tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0), tensor[torch.randperm(50)]):
        found.add(digest(other))
        made += 1
    zeros = torch.zeros(3000, dtype=dtype)
    for index in range(20):  # the signs of two zeros
        found.add(digest(zeros.index_fill(0, torch.tensor([index, index + 1021]), -0.0)))
        made += 1
    for payload in range(1, 20):  # of a NaN
        nan = torch.tensor(float("nan"), dtype=dtype).view(integer) + payload
        found.add(digest(torch.cat([zeros, nan.view(dtype).reshape(1)])))
        made += 1
    assert len(found) == made


def test_digests_and_sketches_follow_the_logical_order() -> None:
    tensor = torch.randn(3, 50, 40)
    same = {
        "column-major": tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "of a slice": torch.cat([tensor, tensor], 2)[:, :, :40],
        "another shape": tensor.view(30, 200),
        "a negative": torch.complex(tensor, -tensor).conj().imag,
    }
    assert {name: Values.of(one) for name, one in same.items()} == dict.fromkeys(same, Values.of(tensor))
    expanded = torch.randn(40, 1).expand(40, 60)
    assert Values.of(expanded) == Values.of(expanded.contiguous())
    assert digest(tensor.transpose(1, 2)) != digest(tensor)
    pair = torch.complex(tensor, tensor * 2)
    assert Values.of(pair.conj()) == Values.of(pair.conj().resolve_conj())
    assert Values.of(pair).l2 == pytest.approx(pair.norm().item())
    assert Values.of(torch._efficientzerotensor((2000,))) == Values.of(torch.zeros(2000))
    assert digest(torch.ones(3, dtype=torch.bool)) != digest(torch.tensor([True, False, True]))


def test_sketches_survive_json_and_have_none_without_numbers() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.complex64, torch.int32):
        for tensor in (torch.randn(2000).mul_(1e-3).to(dtype), torch.zeros(3, dtype=dtype), torch.ones(0, dtype=dtype)):
            values = Values.of(tensor)
            assert Values.from_json(values.to_json()) == values
    assert len(Values.of(torch.randn(2000)).to_dict()["sketch"]) == 100
    with pytest.raises(ValueError, match="a sketch has 16 numbers"):
        Values.from_json([*Values.of(torch.ones(3)).to_json()[:-1], "AAAA"])
    integers = Values.of(torch.arange(3)), Values.of(torch.arange(1, 4))
    assert distance(*integers) is None
    assert distance(integers[0], integers[0]) == 0.0
    huge = Values.of(torch.full((3,), 1e200, dtype=torch.float64))
    assert (huge.l2, huge.sketch, huge.count) == (None, "", 3)


def test_distances_of_one_element_and_with_nan() -> None:
    tensor = torch.randn(100_000)
    changed = tensor.clone()
    changed[77] = float("nan")
    expected = abs(tensor[77].item())
    assert distance(Values.of(tensor), Values.of(changed)) == pytest.approx(expected, rel=0.04)
    changed[77] = tensor[77] + 1e-4  # 3e-7 of the norm
    assert distance(Values.of(tensor), Values.of(changed)) == pytest.approx(1e-4, rel=0.05)


Change = Callable[[torch.Tensor, float, torch.Generator], torch.Tensor]
CHANGES: dict[str, Change] = {
    "noise": lambda x, by, g: x + by * torch.randn(x.shape, generator=g, dtype=x.dtype),
    "element": lambda x, by, g: x.view(-1).scatter_add(0, torch.tensor([7]), x.new_ones(1)).view_as(x),
    "column": lambda x, by, g: x.index_add(1, torch.tensor([5]), by * x.new_ones(len(x), 1)),
    "row": lambda x, by, g: x.index_add(0, torch.tensor([1]), by * x.new_ones(1, x.shape[1])),
    "shift": lambda x, by, g: x + by,
    "scale": lambda x, by, g: x * (1 + by),
    "permuted": lambda x, by, g: x[torch.randperm(len(x), generator=g)],
    "bfloat16": lambda x, by, g: x.bfloat16().to(x.dtype),
    "dropout": lambda x, by, g: x * (torch.rand(x.shape, generator=g) > 0.1),
}


def test_estimated_distances_are_within_half_of_the_norm() -> None:
    generator = torch.Generator().manual_seed(2)
    outside = cases = 0
    for width in (64, 768, 1000, 1021, 1024, 2042, 4096):
        for rows in (-(-1001 // width) + 1, 30_000 // width + 2, 200_000 // width):
            tensor = torch.randn(rows, width, generator=generator)
            before = Values.of(tensor)
            for change in CHANGES.values():
                by = 10 ** -(1 + 5 * torch.rand(1, generator=generator).item())
                changed = change(tensor, by, generator)
                norm = (changed.double() - tensor).norm().item()
                found = distance(before, Values.of(changed))
                assert found is not None
                outside += not norm / 1.5 <= found <= norm * 1.5
                cases += 1
    assert cases == 189
    assert outside <= 0.05 * cases
