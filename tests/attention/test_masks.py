"""Literal small matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import masks


def test_masks_are_what_they_say():
    np.testing.assert_array_equal(masks.causal(3, 4, offset=1), np.tri(3, 4, 1, dtype=bool))
    band = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    np.testing.assert_array_equal(masks.window(3, 4, left=1, right=1), np.array(band, bool))
    padding = masks.padding(jnp.array([2, 0]), 3)
    np.testing.assert_array_equal(padding[:, 0, 0], np.array([[1, 1, 0], [0, 0, 0]], bool))
    packed = masks.segments(jnp.array([[0, 0, 1]]))
    np.testing.assert_array_equal(packed[0, 0], np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool))
    assert masks.combine(None, None) is None
    with pytest.raises(ValueError, match="at least 0"):
        masks.window(3, left=-1, right=0)


@pytest.mark.unchecked
def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match=r"boolean .* as bias"):  # 0 is no "hidden" there
        masks.combine(masks.causal(3), jnp.zeros((3, 3)))


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


@pytest.mark.parametrize(
    ("senders", "receivers", "error", "message"),
    [
        ([0.0], [0], TypeError, "senders must be integers, not float"),
        ([0], [True], TypeError, "receivers must be integers, not bool"),
        ([0, 1], [0], ValueError, r"shapes \(2,\) and \(1,\)"),
        ([[0]], [[0]], ValueError, "two lists of one length"),
        ([0, -1], [0, 1], ValueError, "senders holds -1, which is no index of 3 nodes"),
        ([0, 1], [0, 5], ValueError, "receivers holds 5, .* pads the list has index 4"),
    ],
)
def test_bad_edges(senders, receivers, error, message):
    """Asked of the function itself: in the tests jaxtyping refuses wrong types even earlier."""
    ends = getattr(masks.edge_ends, "__wrapped__", masks.edge_ends)
    with pytest.raises(error, match=message):
        ends(np.array(senders), np.array(receivers), 4, 3)
