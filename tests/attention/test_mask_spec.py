"""Ranges against the matrix written out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.attention.masks import MaskSpec


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 6), (6, 1)])
def test_what_is_allowed_and_used_equals_the_matrix(t, s):
    """Every causal rule, window and pair of lengths, those of 0 and beyond the end too."""
    lengths = np.array([0, 1, 3, 9])
    for causal, window, by_query, by_key in itertools.product(
        (False, True), (None, (0, 0), (2, 1), (1, 9), (2**31, 0)), (False, True), (False, True)
    ):
        spec = MaskSpec(
            t,
            s,
            is_causal=causal,
            window=window,
            query_lengths=jnp.asarray(lengths) if by_query else None,
            key_lengths=jnp.asarray(lengths[::-1]) if by_key else None,
        )
        row, key = np.arange(t)[:, None], np.arange(s)[None]
        left, right = window or (99, 99)
        expected = (row - left <= key) & (key <= row + right) & (not causal or key <= row)
        expected = np.broadcast_to(expected, (4, t, s))
        if by_query:
            expected = expected & (row < lengths[:, None, None])
        if by_key:
            expected = expected & (key < lengths[::-1, None, None])
        allowed = spec.allowed()
        allowed = np.ones((1, 1, t, s), bool) if allowed is None else np.asarray(allowed)
        np.testing.assert_array_equal(np.broadcast_to(allowed[:, 0], (4, t, s)), expected)
        sees, used = spec.used()
        sees = np.ones((1, 1, t), bool) if sees is None else np.asarray(sees)
        used = np.ones((1, s), bool) if used is None else np.asarray(used)
        np.testing.assert_array_equal(np.broadcast_to(sees[:, 0], (4, t)), expected.any(2))
        np.testing.assert_array_equal(np.broadcast_to(used, (4, s)), expected.any(1))


def test_where_all_is_seen_nothing_is_computed():
    assert MaskSpec(5, 5).ranges() is None
    assert MaskSpec(5, 5, window=(4, 4)).ranges() is None
    assert MaskSpec(5, 5, is_causal=True).used() == (None, None)
    assert MaskSpec(7, 5, is_causal=True).used() == (None, None)


@pytest.mark.parametrize("shape", [(2, 3, 1, 7), (1, 3, 1, 7), (2, 1, 5, 7), (2, 1, 1, 1)])
def test_a_mask_is_combined_with_the_ranges(shape):
    mask = np.random.default_rng(2).random(shape) < 0.3
    assert mask.any()
    spec = MaskSpec(5, 7, jnp.asarray(mask), True, (2, 0), None, jnp.array([4, 7]))
    allowed = np.asarray(spec.allowed())
    expected = np.tril(np.ones((5, 7), bool)) & ~np.tril(np.ones((5, 7), bool), -3) & mask
    expected = expected & (np.arange(7) < np.array([4, 7])[:, None, None, None])
    np.testing.assert_array_equal(allowed, expected)
    sees, used = spec.used()
    np.testing.assert_array_equal(sees, expected.any(3))
    np.testing.assert_array_equal(used, expected.any((1, 2)))


def test_long_texts_cost_no_matrix():
    """T = S = 2**20: a [T, S] array would be a terabyte."""

    def seen(lengths):
        spec = MaskSpec(2**20, 2**20, None, True, (9, 0), lengths, lengths)
        return spec.used()

    sees, used = jax.jit(seen)(jnp.array([3, 2**20]))
    np.testing.assert_array_equal(np.asarray(sees).sum(-1)[:, 0], [3, 2**20])
    np.testing.assert_array_equal(np.asarray(used).sum(-1), [3, 2**20])
