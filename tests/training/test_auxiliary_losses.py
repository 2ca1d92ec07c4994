"""Auxiliary losses of heads are added to the loss of a step, and recorded by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep

from attnlab import heads, training
from attnlab.models import FFN, ModelConfig
from attnlab.training.objectives import OBJECTIVES

MODEL = ModelConfig(
    width=16, num_layers=2, max_len=8, ffn=FFN(width=24),
    heads=heads.Standard(num_heads=4, extras=(heads.MixtureOfHeads(balance=1.0),)),
).build()  # fmt: skip
BATCH = {"tokens": jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 9)))}


def one_step(accumulate):
    """Parameters before and after a step of plain gradient descent, and the state after it."""
    objective, optimizer = OBJECTIVES["causal_lm"], optax.sgd(1.0)

    @jax.jit
    def run(batch):
        state = training.init_state(MODEL, objective, optimizer, batch, 0)
        step = functools.partial(training.train_step, MODEL, objective, optimizer)
        return state.params, step(state, batch, 0, accumulate=accumulate)

    return run(BATCH)


@pytest.mark.parametrize("accumulate", deep([1, 2], 2))
def test_the_total_of_one_step_by_hand(accumulate):
    """Cross-entropy of the whole batch, plus the mean over the parts of the loss of each part."""

    def losses(params):
        tokens = BATCH["tokens"]
        log_probs = jax.nn.log_softmax(MODEL.apply({"params": params}, tokens[:, :-1]).logits)
        nats = -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))
        parts = [MODEL.apply({"params": params}, tokens[i::accumulate, :-1]).losses["head_balance"]
                 for i in range(accumulate)]  # fmt: skip
        return nats, sum(parts) / accumulate

    params, state = one_step(accumulate)
    nats, balance = jax.jit(losses)(params)
    assert_close(state.window_loss, nats)
    assert_close(state.window_auxiliary, {"head_balance": balance})
    gradient = jax.jit(jax.grad(lambda p: sum(losses(p))))(params)
    change = jax.tree.map(jnp.subtract, params, state.params)
    assert_close(change, gradient, loosen=10)
    assert np.any(change["layers"]["attention"]["router"])
