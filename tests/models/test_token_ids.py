"""Token ids that are not in the table never read another token's row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from attnlab import generate, heads, models
from attnlab.models import FFN, Alibi, Embedding, ModelConfig, ModelInputs, NoPositions, OutputHead
from attnlab.models.embed import embed

CONFIG = ModelConfig(
    vocab_size=7, max_len=8, width=8, num_layers=1, heads=heads.Standard(num_heads=2),
    ffn=FFN(width=8),
)  # fmt: skip
TYPED = dataclasses.replace(CONFIG, kind="encoder", embedding=Embedding(token_types=2))
TABLE = dataclasses.replace(
    CONFIG, width=2, heads=heads.Standard(num_heads=1), positions=NoPositions()
)
OUTSIDE = [7, 8, -1, -7, 2**31 - 1, -(2**31)]


@functools.cache
def model_of(config):
    """(model, its call under jit, variables)"""
    model = config.build()
    return model, jax.jit(model.apply), {"params": random_params(config)}


@pytest.mark.parametrize("bad", OUTSIDE)
def test_an_id_outside_of_the_table(bad):
    """Is refused; within `jit` it gives NaN in its text, and in no other text of the batch."""
    model, run, variables = model_of(CONFIG)
    for array in (np.array, jnp.array):
        with pytest.raises(ValueError, match=rf"token id {bad} at \[0, 2\].* 0 to 6"):
            model.apply(variables, array([[1, 2, bad, 3]]))
    logits = run(variables, jnp.array([[1, 2, bad, 3], [1, 2, 6, 0]])).logits
    assert np.isnan(logits[0, 2:]).all()
    assert np.isfinite(logits[1]).all()


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_padding_may_hold_any_id(kind):
    output = OutputHead(pooler="mean", num_classes=2)
    model, run, variables = model_of(dataclasses.replace(CONFIG, kind=kind, output=output))
    mask = jnp.array([[True, True, False]])
    for call in (model.apply, run):
        got = [call(variables, jnp.array([[1, 2, last]]), padding_mask=mask) for last in (-100, 0)]
        np.testing.assert_array_equal(*(outputs.logits[:, :2] for outputs in got))
        np.testing.assert_array_equal(*(outputs.classes for outputs in got))


def test_token_types_too():
    _, run, variables = model_of(TYPED)
    tokens, types = jnp.array([[1, 2, 3]]), jnp.array([[0, 1, 2]])
    assert np.isnan(run(variables, tokens, token_types=types).logits).any()
    assert np.isfinite(run(variables, tokens, token_types=types % 2).logits).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
def test_ids_of_any_integer_dtype(dtype):
    params = {"embedding": jnp.arange(14.0).reshape(7, 2)}
    got = embed(params, jnp.array([[0, 6, 3]], dtype), TABLE)
    np.testing.assert_array_equal(got[0], params["embedding"][jnp.array([0, 6, 3])])


def test_ids_outside_of_the_table_have_no_gradient():
    def loss(table, tokens):
        return jnp.nansum(embed({"embedding": table}, tokens, TABLE))

    gradient = jax.grad(loss)(jnp.ones((7, 2)), jnp.array([[0, 6, 0, 9, -1]]))
    np.testing.assert_array_equal(gradient[:, 0], [2, 0, 0, 0, 0, 0, 1])


def test_the_source_of_an_encoder_decoder():
    config = dataclasses.replace(CONFIG, kind="encoder_decoder")
    model, tokens = config.build(), jnp.ones((1, 2), jnp.int32)
    variables = {"params": random_params(config)}
    with pytest.raises(ValueError, match=r"token id -1 at \[0, 0\]"):
        generate(variables["params"], tokens, config, 2, source=[[-1, 2]])
    mask = jnp.array([[False, True]])
    masked = model.apply(
        variables, tokens, source=tokens.at[0, 0].set(-1), source_padding_mask=mask
    )
    assert np.isfinite(masked.logits).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint32])
@pytest.mark.parametrize(
    "scheme", [Alibi(), models.Relative(buckets=8, max_distance=20), models.Rotary()]
)
def test_positions_of_any_integer_dtype(scheme, dtype):
    """Distances between them may be negative."""
    config = ModelConfig(
        vocab_size=11, max_len=9, width=8, num_layers=1, heads=heads.Standard(num_heads=2),
        ffn=FFN(width=0), positions=scheme,
    )  # fmt: skip
    params, ids = random_params(config), jnp.array([[3, 1, 4, 1, 5]])

    @jax.jit
    def run(positions):
        return models.run_model(params, ids, config, ModelInputs(positions=positions)).logits

    given = np.array([4, 0, 7, 3, 5])
    np.testing.assert_array_equal(run(given.astype(dtype)), run(given))
