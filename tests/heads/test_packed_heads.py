"""Packed texts in every layout: each as if it were alone, whatever the others hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from definition import SMALL_BLOCKS, divide
from head_definitions import by_hand
from layout_cases import CASES, make

from attnlab import decode, heads, multi_head_attention

QUICK = ("standard", "grouped", "wide", "two stages", "latent", "extra keys")
LENGTHS = 7, 8


@pytest.mark.parametrize("case", deep(CASES, *QUICK))
def test_a_packed_text_is_the_text_alone(case, x64, monkeypatch):
    """By the definition with a mask; NaN in text 2 reaches no other, in no gradient. Each layout
    has texts of other lengths (some without keys), padding first, and blocks that texts share."""
    divide(monkeypatch, SMALL_BLOCKS)
    layout, rng = CASES[case], np.random.default_rng(list(CASES).index(case))
    params, *inputs = make(layout, jnp.float64)
    of_q, of_k = (np.sort(rng.integers(0, 4, size))[None].repeat(2, 0) for size in LENGTHS)
    mixes_heads = heads.TalkingHeads in map(type, layout.extras)
    options = {
        "segments": (of_q, of_k), "layer": 1, "is_causal": bool(rng.integers(2)),
        "implementation": "dense" if mixes_heads else "blockwise",
    }  # fmt: skip

    @jax.jit
    def run(x, y, z):
        def output(x, y, z):
            return multi_head_attention(params, x, layout, (y, z), **options)

        out, pull = jax.vjp(output, x, y, z)
        others = jnp.asarray(of_q != 2)[..., None]
        return out, pull(jnp.where(others, jnp.cos(jnp.arange(out.size).reshape(out.shape)), 0))

    out, gradients = run(*inputs)
    allowed = (of_q[0][:, None] == of_k[0]) & (of_q[0] > 0)[:, None]
    allowed &= np.tri(*LENGTHS, dtype=bool) | (not options["is_causal"])
    assert_close(out, by_hand(layout, params, *inputs, layer=1, mask=allowed[None]), loosen=100)
    ids = [of_q, of_k, of_k]
    spoiled = [jnp.where((n == 2)[..., None], jnp.nan, a) for n, a in zip(ids, inputs, strict=True)]
    got, got_gradients = run(*spoiled)
    assert np.isnan(got[(of_q == 2) & allowed.any(1)]).all()
    assert_close(got[of_q != 2], out[of_q != 2], loosen=100)
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
