"""Decoding with a cache gives the logits of the whole text, each row as it would be alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from test_models import SMALL, TOKENS, change, make

from attnlab import generate, prefill
from attnlab.models import Attention, Sampling

LONG = change(SMALL, max_len=14)


def test_a_traced_ring_takes_a_text_by_pieces():
    """Nobody knows how full it is: 2 tokens, then 5 that would replace keys still attended to."""
    config = change(LONG, attention=Attention(window=2))
    run, params = make(config)

    @jax.jit
    def both(cache):
        first, cache = prefill(params, TOKENS[:, :2], config, cache)
        second, _ = prefill(params, TOKENS[:, 2:], config, cache)
        return jnp.concatenate([first, second], axis=1)

    assert_close(both(config.init_cache(2, 6)), run(params, TOKENS).logits, loosen=5)


def test_drawn_text_follows_the_probabilities():
    config = change(LONG, num_layers=1)
    run, params = make(config)
    params = jax.tree.map(lambda a: a * 0.4, params)
    prompt = jnp.tile(TOKENS[:1], (4000, 1))

    def draw(**options):
        text = generate(
            params, prompt, config, 1, sampling=Sampling(**options), key=jax.random.key(3)
        )
        return np.asarray(text)[:, 0]

    logits = np.asarray(run(params, TOKENS[:1]).logits[0, -1])
    p = np.exp(logits / 2) / np.exp(logits / 2).sum()
    found = np.bincount(draw(temperature=2.0), minlength=19) / 4000
    np.testing.assert_allclose(found, p, atol=0.04)
    assert set(draw(temperature=2.0, top_k=3)) == set(np.argsort(logits)[-3:])
    before = np.cumsum(np.sort(p)[::-1])[:-1]  # a token more than that is kept
    assert len(set(draw(temperature=2.0, top_p=0.6))) == 1 + np.sum(before < 0.6)
    assert set(draw(temperature=1e-6)) == {int(logits.argmax())}
    np.testing.assert_array_equal(draw(temperature=2.0), draw(temperature=2.0))


# Rows of their own lengths ------------------------------------------------------------------------

TEXTS = np.random.default_rng(3).integers(0, 19, (3, 10))
LEFT = np.arange(6) >= [[0], [2], [5]]
"""The tokens of a prompt that has padding on the left."""


def test_generated_rows_are_those_rows_alone():
    """With several ends; padding on either side."""
    run, params = make(LONG)
    prompt, left = TEXTS[:, :6], LEFT
    lengths, rows, texts = left.sum(1), np.arange(3), np.zeros((3, 10), int)
    for row, text in enumerate(texts):
        text[: lengths[row]] = prompt[row, left[row]]
    for i in range(4):  # whole texts: no token attends to what comes behind it
        best = np.asarray(run(params, texts).logits)[rows, lengths + i - 1]
        texts[rows, lengths + i] = best.argmax(-1)
    full = np.take_along_axis(texts, lengths[:, None] + np.arange(4), 1)
    ends = [int(full[0, 0]), int(full[1, 1])]
    got = np.asarray(generate(params, prompt, LONG, 4, padding_mask=left, end=ends))
    for row, expected in zip(got.tolist(), full.tolist(), strict=True):
        found = [expected.index(e) for e in ends if e in expected]
        last = min(found) + 1 if found else 4
        assert row == expected[:last] + [ends[0]] * (4 - last)
    right = np.array([sorted(m)[::-1] for m in left])
    moved = np.zeros_like(prompt)
    moved[right] = prompt[left]
    np.testing.assert_array_equal(
        generate(params, moved, LONG, 4, padding_mask=right, end=ends), got
    )


@pytest.mark.slow
def test_a_full_row_gives_nan_and_the_others_continue():
    run, params = make(LONG)
    cache = run(params, TEXTS[:, :6], cache=LONG.init_cache(3, 6), padding_mask=LEFT).cache
    late = np.arange(6) >= [[5], [5], [6]]
    outputs = run(params, TEXTS[:, :6], cache=cache, padding_mask=late)
    assert np.isnan(outputs.logits[0]).all()
    assert np.isfinite(outputs.logits[1:]).all()
    assert outputs.cache["length"].tolist() == 3 * [[6, 5, 1]]
    with pytest.raises(ValueError, match=r"12 tokens do not .* size 6; .*=12"):
        prefill(params, TEXTS[:, :6], LONG, cache, padding_mask=LEFT)


def test_a_mask_over_the_cache():
    """A mask of the caller and the cache: as over the whole text."""
    run, params = make(LONG)
    mask = jnp.ones((7, 7), bool).at[:, 2].set(False).at[2, 2].set(True)
    cached = run(params, TOKENS, mask=mask, cache=LONG.init_cache(2, 7)).logits
    assert_close(cached, run(params, TOKENS, mask=mask).logits, loosen=5)
