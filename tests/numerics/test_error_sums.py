"""Sums of errors over tensors, compared with NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_promote.numerics import impacts as error_sums
from torch_promote.numerics.impacts import Errors, ErrorSums

NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20)


@given(NUMBERS, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_of_a_cast(numbers: list[float], dtype: torch.dtype) -> None:
    reference = torch.tensor(numbers, dtype=torch.float32)
    result = reference.to(dtype)
    sums = ErrorSums()
    sums.add(result, reference)
    errors = sums.total()
    ours, theirs = result.double().numpy(), reference.double().numpy()
    difference = np.linalg.norm(ours - theirs)
    if difference == 0:
        assert errors == Errors()
        return
    relative = difference / np.linalg.norm(theirs)
    assert errors.relative == pytest.approx(relative, rel=1e-9)
    assert errors.sqnr == pytest.approx(-20 * math.log10(relative))
    assert errors.ulp <= 0.5  # a cast rounds to the nearest
    info = torch.finfo(dtype)
    units = [max(info.eps * 2.0 ** math.floor(math.log2(abs(x))), info.smallest_normal * info.eps) for x in theirs if x]
    wanted = max(abs(a - b) / unit for a, b, unit in zip(ours[theirs != 0], theirs[theirs != 0], units, strict=True))
    assert errors.ulp == pytest.approx(wanted)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(1, 7))
def test_pieces_and_tensors_add_up(tensors: list[list[float]], at_once: int) -> None:
    references = [torch.tensor(one, dtype=torch.float64) for one in tensors]
    results = [one.to(torch.bfloat16) for one in references]
    together, apart = ErrorSums(), ErrorSums()
    together.add(torch.cat(results), torch.cat(references))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_sums, "_AT_ONCE", at_once)
        for result, reference in zip(results, references, strict=True):
            one = ErrorSums()
            one.add(result, reference)
            apart.merge(one)
    assert apart.total().relative == pytest.approx(together.total().relative, rel=1e-9)
    assert apart.total().ulp == together.total().ulp


@pytest.mark.parametrize(
    ("result", "reference", "nonfinite"),
    [
        ([math.inf, 1.0], [70000.0, 1.0], 1),
        ([math.nan, math.nan], [0.0, 1.0], 2),
        ([-math.inf, 1.0], [-math.inf, 1.0], 0),  # a mask
        ([-math.inf, 1.0], [torch.finfo(torch.float32).min, 1.0], 0),  # a mask
        ([math.nan, 1.0], [math.nan, 1.0], 0),
    ],
)
def test_what_is_not_finite(result: list[float], reference: list[float], nonfinite: int) -> None:
    sums = ErrorSums()
    sums.add(torch.tensor(result).half(), torch.tensor(reference))
    errors = sums.total()
    assert errors.nonfinite == nonfinite
    assert errors.relative == (math.inf if nonfinite else 0.0)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_of_hardly_any_numbers(shape: tuple[int, ...]) -> None:
    sums = ErrorSums()
    sums.add(torch.zeros(shape), torch.zeros(shape))
    assert sums.total() == Errors()


def test_complex_numbers() -> None:
    sums = ErrorSums()
    sums.add(torch.tensor([3 + 4.5j]), torch.tensor([3 + 4j]))
    assert sums.total().relative == pytest.approx(0.1)


def test_an_error_where_the_reference_is_zero() -> None:
    sums = ErrorSums()
    sums.add(torch.tensor([1.0]), torch.tensor([0.0]))
    assert sums.total().relative == math.inf
