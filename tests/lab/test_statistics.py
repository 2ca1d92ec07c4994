"""Statistics of comparisons: values by hand, as scipy has them, and what simulations promise."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from attnlab.lab.stats import (
    anytime_difference,
    anytime_half_width,
    average_effects,
    best_rate,
    compare_pairs,
    holm,
    more_seeds_may_decide,
    paired_difference,
    text_difference,
)

A, B, C = ((("v", "a"),), (("v", "b"),), (("v", "c"),))


def scores(*values):
    """Of one text, seeds from 0."""
    return {("", seed): float(value) for seed, value in enumerate(values)}


def test_paired_differences_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, error 1 / sqrt(3); t(0.975, 2) = 4.30265.
    got = paired_difference([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    found = (got.count, got.mean, got.low, got.high, got.p)
    np.testing.assert_allclose(found, (3, 2, 2 - half, 2 + half, 0.0741799002274485), rtol=1e-8)
    assert got.includes_zero


def test_paired_differences_are_those_of_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    theirs = stats.ttest_rel(b, a)
    interval = theirs.confidence_interval(0.95)
    got = paired_difference(b - a)
    np.testing.assert_allclose((got.low, got.high, got.p), (*interval, theirs.pvalue), rtol=1e-10)


def test_differences_without_spread_and_of_one_seed():
    assert paired_difference([1.0, 1.0]).p == 0.0
    assert paired_difference([0.0, 0.0]).p == 1.0
    uneven = text_difference([1.0, 1.0, 1.0], ["a", "a", "b"])
    assert (uneven.mean, uneven.error, uneven.p) == (1.0, 0.0, 0.0)
    one = paired_difference([0.5])
    assert (one.mean, one.includes_zero) == (0.5, True)
    assert math.isnan(one.p)


def test_texts_and_seeds_are_both_sources_of_variation():
    """With as many seeds for each text the interval is that of the means of texts."""
    rng = np.random.default_rng(4)
    texts = np.repeat(["a", "b", "c", "d"], 3)
    d = np.repeat(rng.normal(size=4), 3) + 0.1 * rng.normal(size=12)
    means = d.reshape(4, 3).mean(1)
    theirs = stats.ttest_1samp(means, 0.0)
    got = text_difference(d, texts.tolist())
    low, high = theirs.confidence_interval(0.95)
    np.testing.assert_allclose((got.low, got.high, got.p), (low, high, theirs.pvalue), rtol=1e-4)
    assert got.df == 3
    alone = text_difference(means, ["a", "b", "c", "d"])  # one seed for each text
    assert (alone.low, alone.p) == pytest.approx((low, theirs.pvalue))


def test_every_text_counts_the_same_however_many_seeds_it_has():
    d, names = [1.0, 3.0, 5.0, 4.0, 9.0], ["a", "a", "a", "b", "c"]
    got, theirs = text_difference(d, names), stats.ttest_1samp([3.0, 4.0, 9.0], 0.0)
    low, high = theirs.confidence_interval(0.95)
    found = (got.mean, got.low, got.high, got.p, got.df, got.count)
    assert found == pytest.approx((16 / 3, low, high, theirs.pvalue, 2, 5))


def test_an_interval_over_texts_holds_the_truth():
    rng, held, wrong = np.random.default_rng(5), 0, 0
    for _ in range(400):
        d = np.repeat(rng.normal(size=4), 3) + 0.3 * rng.normal(size=12)
        got = text_difference(d, ["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["d"] * 3)
        held += got.low < 0 < got.high
        alone = paired_difference(d)
        wrong += not alone.low < 0 < alone.high
    assert held / 400 > 0.92
    assert wrong / 400 > 0.15  # as if runs on one text were independent


def test_holm_by_hand():
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1 -> raised to the 0.06 before it.
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert math.isnan(holm([0.01, math.nan])[1])
    assert holm([0.01, math.nan])[0] == 0.01


def test_the_anytime_test_by_hand():
    """Differences 1, 3, 3, 5: t^2 = 4 x 9 / (8/3) = 13.5, t^2 / 3 = 4.5, r = 1/5."""
    evidence = math.sqrt(1 / 5) * (5.5 / 1.9) ** 2
    got = anytime_difference([1.0, 3.0, 3.0, 5.0])
    assert got.p == pytest.approx(1 / evidence)
    assert got.mean == 3


def test_the_anytime_interval_ends_where_the_evidence_does():
    d = np.random.default_rng(1).normal(1.0, 1.0, 12)
    got = anytime_difference(d)
    for end in (got.low, got.high):
        assert anytime_difference(d - end).p == pytest.approx(0.05)
    assert (got.low > 0) == (got.p < 0.05)
    assert anytime_difference(d[:4]).high == math.inf


def test_false_alarms_of_whoever_looks_after_every_seed():
    """10,000 experiments without a difference, looked at from the third to the tenth seed."""
    draws = np.random.default_rng(0).normal(size=(10_000, 10))
    n = np.arange(3, 11)
    mean = (draws.cumsum(1) / np.arange(1, 11))[:, 2:]
    spread = np.stack([draws[:, :i].std(axis=1, ddof=1) for i in n], axis=1)
    # The function itself on some of them; then the same rule on all.
    for i, (j, count) in itertools.product(range(40), enumerate(n)):
        significant = anytime_difference(draws[i, :count]).p < 0.05
        assert significant == (abs(mean[i, j]) > spread[i, j] * anytime_half_width(count))
    half = np.array([anytime_half_width(count) for count in n])
    alarms = np.mean((abs(mean) > spread * half).any(axis=1))
    t = mean / spread * np.sqrt(n)
    of_t = np.mean((2 * stats.t.sf(abs(t), n - 1) < 0.05).any(axis=1))
    assert 0.005 < alarms < 0.02  # promised: at most 0.05
    assert 0.14 < of_t < 0.19


def test_seeds_are_added_only_where_they_may_decide():
    rng = np.random.default_rng(6)
    assert more_seeds_may_decide([0.1, 0.2], 12)
    assert not more_seeds_may_decide([0.1] * 12, 12)
    clear = 1 + 0.3 * rng.normal(size=6)
    assert more_seeds_may_decide(clear, 12)
    none = 1e-3 * rng.normal(size=6)
    assert more_seeds_may_decide(none, 12, margin=0.01)
    hopeless = rng.normal(size=6)
    assert not more_seeds_may_decide(hopeless - hopeless.mean(), 7)


@pytest.mark.parametrize(
    ("values", "margin", "conclusion"),
    [
        ((1.0, 1.1, 1.2, 1.1, 1.0), 0.0, "higher"),
        ((-1.0, -1.1, -1.2, -1.1, -1.0), 0.0, "lower"),
        ((0.01, -0.01, 0.0, 0.01, -0.01), 0.1, "equivalent"),
        ((0.01, -0.01, 0.0, 0.01, -0.01), 0.0, "inconclusive"),
        ((0.011, 0.012, 0.010, 0.011, 0.012), 0.1, "higher"),  # within the margin, yet not 0
    ],
)
def test_conclusions(values, margin, conclusion):
    found = compare_pairs({A: scores(*values), B: scores(*[0.0] * 5)}, [(A, B)], margin=margin)
    assert found[0].conclusion == conclusion


def test_equivalence_is_corrected_as_differences_are():
    """One comparison of twenty is within the margin by its own interval alone."""
    rng = np.random.default_rng(7)
    d = np.array([0.02, -0.02, 0.03, -0.03, 0.0])
    variants = {A: scores(*d), B: scores(*[0.0] * 5)}
    margin = paired_difference(d).high * 1.01
    alone = compare_pairs(variants, [(A, B)], margin=margin)
    assert alone[0].conclusion == "equivalent"
    others = {(("v", f"noise {i}"),): scores(*rng.normal(size=5)) for i in range(19)}
    pairs = [(A, B), *((other, B) for other in others)]
    found = compare_pairs({**variants, **others}, pairs, margin=margin)
    assert found[0].conclusion == "inconclusive"
    assert found[0].p_equivalent > 0.05


def test_which_test_judges():
    rng = np.random.default_rng(8)
    three = {A: scores(1, 2, 4), B: scores(2, 1, 5), C: scores(3, 3, 3)}
    assert {c.difference.df for c in compare_pairs(three, [(B, A), (C, A)])} == {2}
    many = {v: scores(*rng.normal(size=6)) for v in (A, B, C)}
    assert compare_pairs(many, [(B, A), (C, A)])[0].difference.method == "paired t"
    added = compare_pairs(many, [(B, A), (C, A)], seeds_added=True)
    assert {c.difference.method for c in added} == {"anytime"}
    texts = {v: {(t, s): rng.normal() for t in "xyz" for s in (0, 1)} for v in (A, B)}
    judged = compare_pairs(texts, [(B, A)])[0]
    assert (judged.difference.method, judged.texts) == ("t over texts", 3)
    looked = compare_pairs(texts, [(B, A)], seeds_added=True)[0].difference
    assert looked.p == pytest.approx(min(1.0, 4 * judged.difference.p))
    half = stats.t.ppf(1 - 0.025 / 4, 2) * judged.difference.error
    assert looked.high - looked.mean == pytest.approx(half)
    unlike = {A: scores(1, 2, 3), B: scores(1, 2), C: scores(3, 2, 2)}
    found = compare_pairs(unlike, [(B, A), (C, A)])
    assert [c.difference.count for c in found] == [2, 3]  # seeds that both have


def test_averaged_effects_by_hand():
    """A layout over both plans: per seed the mean of two scores."""
    rng = np.random.default_rng(9)
    variants = [(("layout", layout), ("sharing", plan)) for layout in "ab" for plan in ("x", "y")]
    y = rng.normal(size=(4, 5))
    some = {v: scores(*y[i]) for i, v in enumerate(variants)}
    layout, plan = average_effects(some)
    d = y[2:].mean(0) - y[:2].mean(0)
    assert (layout.tag, layout.over) == ("layout", ("sharing",))
    assert layout.comparison.difference.mean == pytest.approx(d.mean())
    assert layout.comparison.paired.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    assert layout.single == pytest.approx((y[2] - y[0]).mean(keepdims=True).tolist()
                                          + (y[3] - y[1]).mean(keepdims=True).tolist())  # fmt: skip
    assert plan.comparison.family == 2
    early = average_effects(some, seeds=(0, 1), tags=["layout"])
    assert early[0].comparison.difference.count == 2
    assert average_effects({v: some[v] for v in variants[:3]}) == []  # not all combinations


def test_the_best_rate_is_that_of_the_parabola():
    parabola = lambda rate: 2.0 + 0.5 * math.log(rate / 0.01) ** 2
    rates = [0.0025, 0.005, 0.01, 0.02, 0.04]
    found = best_rate({rate: parabola(rate) for rate in rates})
    assert found.rate == pytest.approx(0.01)
    assert found.score == pytest.approx(2.0)
    a, b, c = found.coefficients
    assert a + b * math.log(0.02) + c * math.log(0.02) ** 2 == pytest.approx(parabola(0.02))
    assert best_rate({rate: rate for rate in rates}) is None  # at an end
    assert best_rate({0.01: 2.0, 0.02: 1.0, 0.04: math.inf}) is None
    assert best_rate({0.01: math.inf, 0.02: 1.0, 0.04: 2.0}) is None


def test_the_interval_of_a_rate_holds_the_truth():
    rng, held = np.random.default_rng(10), 0
    x = np.log(2.0) * np.arange(-2, 3)
    for _ in range(500):
        y = 2 + 0.5 * x**2 + 0.05 * rng.normal(size=5)
        found = best_rate(dict(zip(np.exp(x).tolist(), y.tolist(), strict=True)))
        held += found is not None and found.low <= 1.0 <= found.high
    assert held / 500 > 0.9
