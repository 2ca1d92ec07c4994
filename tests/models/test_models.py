"""Whole models: masks, positions, dropout, poolers, an encoder with heads of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from random_models import random_params

from attnlab import heads, masks, models
from attnlab.heads.positions import relative_buckets
from attnlab.models import FFN, Compute, Dropout, Embedding, ModelConfig, NoPositions, Norm, Rotary
from attnlab.models.embed import image_features
from attnlab.models.specs import DropoutPlace

SMALL = ModelConfig(
    vocab_size=19, max_len=9, width=12, num_layers=3,
    heads=heads.Standard(num_heads=3, biases=("q", "k", "v", "o")), ffn=FFN(width=10),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 7)))
SOURCE = jnp.asarray(np.random.default_rng(5).integers(0, 19, (2, 5)))


def change(config, **fields):
    return dataclasses.replace(config, **fields)


def make(config=SMALL, **names):
    """(jitted call that returns `Outputs`, large random parameters)."""
    model = config.build()

    @jax.jit
    def run(params, tokens, seed=None, **inputs):
        if seed is not None:
            inputs |= {"deterministic": False, "rngs": {"dropout": jax.random.key(seed)}}
        return model.apply({"params": params}, tokens, **inputs, **names)

    return run, random_params(config)


# Masks and positions ------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["separate", "cla:2"])
def test_rotary_positions_count_from_anywhere(sharing):
    """Also for keys that a layer reads from the one before."""
    run, params = make(change(SMALL, positions=Rotary(), sharing=sharing))
    shifted = run(params, TOKENS, positions=jnp.arange(7) + 5).logits
    assert_close(shifted, run(params, TOKENS).logits, loosen=5)
    apart = run(params, TOKENS, positions=jnp.arange(7) * 2).logits
    assert np.abs(apart - shifted).max() > 1e-2


def test_positions_that_skip_padding():
    """A left-padded text is the text, when padding is masked too. RoBERTa counts from 1
    more than pad_token, so that max_len 9 has room for 7 tokens."""
    config = change(SMALL, kind="encoder", positions=models.Learned(pad_token=1))
    run, params = make(config)
    text = jnp.maximum(TOKENS, 2)
    padded = jnp.pad(text, [(0, 0), (2, 0)], constant_values=1)
    got = run(params, padded, padding_mask=padded != 1).logits
    assert_close(got[:, 2:], run(params, text).logits)
    with pytest.raises(ValueError, match="mixtures"):
        run(params, jax.nn.one_hot(text, 19))
    with pytest.raises(ValueError, match="may have 7 tokens, not 9; raise max_len"):
        config.build().apply({"params": params}, jnp.maximum(padded, 2))
    assert np.isnan(run(params, jnp.maximum(padded, 2)).logits).any()


def test_masks_and_token_types():
    run, params = make(change(SMALL, kind="encoder", embedding=Embedding(token_types=2, norm=True)))
    mask, plain = masks.padding(jnp.array([7, 4]), 7), run(params, TOKENS).logits
    got, changed = (
        run(params, tokens, mask=mask).logits for tokens in (TOKENS, TOKENS.at[1, 5].add(1) % 19)
    )
    np.testing.assert_array_equal(got[1, :4], changed[1, :4])
    assert np.abs(got[1, :4] - plain[1, :4]).max() > 1e-3
    types = jnp.zeros_like(TOKENS)
    np.testing.assert_array_equal(plain, run(params, TOKENS, token_types=types).logits)
    assert np.abs(plain - run(params, TOKENS, token_types=types + 1).logits).max() > 1e-3


def test_position_scale_is_a_factor_of_the_queries_of_a_position(x64):
    """At positions of the call, of the caller and of a cache; beside scales of layers."""
    plain = change(SMALL, num_layers=1, positions=NoPositions(), compute=Compute(dtype="float64"))
    both = models.Attention(position_scale=(0.7, 2.0), layer_scales=(3.0,))
    config = change(plain, attention=both)
    run, params = make(plain, capture=("scores",))
    positions = jnp.array([0, 1, 2, 5, 9])
    expected = run(params, TOKENS[:, :5]).captured["scores"]
    run, _ = make(config, capture=("scores",))
    got = run(params, TOKENS[:, :5], positions=positions).captured["scores"]
    factor = 3 * (1 + 0.7 * np.log([1, 1, 2, 3, 5]))
    assert_close(got, expected * factor[:, None], loosen=100)
    whole = run(params, TOKENS).logits
    cache, found = config.init_cache(2, TOKENS.shape[1]), []
    for token in TOKENS.T:
        step = run(params, token[:, None], cache=cache)
        cache, found = step.cache, [*found, step.logits]
    assert_close(jnp.concatenate(found, axis=1), whole, loosen=100)


def test_relative_positions_per_layer_are_one_table_each(x64):
    """Also where layers share their attention; it adds nothing to x here, so scores are apart."""
    config = change(
        SMALL, positions=models.Relative(buckets=8, max_distance=6, per_layer=True),
        sharing="0,1,0", compute=Compute(dtype="float64"),
    )  # fmt: skip
    params = random_params(config)
    tables, attention = params["relative_bias"], params["layers"]["attention"]
    assert tables.shape == (3, 8, 3)
    attention["o"] = 0 * attention["o"]
    run, _ = make(config, capture=("scores",))
    got = run(params, TOKENS).captured["scores"]
    plain = run(params | {"relative_bias": 0 * tables}, TOKENS).captured["scores"]
    ahead = np.arange(7)[None, :] - np.arange(7)[:, None]
    buckets = relative_buckets(ahead, num_buckets=8, max_distance=6, two_sided=False)
    expected = jnp.moveaxis(tables[:, buckets], -1, 1)[:, None]
    seen = np.tril(np.ones((7, 7), bool))
    difference = (got - plain)[..., seen]
    assert_close(difference, jnp.broadcast_to(expected[..., seen], difference.shape), loosen=100)


def test_a_model_in_bfloat16_tells_positions_beyond_256_apart():
    """What a head attends to is that of the float32 model: a shift by one of 600 moves it."""
    config = change(SMALL, num_layers=1, max_len=600, positions=Rotary())
    params, tokens = random_params(config), jnp.full((1, 600), 3)

    def probs(dtype):
        run, _ = make(change(config, compute=Compute(dtype=dtype)), capture=("probs",))
        return run(params, tokens).captured["probs"][0]

    ours, exact = (np.asarray(probs(dtype), float) for dtype in ("bfloat16", "float32"))
    np.testing.assert_allclose(ours[0, 0, 599], exact[0, 0, 599], atol=0.1 * exact[0, 0, 599].max())


# Dropout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dropout",
    [
        *(Dropout(rate=0.5, places=(place,)) for place in DropoutPlace.__args__),
        Dropout(attention=0.5), Dropout(ffn=0.5), Dropout(embedding=0.5),
        Dropout(embedding=0.5, places=("ffn",)),
    ],
)  # fmt: skip
def test_each_dropout_acts_alone(dropout):
    run, params = make(change(SMALL, dropout=dropout))
    same, again, other = (run(params, TOKENS, seed).logits for seed in (0, 0, 1))
    np.testing.assert_array_equal(same, again)
    for a in (other, run(params, TOKENS).logits):
        assert np.abs(same - a).max() > 1e-3


def test_embeddings_can_have_a_rate_of_their_own():
    spec = {"rate": 0.5, "embedding": 0.0}, {"rate": 0.5, "places": ("attention", "ffn")}
    logits = []
    for fields in spec:
        run, params = make(change(SMALL, dropout=Dropout(**fields)))
        logits.append(run(params, TOKENS, 0).logits)
    np.testing.assert_array_equal(*logits)
    assert not Dropout(rate=0.5, places=("embeddings", "final")).is_active


# Outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooler", ["max", "mean"])
def test_a_row_of_padding_is_pooled_to_zeros(pooler):
    run, params = make(change(SMALL, kind="encoder", output=models.OutputHead(pooler=pooler)))
    pooled = run(params, TOKENS, padding_mask=jnp.zeros((2, 7), bool).at[1].set(True)).pooled
    assert np.any(pooled, axis=1).tolist() == [False, True]


@pytest.mark.parametrize("pooler", deep(["max", "mean", "each"], "max"))
def test_poolers_have_finite_gradients(pooler):
    """The gradient of a maximum must not compare with a value that is computed a second time."""
    output = models.OutputHead(pooler=pooler, num_classes=3)
    config = change(SMALL, sharing="relaxed:2", output=output, compute=Compute(remat=False))
    run, _ = make(config)
    gradients = jax.jit(jax.grad(lambda p: jnp.mean(run(p, TOKENS).classes ** 2)))
    for seed in range(3):
        gradient = gradients(random_params(config, seed, 0.4))
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(gradient))


def test_a_token_is_a_row_of_features():
    """Half of two tokens is the mean of both. A single 1 is the token: see the random models."""
    config = change(SMALL, kind="encoder", positions=NoPositions())
    run, params = make(config, capture=("embeddings",))
    words, table = jax.nn.one_hot(TOKENS, 19), params["embedding"]
    halves = run(params, (words + words[:, ::-1]) / 2).captured["embeddings"]
    assert_close(halves, (table[TOKENS] + table[TOKENS[:, ::-1]]) / 2)
    run, params = make(change(config, embedding=Embedding(zero_token=int(TOKENS[0, 0]))))
    assert_close(run(params, words).logits, run(params, TOKENS).logits, loosen=10)


def test_features_stand_for_images():
    """What a model makes of images is checked with the golden ViT and DINOv2."""
    images = models.Images(height=6, width=15, channels=2, patch_height=3, patch_width=5)
    sizes = {"vocab_size": images.num_features, "max_len": images.num_tokens}
    run, params = make(change(SMALL, kind="encoder", embedding=Embedding(images=images), **sizes))
    assert params["embedding"].shape == (3 * 5 * 2 + 2, 12)  # a patch, the class token, a bias
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 15, 2)), jnp.float32)
    got, expected = (run(params, a).hidden for a in (pixels, image_features(pixels, images)))
    np.testing.assert_array_equal(got, expected)


# Encoder and decoder ------------------------------------------------------------------------------


def test_an_encoder_with_another_number_of_heads():
    """It computes what it computes alone."""
    layout = heads.Standard(num_heads=3, head_dim=6)
    config = change(
        SMALL, kind="encoder_decoder", num_layers=1, heads=layout, norm=Norm(kind="rms"),
        encoder=models.EncoderConfig(num_layers=2, num_heads=4),
        positions=models.Relative(buckets=8, max_distance=6),
    )  # fmt: skip
    run, params = make(config)
    assert params["layers"]["cross"]["q"].shape == (1, 12, 3, 6)
    alone = change(
        config, kind="encoder", num_layers=2, encoder=None, heads=change(layout, num_heads=4)
    )
    own = {n.removeprefix("encoder_"): a for n, a in params.items() if n.startswith("encoder_")}
    own["embedding"] = params["embedding"]
    encoded = run(params, TOKENS, source=SOURCE).encoded
    assert_close(encoded, make(alone)[0](own, SOURCE).hidden)
