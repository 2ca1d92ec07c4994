"""Inputs of a model that do not fit: one error that says what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import random_params

from attnlab import heads
from attnlab.models import FFN, Embedding, Learned, ModelConfig, generate, prefill

SMALL = dict(
    vocab_size=19, max_len=9, width=12, num_layers=2, heads=heads.Standard(num_heads=3),
    ffn=FFN(width=8),
)  # fmt: skip
TOKENS = jnp.array([[3, 1, 4]])


@pytest.mark.parametrize(
    "key",
    [0, None, TOKENS, {"params": 0}, jnp.array([1.0, 2.0]), jax.random.split(jax.random.key(0))],
)  # fmt: skip
def test_what_is_no_random_key(key):
    model = ModelConfig(**SMALL).build()
    with pytest.raises(ValueError, match=r"random key first, as of jax\.random\.key\(0\)"):
        model.init(key, TOKENS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask", jnp.ones(3, bool)), ("mask", jnp.array(True)),
        ("padding_mask", jnp.ones(3, bool)), ("padding_mask", jnp.ones((1, 1), bool)),
        ("padding_mask", jnp.ones((1, 1, 3), bool)),
        ("positions", jnp.arange(2)), ("positions", jnp.array(1)),
        ("positions", jnp.ones((2, 3), int)), ("positions", jnp.ones(3)),
        ("token_types", jnp.zeros(3, int)), ("token_types", jnp.zeros((2, 3), int)),
        ("head_mask", jnp.ones((2, 2, 3))),
    ],
)  # fmt: skip
def test_shapes(field, value):
    model = ModelConfig(**SMALL, embedding=Embedding(token_types=2)).build()
    variables = {"params": random_params(model.config)}
    for call in (model.apply, jax.jit(model.apply)):
        with pytest.raises(ValueError, match=field):
            call(variables, TOKENS, **{field: value})


def test_padding_masks_are_booleans_or_zeros_and_ones():
    """A mask that is added to the scores, 0 at tokens and -1e9 at padding, is not read inverted."""
    model = ModelConfig(**SMALL, kind="encoder_decoder").build()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS, source=TOKENS))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), shapes)
    logits = {}
    for kind in (bool, int):
        mask = np.array([[1, 1, 0]]).astype(kind)
        masks = dict(padding_mask=mask, source_padding_mask=mask)
        logits[kind] = model.apply(variables, TOKENS, source=TOKENS, **masks).logits
    np.testing.assert_array_equal(logits[bool], logits[int])
    added = jnp.array([[0.0, 0.0, -1e9]])
    for name in ("padding_mask", "source_padding_mask"):
        with pytest.raises(TypeError, match=rf"^{name} must be boolean .* not float32"):
            model.apply(variables, TOKENS, source=TOKENS, **{name: added})
        with pytest.raises(ValueError, match=f"^{name} must hold 0"):
            model.apply(variables, TOKENS, source=TOKENS, **{name: np.array([[1, 1, 2]])})
    params, config = variables["params"], model.config
    with pytest.raises(TypeError, match="padding_mask must be boolean"):
        generate(params, TOKENS, config, 2, source=TOKENS, padding_mask=added)


def test_positions_beyond_those_of_padding():
    """RoBERTa counts from pad_token + 1, so that max_len 9 has room for 7 tokens."""
    model = ModelConfig(**SMALL, kind="encoder", positions=Learned(pad_token=1)).build()
    variables, run = {"params": random_params(model.config)}, jax.jit(model.apply)
    tokens = 2 + np.arange(9)[None]
    assert np.isfinite(run(variables, tokens[:, :7]).logits).all()
    padded = np.where(tokens < 4, 1, tokens)
    assert np.isfinite(run(variables, padded).logits).all()
    with pytest.raises(ValueError, match="may have 7 tokens, not 9; raise max_len"):
        model.apply(variables, tokens)
    assert np.isnan(run(variables, tokens).logits).any()


@pytest.mark.parametrize(
    "cache", [8, {}, {"layers": 8}, ModelConfig(num_layers=3).init_cache(1, 9)]
)
def test_what_is_no_cache_of_the_model(cache):
    config = ModelConfig(**SMALL)
    with pytest.raises(ValueError, match="init_cache"):
        prefill(random_params(config), TOKENS, config, cache)
