"""Decoding with a cache gives the logits of the whole text, each row as it would be alone; so
generated text is that of full forward passes. Sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, diagonal
from random_models import random_params
from test_models import SMALL, TOKENS, change, make

from attnlab.heads import LAYOUTS
from attnlab.models import Attention, Norm, Rotary, Sampling, limit_logits
from attnlab.models.generate import generate, next_token, prefill, stream

LONG = change(SMALL, max_len=14)
TEXTS = np.random.default_rng(3).integers(0, 19, (3, 10))
LEFT = np.arange(6) >= [[0], [2], [5]]
"""The tokens of a prompt that has padding on the left."""
KEY = jax.random.key(5)


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


def test_the_long_factors_alone_decode_any_length():
    config = change(LONG, positions=Rotary(scaling="longrope:1,1,1,4,4"))
    params = random_params(config)
    first, cache = prefill(params, TOKENS[:, :1], config, config.init_cache(2, 7))
    second, _ = prefill(params, TOKENS[:, 1:], config, cache)
    logits = jnp.concatenate([first, second], axis=1)
    assert_close(logits, config.build().apply({"params": params}, TOKENS).logits, loosen=10)


# Generated text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "window"), diagonal(LAYOUTS, [None, 3], of={"standard", "wide", "latent"})
)
def test_generated_rows_are_those_of_full_forward_passes(layout, window):
    """Each as it would be alone, with several ends, and padding on either side that holds no id."""
    config = change(
        LONG, heads=LAYOUTS[layout](num_heads=3), attention=Attention(window=window),
        sharing="albert", norm=Norm(kind="rms"),
    )  # fmt: skip
    variables, run = {"params": random_params(config)}, jax.jit(config.build().apply)
    prompt, right = np.where(LEFT, TEXTS[:, :6], -1), LEFT[:, ::-1]
    moved, texts, lengths = np.full((3, 6), -1), np.zeros((3, 10), int), LEFT.sum(1)
    moved[right] = texts[:, :6][right] = prompt[LEFT]
    for i in range(4):  # whole texts: no token attends to what comes behind it
        logits = np.asarray(run(variables, texts).logits)[np.arange(3), lengths + i - 1]
        texts[np.arange(3), lengths + i] = logits.argmax(-1)
    full = np.take_along_axis(texts, lengths[:, None] + np.arange(4), 1)
    np.testing.assert_array_equal(generate(variables, prompt[:1], config, 4), full[:1])
    ends = [int(full[0, 0]), int(full[1, 1])]
    for row in full:
        row[1 + min(np.flatnonzero(np.isin(row, ends)), default=3) :] = ends[0]
    for text, mask in ((prompt, LEFT), (moved, right)):
        got = generate(variables, text, config, 4, padding_mask=mask, end=ends)
        np.testing.assert_array_equal(got, full)


def test_a_stream_draws_what_generate_draws():
    options = {"sampling": Sampling(temperature=3.0, top_p=0.9, top_k=12), "key": KEY}
    params, prompt = random_params(LONG), TEXTS[:, :6]
    columns = list(stream(params, prompt, LONG, 6, **options))
    got = np.stack([np.asarray(column) for column in columns], 1)  # all are still there
    np.testing.assert_array_equal(got, generate(params, prompt, LONG, 6, **options))
    other = generate(params, prompt, LONG, 6, **options | {"key": jax.random.key(6)})
    assert (got != other).any()
    options["end"] = got[:, 2].tolist()
    assert len(list(stream(params, prompt, LONG, 6, **options))) <= 3  # all rows have ended


def test_drawn_text_follows_the_probabilities():
    """Numbers of NumPy are numbers."""
    config = change(LONG, num_layers=1)
    run, params = make(config)
    params = jax.tree.map(lambda a: a * 0.4, params)
    limits = {"temperature": np.float32(2.0), "top_k": np.int64(7), "top_p": 0.8}
    expected = jax.nn.softmax(limit_logits(run(params, TOKENS[:1]).logits[0, -1], **limits))
    options = {"sampling": Sampling(**limits), "key": KEY, "cache_size": np.int64(8)}
    drawn = generate(params, jnp.tile(TOKENS[:1], (4000, 1)), config, np.int64(1), **options)
    found = np.bincount(drawn[:, 0], minlength=19) / 4000
    np.testing.assert_allclose(found, expected, atol=0.03)
    np.testing.assert_array_equal(found > 0, expected > 0)


@pytest.mark.parametrize("limit", [{"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-50}])
def test_a_tiny_limit_keeps_the_likeliest_token(limit):
    logits = jnp.array([[1.0, 9.0, 3.0], [8.0, 7.0, 2.0]])
    got = next_token(logits, KEY, **limit)
    assert got.tolist() == [1, 0]


def test_limits_equal_their_definition_in_float64():
    logits = np.random.default_rng(0).normal(size=(50, 17)) * 3
    for temperature, top_k, top_p in ((1.0, None, 0.6), (2.0, 5, 0.8), (0.3, 9, 0.95)):
        limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        limited = limit_logits(jnp.asarray(logits), **limits)
        for row, probs in zip(logits, np.asarray(jax.nn.softmax(limited)), strict=True):
            p = np.exp(row / temperature)
            order = np.argsort(-p)[:top_k]
            before = np.cumsum(p[order]) - p[order]
            kept = order[before < top_p * p[order].sum()]
            expected = np.zeros(17)
            expected[kept] = p[kept] / p[kept].sum()
            np.testing.assert_allclose(probs, expected, rtol=1e-4)
    assert jax.nn.softmax(limit_logits(jnp.zeros(4), top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]
