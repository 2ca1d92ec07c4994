"""Before the layers and behind them: what stands for a token, and what speaks for a text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from test_models import SMALL, make

from attnlab.model.outer import POOLERS, embed, number_positions

TOKENS = jnp.array([[3, 4, 5, 6], [7, 8, 9, 9]])


@pytest.mark.parametrize("pooler", POOLERS)
def test_pooling_passes_over_padding(pooler):
    """What stands in the padding changes nothing, and a text without padding is pooled the same."""
    config = dataclasses.replace(
        SMALL, kind="encoder", pooler=pooler, pooled_classes=5, positions="none"
    )
    _, params = make(config, TOKENS)
    model = config.build()

    @jax.jit
    def run(tokens, real=None):
        given = {"return_outputs": True, "padding_mask": real}
        return model.apply({"params": params}, tokens, **given).classes

    real = jnp.array([[True, True, True, False], [True, True, False, False]])
    got = run(TOKENS, real)
    assert got.shape == ((2, 4, 5) if pooler == "each" else (2, 5))
    other = run(jnp.where(real, TOKENS, 1), real)
    for i, n in enumerate((3, 2)):
        rows = (i, slice(n)) if pooler == "each" else i
        np.testing.assert_array_equal(got[rows], other[rows])
        assert_close(got[rows], run(TOKENS[i : i + 1, :n])[0])
    assert np.isfinite(run(TOKENS, jnp.zeros((2, 4), bool))).all()


def test_a_token_is_a_row_of_features():
    """A single 1 in the vocabulary is the token; half of two words is the mean of both."""
    config = dataclasses.replace(SMALL, kind="encoder", positions="none")
    run, params = make(config, TOKENS)
    one_hot, table = jax.nn.one_hot(TOKENS, config.vocab_size), params["embedding"]
    assert_close(embed(params, one_hot, config=config), table[TOKENS])
    halves = (one_hot + one_hot[:, ::-1]) / 2
    expected = (table[TOKENS] + table[TOKENS[:, ::-1]]) / 2
    assert_close(embed(params, halves, config=config), expected)
    assert_close(run(params, one_hot), run(params, TOKENS), loosen=10)
    unpadded = dataclasses.replace(config, positions="learned_unpadded", pad_token=1)
    with pytest.raises(ValueError, match=r"tokens \(2, 4, 19\) are mixtures of all"):
        number_positions(unpadded, one_hot)
