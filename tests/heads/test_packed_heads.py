"""Packed texts in every layout: each as if it were alone, whatever the others hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from head_definitions import by_hand
from layout_cases import CASES, make

from attnlab import decode, heads, multi_head_attention

QUICK = ("standard", "grouped", "wide", "two stages", "latent", "extra keys")
OF_QUERIES = np.array([[1, 1, 2, 2, 2, 3, 3]] * 2)
OF_KEYS = np.array([[1, 1, 1, 2, 2, 3, 3, 3]] * 2)


@pytest.mark.parametrize("case", deep(CASES, *QUICK))
def test_a_packed_text_is_the_text_alone(case, x64):
    """By the definition with a mask; NaN in text 2 reaches no other, in no gradient."""
    layout = CASES[case]
    params, *inputs = make(layout, jnp.float64)

    @jax.jit
    def run(x, y, z):
        def output(x, y, z):
            segments = OF_QUERIES, OF_KEYS
            return multi_head_attention(params, x, layout, (y, z), segments=segments, layer=1)

        out, pull = jax.vjp(output, x, y, z)
        others = jnp.asarray(OF_QUERIES != 2)[..., None]
        return out, pull(jnp.where(others, jnp.cos(jnp.arange(out.size).reshape(out.shape)), 0))

    out, gradients = run(*inputs)
    allowed = OF_QUERIES[0][:, None] == OF_KEYS[0]
    assert_close(out, by_hand(layout, params, *inputs, layer=1, allowed=allowed), loosen=100)
    ids = [OF_QUERIES, OF_KEYS, OF_KEYS]
    spoiled = [jnp.where((n == 2)[..., None], jnp.nan, a) for n, a in zip(ids, inputs, strict=True)]
    got, got_gradients = run(*spoiled)
    assert np.isnan(got[OF_QUERIES == 2]).all()
    assert_close(got[OF_QUERIES != 2], out[OF_QUERIES != 2], loosen=100)
    for n, a, expected in zip(ids, got_gradients, gradients, strict=True):
        assert_close(a[n != 2], expected[n != 2], loosen=100)


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
