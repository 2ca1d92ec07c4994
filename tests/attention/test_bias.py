"""What a very negative bias means: one rule for every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import SMALL_BLOCKS, SMALL_STRIPS, divide

from attnlab import dot_product_attention, masks

B, T, S, N, H = 2, 5, 7, 3, 4
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=(B, a, N, H)).astype("float32") for a in (T, S, S))
LOWEST = float(np.finfo("float32").min)
EDGES = masks.Edges(jnp.tile(jnp.arange(S), T), jnp.repeat(jnp.arange(T), S))
BACKENDS = ("dense", "blockwise", "xla", "edges")


def attend(implementation, bias, mask=None):
    """Output, and the gradients of query, key, value and bias."""
    if implementation == "edges":
        mask = EDGES if mask is None else masks.Edges(*(e[mask.ravel()] for e in EDGES))

    def loss(*arrays):
        out = dot_product_attention(*arrays, mask=mask, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (_, out), grads = run(QUERY, KEY, VALUE, bias)
    return np.asarray(out), grads


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_row_of_the_smallest_bias_is_the_mean_of_the_values(implementation):
    bias = np.zeros((T, S), "float32")
    bias[1] = LOWEST
    out, grads = attend(implementation, bias)
    assert_close(out[:, 1], VALUE.mean(1))
    assert all(np.isfinite(a).all() for a in grads)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_mask_hides_more_than_any_bias(implementation):
    """Of the keys that a mask leaves, the mean; with -inf on all of them, zeros."""
    bias, mask = np.zeros((T, S), "float32"), RNG.random((T, S)) < 0.6
    mask[1] = [False, True, True, False, False, True, False]
    bias[1], bias[3] = LOWEST, -np.inf
    out, grads = attend(implementation, bias, mask)
    assert_close(out[:, 1], VALUE[:, mask[1]].mean(1))
    assert not out[:, 3].any()
    assert all(np.isfinite(a).all() for a in grads)
    assert_close(attend(implementation, bias, mask)[1], attend("dense", bias, mask)[1])


@pytest.mark.parametrize("limits", [SMALL_BLOCKS, SMALL_STRIPS])
def test_blocks_keep_the_rule(limits, monkeypatch):
    divide(monkeypatch, limits)
    bias = np.zeros((T, S), "float32")
    bias[1], bias[3], bias[4, :6] = LOWEST, -np.inf, LOWEST
    assert_close(attend("blockwise", bias), attend("dense", bias))
    assert_close(attend("dense", bias)[0][:, 4], VALUE[:, 6])
