"""Training on packed documents is training on each alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep

from attnlab.data.dataset import DataSizes
from attnlab.data.packing import packed_rows
from attnlab.heads import Standard
from attnlab.models import FFN, Alibi, Compute, Learned, ModelConfig, Relative, Rotary
from attnlab.training import OBJECTIVES, Evaluator, init_state, sharding, train_step

LENGTH = 15
SIZES = np.random.default_rng(0).integers(2, LENGTH + 2, 12)
TOKENS = np.random.default_rng(1).integers(0, 40, SIZES.sum())


def padded():
    """A row for each document."""
    rows = np.zeros((len(SIZES), LENGTH + 1), np.int32)
    for row, text in zip(rows, np.split(TOKENS, np.cumsum(SIZES)[:-1]), strict=True):
        row[: len(text)] = text
    return {"tokens": rows, "valid": np.arange(1, LENGTH + 1) < SIZES[:, None]}


def packed():
    count, select = packed_rows({"tokens": TOKENS.astype(np.int32)}, np.cumsum(SIZES), LENGTH)
    assert count < len(SIZES)
    return select(np.arange(count))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("positions", deep([Learned(), Rotary(), Alibi(), Relative()], Rotary()))
def test_packed_documents_give_the_loss_and_gradient_of_padded_ones(positions):
    """A step of plain gradient descent and an evaluation, per target."""
    model = ModelConfig(
        vocab_size=40, max_len=LENGTH, width=8, num_layers=1, heads=Standard(num_heads=2),
        ffn=FFN(width=12), positions=positions, compute=Compute(dtype="float64"),
    ).build()  # fmt: skip
    objective = OBJECTIVES["causal_lm"].bind(DataSizes(40))
    evaluate = Evaluator(model, objective, sharding.data_mesh(jax.devices()[:1]), batch_size=4)

    def step(batch):
        batch = jax.tree.map(jnp.asarray, batch)
        state = init_state(model, objective, optax.sgd(1.0), batch, 0)
        large = jax.tree.map(lambda a: 3 * a.astype(jnp.float64), state.params)
        end = train_step(model, objective, optax.sgd(1.0), state._replace(params=large), batch, 0)
        return end.window_loss, jax.tree.map(jnp.subtract, end.params, large), large

    alone, together = (jax.jit(step)(rows) for rows in (padded(), packed()))
    assert_close(together, alone, loosen=1000)
    params = jax.tree.map(lambda a: a[None], alone[2])
    scores = [
        evaluate(params, rows)["loss"]
        for rows in (padded(), packed() | {"valid": np.ones(len(packed()["tokens"]), bool)})
    ]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-6)
    np.testing.assert_allclose(scores[0], alone[0], rtol=1e-6)


def test_targets_of_packed_texts():
    """By hand: none is the first token of a text, none is padding, and no text sees another."""
    batch = {
        "tokens": jnp.array([[5, 6, 7, 8, 9, 0]]),
        "segments": jnp.array([[1, 1, 2, 2, 3, 0]]),
    }
    causal = OBJECTIVES["causal_lm"].prepare(batch, jax.random.key(0))
    assert causal.weights.tolist() == [[1, 0, 1, 0, 0]]
    assert causal.inputs["segments"].tolist() == [[1, 1, 2, 2, 3]]
    masked = [OBJECTIVES["masked_lm"].prepare(batch, jax.random.key(i)) for i in range(60)]
    assert jnp.max(jnp.stack([m.weights for m in masked]), axis=0).tolist() == [[1, 0, 1, 0, 0]]
    assert masked[0].inputs["segments"].tolist() == [[1, 2, 2, 3, 0]]
    with pytest.raises(ValueError, match="span_corruption"):
        OBJECTIVES["span_corruption"].prepare(batch, jax.random.key(0))
