"""Decoding with a cache gives the logits of the whole text, each row as it would be alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOLERANCE, assert_close
from test_models import SMALL, TOKENS, change, make, random_params

from attnlab import generate, prefill
from attnlab.heads import LAYOUTS
from attnlab.models import (
    Attention,
    Compute,
    Sampling,
)

LONG = change(SMALL, max_len=14)
EVEN = ("standard", "narrow", "narrow_tied", "alt", "two_stage")
"""Layouts that need an even head_dim for rotary positions."""


def layout_of(name):
    return LAYOUTS[name](num_heads=3, **({"head_dim": 6} if name in EVEN else {}))


def in_pieces(config, params, size, pieces=((0, 4), (4, 5), (5, 7)), **inputs):
    """Logits of TOKENS through a cache."""
    model, cache, found = config.build(), config.init_cache(2, size), []
    for start, end in pieces:
        outputs = model.apply({"params": params}, TOKENS[:, start:end], cache=cache, **inputs)
        cache = outputs.cache
        found.append(outputs.logits)
    return jnp.concatenate(found, axis=1)


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
    assert set(draw(temperature=1e-6)) == {int(logits.argmax())}
    np.testing.assert_array_equal(draw(temperature=2.0), draw(temperature=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_in_bfloat16(layout):
    """Logits to 3 % of the largest; each token that is written greedily is, to that, the best."""
    config = change(LONG, heads=layout_of(layout), compute=Compute(dtype="bfloat16"))
    run, params = make(config)
    written = generate(params, TOKENS, config, 5)
    full = np.asarray(run(params, jnp.concatenate([TOKENS, written], axis=1)).logits)
    largest, allowed = np.abs(full).max(), TOLERANCE["bfloat16"]
    cached = jax.jit(lambda p: in_pieces(config, p, 7))(params)
    assert np.abs(cached - full[:, :7]).max() <= allowed * largest
    chosen = np.take_along_axis(full[:, 6:-1], np.asarray(written)[..., None], axis=-1)[..., 0]
    assert (full[:, 6:-1].max(-1) - chosen).max() <= allowed * largest


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
    params, model = random_params(LONG), LONG.build()
    run = jax.jit(lambda tokens, cache, mask: model.apply(
        {"params": params}, tokens, cache=cache, padding_mask=mask
    ))  # fmt: skip
    cache = run(TEXTS[:, :6], LONG.init_cache(3, 6), LEFT).cache
    outputs = run(TEXTS[:, :6], cache, np.arange(6) >= [[5], [5], [6]])
    assert np.isnan(outputs.logits[0]).all()
    assert np.isfinite(outputs.logits[1:]).all()
    assert outputs.cache["length"].tolist() == 3 * [[6, 5, 1]]
    with pytest.raises(ValueError, match=r"6 tokens behind 6 do not .* size 6; .*=12"):
        prefill(params, TEXTS[:, :6], LONG, cache, padding_mask=LEFT)


def test_a_mask_over_the_cache():
    """A mask of the caller and the cache: as over the whole text."""
    run, params = make(LONG)
    mask = jnp.ones((7, 7), bool).at[:, 2].set(False).at[2, 2].set(True)
    whole = run(params, TOKENS, mask=mask).logits
    got = jax.jit(lambda p: in_pieces(LONG, p, 7, pieces=((0, 7),), mask=mask))(params)
    assert_close(got, whole, loosen=5)
