"""Medians, quartiles, ratios and overheads, compared with values computed by hand."""

from __future__ import annotations

import pytest

from torch_promote.bench.figures import Overhead, Spread, overhead, ratio, spread


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    # Of five sorted values the quartiles are the second and the fourth; of six they lie between two.
    assert spread([10, 50, 20, 40, 30]) == Spread(30, 20, 40)
    assert spread([1, 2, 3, 4, 5, 6]) == Spread(3.5, 2.25, 4.75)


def test_a_spread_of_two_values() -> None:
    assert spread([1.0, 3.0]) == Spread(2.0, 1.5, 2.5)


def test_a_ratio_is_taken_round_by_round() -> None:
    # 1/2, 30/10, 2/8: the ratio of the medians would be 2/8.
    assert ratio([1, 30, 2], [2, 10, 8]).median == 0.5


def test_an_overhead_is_a_share_of_stocks_in_each_round() -> None:
    # (2-1)/(5-1), (4-1)/(5-1), (6-2)/(6-2), (3-3)/(7-3), (5-3)/(7-3)
    found = overhead([2, 4, 6, 3, 5], [5, 5, 6, 7, 7], [1, 1, 2, 3, 3])
    assert found == Overhead(Spread(0.5, 0.25, 0.75))


def test_an_overhead_below_the_base_is_negative() -> None:
    found = overhead([1, 1, 1], [4, 4, 4], [2, 2, 2])
    assert found.spread == Spread(-0.5, -0.5, -0.5)


def test_rounds_in_which_stock_is_no_slower_have_no_share() -> None:
    # stock - base: 10, 10, 10, 10, 10, 10, 0
    found = overhead([6] * 7, [11] * 6 + [1], [1] * 7)
    assert found == Overhead(Spread(0.5, 0.5, 0.5), left_out=1)


def test_stock_in_its_noise_has_no_overhead() -> None:
    # stock - base: 1, 1, 3, 4, 5: the median 3 is no more than the distance of the quartiles, 4 - 1.
    found = overhead([9] * 5, [2, 2, 4, 5, 6], [1] * 5)
    assert found == Overhead(None, 0, "stock - base is within its noise: median 3 ns, quartiles 1 to 4")


def test_stock_just_out_of_its_noise_has_an_overhead() -> None:
    # stock - base: 2, 2, 4, 5, 5: the median 4 is more than 5 - 2.
    assert overhead([3] * 5, [3, 3, 5, 6, 6], [1] * 5).spread is not None


@pytest.mark.parametrize("stock", [[1, 1, 1], [0.5, 0.5, 0.5]])
def test_stock_at_or_below_the_base_has_no_overhead(stock: list[float]) -> None:
    found = overhead([2, 2, 2], stock, [1, 1, 1])
    assert (found.spread, found.left_out) == (None, 3)
    assert found.reason.startswith("stock takes no longer than the base: median")
