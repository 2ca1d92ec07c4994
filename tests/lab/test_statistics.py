"""Statistics of comparisons: values by hand, as scipy has them, and what simulations promise."""

import math

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from attnlab.lab import stats

A, B, C = ((("v", "a"),), (("v", "b"),), (("v", "c"),))


def scores(*values):
    """Of one text, seeds from 0."""
    return {("", seed): float(value) for seed, value in enumerate(values)}


def test_differences_without_spread_and_of_one_seed():
    assert [stats.paired_difference([x, x]).p for x in (1.0, 0.0)] == [0.0, 1.0]
    one = stats.paired_difference([0.5])
    assert (one.mean, one.count, one.method) == (0.5, 1, "none")
    assert math.isnan(one.p + one.low)
    assert math.isnan(stats.anytime_difference([]).mean)


def test_outside_of_the_margin_is_the_nearer_end():
    d = [0.01, 0.03, 0.02, 0.04]
    got = stats.paired_difference(d, margin=0.1)
    assert got.p_outside == pytest.approx(ttest_1samp(d, 0.1).pvalue)
    assert stats.paired_difference(d, margin=0.02).p_outside == 1.0  # the mean is outside
    shifted = stats.anytime_difference(np.array(d * 3) - 0.1)
    assert stats.anytime_difference(d * 3, 0.1).p_outside == pytest.approx(shifted.p)


@pytest.mark.parametrize(
    ("p", "family", "corrected"),
    [
        # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1 -> raised to the 0.06 before it.
        ([0.01, 0.04, 0.03, 0.005], None, [0.03, 0.06, 0.06, 0.02]),
        ([0.6, 0.7], None, [1.0, 1.0]),
        ([0.01, math.nan], None, [0.01, math.nan]),
        ([0.01, math.nan], 3, [0.03, math.nan]),
    ],
)
def test_holm_by_hand(p, family, corrected):
    np.testing.assert_allclose(stats.holm(p, family), corrected)


def test_the_anytime_test_by_hand():
    """Differences 1, 3, 3, 5: t^2 = 4 x 9 / (8/3) = 13.5, t^2 / 3 = 4.5, r = 1/5."""
    evidence = math.sqrt(1 / 5) * (5.5 / 1.9) ** 2
    got = stats.anytime_difference([1.0, 3.0, 3.0, 5.0])
    assert got.p == pytest.approx(1 / evidence)
    assert got.mean == 3


def test_the_anytime_interval_ends_where_the_evidence_does():
    d = np.random.default_rng(1).normal(1.0, 1.0, 12)
    got = stats.anytime_difference(d)
    for end in (got.low, got.high):
        assert stats.anytime_difference(d - end).p == pytest.approx(0.05)
    assert (got.low > 0) == (got.p < 0.05)
    assert got.low + got.high == pytest.approx(2 * got.mean)
    assert got.low < got.high
    assert stats.anytime_difference(d[:4]).high == math.inf


def test_seeds_are_added_only_where_they_may_decide():
    rng = np.random.default_rng(6)
    assert stats.more_seeds_may_decide([0.1, 0.2], 12)
    assert not stats.more_seeds_may_decide([0.1] * 12, 12)
    clear = 1 + 0.3 * rng.normal(size=6)
    assert stats.more_seeds_may_decide(clear, 12)
    none = 1e-3 * rng.normal(size=6)
    assert stats.more_seeds_may_decide(none, 12, margin=0.01)
    hopeless = rng.normal(size=6)
    assert not stats.more_seeds_may_decide(hopeless - hopeless.mean(), 7)


@pytest.mark.parametrize(
    ("values", "margin", "conclusion"),
    [
        ((1.0, 1.1, 1.2, 1.1, 1.0), 0.0, "worse"),
        ((-1.0, -1.1, -1.2, -1.1, -1.0), 0.0, "better"),
        ((0.01, -0.01, 0.0, 0.01, -0.01), 0.1, "equivalent"),
        ((0.01, -0.01, 0.0, 0.01, -0.01), 0.0, "inconclusive"),
        ((0.011, 0.012, 0.010, 0.011, 0.012), 0.1, "worse"),  # within the margin, yet not 0
    ],
)
def test_conclusions(values, margin, conclusion):
    some = {A: scores(*values), B: scores(*[0.0] * 5)}
    [found] = stats.compare_pairs(some, [(A, B)], margin=margin)
    assert found.conclusion == conclusion
    [found] = stats.compare_pairs(some, [(A, B)], margin=margin, sign=-1)
    turned = {"worse": "better", "better": "worse"}.get(conclusion, conclusion)
    assert found.conclusion == turned


