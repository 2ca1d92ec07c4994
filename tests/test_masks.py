"""Literal small matrices."""

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
