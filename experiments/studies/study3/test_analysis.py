"""The registered tests on numbers whose answer is known, and on simulated studies."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.studies.study3 import analysis
from experiments.studies.study3.analysis import Events
from experiments.studies.study3.spec import Variant

WIDTHS = (4, 8, 16, 32, 64)


def test_t_and_equivalence_agree_with_scipy():
    d = np.array([0.001, 0.004, -0.002, 0.003, 0.005, -0.001, 0.002, 0.0])
    found = analysis.over_texts(d)
    theirs = stats.ttest_1samp(d, 0.0)
    interval = theirs.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((*interval, theirs.pvalue))
    below = stats.ttest_1samp(d, analysis.MARGIN, alternative="less").pvalue
    above = stats.ttest_1samp(d, -analysis.MARGIN, alternative="greater").pvalue
    assert analysis.p_equivalence(found) == pytest.approx(max(below, above))
    assert analysis.conclusion(found) == "equivalent"
    assert analysis.conclusion(analysis.over_texts(d + 0.02)) == "different"
    assert analysis.conclusion(analysis.over_texts(10 * d)) == "inconclusive"


def test_log_rank_without_strata_is_that_of_scipy():
    rng = np.random.default_rng(1)
    step, copied, slow = (
        rng.integers(1, 9, 30).astype(float),
        rng.random(30) < 0.7,
        rng.random(30) < 0.4,
    )
    events = Events(step, copied, slow, np.zeros(30, int), np.zeros(30, int))
    observed, p = analysis.log_rank(events, draws=20_000)
    group = lambda which: stats.CensoredData(
        uncensored=step[which & copied], right=step[which & ~copied]
    )
    theirs = stats.logrank(group(slow), group(~slow))
    assert np.sign(observed) == np.sign(theirs.statistic)
    assert p == pytest.approx(theirs.pvalue, abs=0.04)  # permutations beside the normal limit
    assert analysis.log_rank_scores(events).sum() == pytest.approx(0, abs=1e-12)


def test_a_block_that_lacks_a_run_does_not_shift_the_log_rank_test():
    """All 3 x 2 ways to permute the groups within two blocks, of 3 runs and of 2."""
    slow, block = np.array([True, False, False, True, False]), np.array([0, 0, 0, 1, 1])
    events = Events(
        np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.ones(5, bool), slow, np.zeros(5, int), block
    )
    scores = analysis.log_rank_scores(events)
    sums = np.add.outer(scores[:3], scores[3:]).ravel()
    far = np.abs(sums - sums.mean()) >= abs(sums[0] - sums.mean()) - 1e-9
    observed, p = analysis.log_rank(events, draws=20_000)
    assert observed == pytest.approx(sums[0] - sums.mean())
    assert p == pytest.approx(far.mean(), abs=0.02)


def test_log_rank_of_three_runs_by_hand():
    # At step 1 one of three, at step 2 one of two; the last is censored at 3.
    events = Events(
        np.array([1.0, 2.0, 3.0]), np.array([True, True, False]), np.array([True, False, False]),
        np.zeros(3, int), np.zeros(3, int),
    )  # fmt: skip
    assert analysis.log_rank_scores(events) == pytest.approx([2 / 3, 1 / 6, -5 / 6])


def test_hazard_ratio_solves_the_equation_of_cox():
    rng = np.random.default_rng(2)
    slow = np.arange(200) % 2 == 0
    step = rng.exponential(1 / np.where(slow, 0.5, 1.0))
    events = Events(step, np.ones(200, bool), slow, np.zeros(200, int), np.arange(200))
    ratio = analysis.hazard_ratio(events)
    weight = np.where(slow, ratio, 1.0)  # without ties: sum of covariate less its weighted mean
    residuals = [slow[i] - (weight * slow)[step >= step[i]].sum() / weight[step >= step[i]].sum()
                 for i in range(200)]  # fmt: skip
    assert sum(residuals) == pytest.approx(0, abs=1e-3)
    assert 0.35 < ratio < 0.7
    low, high = analysis.hazard_interval(events, draws=50)
    assert low < ratio < high


def test_the_hazard_interval_is_infinite_where_one_group_alone_copied():
    yes, no = np.array([True, True, False, False]), np.zeros(4, int)
    events = Events(np.array([1.0, 2.0, 3.0, 3.0]), yes, yes, no, np.array([0, 1, 0, 1]))
    assert analysis.hazard_interval(events, draws=20) == (math.inf, math.inf)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = {"a": 1.0, "b": 4.0, "c": 2.0, "d": 7.0}
    found = analysis.jackknife(
        list(values), lambda texts: float(np.mean([values[t] for t in texts]))
    )
    expected = analysis.over_texts(list(values.values()))
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_best_width_without_a_minimum_is_the_lower_end():
    assert analysis.best_width({4: 1.0, 16: 1.2, 64: 1.1}) == 2.0
    assert analysis.best_width({4: 1.3, 16: 1.1, 64: 1.0}) == 6.0  # its minimum is beyond 64


def made_row(
    variant: Variant, text: str, seed: int, bits: float, **more: object
) -> dict[str, object]:
    row = {"role": "judged", "status": "complete", "text": text, "seed": seed, "heldout_bits": bits,
           "steps": 100, "copy_step": -1}  # fmt: skip
    return dataclasses.asdict(variant) | row | more


def test_scores_are_means_over_seeds_without_diverged_texts():
    a, b = Variant(4, 16), Variant(16, 4)
    table = pd.DataFrame([
        made_row(a, "python", 1, 2.0), made_row(a, "python", 2, 3.0), made_row(a, "web", 1, 1.0),
        made_row(b, "python", 1, 2.25), made_row(b, "web", 1, math.inf, status="diverged"),
        made_row(a, "python", 3, 9.0, role="tuning"),
    ])  # fmt: skip
    assert analysis.scores(table, a) == {"python": 2.5, "web": 1.0}
    terms = (1, analysis.scores(table, b)), (-1, analysis.scores(table, a))
    assert analysis.contrast(*terms) == pytest.approx([-0.25])


def test_copy_share_and_events_are_read_from_rows():
    one, best = Variant(1, 64, length=256), Variant(4, 16, length=256)
    copies = {"heldout_copy_bytes": 25, "heldout_bytes": 100}
    table = pd.DataFrame([
        made_row(one, "python", 1, 2.2, heldout_copy_bits=1.6, copy_step=-1, **copies),
        made_row(best, "python", 1, 2.0, heldout_copy_bits=1.0, copy_step=40, **copies),
    ])  # fmt: skip
    assert analysis.copy_part(table, one, best, "python") == pytest.approx((0.2, 0.25 * 0.6))
    found = analysis.events(table, [best, one], [one])
    assert found.step.tolist() == [40, 100]
    assert found.copied.tolist() == [True, False]
    assert found.slow.tolist() == [False, True]
    assert len(set(found.block)) == 1  # one text and seed


def false_positive_limit(draws: int) -> float:
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.004, 0.01])
def test_intervals_over_texts_cover_and_equivalence_is_seldom_wrong(spread):
    rng, draws = np.random.default_rng(3), 4000
    for truth in (0.0, 0.02):
        found = [analysis.over_texts(truth + spread * rng.standard_normal(8)) for _ in range(draws)]
        assert 0.94 < np.mean([one.low <= truth <= one.high for one in found]) < 0.96
    at_margin = [analysis.over_texts(analysis.MARGIN + spread * rng.standard_normal(8))
                 for _ in range(draws)]  # fmt: skip
    assert np.mean(
        [analysis.p_equivalence(one) < 0.05 for one in at_margin]
    ) < false_positive_limit(draws)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_the_jackknife_of_the_best_width_covers(shift):
    """Curvature and spread as in the second study: 0.01 bits per (log2 h)^2, 0.008 over texts."""
    rng, draws, texts = np.random.default_rng(4), 1000, [f"text{i}" for i in range(8)]

    def positions(best: float) -> dict[int, dict[str, float]]:
        return {
            h: {t: 0.01 * (math.log2(h) - best) ** 2 + 0.008 * rng.standard_normal() for t in texts}
            for h in WIDTHS
        }

    found = [analysis.width_shift(positions(4.0), positions(4.0 + shift)) for _ in range(draws)]
    covered = np.mean([one.low <= shift <= one.high for one in found])
    assert 0.92 < covered < 0.98
    if not shift:
        assert np.mean([one.p < 0.05 for one in found]) < 0.06 + 3 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.slow
def test_log_rank_under_no_difference_is_significant_in_one_case_of_twenty():
    """Two texts, eight seeds, five widths; seeds have effects of their own, 40 % never copy."""
    rng, draws = np.random.default_rng(5), 1000
    slow = np.tile([True, True, True, False, False], 16)
    block, stratum = np.repeat(np.arange(16), 5), np.repeat([0, 1], 40)
    p_values = []
    for _ in range(draws):
        late = np.repeat(rng.standard_normal(16), 5) + np.repeat([0.0, 1.0], 40)
        step = np.ceil(20 * rng.random(80) ** np.exp(-0.3 * late) * 1.6)
        events = Events(np.minimum(step, 20), step <= 20, slow, stratum, block)
        p_values.append(analysis.log_rank(events, draws=500)[1])
    assert 0.03 < np.mean(np.array(p_values) < 0.05) < false_positive_limit(draws)
