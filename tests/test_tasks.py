"""Inputs, targets and what counts."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close

from attnlab import tasks

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (40, 101)))


def test_causal_lm_predicts_the_next_byte():
    example = tasks.causal_lm(TOKENS, jax.random.key(0))
    np.testing.assert_array_equal(example.inputs[:, 1:], example.targets[:, :-1])
    np.testing.assert_array_equal(example.targets, TOKENS[:, 1:])
    assert example.weights.all()


def test_masked_lm_hides_what_it_asks():
    example = tasks.masked_lm(TOKENS, jax.random.key(0))
    np.testing.assert_array_equal(example.targets, TOKENS[:, 1:])
    asked = np.asarray(example.weights, bool)
    np.testing.assert_array_equal(example.inputs[~asked], example.targets[~asked])
    shown = np.asarray(example.inputs[asked])
    masked = shown == tasks.MASK_TOKEN
    same = shown == np.asarray(example.targets[asked])
    np.testing.assert_allclose(asked.mean(), 0.15, atol=0.02)
    np.testing.assert_allclose([masked.mean(), same.mean()], [0.8, 0.1], atol=0.04)
    other = tasks.masked_lm(TOKENS, jax.random.key(1))
    assert (other.weights != example.weights).any()


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])) + 7.0
    nats = tasks.cross_entropy(logits, jnp.array([[1, 2]]))
    assert_close(nats, -jnp.log(jnp.array([[0.25, 0.8]])), loosen=10)
