"""Norms, activations, dropout: against Flax and the definitions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from scipy.special import erf

from attnlab import feed_forward, layer_norm, rms_norm
from attnlab.model.pointwise import ACTIVATIONS, dropout, init_feed_forward


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_layer_norm_equals_flax():
    x, w = 3 * draw(2, 5, 7) + 2, {"scale": draw(7, seed=1), "bias": draw(7, seed=2)}
    flax = nn.LayerNorm(epsilon=1e-3).apply({"params": w}, x)
    assert_close(jax.jit(lambda w, x: layer_norm(w, x, eps=1e-3))(w, x), flax)
    assert layer_norm(w, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rms_norm_equals_flax():
    x, w = 3 * draw(2, 5, 7) + 2, {"scale": draw(7, seed=1)}
    flax = nn.RMSNorm(epsilon=1e-1).apply({"params": w}, x)
    assert_close(jax.jit(lambda w, x: rms_norm(w, x, eps=1e-1))(w, x), flax)
    assert rms_norm(w, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


HAND = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_by_hand(activation, bias):
    shapes = jax.eval_shape(
        lambda key: init_feed_forward(key, 3, 5, activation=activation, bias=bias),
        jax.random.key(0),
    )
    w = {name: draw(*a.shape, seed=i) for i, (name, a) in enumerate(shapes.items())}
    x = draw(2, 4, 3, seed=9)
    got = jax.jit(lambda w, x: feed_forward(w, x, activation=activation))(w, x)
    w = {name: np.asarray(a) for name, a in w.items()}
    linear = lambda name, x: x @ w[name] + w.get(f"{name}_bias", 0)
    f = HAND[activation.removeprefix("gated_")]
    if activation.startswith("gated_"):
        hidden = f(linear("gate", np.asarray(x))) * linear("up", np.asarray(x))
    else:
        hidden = f(linear("up", np.asarray(x)))
    assert_close(got, jnp.asarray(linear("down", hidden), jnp.float32))
    assert ("up_bias" in w) == bias


def test_dropout_keeps_the_mean_and_needs_a_key():
    x = jnp.ones((100, 100))
    dropped = dropout(x, 0.2, jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, 1.25}
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)
    assert dropout(x, 0.2, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
