"""Positions: values by hand, and properties of rotary embedding."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import positions
from attnlab.models import Rotary


def rotary_rates(scaling, size, base, position=1):
    """The angles of one position."""
    scaling = positions.read_scaling(scaling)
    return positions.rotary_angles(jnp.array([position]), size, base=base, scaling=scaling)[0]


def test_sinusoidal_by_hand():
    table = positions.sinusoidal(3, 4)
    expected = [[np.sin(p), np.cos(p), np.sin(p / 100), np.cos(p / 100)] for p in range(3)]
    assert_close(table, jnp.array(expected, jnp.float32))
    assert positions.sinusoidal(3, 5).shape == (3, 5)


def test_rotary_rotates_pairs_half_a_head_apart():
    """Of a head of 6 the first 4 numbers; the others stay."""
    x = jnp.array([1.0, 0.0, 0.0, 0.0, 5.0, 7.0]).reshape(1, 1, 1, 6)
    rotated = positions.rotate(x, positions.rotary_angles(jnp.array([2]), 4))
    expected = jnp.array([np.cos(2.0), 0, np.sin(2.0), 0, 5, 7], jnp.float32)
    assert_close(rotated[0, 0, 0], expected)


def test_scaled_rates_by_hand(x64):
    """Llama 3.1's, wave by wave: short ones kept, long ones stretched, a line between them."""
    rates = 100.0 ** (-np.arange(12) / 12)
    wave = 2 * np.pi / rates
    kept = (64 / wave - 1) / 3
    between = (1 - kept) * rates / 8 + kept * rates
    expected = np.where(wave < 64 / 4, rates, np.where(wave > 64, rates / 8, between))
    np.testing.assert_allclose(rotary_rates("llama3:8,1,4,64", 24, 100.0), expected, rtol=1e-12)
    assert len(np.unique(np.round(expected / rates, 6))) > 4
    linear = rotary_rates("linear:2.5", 24, 100.0, position=5)
    np.testing.assert_allclose(linear, 2 * rates, rtol=1e-12)


def test_yarn_keeps_fast_rates_and_divides_slow_ones():
    """Of 16 numbers at base 16 in 64 positions, beta 4 and 1: the ramp goes from i = 5 to 14."""
    rates = 16.0 ** (-np.arange(8) / 8)
    index = [16 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(16)) for turns in (4, 1)]
    low, high = math.floor(index[0]), math.ceil(index[1])
    part = np.clip((np.arange(8) - low) / (high - low), 0, 1)
    got = rotary_rates("yarn:4,4,1,64", 16, 16.0)
    np.testing.assert_allclose(got, rates * (1 - part) + rates / 4 * part, rtol=1e-5)
    assert got[0] == 1
    assert got[-1] < rates[-1]


def test_dynamic_scaling_changes_nothing_up_to_its_length():
    plain = positions.rotary_angles(jnp.array([63]), 8)[0]
    np.testing.assert_array_equal(rotary_rates("dynamic:2,64", 8, 1e4, position=63), plain)


FOO = positions.RotaryScaling("foo", ())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Rotary(scaling="ntk:4"), "unknown rotary_scaling 'ntk'"),
        (lambda: Rotary(scaling="longrope:4"), "write longrope:"),
        (lambda: Rotary(scaling="linear:0"), "write linear:FACTOR, all of them above 0"),
        (lambda: Rotary(scaling="llama3:8,1,4"), "write llama3:FACTOR,LOW_FREQ_FACTOR"),
        (lambda: Rotary(scaling="llama3:8,4,4,64"), "low_freq_factor must be less"),
        (lambda: positions.rotary_angles(jnp.arange(2), 4, scaling=FOO), "rotary_scaling 'foo'"),
        (lambda: positions.rotary_angles(jnp.arange(2), 5), "head_dim 5 must be even"),
        (lambda: positions.sinusoidal_halves(3, 4, rates="papr"), "did you mean 'paper'"),
    ],
)
def test_mistakes(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_sinusoidal_halves_by_hand():
    """tensor2tensor's table: sines, then cosines; the divisor is n - 1; an odd width ends in 0."""
    table = positions.sinusoidal_halves(5, 7)
    rates = 1e4 ** (-np.arange(3) / 2)
    for p in range(5):
        row = [*np.sin(p * rates), *np.cos(p * rates), 0]
        np.testing.assert_allclose(table[p], row, atol=1e-6)


@pytest.mark.parametrize("two_sided", [True, False])
def test_relative_buckets_by_hand(two_sided):
    """The definition, in float64 away from the edges."""
    distances = np.arange(-300, 301)
    got = positions.relative_buckets(
        jnp.asarray(distances), num_buckets=32, max_distance=128, two_sided=two_sided
    )
    n = 16 if two_sided else 32
    far, exact = np.abs(distances) if two_sided else np.maximum(-distances, 0), n // 2
    grown = np.log(np.maximum(far, 1) / exact) / np.log(128 / exact) * (n - exact) + 1e-6
    expected = np.where(far < exact, far, np.minimum(exact + grown.astype(int), n - 1))
    np.testing.assert_array_equal(got, expected + n * (two_sided & (distances > 0)))
