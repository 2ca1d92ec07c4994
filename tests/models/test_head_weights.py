"""Axes that optimizers and devices see, and how similar heads are, by definition."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import diagonal
from random_models import random_params

from attnlab import heads
from attnlab.heads import EXTRAS, LAYOUTS, ExtraKeys, Gate, HeadNorm, Latent, Narrow, Sink, Standard
from attnlab.models import specs
from attnlab.models.config import ModelConfig
from attnlab.models.head_similarity import head_distance, identical_heads
from attnlab.models.layer import init_layer
from attnlab.models.params import leaves, matrix_axes, param_shapes, shard_axes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_sum_over_their_fan_in(layout):
    """Initial weights have standard deviation 1/sqrt(number of rows)."""
    config = ModelConfig(width=24, heads=LAYOUTS[layout](num_heads=3), num_layers=2)
    params = jax.jit(init_layer(config.layer)["attention"])(jax.random.key(0))
    axes = matrix_axes(config)(param_shapes(config))["layers"]["attention"]
    weights = config.layout.all_weights
    checked = 0
    for name, found in axes.items():
        if name == "norm" or not found[0]:
            continue
        reads, makes = found
        a = params[name]
        rows = math.prod(a.shape[a.ndim - reads - makes : a.ndim - makes])
        rows /= math.prod(config.layout.size(axis) for axis in weights[name].mean_axes)
        assert np.std(a) * rows**0.5 == pytest.approx(1, rel=0.25), name
        checked += 1
    assert checked


def test_axes_by_hand():
    config = ModelConfig(width=24, heads=Narrow(num_heads=3, biases=("q",), qk_norm=HeadNorm()))
    axes = matrix_axes(config)({"params": param_shapes(config)})["params"]
    attention = axes["layers"]["attention"]
    assert attention["q"] == (1, 1)
    assert attention["o"] == (2, 1)
    assert attention["q_bias"] == (0, 2)
    assert attention["q_norm"] == attention["norm"]["scale"] == (0, 1)
    assert axes["embedding"] == axes["layers"]["ffn"]["up"] == (1, 1)
    whole = Standard(num_heads=4, qk_norm=HeadNorm(over="own_head"))
    config = ModelConfig(heads=whole, sharing="relaxed:2")
    delta = matrix_axes(config)(param_shapes(config))["layers"]["delta"]["attention"]
    assert (delta["q_norm"], delta["q"]["up"]) == ((0, 2), (1, 1))
    relative = ModelConfig(positions=specs.Relative())
    assert matrix_axes(relative)(param_shapes(relative))["relative_bias"] == (0, 2)


@pytest.mark.parametrize("extra", sorted({*EXTRAS} - {"talking_heads", "mixture_of_heads"}))
def test_every_extra_has_axes(extra):
    extra = EXTRAS[extra]
    config = ModelConfig(heads=Standard(num_heads=4, extras=(extra(),)))
    axes = shard_axes(config)(param_shapes(config))["layers"]["attention"]
    assert all(axes[name] < 0 for name in extra().weights(config.layout))


MANY = Standard(
    num_heads=4, biases=("q", "k", "v", "o"), extras=(Gate("element"), Sink(), ExtraKeys(2))
)


IDENTICAL = [
    (MANY, ("outputs",), set()),
    (MANY, ("probs",), {"v", "v_bias", "o", "gate", "extra_v"}),
    (Latent(num_heads=4), ("outputs",), set()),
    (heads.TensorProduct(num_heads=4), ("outputs",), set()),
    (Narrow(num_heads=4), ("q", "k"), {"v", "o"}),
    (heads.Wide(num_heads=4), ("q",), {"k", "v", "o"}),
]


@pytest.mark.parametrize(("case", "sharing"), diagonal(range(6), ["cla:2", "separate"]))
def test_identical_heads(case, sharing):
    layout, names, different = IDENTICAL[case]
    config = ModelConfig(width=16, heads=layout, sharing=sharing, num_layers=4)
    params = random_params(config)
    made = identical_heads(config, {"params": params}, names)
    found = {
        leaf.path[-1]
        for leaf in leaves(config, made)
        if leaf.head_axis is not None and np.ptp(leaf.array, axis=leaf.head_axis).max() > 0
    }
    assert found == different
    assert (float(head_distance(config, made)) == 0) == (not different)
    rest = {leaf.path: leaf for leaf in leaves(config, params) if leaf.head_axis is None}
    for leaf in leaves(config, made):
        if leaf.path in rest:
            assert leaf.array is rest[leaf.path].array


def test_distance_by_hand():
    """Heads (3, 0), (0, 0) and (0, 4) of one weight."""
    config = ModelConfig(
        width=6, num_layers=1, heads=Standard(num_heads=3, head_dim=2, value_dim=1)
    )
    q = jnp.array([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]]).reshape(1, 1, 3, 2)
    params = {"layers": {"attention": {"q": q}, "ffn": {"up": jnp.ones((1, 6, 7))}}}
    expected = np.sqrt((9 + 25) / 2) / np.sqrt(2 * 25 / 3)
    for given in (params, {"params": params}):
        np.testing.assert_allclose(head_distance(config, given), expected, rtol=1e-6)
    one = dataclasses.replace(config, heads=Standard(num_heads=1))
    assert float(head_distance(one, random_params(one))) == 0
