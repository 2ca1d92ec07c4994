"""Packed texts in every layout: outputs and gradients of each text in a row of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from layout_cases import CASES, make

from attnlab import decode, heads, multi_head_attention
from attnlab.heads import positions

TEXTS = np.array([[1, 2, 3]])


def texts_as_rows(a):
    """[6, length, D], a text a row, as two rows of three texts."""
    return a.reshape(2, 3 * a.shape[1], *a.shape[2:])


def rotary_of(layout, *counts):
    """Angles of positions that start anew in each of so many texts: for queries, for keys."""
    size = layout.rotary_size
    if size is None or size % 2:
        return None
    return tuple(
        positions.rotary_angles(jnp.tile(jnp.arange(length), texts), size)
        for texts, length in (counts[:2], counts[2:])
    )


QUICK = ("standard", "grouped", "wide", "two stages", "latent")


@pytest.mark.parametrize("case", deep(CASES, *QUICK))
def test_a_packed_text_is_the_text_alone(case, x64):
    """4 queries and 5 keys a text, through output, params and inputs; then with NaN in text 2."""
    layout = CASES[case]
    params, *inputs = make(layout, jnp.float64, batch=6, length=4)

    def loss(params, inputs, packed):
        options = {"rotary": rotary_of(layout, 1, 4, 1, 5)}
        if packed:
            inputs = [texts_as_rows(a) for a in inputs]
            ids = tuple(np.repeat(TEXTS, n, axis=1).repeat(2, 0) for n in (4, 5))
            options = {"segments": ids, "rotary": rotary_of(layout, 3, 4, 3, 5)}
        x, y, z = inputs
        out = multi_head_attention(params, x, layout, (y, z), layer=1, **options)
        out = out.reshape(6, 4, -1)
        weights = np.cos(np.arange(out.size)).reshape(out.shape)
        return jnp.sum(jnp.sin(out) * weights), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), grads = run(params, inputs, False)
    (_, got), got_grads = run(params, inputs, True)
    assert_close(got, expected, loosen=100)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-8)
    jax.tree.map(close, got_grads, grads)
    spoiled = [a.at[1::3].set(jnp.nan) for a in inputs]
    (_, got), _ = run(params, spoiled, True)
    others = np.arange(6) % 3 != 1
    assert_close(got[others], expected[others], loosen=100)
    assert np.isnan(got[1]).all()


def test_padding_and_caches():
    """Padding of x is hidden from every text; a cache holds one text a row."""
    layout = heads.Standard(width=4, num_heads=2)
    params, x, *_ = make(layout)
    ids, real = np.array([[1, 1, 1, 2, 2, 2, 2]] * 2), jnp.arange(7) != 5
    run = lambda x, **more: multi_head_attention(params, x, layout, segments=ids, **more)
    hidden = run(x.at[:, 5].set(jnp.nan), padding_mask=jnp.array([real, real]))
    expected = multi_head_attention(params, x[:, np.array([3, 4, 6])], layout)
    assert_close(hidden[:, np.array([3, 4, 6])], expected)
    with pytest.raises(ValueError, match="a cache holds one text a row"):
        decode(params, x, layout, heads.init_cache(layout, 2, 9), segments=ids)
