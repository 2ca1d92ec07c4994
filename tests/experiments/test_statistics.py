"""Paired t intervals and Holm, by hand and as SciPy has them."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.reporting.statistics import holm, paired_difference


def test_paired_difference_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, error 1 / sqrt(3); t(0.975, 2) = 4.30265.
    got = paired_difference([1.0, 1.0, 1.0], [2.0, 3.0, 4.0], 0.95)
    half = 4.302652729911275 / math.sqrt(3)
    np.testing.assert_allclose(got, (3, 2, 2 - half, 2 + half, 0.0741799002274485), rtol=1e-8)
    assert got.holds_zero


def test_paired_difference_is_that_of_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    theirs = stats.ttest_rel(b, a)
    interval = theirs.confidence_interval(0.9)
    got = paired_difference(a, b, 0.9)
    expected = (7, np.mean(b - a), interval.low, interval.high, theirs.pvalue)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("b", "p", "holds_zero"),
    [([1.0, 2.0], 1.0, True), ([2.0, 3.0], 0.0, False)],
    ids=["same", "apart"],
)
def test_differences_without_spread(b, p, holds_zero):
    got = paired_difference([1.0, 2.0], b, 0.95)
    assert (got.p, got.holds_zero) == (p, holds_zero)


def test_one_pair_has_no_interval():
    got = paired_difference([1.0], [1.5], 0.95)
    assert (got.pairs, got.mean) == (1, 0.5)
    assert math.isnan(got.low)
    assert math.isnan(got.p)
    assert got.holds_zero


def test_holm_by_hand():
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1 -> raised to the 0.06 before it.
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
