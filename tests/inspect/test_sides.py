"""What a page says of a model is what the model does: gates, losses, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import ModelConfig
from attnlab.inspect import head_statistics, side_of

DECODER = ModelConfig(
    vocab_size=11, max_len=9, width=12, num_layers=3, num_heads=2, head_dim=5, ffn_width=7,
    plan="attention=0,1,1 ffn=0,1,0",
)  # fmt: skip
TOKENS = np.array([[3, 1, 4, 3, 1, 5]], np.int32)


def weights(config, **inputs):
    """Large random ones, every number different."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), **inputs)["params"]
    return jax.tree.map(lambda a: rng.normal(0, 0.6, a.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def decoder():
    """What a page shows of a decoder, and its call with a gate for each head."""
    params, model = weights(DECODER, tokens=TOKENS), DECODER.build()
    side = side_of(model, params, {"tokens": TOKENS}, {"tokens": list("abcdef")})

    @jax.jit
    def logits(params, gate):
        return model.apply({"params": params}, TOKENS, head_gate=gate, return_probs=True)

    return side, functools.partial(logits, params)


def bits(logits):
    """Mean code length of every next token, by NumPy."""
    logits = np.asarray(logits, np.float64)[0, :-1]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return -np.mean(np.log2(p[np.arange(5), TOKENS[0, 1:]]))


def test_maps_and_statistics_are_those_of_the_model(decoder):
    side, logits = decoder
    maps = side.maps[0]
    probs = logits(np.ones((3, 2)))[1]
    assert_close(jnp.asarray(maps.probs), probs[:, 0])
    for name, value in head_statistics(probs, TOKENS).items():
        assert_close(jnp.asarray(maps.statistics[name]), value)
        assert name in maps.meanings
    assert (maps.name, maps.keys, maps.plan) == ("decoder", None, {"attention": (0, 1, 1)})
    assert "3 layers of width 12, 2 standard heads of width 5, plan attention=0,1,1" in side.about


def test_a_loss_without_a_head_is_that_of_its_gate(decoder):
    side, logits = decoder
    told = side.maps[0].statistics
    whole = bits(logits(np.ones((3, 2)))[0])
    for layer, head in ((0, 1), (1, 0), (2, 1)):
        gate = np.ones((3, 2))
        gate[layer, head] = 0
        alone = bits(logits(gate)[0]) - whole
        gate[(1, 2) if layer else 0, head] = 0  # layers 1 and 2 are one set
        whole_set = bits(logits(gate)[0]) - whole
        assert abs(told["loss without it"][layer, head] - alone) < 1e-4
        assert abs(told["loss without it in its set"][layer, head] - whole_set) < 1e-4
    apart = told["loss without it"] - told["loss without it in its set"]
    assert np.abs(apart[1:]).min() > 1e-3
    assert np.abs(apart[0]).max() < 1e-6


@pytest.mark.parametrize("readout", ["tied", "none"])
def test_an_encoder_says_how_far_its_answer_moves(readout):
    config = ModelConfig(
        kind="encoder", vocab_size=11, max_len=9, width=8, num_layers=1, num_heads=2, ffn_width=6,
        readout=readout,
    )  # fmt: skip
    params, model = weights(config, tokens=TOKENS), config.build()
    side = side_of(model, params, {"tokens": TOKENS}, {"tokens": list("abcdef")})
    found = side.maps[0].statistics["change without it"]
    gates = np.array([[[1, 1]], [[0, 1]], [[1, 0]]], np.float32)  # whole, and without each head

    @jax.jit
    def answers(params, gates):
        call = lambda gate: model.apply({"params": params}, TOKENS, head_gate=gate)
        return jax.lax.map(call, gates)

    x = np.asarray(answers(params, gates), np.float64)[:, 0]
    if readout == "none":
        expected = [np.linalg.norm(a - x[0]) / np.linalg.norm(x[0]) for a in x]
    else:
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        expected = [np.mean(np.sum(p[0] * np.log2(p[0] / q), -1)) for q in p]
    assert np.abs(found - expected[1:]).max() < 1e-4
    assert found.min() > 1e-3


BOTH = ModelConfig(
    kind="encoder_decoder", vocab_size=11, max_len=9, width=8, num_layers=2, num_heads=2,
    encoder_layers=1, ffn_width=6, plan="albert",
)  # fmt: skip
TEXTS = {"source": TOKENS, "tokens": TOKENS[:, :4]}
WRITTEN = {"source": list("abcde"), "tokens": list("xyzw")}  # the last of the source is filling


def test_an_encoder_decoder_has_three_attentions():
    side = side_of(BOTH.build(), weights(BOTH, **TEXTS), TEXTS, WRITTEN, ablate=False)
    shapes = {maps.name: maps.probs.shape for maps in side.maps}
    assert shapes == {
        "encoder": (1, 2, 5, 5), "decoder": (2, 2, 4, 4), "decoder to encoder": (2, 2, 4, 5),
    }  # fmt: skip
    plans = [dict(maps.plan) for maps in side.maps]
    assert plans == [{"attention": (0,)}, {"attention": (0, 0)}, {"cross": (0, 0)}]
    assert (side.maps[2].tokens, side.maps[2].keys) == (list("xyzw"), list("abcde"))
    assert "loss without it" not in side.maps[0].statistics


@pytest.mark.slow
def test_a_head_of_each_of_the_three_is_gated():
    params = jax.tree.map(jnp.asarray, weights(BOTH, **TEXTS))
    side = side_of(BOTH.build(), params, TEXTS, WRITTEN)
    apply = lambda edit: BOTH.build().apply({"params": params}, **TEXTS, edit=edit)

    def gone(last):
        return lambda heads, layer: jnp.where(layer == last, heads.at[:, :, 1].set(0), heads)

    edits = {"encoder": (0, "encoder."), "decoder": (1, ""), "decoder to encoder": (1, "cross.")}
    named = {name: {f"{prefix}heads": gone(last)} for name, (last, prefix) in edits.items()}
    logits = jax.jit(lambda: {name: apply(edit) for name, edit in {"": {}, **named}.items()})()
    cost = lambda a: -jnp.mean(jax.nn.log_softmax(a[0, :-1])[jnp.arange(3), TOKENS[0, 1:4]])
    for maps in side.maps:
        worth = float(cost(logits[maps.name]) - cost(logits[""])) / np.log(2)
        assert abs(worth) > 1e-3
        last = edits[maps.name][0]
        assert abs(maps.statistics["loss without it"][last, 1] - worth) < 1e-4


def test_one_text_at_a_time():
    params = weights(DECODER, tokens=TOKENS)
    two = {"tokens": np.concatenate([TOKENS, TOKENS])}
    with pytest.raises(ValueError, match="one text, not 2"):
        side_of(DECODER.build(), params, two, {"tokens": list("abcdef")}, ablate=False)
