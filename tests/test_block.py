"""One layer against Flax's own modules and the definition."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import HeadSpec, feed_forward, layer_norm, multi_head_attention, transformer_block
from attnlab.block import ACTIVATIONS, NORMS, BlockSpec, dropout, init_block


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(spec):
    parts = init_block(spec)
    shapes = jax.eval_shape(lambda key: {p: f(key) for p, f in parts.items()}, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [draw(*a.shape, seed=i) for i, a in enumerate(leaves)])


def test_layer_norm_equals_flax():
    x, w = 3 * draw(2, 5, 7) + 2, {"scale": draw(7, seed=1), "bias": draw(7, seed=2)}
    flax = nn.LayerNorm(epsilon=1e-3).apply({"params": w}, x)
    assert_close(jax.jit(lambda w, x: layer_norm(w, x, eps=1e-3))(w, x), flax)
    assert layer_norm(w, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_by_hand(activation):
    from scipy.special import erf

    hand = {
        "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": lambda x: np.maximum(x, 0),
    }[activation]
    w = {"up": draw(3, 5), "up_bias": draw(5), "down": draw(5, 3), "down_bias": draw(3)}
    x = draw(2, 4, 3, seed=4)
    got = jax.jit(lambda w, x: feed_forward(w, x, activation=activation))(w, x)
    w = {n: np.asarray(a) for n, a in w.items()}
    expected = hand(np.asarray(x) @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
    assert_close(got, jnp.asarray(expected, jnp.float32))


@pytest.mark.parametrize("norm", NORMS)
def test_order_of_norm_and_residual(norm):
    spec = BlockSpec(HeadSpec("standard", 6, 2), ffn_width=10, norm=norm, is_causal=True)
    w, x = make(spec), draw(2, 5, 6, seed=9)
    run = jax.jit(lambda w, x: transformer_block(w, x, spec=spec, return_probs=True)[:2])
    got, probs = run(w, x)

    def f(w, y):
        heads = {name: w[name] for name in spec.heads.shapes}
        return multi_head_attention(heads, y, spec=spec.heads, is_causal=True)

    a, b = w["attention"], w["ffn"]
    if norm == "pre":
        y = x + f(a, layer_norm(a["norm"], x))
        y = y + feed_forward(b, layer_norm(b["norm"], y))
    else:
        y = layer_norm(a["norm"], x + f(a, x))
        y = layer_norm(b["norm"], y + feed_forward(b, y))
    assert_close(got, y)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    assert not np.triu(probs, 1).any()


def test_dropout_keeps_the_mean_and_needs_a_key():
    x = jnp.ones((100, 100))
    dropped = dropout(x, 0.2, jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, 1.25}
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)
    assert dropout(x, 0.2, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"])
def test_each_dropout_acts(rate):
    spec = BlockSpec(HeadSpec("standard", 6, 2), ffn_width=10, **{rate: 0.5})
    w, x = make(spec), draw(2, 5, 6, seed=9)
    run = jax.jit(lambda key: transformer_block(w, x, spec=spec, dropout_key=key)[0])
    plain = transformer_block(w, x, spec=spec)[0]
    one, two = run(jax.random.key(0)), run(jax.random.key(1))
    assert np.abs(one - plain).max() > 0.01
    assert np.abs(one - two).max() > 0.01


def test_initial_scales():
    spec = BlockSpec(HeadSpec("standard", 64, 4), ffn_width=256)
    make_one = jax.jit(
        lambda key: {p: f(key) for p, f in init_block(spec, residual_scale=0.5).items()}
    )
    w = make_one(jax.random.key(0))
    expected = {"up": 64**-0.5, "down": 0.5 * 256**-0.5}
    for name, std in expected.items():
        np.testing.assert_allclose(jnp.std(w["ffn"][name]), std, rtol=0.03)
    np.testing.assert_allclose(jnp.std(w["attention"]["o"]), 0.5 * 64**-0.5, rtol=0.03)
    np.testing.assert_allclose(jnp.std(w["attention"]["q"]), 64**-0.5, rtol=0.03)
    np.testing.assert_array_equal(w["ffn"]["norm"]["scale"], np.ones(64))
