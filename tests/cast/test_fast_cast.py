"""A cast of a plain tensor has the bits, strides and dtype of `tensor.to(dtype)`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fast_cast import BF16, FP16, FP32, PAIRS, assert_as_to, patterns, records
from helpers.subprocesses import environment

F8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
#: Sizes around the boundaries of vectors of 8 and 16 numbers; the largest size of the fast path; one more.
COUNTS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 4097, 32767, 32768, 32769)


@pytest.fixture(params=[False, True], ids=["", "flush_denormal"])
def flush_denormal(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor cannot")
    yield request.param
    torch.set_flush_denormal(False)


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def pair(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.usefixtures("flush_denormal")
def test_every_pattern(pair: tuple[torch.dtype, torch.dtype]) -> None:
    source = patterns(pair[0])
    assert source.isnan().any()
    for numbers in (source[~source.isnan()], source):
        for part in numbers.split(32768):
            assert_as_to(part, pair[1])


NANS = {
    FP32: (0x7FC00000, 0x7F800001, -1, 0x7FFFFFFF, -0x7FFFFF),
    BF16: (0x7FC0, 0x7F81, -1),
    FP16: (0x7E00, 0x7C01, -1),
}


@pytest.mark.parametrize("count", [1, 5, 8, 16, 19, 40])
def test_a_nan_at_any_place_has_the_bits_that_pytorch_chooses(
    pair: tuple[torch.dtype, torch.dtype], count: int
) -> None:
    integers = torch.int32 if pair[0] is FP32 else torch.int16
    for bits in NANS[pair[0]]:
        for place in range(count):
            numbers = torch.ones(count, dtype=pair[0])
            numbers.view(integers)[place] = bits
            assert numbers.isnan().sum() == 1
            assert_as_to(numbers, pair[1])


@pytest.mark.parametrize("count", COUNTS)
def test_every_size(pair: tuple[torch.dtype, torch.dtype], count: int) -> None:
    assert_as_to(torch.randn(count).to(pair[0]), pair[1])


@pytest.mark.parametrize("source", [BF16, FP16, FP32, *F8], ids=str)
@pytest.mark.parametrize("target", [BF16, FP16, FP32], ids=str)
def test_every_pair(source: torch.dtype, target: torch.dtype) -> None:
    if source is not target:
        assert_as_to(torch.randn(5, 7).to(source), target)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).div(3).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        how = draw(st.sampled_from(["all", "some", "steps", "one", "expand"]))
        if how == "some":
            tensor = tensor.narrow(dim, min(1, size), max(size - 1, 0))
        elif how == "steps":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how in ("one", "expand") and size > 0:
            tensor = tensor.narrow(dim, size - 1, 1)
            tensor = tensor.expand(*(3 if how == "expand" and d == dim else -1 for d in range(tensor.dim())))
    return tensor


@settings(max_examples=150, deadline=None)
@given(strided(), st.sampled_from(PAIRS), st.booleans())
def test_any_geometry(tensor: torch.Tensor, pair: tuple[torch.dtype, torch.dtype], requires_grad: bool) -> None:
    stored = tensor.untyped_storage().nbytes() // 4
    source = tensor.as_strided((stored,), (1,), 0).to(pair[0])
    source = source.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).requires_grad_(requires_grad)
    assert_as_to(source, pair[1])
    with torch.no_grad():
        assert_as_to(source, pair[1])


# --- which casts call no op


def test_small_dense_tensors_are_cast_without_an_op_and_others_by_pytorchs_kernel(
    pair: tuple[torch.dtype, torch.dtype],
) -> None:
    source = torch.randn(32, 1024).to(pair[0])
    general = {"torch_promote::cast", "aten::_to_copy"}
    expected = general if FP16 in pair else {"torch_promote::cast"}
    for dense in (source, source.t(), source[3:], source.requires_grad_()):
        assert records(dense, pair[1]) == expected
    for other in (torch.randn(32769).to(pair[0]), source.detach()[:, 3:], torch.ones(4).to(pair[0]).expand(3, 4)):
        assert records(other, pair[1]) == general


PROGRAM = """
import torch
from helpers.fast_cast import PAIRS, assert_as_to, patterns
for source, target in PAIRS:
    for part in patterns(source).split(32767):
        assert_as_to(part, target)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("capability", ["default", pytest.param("avx2", marks=pytest.mark.slow)])
def test_has_the_bits_of_pytorchs_kernels_for_other_processors(capability: str) -> None:
    """In a process in which PyTorch uses the kernels of an older processor, while ours uses those of this one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(ATEN_CPU_CAPABILITY=capability),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    assert capability.upper() in done.stdout.upper()
