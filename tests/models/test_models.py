"""Whole models: causality, positions, sharing, dropout, padding, poolers, encoder and decoder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import heads, masks
from attnlab.models import (
    FFN,
    Attention,
    Compute,
    Dropout,
    Embedding,
    EncoderConfig,
    Learned,
    ModelConfig,
    NoPositions,
    Norm,
    OutputHead,
    Relative,
    Rotary,
    Sinusoidal,
    param_shapes,
)
from attnlab.models.specs import DropoutPlace

SMALL = ModelConfig(
    vocab_size=19, max_len=9, width=12, num_layers=3,
    heads=heads.Standard(num_heads=3, biases=("q", "k", "v", "o")), ffn=FFN(width=10),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 7)))
SOURCE = jnp.asarray(np.random.default_rng(5).integers(0, 19, (2, 5)))
POSITIONS = [Learned(), Sinusoidal(), Rotary(), Relative(), NoPositions()]


def change(config, **fields):
    return dataclasses.replace(config, **fields)


def random_params(config, seed=1, scale=1.0):
    """Large random parameters, so that attention is not uniform."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: jnp.asarray(scale * rng.normal(size=a.shape), a.dtype), param_shapes(config)
    )


def make(config=SMALL):
    """(jitted call that returns `Outputs`, large random parameters)."""
    model = config.build()

    @jax.jit
    def run(params, tokens, seed=None, **inputs):
        if seed is None:
            return model.apply({"params": params}, tokens, **inputs)
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, tokens, deterministic=False, rngs=rngs, **inputs)

    return run, random_params(config)


def moved(a, b):
    """Positions whose logits differ."""
    return np.abs(a.logits - b.logits).max((0, 2)) > 0


# Who attends to whom ------------------------------------------------------------------------------


def test_windows():
    """A token reaches so many tokens back per layer, in an encoder also ahead."""
    for kind, first in (("decoder", 1), ("encoder", 0)):
        config = change(SMALL, kind=kind, num_layers=1, attention=Attention(window=1))
        run, params = make(config)
        changed = moved(run(params, TOKENS), run(params, TOKENS.at[:, 1].add(1) % 19))
        assert changed.tolist() == [first == 0, True, True, False, False, False, False]


def test_without_positions_an_encoder_cannot_tell_the_order():
    run, params = make(change(SMALL, kind="encoder", positions=NoPositions()))
    order = np.random.default_rng(2).permutation(7)
    expected = run(params, TOKENS).logits[:, order]
    assert_close(run(params, TOKENS[:, order]).logits, expected, loosen=10)


@pytest.mark.parametrize("sharing", ["separate", "cla:2"])
def test_rotary_positions_count_from_anywhere(sharing):
    """Also for keys that a layer reads from the one before."""
    run, params = make(change(SMALL, positions=Rotary(), sharing=sharing))
    shifted = run(params, TOKENS, positions=jnp.arange(7) + 5).logits
    assert_close(shifted, run(params, TOKENS).logits, loosen=5)
    apart = run(params, TOKENS, positions=jnp.arange(7) * 2).logits
    assert np.abs(apart - shifted).max() > 1e-2


def test_positions_that_skip_padding():
    """A left-padded text is the text, when padding is masked too."""
    run, params = make(change(SMALL, kind="encoder", positions=Learned(pad_token=1)))
    text = TOKENS[:, :4].at[:].max(2)
    padded = jnp.concatenate([jnp.ones((2, 2), text.dtype), text], axis=1)
    got = run(params, padded, padding_mask=padded != 1).logits
    assert_close(got[:, 2:], run(params, text).logits)
    with pytest.raises(ValueError, match="mixtures"):
        run(params, jax.nn.one_hot(text, 19))


def test_positions_beyond_those_of_padding():
    """RoBERTa counts from pad_token + 1, so that max_len 9 has room for 7 tokens."""
    model = change(SMALL, kind="encoder", positions=Learned(pad_token=1)).build()
    variables, run = {"params": random_params(model.config)}, jax.jit(model.apply)
    tokens = 2 + np.arange(9)[None]
    assert np.isfinite(run(variables, tokens[:, :7]).logits).all()
    padded = np.where(tokens < 4, 1, tokens)
    assert np.isfinite(run(variables, padded).logits).all()
    with pytest.raises(ValueError, match="may have 7 tokens, not 9; raise max_len"):
        model.apply(variables, tokens)
    assert np.isnan(run(variables, tokens).logits).any()


