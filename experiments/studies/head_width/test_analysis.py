"""The analysis of the head-width study on data whose answer is known."""

import math

import numpy as np
import pytest
from pandas import DataFrame, Series

from experiments.studies.head_width import analysis
from experiments.studies.head_width.mixed_model import fit_reml, t_estimate
from experiments.studies.head_width.test_simulations import EFFECTS, Simulation

# Dyestuff (Davies and Goldsmith 1972), the first example of lme4: six batches of five.
DYESTUFF = np.array([
    1545, 1440, 1440, 1520, 1580, 1540, 1555, 1490, 1560, 1495, 1595, 1550, 1605, 1510, 1560,
    1445, 1440, 1595, 1465, 1545, 1595, 1630, 1515, 1635, 1625, 1520, 1455, 1450, 1480, 1445.0,
])  # fmt: skip


def pairs_of(values):
    """Text -> differences, as the analysis has them."""
    every = {(text, seed): one for text, many in values.items() for seed, one in enumerate(many)}
    return Series(every).rename_axis(["text", "seed"])


def test_reml_gives_what_lme4_prints():
    batches = DataFrame(np.repeat(np.eye(6), 5, axis=0))
    model = fit_reml(Series(DYESTUFF), DataFrame({"one": np.ones(30)}), [batches], 6)
    assert model.criterion == pytest.approx(319.6543, abs=1e-3)
    assert model.component_sd[0] == pytest.approx(42.00, abs=0.05)
    assert model.residual_sd == pytest.approx(49.51, abs=0.01)
    found = model.contrast({"one": 1})
    assert (found.value, found.error) == pytest.approx((1527.5, 19.38), abs=0.02)


def test_differences_pair_texts_and_seeds_and_leave_out_diverged_texts():
    frame = DataFrame({
        "bits": [1.0, 2.0, 3.0, 1.5, 2.7, math.inf],
        "text": ["a", "a", "b", "a", "a", "b"],
        "seed": [1, 2, 3, 1, 2, 3],
    })  # fmt: skip
    found = analysis.paired(frame[:3], frame[3:])
    assert found.to_dict() == pytest.approx({("a", 1): 0.5, ("a", 2): 0.7})


def test_no_interval_is_narrower_than_the_pooled_one():
    close = pairs_of({"a": [0.100], "b": [0.101], "c": [0.099]})
    wide = pairs_of({"a": [0.0], "b": [0.1], "c": [0.2]})
    pooled = analysis.pool([close, wide])
    assert pooled.sd == pytest.approx(math.sqrt((1e-6 + 0.01) / 2))
    found = analysis.over_texts(close, pooled)
    half = 2.776 * pooled.sd / math.sqrt(3)  # t of 4 degrees of freedom
    assert found.high - found.value == pytest.approx(half, rel=1e-3)
    assert found.p == analysis.over_texts(close).p


def test_the_bootstrap_covers_the_spread_of_texts():
    random = np.random.default_rng(0)
    pairs = pairs_of({str(i): 0.1 * i + random.normal(size=2) * 0.01 for i in range(8)})
    low, high = analysis.bootstrap(pairs)
    found = analysis.over_texts(pairs)
    assert found.low < low < 0.25
    assert 0.45 < high < found.high
    assert math.isnan(analysis.bootstrap(pairs[:1])[0])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [  # (difference, error) of the mixed model and of the paired t-test, 8 texts
        ((0.06, 0.01), (0.06, 0.01), "significant"),
        ((0.06, 0.01), (0.06, 0.03), "inconclusive"),
        ((0.06, 0.01), (-0.06, 0.01), "inconclusive"),
        ((0.002, 0.008), (0.002, 0.008), "equivalent within 0.02"),
        ((0.002, 0.008), (0.002, 0.011), "inconclusive"),
        ((0.027, 0.01), (0.027, 0.01), "inconclusive"),  # p = 0.03
        ((0.012, 0.002), (0.012, 0.002), "significant, and equivalent within 0.02"),
    ],
)
def test_the_primary_hypothesis_needs_both_tests(first, second, expected):
    tests = [t_estimate(*one, 8) for one in (first, second)]
    assert analysis.primary_conclusion(tests) == expected


def test_equivalence_is_two_one_sided_tests():
    """By hand: the 90 % interval of -0.002 +- 0.008 with 7 degrees of freedom ends at -0.01716."""
    small = t_estimate(-0.002, 0.008, 8)
    assert analysis.equivalence(small, 0.01717) < 0.05 < analysis.equivalence(small, 0.01715)
    assert analysis.equivalence(t_estimate(0.0, 0.01, 8), 0.0) == 0.5


def test_a_compute_multiple_of_a_known_slope():
    twice = 0.1 * math.log(2)
    slope = t_estimate(-0.1, 0.0, 8)
    found = analysis.compute_multiple(t_estimate(twice, 0.01, 8), slope)
    assert found.value == pytest.approx(2)
    assert found.low == pytest.approx(2 * math.exp(-2.3646 * 0.1), rel=1e-3)
    both = analysis.compute_multiple(t_estimate(twice, 0.01, 8), t_estimate(-0.1, 0.03, 8))
    assert both.high > found.high


def test_the_slope_of_the_loss_comes_from_all_sizes():
    sim = Simulation(EFFECTS | {"b2": 1e-9, "k": 0.0})
    frame = analysis.columns(sim.rows, sim.formula)
    frame["bits"] = 2 - 0.05 * np.log(frame["flops_per_token"] * frame["bytes_trained"])
    assert analysis.loss_slope(frame).value == pytest.approx(-0.05)
    assert analysis.loss_slope(frame).count == 8
