"""Cached decoding is the full forward; generated text is what the full forward would choose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOLERANCE, assert_close, diagonal
from test_models import SMALL, TOKENS, make

from attnlab import LAYOUTS, generate, plan_names, prefill
from attnlab.model.outer import POSITIONS

LONG = dataclasses.replace(SMALL, max_len=14)
SIZES = {"standard": {"head_dim": 6}, "narrow": {"head_dim": 6}, "narrow_tied": {"head_dim": 6}}
SIZES |= {"alt": {"head_dim": 6}, "two_stage": {"head_dim": 6}}  # even, for rotary positions


def in_pieces(config, params, size):
    """Logits of TOKENS through a cache: 4 tokens, 1, 2."""
    model, cache = config.build(), config.empty_cache(2, size)
    logits = []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        seen, cache = model.apply({"params": params}, TOKENS[:, start:end], cache=cache)
        logits.append(seen)
    return jnp.concatenate(logits, axis=1)


SEEN_FROM_ANYWHERE = [name for name, row in POSITIONS.items() if not row.skips_padding]


SOME = {"wide", "narrow", "collaborative", "latent", "tensor", "grouped_tied"}


@pytest.mark.parametrize(
    ("layout", "positions", "window"),
    diagonal(LAYOUTS, SEEN_FROM_ANYWHERE, [None, 2], of=SOME),
)
def test_cached_decoding_is_the_full_forward(layout, positions, window):
    """In turn of all plans; with a window in a cache that goes round."""
    if (layout, positions) == ("absorbed", "rotary"):
        pytest.skip("refused: keys that are inputs cannot be turned")
    turn = 4 * list(LAYOUTS).index(layout) + list(POSITIONS).index(positions)
    plan = str(np.roll(plan_names(), turn)[int(window is not None)])
    fields = {"plan": plan, "positions": positions, "layout": layout, "window": window}
    config = dataclasses.replace(LONG, **fields, **SIZES.get(layout, {}))
    run, params = make(config)
    got = jax.jit(lambda p: in_pieces(config, p, 7 if window is None else 6))(params)
    assert_close(got, run(params, TOKENS), loosen=5)


def test_as_pythia_and_llama_decode():
    """Sublayers beside each other; a part of the head turned, at rates that are slowed."""
    config = dataclasses.replace(
        LONG, norm="parallel", positions="rotary", rotary_fraction=0.5, head_dim=8, num_kv_heads=1,
        rotary_scaling="llama3:8,1,4,6", rotary_base=20.0,
    )  # fmt: skip
    run, params = make(config)
    got = jax.jit(lambda p: in_pieces(config, p, 7))(params)
    expected = run(params, TOKENS)
    assert_close(got, expected, loosen=5)
    for changed in (dict(rotary_fraction=1.0), dict(rotary_scaling=None), dict(norm="pre")):
        other = dataclasses.replace(config, **changed).build().apply({"params": params}, TOKENS)
        assert np.abs(other - expected).max() > 1e-3, changed


def test_with_talking_heads_in_the_absorbed_order():
    config = dataclasses.replace(LONG, layout="wide", order="absorbed", talking_heads=True)
    run, params = make(config)
    assert set(config.empty_cache(2, 7)) == {"x", "length"}
    got = jax.jit(lambda p: in_pieces(config, p, 7))(params)
    assert_close(got, run(params, TOKENS), loosen=5)


def by_full_forwards(run, params, prompt, count):
    for _ in range(count):
        best = run(params, prompt)[:, -1].argmax(-1)
        prompt = jnp.concatenate([prompt, best[:, None]], axis=1)
    return prompt[:, -count:]


@pytest.mark.parametrize("window", [None, 3])
def test_greedy_text_is_that_of_full_forwards(window):
    """A window of 3 tokens keeps a cache of 7 for a text of 12: the prompt goes in by pieces."""
    config = dataclasses.replace(LONG, plan="albert", window=window)
    run, params = make(config)
    got = generate(config.build(), params, TOKENS, 5)
    np.testing.assert_array_equal(got, by_full_forwards(run, params, TOKENS, 5))


def test_drawn_text_follows_the_probabilities():
    config = dataclasses.replace(LONG, num_layers=1)
    run, params = make(config)
    params = jax.tree.map(lambda a: a * 0.4, params)
    prompt = jnp.tile(TOKENS[:1], (4000, 1))
    model = config.build()
    draw = lambda **options: np.asarray(
        generate(model, params, prompt, 1, key=jax.random.key(3), **options)
    )[:, 0]
    logits = np.asarray(run(params, TOKENS[:1])[0, -1])
    p = np.exp(logits / 2) / np.exp(logits / 2).sum()
    found = np.bincount(draw(temperature=2.0), minlength=19) / 4000
    np.testing.assert_allclose(found, p, atol=0.04)
    best = set(np.argsort(logits)[-3:])
    assert set(draw(temperature=2.0, top_k=3)) == best
    assert set(draw(temperature=1e-6)) == {int(logits.argmax())}
    np.testing.assert_array_equal(draw(temperature=2.0), draw(temperature=2.0))


def test_prefill_in_two_calls_and_overflow():
    _, params = make(LONG)
    model = LONG.build()
    logits, cache = prefill(model, params, TOKENS[:, :5], LONG.empty_cache(2, 6))
    assert logits.shape == (2, 5, 19)
    with pytest.raises(ValueError, match=r"2 tokens behind 5 do not fit a cache of size 6; .*=7"):
        prefill(model, params, TOKENS[:, 5:], cache)
    traced, after = jax.jit(lambda c: prefill(model, params, TOKENS[:, 5:], c))(cache)
    assert np.isnan(traced).all()
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_a_traced_cache_that_goes_round_takes_a_text_by_pieces():
    """Nobody knows how full it is: 2 tokens, then 5 that would push out what they still see."""
    config = dataclasses.replace(LONG, window=2)
    run, params = make(config)
    model = config.build()

    @jax.jit
    def both(cache):
        first, cache = prefill(model, params, TOKENS[:, :2], cache)
        second, _ = prefill(model, params, TOKENS[:, 2:], cache)
        return jnp.concatenate([first, second], axis=1)

    assert_close(both(config.empty_cache(2, 6)), run(params, TOKENS), loosen=5)


def test_a_text_as_long_as_max_len_and_no_longer():
    _, params = make(LONG)
    model = LONG.build()
    _, cache = prefill(model, params, TOKENS, LONG.empty_cache(2, 20))
    logits, cache = prefill(model, params, TOKENS, cache)
    assert np.isfinite(logits).all()
    assert generate(model, params, TOKENS, 7).shape == (2, 7)
    with pytest.raises(ValueError, match="1 tokens behind 14 are longer than max_len 14"):
        prefill(model, params, TOKENS[:, :1], cache)


def test_a_cache_no_larger_than_the_window_cannot_go_round():
    config = dataclasses.replace(LONG, window=3)
    with pytest.raises(ValueError, match="or give the model a window smaller than the cache"):
        prefill(config.build(), {}, TOKENS, config.empty_cache(2, 3))
    with pytest.raises(ValueError, match="cache_size 3 is too small for 9 tokens"):
        generate(config.build(), {}, TOKENS, 2, cache_size=3)


def test_positions_past_the_table_are_nan_in_a_traced_step():
    _, params = make(LONG)
    model, step = LONG.build(), jnp.zeros((2, 1), jnp.int32)
    run = jax.jit(lambda c: model.apply({"params": params}, step, cache=c))
    cache = LONG.empty_cache(2, 20)
    for position in range(15):
        logits, cache = run(cache)
        assert np.isnan(logits).all() == (position >= 14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 8}, "7 tokens and 8 new ones are longer than max_len 14"),
        ({"num_tokens": 0}, "at least one token"),
        ({"temperature": 0.5}, "pass key="),
        ({"temperature": -1.0}, "at least 0"),
        ({"top_k": 20}, "top_k must be from 1 to vocab_size 19"),
        ({"cache_size": 8}, "cache_size 8 is too small for 9 tokens"),
    ],
)
def test_bad_calls_say_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        generate(LONG.build(), {}, TOKENS, **{"num_tokens": 2} | changes)


def test_an_encoder_generates_nothing():
    encoder = dataclasses.replace(LONG, kind="encoder")
    with pytest.raises(ValueError, match="only a decoder generates text, this is an encoder"):
        generate(encoder.build(), {}, TOKENS, 2)
    with pytest.raises(ValueError, match="only a decoder goes on from a cache"):
        make(encoder)[0](make(encoder)[1], TOKENS, cache=encoder.empty_cache(2, 9))


@pytest.mark.parametrize(
    ("plan", "positions"),
    diagonal(
        ["cla:2", "relaxed:2", "dictionary:2", "attention=0,0,0 kv=0,0,@0 ffn=0,1,0"],
        ["learned", "rotary", "relative"],
        of={"attention=0,0,0 kv=0,0,@0 ffn=0,1,0"},
    ),
)
def test_layers_that_share_more(plan, positions):
    """Keys that layers share are kept once; with a window they go round in one cache."""
    for window, size in ((None, 7), (2, 6)):
        fields = {"plan": plan, "positions": positions, "window": window, "head_dim": 6}
        config = dataclasses.replace(LONG, **fields)
        run, params = make(config)
        got = jax.jit(lambda p, c=config, s=size: in_pieces(c, p, s))(params)
        assert_close(got, run(params, TOKENS), loosen=5)
        count = 3 if plan in ("relaxed:2", "dictionary:2") else 2
        assert config.empty_cache(2, 7)["k"].shape[0] == count


BOTH = dataclasses.replace(LONG, kind="encoder_decoder", encoder_layers=2, share_encoder=True)


def test_an_encoder_with_a_decoder_writes_what_the_full_forward_would_choose():
    """The source is read once; padding of it does not count; behind the end nothing else."""
    model, source = BOTH.build(), TOKENS[:, :5]
    shapes = jax.eval_shape(model.init, jax.random.key(0), source, TOKENS[:, :1])["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)
    real = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
    got = generate(model, params, TOKENS[:, :1], 6, source=source, padding_mask=real)
    run = jax.jit(lambda tokens: model.apply({"params": params}, source, tokens, padding_mask=real))
    tokens = jnp.concatenate([TOKENS[:, :1], got], axis=1)
    np.testing.assert_array_equal(got, run(tokens)[:, :-1].argmax(-1))
    np.testing.assert_array_equal(model.generate(params, TOKENS[:, :1], 6, source=source,
                                                 padding_mask=real), got)  # fmt: skip
    alone = generate(model, params, TOKENS[1:, :1], 6, source=source[1:, :3])
    np.testing.assert_array_equal(got[1:], alone)
    stop = int(got[0, 2])
    ended = generate(model, params, TOKENS[:, :1], 6, source=source, padding_mask=real, end=stop)
    for row, full in zip(ended.tolist(), got.tolist(), strict=True):
        last = full.index(stop) if stop in full else 6
        assert row == full[:last] + [stop] * (6 - last)
    with pytest.raises(ValueError, match="source is what an encoder_decoder reads"):
        generate(model, params, TOKENS, 1)
    with pytest.raises(ValueError, match="source is what an encoder_decoder reads; this is a dec"):
        generate(LONG.build(), params, TOKENS, 1, source=source)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_in_bfloat16_is_the_full_forward(layout):
    """Logits to 3 % of the largest; each token that is written greedily is, to that, the best."""
    config = dataclasses.replace(LONG, layout=layout, dtype="bfloat16", **SIZES.get(layout, {}))
    model, params = config.build(), make(config)[1]

    @jax.jit
    def run(params):
        written = generate(model, params, TOKENS, 5)
        text = jnp.concatenate([TOKENS, written], axis=1)
        full = model.apply({"params": params}, text)
        return written, in_pieces(config, params, 7), full

    written, cached, full = run(params)
    largest, allowed = np.abs(full).max(), TOLERANCE["bfloat16"]
    assert np.abs(cached - full[:, :7]).max() <= allowed * largest
    chosen = np.take_along_axis(full[:, 6:-1], written[..., None], axis=-1)[..., 0]
    assert (full[:, 6:-1].max(-1) - chosen).max() <= allowed * largest
