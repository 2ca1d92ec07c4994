"""Generated text is that of full forward passes; sampling; errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import diagonal
from test_decoding import LEFT, TEXTS
from test_models import SMALL, TOKENS, random_params

from attnlab.heads import LAYOUTS
from attnlab.models import specs
from attnlab.models.config import ModelConfig
from attnlab.models.generate import Sampling, generate, limit_logits, next_token, prefill, stream

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
        CONFIG,
        heads=LAYOUTS[layout](num_heads=3),
        attention=specs.Attention(window=window),
        sharing="albert",
    )
    params = random_params(config)
    got = generate({"params": params}, TOKENS, config, 5)
    text = jnp.concatenate([TOKENS, got], axis=1)
    logits = jax.jit(config.build().apply)({"params": params}, text).logits
    np.testing.assert_array_equal(got, logits[:, 6:-1].argmax(-1))


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


def test_prefill_in_two_calls_and_overflow(params):
    logits, cache = prefill(params, TOKENS[:, :5], CONFIG, CONFIG.init_cache(2, 6))
    assert logits.shape == (2, 5, 19)
    with pytest.raises(ValueError, match=r"cache of size 6; .*=7"):
        prefill(params, TOKENS[:, 5:], CONFIG, cache)
    traced, after = jax.jit(lambda c: prefill(params, TOKENS[:, 5:], CONFIG, c))(cache)
    assert np.isnan(traced).all()
    jax.tree.map(np.testing.assert_array_equal, after, cache)
    _, cache = prefill(params, TOKENS, CONFIG, CONFIG.init_cache(2, 20))
    _, cache = prefill(params, TOKENS, CONFIG, cache)
    with pytest.raises(ValueError, match="max_len 14"):
        prefill(params, TOKENS[:, :1], CONFIG, cache)
    windowed = dataclasses.replace(CONFIG, attention=specs.Attention(window=3))
    with pytest.raises(ValueError, match="window"):
        prefill(params, TOKENS, windowed, windowed.init_cache(2, 3))
    with pytest.raises(ValueError, match="padding_mask"):
        prefill(params, TOKENS[:, :5], CONFIG, CONFIG.init_cache(2, 6), padding_mask=TOKENS >= 0)
    with pytest.raises(ValueError, match="no token"):
        prefill(params, TOKENS[:, :0], CONFIG, CONFIG.init_cache(2, 6))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_tokens": 8}, "max_len"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 1.5}, "num_tokens"),
        ({"sampling": Sampling(temperature=0.5)}, "key"),
        ({"sampling": Sampling(top_k=20)}, "top_k"),
        ({"sampling": Sampling(temperature=1), "key": 0}, "key"),
        ({"cache_size": 8}, "cache_size"),
        ({"cache_size": 9.0}, "cache_size"),
        ({"end": 4.7}, "end"),
        ({"end": (3, 19)}, "end 19"),
        ({"source_padding_mask": LEFT}, "source_padding_mask"),
        ({"padding_mask": LEFT[:, :3]}, "padding_mask"),
        ({"padding_mask": np.arange(7) >= [[0], [7]]}, "padding_mask: row 1"),
        ({"source": TOKENS}, "source"),
        ({"prompt": TOKENS.at[1, 2].set(19)}, r"19 at \[1, 2\]"),
        ({"prompt": TOKENS.at[0, 2].set(-1)}, r"-1 at \[0, 2\]"),
        ({"prompt": "text"}, "text"),
        ({"params": {}}, "params"),
        ({"temperature": 1.0}, "temperature"),
        ({"config": ModelConfig(kind="encoder"), "params": None}, "encoder"),
        ({"config": ModelConfig(output=specs.OutputHead(kind="none")), "params": None}, "none"),
        ({"config": ModelConfig(kind="encoder_decoder"), "params": None}, "source"),
    ],
)
def test_bad_calls_say_what_to_do(params, changes, field):
    """Before anything is compiled; `stream` at the call, not with its first token."""
    given = {"params": params, "prompt": TOKENS, "config": CONFIG, "num_tokens": 2} | changes
    if given["params"] is None:
        given["params"] = random_params(given["config"])
    for write in (generate, stream):
        with pytest.raises((TypeError, ValueError), match=field):
            write(**given)


def test_tokens_under_padding_may_be_anything(params):
    mask = np.arange(7) >= [[0], [3]]
    prompt = np.where(mask, TOKENS, -1)
    same = generate(params, TOKENS, CONFIG, 3, padding_mask=mask)
    np.testing.assert_array_equal(generate(params, prompt, CONFIG, 3, padding_mask=mask), same)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_k": 0},
        {"top_p": 0.0},
    ],
)  # fmt: skip
def test_sampling_that_draws_nothing(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampling(**fields)


@pytest.mark.parametrize("limit", [{"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-50}])
def test_a_tiny_limit_keeps_the_likeliest_token(limit):
    logits = jnp.array([[1.0, 9.0, 3.0], [8.0, 7.0, 2.0]])
    got = next_token(logits, KEY, **limit)
    assert got.tolist() == [1, 0]


def test_numbers_of_numpy_are_numbers(params):
    given = {"sampling": Sampling(temperature=np.float32(3.0), top_k=np.int64(5)), "key": KEY}
    got = generate(params, TOKENS, CONFIG, np.int64(2), cache_size=np.int64(9), **given)
    assert got.shape == (2, 2)
    with pytest.raises(ValueError, match="top_k must be from 1 to vocab_size 3, not 5"):
        limit_logits(jnp.zeros((1, 3)), top_k=5)


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
