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
    roots = {n: n.removesuffix("_turned") for n, _, axis in leaves if axis is not None}
    assert changed == {n for n, root in roots.items() if set(root) <= set("qk")}
    assert changed
    assert all(name.startswith(tuple("qkvom")) for name, _, axis in leaves if axis is not None)


BESIDE = dict(gate="element", sink="learnt", extra_keys=2)


@pytest.mark.parametrize(
    ("maps", "fields", "kept"),
    [
        ("qkvo", BESIDE, set()),
        ("qkvo", BESIDE | {"gate": "head"}, set()),
        ("qk", BESIDE, {"v", "v_bias", "o", "gate", "extra_v"}),
        ("kv", BESIDE, {"q", "q_bias", "o", "gate", "sink"}),
        ("qkvo", dict(layout="latent", rotary_dim=2), set()),
        ("qkvo", dict(layout="tensor"), set()),
    ],
)
def test_what_stands_beside_the_maps_goes_with_them(maps, fields, kept):
    """Equal heads are equal in all that is theirs, so that nothing tells them apart."""
    config = ModelConfig(width=12, num_heads=3, num_layers=2, max_len=4, **fields)
    shapes = jax.eval_shape(config.build().init, jax.random.key(1), jnp.zeros((1, 4), int))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape), shapes["params"])
    made = alike.same_heads(config, params, maps)
    apart = set()
    for name, a, axis in alike.head_axes(config, made):
        if axis is not None and np.ptp(np.asarray(a), axis=axis).max() > 0:
            apart.add(name)
    assert apart == kept
    assert (float(alike.heads_apart(config, made)) == 0) == (not kept)


def test_how_far_apart_heads_are():
    """By hand: heads (3, 0), (0, 0) and (0, 4) of one map; nothing else has heads."""
    config = ModelConfig(num_heads=3, width=6, num_layers=1, head_dim=2, value_dim=1)
    q = jnp.array([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]]).reshape(1, 1, 3, 2)
    params = {"layers": {"attention": {"q": q}, "ffn": {"up": jnp.ones((1, 6, 7))}}}
    params["layers"]["attention_mixture"] = {"q": jnp.array([[1.0, 0.0], [0.0, 5.0]])}  # no heads
    expected_ = np.sqrt((9 + 25) / 2) / np.sqrt(2 * 25 / 3)
    assert_close(alike.heads_apart(config, params), np.float32(expected_))
    moved = jax.tree.map(lambda a: a + 2, params)
    moved["layers"]["attention"]["q"] = q.at[0, 0, 0, 0].add(6.0)
    assert_close(alike.least_moved(params, moved), np.float32(2))  # 6 / sqrt(6) is more
    assert float(alike.least_moved(params, params)) == 0