def test_masks_and_token_types():
    config = change(SMALL, kind="encoder", embedding=Embedding(token_types=2, norm=True))
    run, params = make(config)
    mask = masks.padding(jnp.array([7, 4]), 7)
    got = run(params, TOKENS, mask=mask).logits
    changed = run(params, TOKENS.at[1, 5].add(1) % 19, mask=mask).logits
    np.testing.assert_array_equal(got[1, :4], changed[1, :4])
    types, plain = jnp.zeros_like(TOKENS), run(params, TOKENS).logits
    np.testing.assert_array_equal(plain, run(params, TOKENS, token_types=types).logits)
    assert np.abs(plain - run(params, TOKENS, token_types=types + 1).logits).max() > 1e-3


# Sharing ------------------------------------------------------------------------------------------


def test_head_masks_act_per_application_of_shared_weights():
    run, params = make(change(SMALL, sharing="albert"))
    mask = jnp.ones((3, 3))
    assert_close(run(params, TOKENS, head_mask=mask).logits, run(params, TOKENS).logits)
    first, last = (run(params, TOKENS, head_mask=mask.at[i, 1].set(0)).logits for i in (0, 2))
    assert np.abs(first - last).max() > 1e-3


SCALES = (1.0, 0.5, 2.0)


@pytest.mark.parametrize("order", ["factored", None])
def test_layer_scales_are_factors_of_the_queries(order, x64):
    """Of each application, not of a group: layers 0 and 2 share their weights here."""
    compute = Compute(dtype="float64")
    shared = change(
        SMALL, sharing="0,1,0", compute=compute, positions=NoPositions(),
        attention=Attention(layer_scales=SCALES, order=order),
    )  # fmt: skip
    separate = change(shared, sharing="separate", attention=Attention(order=order))
    params = jax.tree.map(lambda a: a.astype(jnp.float64), random_params(shared))
    layers = jax.tree.map(lambda a: a[jnp.array([0, 1, 0])], params["layers"])
    factor = jnp.array(SCALES)
    for name in ("q", "q_bias"):
        a = layers["attention"][name]
        layers["attention"][name] = a * factor.reshape(3, *(1,) * (a.ndim - 1))
    expected = run_captured(separate, params | {"layers": layers}, "scores")
    got = run_captured(shared, params, "scores")
    assert_close(got.logits, expected.logits, loosen=100)
    assert_close(got.captured["scores"], expected.captured["scores"], loosen=100)
    cache = shared.init_cache(2, 9)
    cached = shared.build().apply({"params": params}, TOKENS[:, :5], cache=cache).logits
    assert_close(cached, expected.logits[:, :5], loosen=100)


def test_position_scale_is_a_factor_of_the_queries_of_a_position(x64):
    """At positions of the call, of the caller and of a cache; beside scales of layers."""
    plain = change(SMALL, num_layers=1, positions=NoPositions(), compute=Compute(dtype="float64"))
    both = Attention(position_scale=(0.7, 2.0), layer_scales=(3.0,))
    config = change(plain, attention=both)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), random_params(plain))
    positions = jnp.array([0, 1, 2, 5, 9])
    expected = run_captured(plain, params, "scores").captured["scores"][..., :5, :5]
    model = config.build()
    got = model.apply(
        {"params": params}, TOKENS[:, :5], positions=positions, capture=("scores",)
    ).captured["scores"]
    factor = 3 * (1 + 0.7 * np.log([1, 1, 2, 3, 5]))
    assert_close(got, expected * factor[:, None], loosen=100)
    whole = model.apply({"params": params}, TOKENS).logits
    cache, found = config.init_cache(2, TOKENS.shape[1]), []
    for token in TOKENS.T:
        step = model.apply({"params": params}, token[:, None], cache=cache)
        cache, found = step.cache, [*found, step.logits]
    assert_close(jnp.concatenate(found, axis=1), whole, loosen=100)


def run_captured(config, params, *names):
    model = config.build()
    return jax.jit(lambda p: model.apply({"params": p}, TOKENS, capture=names))(params)


# Dropout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dropout",
    [
        *(Dropout(rate=0.5, places=(place,)) for place in DropoutPlace.__args__),
        Dropout(attention=0.5), Dropout(ffn=0.5), Dropout(embedding=0.5),
    ],
)  # fmt: skip
def test_each_dropout_acts_alone(dropout):
    run, params = make(change(SMALL, dropout=dropout))
    same, other = run(params, TOKENS, 0).logits, run(params, TOKENS, 1).logits
    np.testing.assert_array_equal(same, run(params, TOKENS, 0).logits)
    assert np.abs(same - other).max() > 1e-3
    assert np.abs(same - run(params, TOKENS).logits).max() > 1e-3


def test_embeddings_can_have_a_rate_of_their_own():
    run, params = make(change(SMALL, dropout=Dropout(rate=0.5, embedding=0.0)))
    only, _ = make(change(SMALL, dropout=Dropout(rate=0.5, places=("attention", "ffn"))))
    got, expected = run(params, TOKENS, 0).logits, only(params, TOKENS, 0).logits
    np.testing.assert_array_equal(got, expected)


# Outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooler", ["max", "mean"])
def test_a_row_of_padding_is_pooled_to_zeros(pooler):
    run, params = make(change(SMALL, kind="encoder", output=OutputHead(pooler=pooler)))
    pooled = run(params, TOKENS, padding_mask=jnp.zeros((2, 7), bool).at[1].set(True)).pooled
    assert not pooled[0].any()
    assert pooled[1].any()


@pytest.mark.parametrize("pooler", deep(["max", "mean", "each"], "max"))
def test_poolers_have_finite_gradients(pooler):
    """The gradient of a maximum must not compare with a value that is computed a second time."""
    config = change(
        SMALL, max_len=7, norm=Norm(bias=False), positions=Sinusoidal(), sharing="relaxed:2",
        embedding=Embedding(width=12, scale=2.0, token_types=2), delta_rank=2,
        output=OutputHead(pooler=pooler, num_classes=3),
        heads=heads.Standard(num_heads=2, scale=0.3, biases=("k",)), compute=Compute(remat=False),
    )  # fmt: skip
    run, _ = make(config)
    gradients = jax.jit(jax.grad(lambda p: jnp.mean(run(p, TOKENS).classes ** 2)))
    for seed in range(3):
        gradient = gradients(random_params(config, seed, 0.4))
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(gradient))


def test_a_token_is_a_row_of_features():
    """A single 1 in the vocabulary is the token; half of two tokens is the mean of both."""
    run, params = make(change(SMALL, kind="encoder", positions=NoPositions()))
    words = jax.nn.one_hot(TOKENS, 19)
    assert_close(run(params, words).logits, run(params, TOKENS).logits, loosen=10)
    halves = run_captured_words(params, (words + words[:, ::-1]) / 2)
    table = params["embedding"]
    assert_close(halves, (table[TOKENS] + table[TOKENS[:, ::-1]]) / 2)


def run_captured_words(params, words):
    config = change(SMALL, kind="encoder", positions=NoPositions())
    model = config.build()
    outputs = model.apply({"params": params}, words, capture=("embeddings",))
    return outputs.captured["embeddings"]


# Encoder and decoder ------------------------------------------------------------------------------

SEQ = change(
    SMALL, kind="encoder_decoder", encoder=EncoderConfig(num_layers=2), norm=Norm(kind="rms"),
    positions=Relative(buckets=8, max_distance=6),
    ffn=FFN(width=10, activation="gated_gelu"),
)  # fmt: skip


def test_who_attends_to_whom_in_an_encoder_decoder():
    """A token of the source changes all logits, one of the target those from it on."""
    run, params = make(SEQ)
    plain = run(params, TOKENS, source=SOURCE)
    assert moved(plain, run(params, TOKENS, source=SOURCE.at[:, 3].add(1) % 19)).all()
    changed = moved(plain, run(params, TOKENS.at[:, 4].add(1) % 19, source=SOURCE))
    assert changed[4:].all()
    assert not changed[:4].any()
    mask = jnp.asarray(np.arange(5) < 3)[None].repeat(2, 0)
    masked = run(params, TOKENS, source=SOURCE, source_padding_mask=mask).logits
    assert_close(masked, run(params, TOKENS, source=SOURCE[:, :3]).logits)


def test_an_encoder_with_another_number_of_heads():
    """It computes what it computes alone."""
    layout = heads.Standard(num_heads=3, head_dim=6)
    config = change(
        SEQ, num_layers=1, heads=layout, encoder=EncoderConfig(num_layers=2, num_heads=4)
    )
    run, params = make(config)
    assert params["layers"]["cross"]["q"].shape == (1, 12, 3, 6)
    assert params["encoder_layers"]["attention"]["q"].shape == (2, 12, 4, 6)
    assert params["encoder_relative_bias"].shape == (8, 4)
    alone = change(
        config, kind="encoder", num_layers=2, encoder=None, heads=change(layout, num_heads=4)
    )
    own = {n.removeprefix("encoder_"): a for n, a in params.items() if n.startswith("encoder_")}
    own["embedding"] = params["embedding"]
    encoded = run(params, TOKENS, source=SOURCE).encoded
    assert_close(encoded, make(alone)[0](own, SOURCE).hidden)


def test_padding_masks_are_booleans_or_zeros_and_ones():
    run, params = make(SEQ)
    logits = []
    for kind in (bool, int):
        mask = np.array([[1, 1, 0, 0, 1]] * 2).astype(kind)
        masks = {"padding_mask": mask, "source_padding_mask": mask}
        logits.append(run(params, TOKENS[:, :5], source=SOURCE, **masks).logits)
    np.testing.assert_array_equal(*logits)
