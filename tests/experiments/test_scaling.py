"""Power laws over sizes: what is known beforehand is found again, as often as the interval says."""

import math

import numpy as np
import pytest

from experiments.reporting import scaling

SIZES = 4.0 ** np.arange(3)
E, A, ALPHA, PHI, GAIN = 1.5, 2.0, 0.2, 0.46, 1.7


def truth(x):
    return E + A * np.asarray(x, float) ** -ALPHA


def drawn(count, seeds=2, spread=0.01):
    """`count` times losses [K, S] of a base, and of an arm that is worth 1.7 times its size."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        noise = spread * rng.standard_normal((2, len(SIZES), seeds))
        yield truth(SIZES)[:, None] + noise[0], truth(GAIN * SIZES)[:, None] + noise[1]


def holds(found, value):
    return found.low <= value <= found.high


def test_a_law_without_noise_is_found():
    x = 3e5 * 4.0 ** np.arange(5)
    found = scaling.law(x, (1.25 + 40 * x**-0.31)[:, None].repeat(2, 1))
    assert found.has_floor
    assert found.floor == pytest.approx(1.25, abs=1e-4)
    assert found.scale == pytest.approx(40, rel=1e-3)
    assert found.exponent.value == pytest.approx(0.31, abs=1e-4)
    np.testing.assert_allclose(found.at(x), 1.25 + 40 * x**-0.31, atol=1e-6)


def test_too_few_points_have_no_floor():
    """Two sizes: a line through their logarithms. As many observations as parameters: no E."""
    found = scaling.law([10, 1000], [[4.0, 4.0], [2.0, 2.0]])
    assert (found.has_floor, found.floor) == (False, 0.0)
    assert found.exponent.value == pytest.approx(math.log(2) / math.log(100), abs=1e-4)
    assert not scaling.law(SIZES, truth(SIZES)[:, None]).has_floor
    alone = scaling.law([10, 1000], [[4.0], [2.0]]).exponent
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_a_loss_that_rises_bounds_no_exponent():
    rising = np.array([[2.0, 2.01], [2.1, 2.12], [2.3, 2.29]])
    found = scaling.law(SIZES, rising)
    assert (found.exponent.low, found.exponent.high) == (0.0, math.inf)


def test_the_gain_is_that_of_the_formula():
    """At equal compute ((L_base - E) / (L - E))^(1 / alpha); beside it, times the ratio of both."""
    base = truth(SIZES)[:, None].repeat(2, 1)
    better = 2.3
    expected = ((truth(16.0) - E) / (better - E)) ** (1 / ALPHA)
    equal = scaling.gain(SIZES, base, 16.0, [better, better])
    half = scaling.gain(SIZES, base, 8.0, [better, better])
    assert equal.value == pytest.approx(expected, rel=1e-3)
    assert half.value == pytest.approx(2 * expected, rel=1e-3)
    assert math.isinf(scaling.gain(SIZES, base, 16.0, [1.4, 1.4]).value)


def test_phi_counts_what_is_used_once_beside_what_is_used_often():
    """2 layers, 4 four times, 2 layers: as good as 4 + 4 x 4^0.46 = 11.6 of their own."""
    blocks = 4 + 4 * 4**PHI
    assert blocks == pytest.approx(11.57, abs=0.005)
    alone = [({1: 20 * x}, [truth(20 * x)] * 2) for x in SIZES]
    shared = [({1: 4 * x, 4: 4 * x}, [truth(blocks * x)] * 2) for x in SIZES]
    assert scaling.phi([*alone, *shared]).value == pytest.approx(PHI, abs=1e-3)


def test_the_exponent_is_in_its_interval_in_95_of_100_draws():
    found = [scaling.law(SIZES, base).exponent for base, _ in drawn(100)]
    assert sum(holds(one, ALPHA) for one in found) >= 95
    assert sum(one.high < 2 * ALPHA for one in found) > 90  # and says something


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, -1])
def test_the_gain_is_in_its_interval_in_95_of_100_draws(end):
    found = [scaling.gain(SIZES, base, SIZES[end], arm[end]) for base, arm in drawn(100)]
    assert sum(holds(one, GAIN) for one in found) >= 95
    assert sum(one.low > 1 for one in found) > 90


@pytest.mark.slow
def test_phi_is_in_its_interval_in_95_of_100_draws():
    rng, found = np.random.default_rng(1), []
    for base, _ in drawn(100):
        alone = [({1: x}, losses) for x, losses in zip(SIZES, base, strict=True)]
        shared = [
            ({1: x / 8, 4: x / 8}, truth(x / 8 * (1 + 4**PHI)) + 0.01 * rng.standard_normal(2))
            for x in SIZES
        ]
        found.append(scaling.phi([*alone, *shared]))
    assert sum(holds(one, PHI) for one in found) >= 95
    assert sum(one.low > 0 and one.high < 1 for one in found) > 90
