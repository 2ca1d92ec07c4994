"""Generated text is that of full forward passes; sampling; errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, diagonal
from random_models import random_params
from test_decoding import TEXTS
from test_models import SMALL, TOKENS

from attnlab.heads import LAYOUTS
from attnlab.models import specs
from attnlab.models.generate import (
    Sampling,
    generate,
    limit_logits,
    next_token,
    prefill,
    stream,
)

CONFIG = dataclasses.replace(SMALL, max_len=14)
KEY = jax.random.key(5)
DRAW = dict(temperature=3.0, top_p=0.9, top_k=12)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.mark.parametrize(
    ("layout", "window"), diagonal(LAYOUTS, [None, 3], of={"standard", "wide", "latent"})
)
def test_greedy_text_is_that_of_full_forward_passes(layout, window):
    config = dataclasses.replace(
        CONFIG, heads=LAYOUTS[layout](num_heads=3), sharing="albert",
        attention=specs.Attention(window=window),
    )  # fmt: skip
    params = random_params(config)
    got = generate({"params": params}, TOKENS, config, 5)
    text = jnp.concatenate([TOKENS, got], axis=1)
    logits = jax.jit(config.build().apply)({"params": params}, text).logits
    np.testing.assert_array_equal(got, logits[:, 6:-1].argmax(-1))


def test_the_long_factors_alone_decode_any_length():
    config = dataclasses.replace(CONFIG, positions=specs.Rotary(scaling="longrope:1,1,1,4,4"))
    params = random_params(config)
    cache = config.init_cache(2, 7)
    found = [prefill(params, TOKENS[:, :1], config, cache)]
    found.append(prefill(params, TOKENS[:, 1:], config, found[0].cache))
    logits = jnp.concatenate([one.logits for one in found], axis=1)
    assert_close(logits, config.build().apply({"params": params}, TOKENS).logits, loosen=10)


def test_a_stream_draws_what_generate_draws(params):
    options = {"sampling": Sampling(**DRAW), "key": KEY}
    prompt = TEXTS[:, :6]
    columns = list(stream(params, prompt, CONFIG, 6, **options))
    got = np.stack([np.asarray(column) for column in columns], 1)  # all are still there
    np.testing.assert_array_equal(got, generate(params, prompt, CONFIG, 6, **options))
    other = generate(params, prompt, CONFIG, 6, **options | {"key": jax.random.key(6)})
    assert (got != other).any()
    options["end"] = got[:, 2].tolist()
    assert len(list(stream(params, prompt, CONFIG, 6, **options))) <= 3  # all rows have ended


def test_tokens_under_padding_may_be_anything(params):
    mask = np.arange(7) >= [[0], [3]]
    prompt = np.where(mask, TOKENS, -1)
    same = generate(params, TOKENS, CONFIG, 3, padding_mask=mask)
    np.testing.assert_array_equal(generate(params, prompt, CONFIG, 3, padding_mask=mask), same)


@pytest.mark.parametrize("limit", [{"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-50}])
def test_a_tiny_limit_keeps_the_likeliest_token(limit):
    logits = jnp.array([[1.0, 9.0, 3.0], [8.0, 7.0, 2.0]])
    got = next_token(logits, KEY, **limit)
    assert got.tolist() == [1, 0]


def test_numbers_of_numpy_are_numbers(params):
    given = {"sampling": Sampling(temperature=np.float32(3.0), top_k=np.int64(5)), "key": KEY}
    got = generate(params, TOKENS, CONFIG, np.int64(2), cache_size=np.int64(9), **given)
    assert got.shape == (2, 2)


@pytest.mark.parametrize("top_k", [0, 5])
def test_no_logits_and_more_than_there_are_cannot_be_kept(top_k):
    with pytest.raises(ValueError, match=f"top_k must be from 1 to vocab_size 3, not {top_k}"):
        limit_logits(jnp.zeros((1, 3)), top_k=top_k)


def test_limits_equal_their_definition_in_float64():
    logits = np.random.default_rng(0).normal(size=(50, 17)) * 3
    for temperature, top_k, top_p in ((1.0, None, 0.6), (2.0, 5, 0.8), (0.3, 9, 0.95)):
        limited = limit_logits(
            jnp.asarray(logits), temperature=temperature, top_k=top_k, top_p=top_p
        )
        for row, probs in zip(logits, np.asarray(jax.nn.softmax(limited)), strict=True):
            p = np.exp(row / temperature)
            order = np.argsort(-p)[:top_k]
            before = np.cumsum(p[order]) - p[order]
            kept = order[before < top_p * p[order].sum()]
            expected = np.zeros(17)
            expected[kept] = p[kept] / p[kept].sum()
            np.testing.assert_allclose(probs, expected, rtol=1e-4)
    assert jax.nn.softmax(limit_logits(jnp.zeros(4), top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]
