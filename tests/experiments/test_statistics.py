"""Paired t intervals and Holm, by hand and as SciPy has them."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.reporting.statistics import (
    half_width,
    holm,
    paired_difference,
    sequential_difference,
)


def test_paired_difference_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, error 1 / sqrt(3); t(0.975, 2) = 4.30265.
    got = paired_difference([1.0, 1.0, 1.0], [2.0, 3.0, 4.0], 0.95)
    half = 4.302652729911275 / math.sqrt(3)
    np.testing.assert_allclose(got[:5], (3, 2, 2 - half, 2 + half, 0.0741799002274485), rtol=1e-8)
    assert got.holds_zero


def test_paired_difference_is_that_of_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    theirs = stats.ttest_rel(b, a)
    interval = theirs.confidence_interval(0.9)
    got = paired_difference(a, b, 0.9)
    expected = (7, np.mean(b - a), interval.low, interval.high, theirs.pvalue)
    np.testing.assert_allclose(got[:5], expected, rtol=1e-10)


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


def test_the_sequential_test_by_hand():
    """Differences 1, 3, 3, 5: t^2 = 4 x 9 / (8/3) = 13.5, t^2 / 3 = 4.5, r = 1/5."""
    evidence = math.sqrt(1 / 5) * (5.5 / 1.9) ** 2
    got = sequential_difference([0.0] * 4, [1.0, 3.0, 3.0, 5.0], 0.95)
    assert got.p == pytest.approx(1 / evidence)
    assert (got.pairs, got.mean) == (4, 3)


def test_the_sequential_interval_ends_where_the_evidence_does():
    d = np.random.default_rng(1).normal(1.0, 1.0, 12)
    got = sequential_difference(0 * d, d, 0.95)
    for end in (got.low, got.high):
        assert sequential_difference(0 * d + end, d, 0.95).p == pytest.approx(0.05)
    assert (got.low > 0) == (got.p < 0.05)
    assert sequential_difference(d[:4], 0 * d[:4], 0.95).high == math.inf


def test_false_alarms_of_whoever_looks_after_every_seed():
    """10,000 experiments without a difference, looked at from the third to the tenth seed."""
    draws = np.random.default_rng(0).normal(size=(10_000, 10))
    tests = (paired_difference, sequential_difference)
    n = np.arange(3, 11)
    mean = (draws.cumsum(1) / np.arange(1, 11))[:, 2:]
    spread = np.stack([draws[:, :i].std(axis=1, ddof=1) for i in n], axis=1)
    t = mean / spread * np.sqrt(n)
    # The functions themselves on some of them; then the same rule on all.
    for i in range(40):
        for j, count in enumerate(n):
            d = draws[i, :count]
            fixed, anytime = (test(0 * d, d, 0.95) for test in tests)
            assert (fixed.p < 0.05) == (2 * stats.t.sf(abs(t[i, j]), count - 1) < 0.05)
            assert (anytime.p < 0.05) == (abs(mean[i, j]) > spread[i, j] * half_width(count, 0.95))
    half = np.array([half_width(count, 0.95) for count in n])
    alarms = np.mean((abs(mean) > spread * half).any(axis=1))
    of_t = np.mean((2 * stats.t.sf(abs(t), n - 1) < 0.05).any(axis=1))
    assert 0.005 < alarms < 0.02  # promised: at most 0.05
    assert 0.14 < of_t < 0.19
