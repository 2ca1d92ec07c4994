"""Rows of one batch that are padded go on as they would alone; what is drawn, and where it ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, diagonal
from test_models import SMALL, make

from attnlab import (
    LAYOUTS,
    HeadSpec,
    generate,
    init_cache,
    init_heads,
    multi_head_attention,
    prefill,
    stream,
)
from attnlab.heads.old.project import memory_names
from attnlab.model.draw import limit_logits
from attnlab.model.outer import POSITIONS

LONG = dataclasses.replace(SMALL, max_len=14, head_dim=6)
RNG = np.random.default_rng(3)
TEXTS = RNG.integers(0, 19, (3, 10))
MASKS = [np.arange(6) >= [[0], [2], [5]], np.array([[1, 1, 1], [1, 0, 1], [0, 1, 1]]) > 0, None]
"""Of three calls; the second has padding between tokens, the third none."""


def calls():
    """(tokens, mask, which position of its own each token has) of each call."""
    done = np.zeros((3, 1), int)
    for mask in MASKS:
        real = np.ones((3, 1), bool) if mask is None else mask
        at = np.maximum(done + real.cumsum(1) - 1, 0)
        other = RNG.integers(0, 19, at.shape)
        yield np.where(real, np.take_along_axis(TEXTS, at, 1), other), mask, (real, at)
        done = done + real.sum(1, keepdims=True)


CALLS = list(calls())
SEEN_FROM_ANYWHERE = [name for name, row in POSITIONS.items() if not row.skips_padding]
PLANS = ["albert", "attention=0,0,1 kv=0,@0,1 ffn=0,1,0"]


@pytest.mark.parametrize(
    ("layout", "plan", "window"), diagonal(LAYOUTS, PLANS, [None, 2], of={"latent"})
)
def test_each_row_is_that_row_alone(layout, plan, window, x64):
    """The full forward of its text, which no padding touches; with a window in a cache that only
    the longest row goes round in."""
    turn = list(LAYOUTS).index(layout) + PLANS.index(plan) + (window or 0)
    if not memory_names(HeadSpec(layout, width=12, num_heads=3)):
        plan = "albert"  # layers cannot share keys that are inputs
    fields = {"layout": layout, "window": window, "dtype": "float64", "plan": plan}
    positions = SEEN_FROM_ANYWHERE[turn % len(SEEN_FROM_ANYWHERE)]
    if layout == "absorbed" and positions == "rotary":
        positions = "relative"
    if layout not in ("standard", "narrow", "narrow_tied", "alt", "two_stage"):
        fields["head_dim"] = None
    config = dataclasses.replace(LONG, positions=positions, **fields)
    run, params = make(config)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), params)

    @jax.jit
    def both(params):
        cache, found = config.empty_cache(3, 10 if window is None else 8), []
        for tokens, mask, _ in CALLS:
            logits, cache = prefill(config.build(), params, tokens, cache, padding_mask=mask)
            found.append(logits)
        return found, cache["length"], run(params, TEXTS)

    found, length, alone = both(params)
    for got, (_, _, (real, at)) in zip(found, CALLS, strict=True):
        expected = np.take_along_axis(np.asarray(alone), at[..., None], 1)
        assert_close(np.asarray(got)[real], expected[real], loosen=10)
    assert length.shape[1:] == (3,)
    assert (length == jnp.array([10, 7, 4])).all()


def test_generated_rows_are_those_rows_alone():
    """With several ends; padding stands on either side."""
    config = dataclasses.replace(LONG, readout="own")
    run, params = make(config)
    model = config.build()
    prompt, left, _ = CALLS[0]
    lengths, rows, texts = left.sum(1), np.arange(3), np.zeros((3, 10), int)
    for row, text in enumerate(texts):
        text[: lengths[row]] = prompt[row, left[row]]
    for i in range(4):  # full forwards, in which nobody sees what comes behind
        best = np.asarray(run(params, texts))[rows, lengths + i - 1]
        texts[rows, lengths + i] = best.argmax(-1)
    full = np.take_along_axis(texts, lengths[:, None] + np.arange(4), 1)
    ends = [int(full[0, 0]), int(full[1, 1])]
    write = lambda prompt, mask: generate(model, params, prompt, 4, prompt_mask=mask, end=ends)
    got = np.asarray(write(prompt, left))
    for row, expected in zip(got.tolist(), full.tolist(), strict=True):
        last = min(expected.index(e) for e in ends if e in expected) + 1
        assert row == expected[:last] + [ends[0]] * (4 - last)
    assert (got != full).any(axis=1).sum() == 2  # rows that would have gone on
    right = np.array([sorted(m)[::-1] for m in left])
    moved = np.zeros_like(prompt)
    moved[right] = prompt[left]
    np.testing.assert_array_equal(write(moved, right), got)


@pytest.mark.slow
def test_a_stream_draws_what_generate_draws():
    _, params = make(LONG)
    model, prompt = LONG.build(), CALLS[0][0]
    options = {"temperature": 3.0, "top_p": 0.9, "top_k": 12, "key": jax.random.key(5)}
    got = np.stack(list(model.stream(params, prompt, 6, **options)), 1)
    np.testing.assert_array_equal(got, model.generate(params, prompt, 6, **options))
    other = model.generate(params, prompt, 6, **options | {"key": jax.random.key(6)})
    assert (got != other).any()
    options["end"] = got[:, 2].tolist()
    ended = np.stack(list(model.stream(params, prompt, 6, **options)), 1)
    assert ended.shape[1] <= 3  # all rows are over
    whole = model.generate(params, prompt, 6, **options)
    np.testing.assert_array_equal(ended, whole[:, : ended.shape[1]])


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_a_source_may_be_padded_anywhere(positions):
    fields = {"kind": "encoder_decoder", "encoder_layers": 2, "positions": positions}
    config = dataclasses.replace(LONG, **fields)
    model, source, real = config.build(), TEXTS[:, :6], CALLS[0][1]
    shapes = jax.eval_shape(model.init, jax.random.key(0), source, source)["params"]
    params = jax.tree.map(lambda a: jnp.asarray(RNG.normal(size=a.shape), a.dtype), shapes)
    prompt, mask = CALLS[1][0], CALLS[1][1]
    given = {"source": source, "padding_mask": real, "prompt_mask": mask}
    got = generate(model, params, prompt, 5, **given)
    for row in range(3):
        alone = {"source": source[row, real[row]][None]}
        expected = generate(model, params, prompt[row, mask[row]][None], 5, **alone)
        np.testing.assert_array_equal(got[row : row + 1], expected)


def test_heads_hide_padding_with_a_cache_and_without():
    """What no head sees does not matter, and takes no place in the cache."""
    spec = HeadSpec("standard", width=6, num_heads=2)
    w, x = init_heads(jax.random.key(0), spec), RNG.normal(size=(2, 5, 6)).astype(np.float32)
    real = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]]) > 0

    @jax.jit
    def run(x):
        call = lambda x, **given: multi_head_attention(w, x, spec=spec, is_causal=True, **given)
        cached, cache = call(x, padding_mask=real, cache=init_cache(spec, 2, 5))
        return call(x, padding_mask=real), cached, call(x[:, [1, 4]]), cache

    plain, cached, alone, cache = run(x)
    assert_close(plain[real], cached[real])
    assert_close(cached[1, [1, 4]], alone[1])
    assert cache["length"].tolist() == [5, 2]
    assert not cache["k"][1, 2:].any()
    with pytest.raises(ValueError, match="padding_mask is of x; hide padding of the context"):
        multi_head_attention(w, x, x + 1, spec=spec, padding_mask=real)
    with pytest.raises(ValueError, match=r"padding_mask \(2, 4\) says which of the new tokens"):
        multi_head_attention(
            w, x, spec=spec, padding_mask=real[:, 1:], cache=init_cache(spec, 2, 5)
        )


@pytest.mark.slow
def test_a_full_row_gives_nan_and_the_others_go_on():
    _, params = make(LONG)
    run = jax.jit(lambda tokens, cache, mask: LONG.build().apply(
        {"params": params}, tokens, cache=cache, padding_mask=mask
    ))  # fmt: skip
    _, cache = run(TEXTS[:, :6], LONG.empty_cache(3, 6), MASKS[0])
    logits, after = run(TEXTS[:, :6], cache, np.arange(6) >= [[5], [5], [6]])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1:]).all()
    assert after["length"].tolist() == 3 * [[6, 5, 1]]
    with pytest.raises(ValueError, match=r"6 tokens behind 6 do not .* size 6; .*=12"):
        prefill(LONG.build(), params, TEXTS[:, :6], cache, padding_mask=MASKS[0])


def test_the_likeliest_down_to_a_sum():
    """By hand, in float64: temperature first, then `top_k`, then `top_p` of what is left."""
    logits = np.random.default_rng(0).normal(size=(50, 17)) * 3
    for temperature, top_k, top_p in ((1.0, None, 0.6), (2.0, 5, 0.8), (0.3, 9, 0.95)):
        got = jax.nn.softmax(
            limit_logits(jnp.asarray(logits), temperature=temperature, top_k=top_k, top_p=top_p)
        )
        for row, probs in zip(logits, np.asarray(got), strict=True):
            p = np.exp(row / temperature)
            order = np.argsort(-p)[:top_k]
            total, kept = 0.0, []
            for token in order:
                if total < top_p * p[order].sum():
                    kept.append(token)
                total += p[token]
            expected = np.zeros(17)
            expected[kept] = p[kept] / p[kept].sum()
            np.testing.assert_allclose(probs, expected, rtol=1e-4)
    even = jax.nn.softmax(limit_logits(jnp.zeros(4), top_p=0.5))
    assert even.tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, which keeps all, not 0.0"),
        ({"end": (3, 19)}, "end 19 is no token: they are 0 to 18"),
        ({"padding_mask": MASKS[0]}, "padding_mask is of a source; .* set prompt_mask"),
        ({"prompt_mask": MASKS[1]}, r"prompt_mask \(3, 3\) must be \(3, 6\), True where there is"),
        ({"prompt_mask": np.arange(6) >= [[0], [6], [1]]}, "prompt_mask: row 1 holds no token"),
    ],
)
def test_bad_calls_say_what_to_do(changes, message):
    """`stream` at once, not with its first token."""
    for write in (generate, stream):
        with pytest.raises(ValueError, match=message):
            write(LONG.build(), {}, TEXTS[:, :6], 2, **changes)
