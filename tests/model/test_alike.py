"""How far apart heads are, and heads that are made the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import ModelConfig
from attnlab.model import alike

LAYOUTS_APART = ("standard", "narrow", "bilinear", "latent")


@pytest.mark.parametrize("layout", LAYOUTS_APART)
def test_heads_that_are_made_the_same(layout):
    """Every head is the first in the maps that were named, all else is as it was."""
    config = ModelConfig(layout=layout, width=12, num_heads=3, num_layers=2, max_len=4)
    params = config.build().init(jax.random.key(1), jnp.zeros((1, 4), int))["params"]
    leaves = alike.head_axes(config, params)
    alike_ = alike.same_heads(config, params, "qk")
    changed = set()
    for (name, before, axis), after in zip(leaves, jax.tree.leaves(alike_), strict=True):
        if not np.array_equal(before, after):
            changed.add(name)
            rows = np.moveaxis(after, axis, 0)
            assert all(np.array_equal(row, np.moveaxis(before, axis, 0)[0]) for row in rows)
    assert changed == {n for n, _, axis in leaves if axis is not None and set(n) <= set("qk")}
    assert changed
    assert all(name.startswith(tuple("qkvom")) for name, _, axis in leaves if axis is not None)


def test_how_far_apart_heads_are():
    """By hand: heads (3, 0), (0, 0) and (0, 4) of one map; nothing else has heads."""
    config = ModelConfig(num_heads=3, width=6, num_layers=1, head_dim=2, value_dim=1)
    q = jnp.array([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]]).reshape(1, 1, 3, 2)
    params = {"layers": {"attention": {"q": q}, "ffn": {"up": jnp.ones((1, 6, 7))}}}
    expected_ = np.sqrt((9 + 25) / 2) / np.sqrt(2 * 25 / 3)
    assert_close(alike.heads_apart(config, params), np.float32(expected_))
    moved = jax.tree.map(lambda a: a + 2, params)
    moved["layers"]["attention"]["q"] = q.at[0, 0, 0, 0].add(6.0)
    assert_close(alike.least_moved(params, moved), np.float32(2))  # 6 / sqrt(6) is more
    assert float(alike.least_moved(params, params)) == 0
