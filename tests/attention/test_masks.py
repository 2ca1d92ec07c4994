"""Literal small masks; what they mean together is the matrix written out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definition import allowed_in

from attnlab import masks
from attnlab.attention.masks import MaskSpec


def test_masks_are_what_they_say():
    """Beside the examples of their docstrings."""
    np.testing.assert_array_equal(masks.causal(3, 4, offset=1), np.tri(3, 4, 1, dtype=bool))
    band = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    np.testing.assert_array_equal(masks.window(3, 4, left=1, right=1), np.array(band, bool))
    assert masks.combine(None, None) is None


RULES = (
    "mask", "is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths",
)  # fmt: skip
"""In the order of `MaskSpec`."""


def equals_the_matrix(t, s, *rules):
    """`allowed` and `used` of a spec of 4 batch rows, where None is all."""
    spec = MaskSpec(t, s, *rules)
    expected = allowed_in(dict(zip(RULES, rules, strict=True)), 4, t, s)
    full = lambda a, shape: np.broadcast_to(True if a is None else np.asarray(a), shape)
    np.testing.assert_array_equal(full(spec.allowed(), expected.shape), expected)
    attending, used = spec.used()
    np.testing.assert_array_equal(full(attending, expected.shape[:3]), expected.any(3))
    np.testing.assert_array_equal(full(used, (4, s)), expected.any((1, 2)))


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 6), (6, 1)])
def test_what_is_allowed_and_used_equals_the_matrix(t, s):
    """Every causal rule, window and pair of lengths, those of 0 and beyond the end too."""
    lengths = jnp.array([0, 1, 3, 9])
    windows = (None, (0, 0), (2, 1), (1, 9), (2**31, 0))
    for rules in itertools.product(
        (None,), (False, True), windows, (None, lengths), (None, lengths[::-1])
    ):
        equals_the_matrix(t, s, *rules)


@pytest.mark.parametrize("shape", [(4, 3, 1, 7), (1, 3, 1, 7), (4, 1, 5, 7), (4, 1, 1, 1)])
def test_a_mask_is_combined_with_the_ranges(shape):
    mask, lengths = np.random.default_rng(2).random(shape) < 0.3, jnp.array([4, 7, 0, 2])
    assert mask.any()
    equals_the_matrix(5, 7, jnp.asarray(mask), True, (2, 0), None, lengths)


def test_where_all_is_seen_nothing_is_computed():
    assert MaskSpec(5, 5).ranges() is None
    assert MaskSpec(5, 5, window=(4, 4)).ranges() is None
    assert MaskSpec(5, 5, is_causal=True).used() == (None, None)
    assert MaskSpec(7, 5, is_causal=True).used() == (None, None)


def test_long_texts_cost_no_matrix():
    """T = S = 2**20: a [T, S] array would be a terabyte."""
    spec = lambda lengths: MaskSpec(2**20, 2**20, None, True, (9, 0), lengths, lengths)
    sees, used = jax.jit(lambda lengths: spec(lengths).used())(jnp.array([3, 2**20]))
    np.testing.assert_array_equal(np.asarray(sees).sum(-1)[:, 0], [3, 2**20])
    np.testing.assert_array_equal(np.asarray(used).sum(-1), [3, 2**20])


def test_neighbourhoods_from_edges():
    """Directed, an edge listed twice counts once, a node sees itself only by a self-loop."""
    senders, receivers = np.array([1, 2, 2, 2, 0]), np.array([0, 1, 1, 2, 2])
    expected = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(masks.from_edges(senders, receivers, 4, 3), expected)
    square = masks.from_edges(senders, receivers, 4)
    np.testing.assert_array_equal(square, np.pad(expected, ((0, 0), (0, 1))))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_padding_edges_are_dropped(dtype):
    """Under jit so are indices that are no node: they must not wrap or move to another node."""
    run = jax.jit(masks.from_edges, static_argnums=(2, 3))
    empty = np.array([], dtype)
    np.testing.assert_array_equal(masks.from_edges(empty, empty, 2, 3), np.zeros((2, 3), bool))
    pad = masks.from_edges(np.array([1, 3], dtype), np.array([0, 2], dtype), 2, 3)
    np.testing.assert_array_equal(pad, [[0, 1, 0], [0, 0, 0]])
    low = 255 if dtype == np.uint8 else -1
    for s, r in ((3, 0), (0, 2), (low, 0), (0, low), (100, 100)):
        got = run(np.array([1, s], dtype), np.array([0, r], dtype), 2, 3)
        np.testing.assert_array_equal(got, pad)
    wide = run(np.array([1, 99], dtype), np.array([0, 99], dtype), 300, 300)
    assert np.argwhere(wide).tolist() == [[0, 1], [99, 99]]


def edges(senders, receivers):
    return lambda: masks.from_edges(np.array(senders), np.array(receivers), 4, 3)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (edges([0.0], [0]), TypeError, "senders must be integers, not float"),
        (edges([0], [True]), TypeError, "receivers must be integers, not bool"),
        (edges([0, 1], [0]), ValueError, r"shapes \(2,\) and \(1,\)"),
        (edges([[0]], [[0]]), ValueError, "of several graphs"),
        (edges([0, -1], [0, 1]), ValueError, "senders holds -1, which is no index of 3 nodes"),
        (edges([0, 1], [0, 5]), ValueError, "receivers holds 5, .* pads the list has index 4"),
        (lambda: masks.window(3, left=-1, right=0), ValueError, "at least 0"),
        (lambda: masks.combine(masks.causal(3), jnp.ones((3, 3))), TypeError, "boolean .*as bias"),
    ],
)
@pytest.mark.unchecked
def test_bad_masks(run, error, message):
    with pytest.raises(error, match=message):
        run()