def test_equivalence_is_corrected_as_differences_are():
    """One comparison of twenty is within the margin by its own interval alone."""
    rng = np.random.default_rng(7)
    d = np.array([0.02, -0.02, 0.03, -0.03, 0.0])
    variants = {A: scores(*d), B: scores(*[0.0] * 5)}
    margin = stats.paired_difference(d).high * 1.01
    [alone] = stats.compare_pairs(variants, [(A, B)], margin=margin)
    assert alone.conclusion == "equivalent"
    others = {(("v", f"noise {i}"),): scores(*rng.normal(size=5)) for i in range(19)}
    pairs = [(A, B), *((other, B) for other in others)]
    found = stats.compare_pairs({**variants, **others}, pairs, margin=margin)
    assert found[0].conclusion == "inconclusive"
    assert found[0].p_equivalent > 0.05


def test_which_test_judges():
    rng = np.random.default_rng(8)
    many = {v: scores(*rng.normal(size=6)) for v in (A, B, C)}
    fixed = stats.compare_pairs(many, [(B, A), (C, A)])
    assert {c.difference.method for c in fixed} == {"paired t"}
    added = stats.compare_pairs(many, [(B, A), (C, A)], seeds_added=True)
    assert {c.difference.method for c in added} == {"anytime"}
    several = {v: {(t, s): rng.normal() for t in "xyz" for s in (0, 1)} for v in (A, B)}
    [judged] = stats.compare_pairs(several, [(B, A)])
    assert (judged.difference.method, judged.texts) == ("t over texts", 3)
    [looked] = stats.compare_pairs(several, [(B, A)], seeds_added=True)
    assert looked.difference.p == pytest.approx(min(1.0, stats.LOOKS * judged.difference.p))
    widths = [c.difference.high - c.difference.mean for c in (looked, judged)]
    ratio = student.ppf(1 - 0.025 / stats.LOOKS, 2) / student.ppf(0.975, 2)
    assert widths[0] / widths[1] == pytest.approx(ratio)
    unlike = {A: scores(1, 2, 3), B: scores(1, 2), C: scores(3, 2, 2)}
    found = stats.compare_pairs(unlike, [(B, A), (C, A)])
    assert [c.difference.count for c in found] == [2, 3]  # seeds that both have


def test_averaged_effects_by_hand():
    """A layout over both plans: per seed the mean of two scores."""
    rng = np.random.default_rng(9)
    variants = [(("layout", layout), ("sharing", plan)) for layout in "ab" for plan in ("x", "y")]
    y = rng.normal(size=(4, 5))
    some = {v: scores(*y[i]) for i, v in enumerate(variants)}
    layout, plan = stats.average_effects(some)
    d = y[2:].mean(0) - y[:2].mean(0)
    assert (layout.variant, layout.baseline) == ((("layout", "b"),), (("layout", "a"),))
    assert (layout.over, plan.over) == (("sharing",), ("layout",))
    assert layout.difference.mean == pytest.approx(d.mean())
    assert layout.difference.p == pytest.approx(ttest_1samp(d, 0).pvalue)
    assert layout.single == pytest.approx([(y[2] - y[0]).mean(), (y[3] - y[1]).mean()])
    p = np.array([layout.difference.p, plan.difference.p])
    assert [layout.p_holm, plan.p_holm] == pytest.approx(stats.holm(p))  # one family
    [other] = stats.average_effects(some, reference={"layout": "b"}, tags=["layout"])
    assert other.difference.mean == pytest.approx(-d.mean())
    assert stats.average_effects({v: some[v] for v in variants[:3]}) == []  # not all combinations


@pytest.mark.parametrize(
    ("scores", "best", "fitted"),
    [
        ([2 + 0.5 * (i - 1.7) ** 2 for i in range(5)], 0.01 * 2**1.7, True),
        ((1.0, 2.0, 3.0), 0.01, False),  # at an end
        ((2.0, 1.0, math.inf), 0.02, False),
        ((math.inf, 1.0, 2.0), 0.02, False),
        ((0.6, 0.7, 0.8, 0.3, 0.5), 0.08, False),  # the parabola is lowest at 0.26
    ],
)
def test_the_best_rate_is_that_of_the_parabola_or_the_best_that_was_tried(scores, best, fitted):
    """The latter without a lowest point between two; and none where all rates diverged."""
    rates = [0.01 * 2**i for i in range(len(scores))]
    found = stats.best_rate(dict(zip(rates, scores, strict=True)))
    assert (found.rate, found.fitted) == (pytest.approx(best), fitted)
    assert stats.best_rate(dict.fromkeys(rates, math.inf)) is None


def test_the_interval_of_a_rate_holds_the_truth():
    rng, held = np.random.default_rng(10), 0
    x = np.log(2.0) * np.arange(-2, 3)
    for _ in range(300):
        y = 2 + 0.5 * x**2 + 0.05 * rng.normal(size=5)
        found = stats.best_rate(dict(zip(np.exp(x).tolist(), y.tolist(), strict=True)))
        held += found is not None and found.low <= 1.0 <= found.high
    assert 0.9 < held / 300 < 0.99
