"""Token ids that are not in the table never read another token's row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import ModelConfig
from attnlab.model.outer import embed

CONFIG = ModelConfig(vocab_size=7, max_len=8, width=8, num_layers=1, num_heads=2, ffn_width=8)
TYPED = dataclasses.replace(CONFIG, token_types=2, kind="encoder")
OUTSIDE = [7, 8, -1, -7, 2**31 - 1, -(2**31)]


def model_of(config):
    model = config.build()
    return model, model.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))


@pytest.mark.parametrize("bad", OUTSIDE)
def test_a_concrete_id_is_refused(bad):
    model, variables = model_of(CONFIG)
    for array in (np.array, jnp.array):
        with pytest.raises(ValueError, match=rf"token id {bad} at \[0, 2\].* 0 to 6"):
            model.apply(variables, array([[1, 2, bad, 3]]))


@pytest.mark.parametrize("bad", OUTSIDE)
def test_an_id_within_jit_gives_nan(bad):
    """In its text, and in no other text of the batch."""
    model, variables = model_of(CONFIG)
    tokens = jnp.array([[1, 2, bad, 3], [1, 2, 6, 0]])
    logits = jax.jit(model.apply)(variables, tokens)
    assert np.isnan(logits[0, 2:]).all()
    assert np.isfinite(logits[1]).all()


def test_padding_may_hold_any_id():
    model, variables = model_of(CONFIG)
    mask = jnp.array([[True, True, False]])
    for call in (model.apply, jax.jit(model.apply)):
        got = [
            call(variables, jnp.array([[1, 2, last]]), padding_mask=mask)[:, :2]
            for last in (-100, 0)
        ]
        np.testing.assert_array_equal(*got)


def test_token_types_too():
    model, variables = model_of(TYPED)
    tokens = jnp.array([[1, 2, 3]])
    types = jnp.array([[0, 1, 2]])
    with pytest.raises(ValueError, match=r"token type 2 at \[0, 2\].* 0 to 1"):
        model.apply(variables, tokens, token_types=types)
    call = jax.jit(lambda v, types: model.apply(v, tokens, token_types=types))
    assert np.isnan(call(variables, types)).any()
    assert np.isfinite(call(variables, types - 1 + jnp.array([[1, 0, 0]]))).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
def test_ids_of_any_integer_dtype(dtype):
    w = {"embedding": jnp.arange(14.0).reshape(7, 2)}
    config = dataclasses.replace(CONFIG, width=2, num_heads=1, positions="none")
    got = embed(w, jnp.array([[0, 6, 3]], dtype), config=config)
    np.testing.assert_array_equal(got[0], w["embedding"][jnp.array([0, 6, 3])])


def test_gradients_of_the_ids_that_are_there():
    """Those of an id outside go nowhere."""
    w = {"embedding": jnp.ones((7, 2))}
    config = dataclasses.replace(CONFIG, width=2, num_heads=1, positions="none")
    seen = lambda table, tokens: jnp.nansum(embed({"embedding": table}, tokens, config=config))
    grads = jax.grad(seen)(w["embedding"], jnp.array([[0, 6, 0, 9, -1]]))
    np.testing.assert_array_equal(grads[:, 0], [2, 0, 0, 0, 0, 0, 1])


def test_a_prompt_is_refused():
    model, variables = model_of(CONFIG)
    with pytest.raises(ValueError, match=r"token id 7 at \[0, 1\]"):
        model.generate(variables["params"], [[1, 7]], 2)
    both = dataclasses.replace(CONFIG, kind="encoder_decoder").build()
    tokens = jnp.ones((1, 2), jnp.int32)
    variables = both.init(jax.random.key(0), tokens, tokens)
    with pytest.raises(ValueError, match=r"token id -1 at \[0, 0\]"):
        both.generate(variables["params"], tokens, 2, source=[[-1, 2]])
    masked = both.apply(
        variables, tokens.at[0, 0].set(-1), tokens, padding_mask=jnp.array([[False, True]])
    )
    assert np.isfinite(masked).all()


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_padding_of_a_pooler_may_hold_any_id(kind):
    config = dataclasses.replace(CONFIG, kind=kind, pooler="mean", pooled_classes=2)
    model, variables = model_of(config)
    mask = jnp.array([[True, True, False]])
    call = jax.jit(lambda t: model.apply(variables, t, padding_mask=mask, return_outputs=True))
    got = [call(jnp.array([[1, 2, last]])).classes for last in (-100, 0)]
    np.testing.assert_array_equal(*got)
