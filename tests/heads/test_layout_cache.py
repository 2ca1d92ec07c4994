"""Decoding with a cache equals the call on the whole text, for every layout and extra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from layout_cases import CASES, FIRST, SELF, make

from attnlab import heads
from attnlab.attention import SoftCap
from attnlab.heads import positions
from attnlab.heads.cache import next_positions

# One of each layout, and extras that attend in their own way; the others are slow.
DEEP = {
    *FIRST, "talking absorbed heads", "tensor product, one text", "low-rank queries without a norm",
    "differential with extras", "extra keys", "learnt soft cap", "talking heads",
    "mixture of heads",
}  # fmt: skip


def angles(layout, at):
    """Rotary angles of these positions, if the layout can rotate."""
    size = layout.rotary_size
    return None if size is None or size % 2 else positions.rotary_angles(at, size)


def chunks(layout, params, x, sizes, cache, padding_mask=None, **options):
    """Outputs of decoding in chunks of these sizes, and the last cache."""
    outputs, start = [], 0
    for size in sizes:
        now = slice(start, start + size)
        real = None if padding_mask is None else padding_mask[:, now]
        rotary = angles(layout, next_positions(cache, size, real))
        out, cache = heads.decode(
            params, x[:, now], layout, cache, rotary=rotary, padding_mask=real, layer=1, **options
        )
        outputs.append(out)
        start += size
    return jnp.concatenate(outputs, axis=1), cache


def whole(layout, params, x, **options):
    rotary = angles(layout, jnp.arange(x.shape[1]))
    return heads.multi_head_attention(
        params, x, layout, rotary=rotary, layer=1, is_causal=True, order="factored", **options
    )


def empty(layout, size, order="factored"):
    rotary = angles(layout, jnp.arange(1)) is not None
    return heads.init_cache(layout, 2, size, jnp.float64, order=order, rotary=rotary)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", deep(SELF, *DEEP))
def test_decoding_in_chunks_equals_the_whole_text(name, x64):
    """In a window, with lengths of their own, and until the cache is full."""
    layout = CASES[name]
    params, x = make(layout, jnp.float64)[:2]
    # Row 0 has 7 tokens, row 1 has 4 and NaN in place of the others.
    real = np.array([[1] * 7, [1, 1, 0, 0, 1, 0, 1]], bool)
    padded, tokens = jnp.where(real[..., None], x, jnp.nan), np.flatnonzero(real[1])

    @jax.jit
    def run(params, x, padded):
        ring, ring_cache = chunks(
            layout, params, x, (2, 1, 2, 2), empty(layout, 4), local_window_size=2
        )
        decoded, _ = chunks(layout, params, x, (3, 1, 3), empty(layout, 9))
        rows, _ = chunks(layout, params, padded, (3, 1, 3), empty(layout, 7), real)
        # A window of 3 behind 4 tokens needs 7 places.
        over, over_cache = chunks(layout, params, x, (3, 4), empty(layout, 6), local_window_size=3)
        plain, alone = whole(layout, params, x), whole(layout, params, x[1:, tokens])
        window = whole(layout, params, x, local_window_size=2)
        got = decoded, ring, rows[0], rows[1][tokens], over[:, :3]
        expected = plain, window, plain[0], alone[0], plain[:, :3]
        lengths = ring_cache["length"], over_cache["length"]
        return got, expected, over[:, 3:], lengths

    decoded, expected, behind, lengths = run(params, x, padded)
    for got, of_whole in zip(decoded, expected, strict=True):
        assert_close(got, of_whole, loosen=100)
    assert np.isnan(behind).all()
    assert lengths == (7, 3)


@pytest.mark.unchecked  # a list of two
@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": 1}, {"local_window_size": [2, 1]},
        {"local_window_size": (10**12, 0)}, {"local_window_size": (1, 3), "is_causal": True},
        {"score_mods": [SoftCap(jnp.arange(1.0, 7))], "is_causal": True},
    ],
)  # fmt: skip
def test_windows_and_a_soft_cap_as_a_modification_decode(options):
    """The cap reads scores alone; those that read positions are refused (`test_layout_errors`)."""
    layout, options = CASES["grouped"], {"is_causal": False} | options
    params, x = make(layout)[:2]
    decoded, _ = heads.decode(params, x, layout, heads.init_cache(layout, 2, 9), **options)
    assert_close(decoded, heads.multi_head_attention(params, x, layout, **options))


@pytest.mark.parametrize("layout", [heads.Wide(width=6, num_heads=2), CASES["latent"]])
def test_every_form_decodes_with_a_cache_of_its_own(layout, x64):
    params, x = make(layout, jnp.float64)[:2]
    run = jax.jit(functools.partial(heads.decode, layout=layout), static_argnames="order")
    expected = heads.multi_head_attention(params, x, layout, is_causal=True, order="factored")
    for step in layout.chain[0]:
        order = step.layout.name
        cache, outputs = heads.init_cache(layout, 2, 7, jnp.float64, order=order), []
        for start, stop in ((0, 4), (4, 7)):
            out, cache = run(params, x[:, start:stop], cache=cache, order=order)
            outputs.append(out)
        assert_close(jnp.concatenate(outputs, axis=1), expected, loosen=100)
